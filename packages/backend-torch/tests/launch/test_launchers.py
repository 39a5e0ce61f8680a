"""The launchers spawn and fork: what runs where, what comes back, and how everything ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures import zygote
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_output import without_torchs_own

from stratagem import Lite, Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.environments import PlainEnvironment
from stratagem.errors import ConfigurationError
from stratagem.launch.environment import environment_of_request
from stratagem.launch.process import threads_per_rank
from stratagem.launch.rank import OWNER_VARIABLE
from stratagem.strategies import DDPStrategy, SingleDeviceStrategy

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "tuple[subprocess.Popen[str], list[int]]"]

COMMON = (SCRIPTS / "launchers_common.py").read_text()


def started_by(launcher: str) -> str:
    return f"DDPStrategy(launcher={launcher!r})"


# -- what comes back


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_weights_logged_values_and_best_checkpoint_come_back_and_nothing_else(
    launcher: str, run_script: RunScript
) -> None:
    text = f"""
    class Registered(DDPStrategy):
        pass

    def main():
        StrategyRegistry.register("registered", Registered, launcher={launcher!r})
        runner, model = trainer("registered"), Net()
        before = model.net.weight.clone()
        assert runner.fit(model, loader(), loader()) is None
        alone = Net()
        reference = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=2,
            enable_checkpointing=False,
        )
        # Two ranks of 4 samples are one process with batches of 8, in the order of the ranks.
        data = loader().dataset.tensors[0]
        pairs = torch.cat([data[0::2].view(4, 4, 4), data[1::2].view(4, 4, 4)], 1).reshape(32, 4)
        reference.fit(alone, DataLoader(TensorDataset(pairs), batch_size=8))
        torch.testing.assert_close(model.net.weight, alone.net.weight)
        assert not torch.equal(model.net.weight, before)
        assert model.seen == 0, "other attributes are those of this process"
        assert set(runner.callback_metrics) == {{"loss", "val"}}
        assert runner.global_step == 8
        assert Path(runner.checkpoint_callback.best_model_path).is_file()
        try:
            runner.optimizers
        except Exception as error:
            print("REFUSED", error)
        values = runner.validate(ckpt_path="best", dataloaders=loader(), verbose=False)
        print("VALUE", values[0]["val"] == runner.callback_metrics["val"].item())

    if __name__ == "__main__":
        main()
    """
    output = run_script(COMMON + textwrap.dedent(text)).stdout
    assert f"REFUSED the run was in processes of its own (launcher '{launcher}')" in output
    assert "only the model's weights, logged values and callbacks' states come back" in output
    assert "VALUE True" in output


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_shards_come_back_as_whole_weights(launcher: str, run_script: RunScript) -> None:
    text = f"""
    from stratagem.strategies import FSDPStrategy

    if __name__ == "__main__":
        for strategy in (
            {started_by(launcher)},
            FSDPStrategy(launcher={launcher!r}, state_dict_type="sharded"),
        ):
            net = Net()
            trainer(strategy, enable_checkpointing=False).fit(net, loader())
            print("WEIGHTS", [round(w, 5) for w in net.net.weight.flatten().tolist()])
    """
    output = run_script(COMMON + textwrap.dedent(text)).stdout
    first, second = (line for line in output.splitlines() if line.startswith("WEIGHTS"))
    assert first == second


@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_a_function_of_lite_returns_the_safe_data_of_rank_0(
    launcher: str, run_script: RunScript
) -> None:
    text = f"""
    class Summing(Lite):
        def run(self, start):
            return {{"sum": self.all_reduce(torch.tensor(start + self.global_rank), "sum")}}

    def model_of(lite):
        return nn.Linear(1, 1)

    def threads(lite):
        return lite.all_gather(torch.tensor(torch.get_num_threads())).tolist()

    def leave(lite):
        raise SystemExit(0)

    if __name__ == "__main__":
        options = {{"accelerator": "cpu", "devices": 2}}
        print("SUM", Summing(strategy={started_by(launcher)}, **options).run(3.0))
        lite = Lite(strategy={started_by(launcher)}, **options)
        print("THREADS", lite.launch(threads))
        print("LEFT", lite.launch(leave))
        for call in (lambda: lite.launch(model_of), lite.launch):
            try:
                call()
            except Exception as error:
                print(type(error).__name__, error)
    """
    output = run_script(COMMON + textwrap.dedent(text), env={"OMP_NUM_THREADS": "3"}).stdout
    assert "SUM {'sum': tensor(7.)}" in output
    # A parent that has not computed with several threads has none to lose in a fork.
    assert "THREADS [3, 3]" in output
    assert "LEFT None" in output
    assert "RankFailedError rank 0 of 2 failed" in output
    assert (
        "as weights-only-safe data (numbers, strings, tensors, and dicts, lists, tuples" in output
    )
    assert "it is of type torch.nn.modules.linear.Linear" in output
    assert f"the launcher '{launcher}' runs a function in new processes, so launch()" in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_ranks_draw_the_random_numbers_of_the_launching_process(
    launcher: str, run_script: RunScript
) -> None:
    text = f"""
    import random
    import numpy
    from stratagem import seed_everything

    def draw(lite=None):
        own = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        return own if lite is None else [own, lite.broadcast(own, 1)]

    if __name__ == "__main__":
        seed_everything(5)
        draw()
        lite = Lite(accelerator="cpu", devices=2, strategy={started_by(launcher)})
        ranks = lite.launch(draw)
        print("ALIKE", ranks == [draw()] * 2)
    """
    output = run_script(COMMON + textwrap.dedent(text), timeout=300).stdout
    assert "ALIKE True" in output


def test_fork_after_computing_threads_uses_one_thread_in_each_rank(run_script: RunScript) -> None:
    text = """
    def work(lite):
        x = torch.randn(400, 400, requires_grad=True)
        (x @ x).sum().backward()
        return torch.get_num_threads()

    if __name__ == "__main__":
        torch.set_num_threads(2)
        work(None)  # starts the pool of threads, which a forked process lacks and would wait for
        lite = Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(launcher="fork"))
        print("THREADS", lite.launch(work))
    """
    finished = run_script(COMMON + textwrap.dedent(text), env={"OMP_NUM_THREADS": "2"})
    assert "THREADS 1" in finished.stdout


# -- what is refused


class Holding(Module):
    """Holds a lock, which cannot be pickled, three levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.tools = {"all": [threading.Lock()]}

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_spawn_names_the_object_that_cannot_be_pickled(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(launcher="spawn"),
        logger=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(Holding(), DataLoader(TensorDataset(torch.ones(4, 1))))
    message = str(refused.value)
    assert "model.tools['all'][0] (<unlocked _thread.lock object" in message
    assert "cannot be pickled (TypeError" in message
    assert "use strategy='ddp' (or 'ddp_fork'), which pickles nothing" in message


class _InUse(CPUAccelerator):
    def fork_problem(self) -> str:
        return "has used devices already"


def test_fork_is_refused_where_devices_in_use_do_not_work_in_a_copy() -> None:
    lite = Lite(accelerator=_InUse(), devices=2, strategy=DDPStrategy(launcher="fork"))
    with pytest.raises(ConfigurationError, match=r"has used devices already; restart the notebook"):
        lite.launch(print)


def test_strategy_refuses_an_unknown_launcher() -> None:
    with pytest.raises(ConfigurationError, match=r"is started by 'in_process', received.*'fork'"):
        Lite(accelerator="cpu", devices=2, strategy=_OneProcess(launcher="fork"))


class _OneProcess(DDPStrategy):
    capabilities = SingleDeviceStrategy.capabilities.__class__(
        one_process=False, many_devices=True, launchers=("in_process",)
    )


# -- ends

WAITING = """
def wait(lite, folder):
    try:
        print(f"RANK {lite.global_rank} waits\\n", end="", flush=True)
        Path(folder, f"rank{lite.global_rank}").write_text(str(os.getpid()))
        if "raise" in sys.argv and lite.global_rank == 1:
            raise ValueError("of rank one")
        time.sleep(60)
    except KeyboardInterrupt:
        print(f"interrupted {lite.global_rank}\\n", end="", flush=True)
        raise

if __name__ == "__main__":
    lite = Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(launcher=sys.argv[1]))
    if "thread" in sys.argv:
        thread = threading.Thread(target=lite.launch, args=(wait, sys.argv[2]))
        thread.start()
        thread.join()
    else:
        lite.launch(wait, sys.argv[2])
"""


@pytest.fixture
def waiting(tmp_path: Path, script_environment: dict[str, str]) -> Start:
    """Start ranks that wait; return the program, once they do, and their process ids."""

    def start(*arguments: str, **env: str) -> tuple[subprocess.Popen[str], list[int]]:
        script = tmp_path / "waiting.py"
        script.write_text(COMMON + WAITING)
        whole = (arguments[0], str(tmp_path), *arguments[1:])
        environment = {**script_environment, **env}
        program = zygote().start(
            script, *whole, environment=environment, folder=tmp_path, merged=True
        )
        deadline = time.monotonic() + 60
        files = [tmp_path / "rank0", tmp_path / "rank1"]
        while not all(f.exists() and f.read_text() for f in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            assert program.poll() is None, program.communicate()
            time.sleep(0.05)
        return program, [int(f.read_text()) for f in files]

    return start


def all_gone(pids: list[int], within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "fork"])
def test_a_killed_launcher_leaves_no_rank(launcher: str, waiting: Start) -> None:
    program, pids = waiting(launcher)
    program.kill()
    assert all_gone(pids)
    program.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code", "heard"),
    [(signal.SIGINT, 1, True), (signal.SIGTERM, 143, False)],
    ids=["interrupt", "terminate"],
)
def test_a_signal_to_the_launcher_reaches_every_rank(
    sent: signal.Signals, code: int, heard: bool, waiting: Start
) -> None:
    program, pids = waiting("fork")
    program.send_signal(sent)
    output, _ = program.communicate(timeout=40)
    assert all_gone(pids)
    assert program.returncode in (code, -sent)
    assert ("interrupted 0" in output and "interrupted 1" in output) is heard


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_the_others(waiting: Start) -> None:
    program, pids = waiting("spawn", "thread")
    os.kill(pids[1], signal.SIGKILL)
    output, _ = program.communicate(timeout=40)
    assert all_gone(pids)
    assert "RankFailedError: rank 1 of 2 was ended by SIGKILL" in output


@pytest.mark.slow
def test_output_of_ranks_gets_a_prefix_or_goes_to_a_folder(
    run_script: RunScript, tmp_path: Path
) -> None:
    arguments = ("fork", str(tmp_path), "raise")
    script = COMMON + WAITING
    prefixed = run_script(script, *arguments, env={"STRATAGEM_PREFIX_OUTPUT": "1"}, expect=1)
    assert "[rank 0] RANK 0 waits\n" in prefixed.stdout
    assert "[rank 1] RANK 1 waits\n" in prefixed.stdout
    assert prefixed.stderr.rstrip().endswith("ValueError: of rank one")
    logs = tmp_path / "logs" / "of this run"
    logged = run_script(script, *arguments, env={"STRATAGEM_LOG_DIR": str(logs)}, expect=1)
    assert "RANK" not in logged.stdout
    assert without_torchs_own((logs / "rank1.log").read_text()) == "RANK 1 waits\n"


@pytest.mark.slow
def test_fork_launch_before_a_script_launch_is_separate(run_script: RunScript) -> None:
    text = """
    def who(lite, name):
        return [name, lite.all_gather(torch.tensor(lite.global_rank)).tolist()]

    if __name__ == "__main__":
        first = Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(launcher="fork"))
        told = first.launch(who, "first")
        second = Lite(accelerator="cpu", devices=2, strategy="ddp")
        print(f"{told} {second.launch(who, 'second')}\\n", end="")
    """
    output = run_script(COMMON + textwrap.dedent(text)).stdout
    assert output.count("['first', [0, 1]] ['second', [0, 1]]") == 2, "one line of each rank"


def test_a_process_that_is_a_rank_already_starts_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SaysNo(PlainEnvironment):
        creates_processes_externally = False

    monkeypatch.setenv("LOCAL_RANK", "1")
    lite = Lite(accelerator="cpu", devices=2, strategy="ddp", plugins=SaysNo())
    for _ in range(2):  # a launch that was refused has started nothing
        with pytest.raises(ConfigurationError, match="this process is one already, LOCAL_RANK=1"):
            lite.launch()


@pytest.mark.slow
def test_switching_detection_off_under_torchrun_launches_anew(run_script: RunScript) -> None:
    text = """
    def who(lite):
        return lite.all_gather(torch.tensor(lite.global_rank)).tolist()

    if __name__ == "__main__":
        lite = Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=30))
        print(f"RANKS {lite.launch(who)}\\n", end="")
    """
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    finished = run_script(
        COMMON + textwrap.dedent(text), before=before, env={"STRATAGEM_CLUSTER": "none"}
    )
    assert finished.stdout.count("RANKS [0, 1]") == 2, "the launched rank prints as well"


@pytest.mark.slow
def test_starting_rank_ends_with_its_launcher(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    script = tmp_path / "slow_start.py"
    script.write_text(
        COMMON
        + """
lite = Lite(accelerator="cpu", devices=2, strategy="ddp")
if "LOCAL_RANK" in os.environ and os.environ["LOCAL_RANK"] == "1":
    Path("rank1").write_text(str(os.getpid()))
    time.sleep(60)
lite.launch()
"""
    )
    program = subprocess.Popen([sys.executable, str(script)], env=script_environment, cwd=tmp_path)
    file = tmp_path / "rank1"
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    program.kill()
    program.wait()
    assert all_gone([int(file.read_text())])


def test_a_process_that_was_given_cores_of_its_own_does_not_divide_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = {0: set(range(4)), os.getppid(): set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(4) == "4"
    cores[os.getppid()] = cores[0]
    assert threads_per_rank(4) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert threads_per_rank(2) == "2"


# -- what a process is started with


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "closed"),
    [
        ("script", "0<&-"),
        ("script", "1>&-"),
        ("script", "2>&-"),
        ("spawn", "0<&- 1>&- 2>&-"),
        ("fork", "0<&- 1>&- 2>&-"),
        ("run", "0<&- 1>&- 2>&-"),
    ],
)
def test_ranks_meet_where_standard_streams_are_closed(
    launcher: str, closed: str, tmp_path: Path, script_environment: dict[str, str]
) -> None:
    """As a daemon's are. A rank's sockets got the numbers 0 to 2, and the other ranks had them."""
    script = tmp_path / "script.py"
    text = f"""
def who(lite):
    print("said to nobody, perhaps")
    print("as well", file=sys.stderr)
    kinds = [stat.S_IFMT(os.fstat(number).st_mode) for number in range(3)]
    assert stat.S_IFSOCK not in kinds
    ranks = lite.all_gather(torch.tensor(lite.global_rank)).tolist()
    Path(f"rank{{lite.global_rank}}").write_text(str(ranks))

if __name__ == "__main__":
    launcher = {launcher!r} if {launcher!r} != "run" else "script"
    Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(launcher=launcher)).launch(who)
"""
    script.write_text(f"{COMMON}\nimport stat\n{text}")
    run = "-m stratagem run --devices 2" if launcher == "run" else ""
    finished = subprocess.run(
        ["sh", "-c", f'exec "$0" {run} script.py {closed}', sys.executable],
        env=script_environment,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["[0, 1]"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["script", "fork"])
def test_a_process_that_a_rank_starts_is_no_rank(launcher: str, run_script: RunScript) -> None:
    """It inherits the rank's variables."""
    text = f"""
    import subprocess

    def alone(lite):
        return [lite.world_size, "LOCAL_RANK" in os.environ]

    def start(lite):
        child = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
        print(f"rank {{lite.global_rank}}: {{child.returncode}} {{child.stdout}}{{child.stderr}}")

    if __name__ == "__main__":
        if "child" in sys.argv:
            print("CHILD", Lite(accelerator="cpu").launch(alone))
        else:
            Lite(accelerator="cpu", devices=2, strategy={started_by(launcher)}).launch(start)
    """
    output = run_script(COMMON + textwrap.dedent(text)).stdout
    for rank in range(2):
        assert f"rank {rank}: 0 CHILD [1, False]" in output


def test_a_child_of_a_rank_that_torchrun_starts_anew_is_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inherited = {OWNER_VARIABLE: f"{os.getppid()}:4711", "STRATAGEM_CLUSTER": "plain"}
    for name, value in {**inherited, "LOCAL_RANK": "1", "MASTER_PORT": "4712"}.items():
        monkeypatch.setenv(name, value)
    environ = environment_of_request(0)
    assert environ["LOCAL_RANK"] == "1"
    assert not environ.keys() & inherited.keys()


def test_rank_with_dead_launcher_ends_with_a_message(run_script: RunScript) -> None:
    text = """
    from stratagem.launch.rank import die_with_parent

    die_with_parent()
    """
    finished = run_script(text, env={"STRATAGEM_PARENT_PID": "4711"}, expect=1)
    assert finished.stderr == (
        "stratagem: this rank ends, since the process that started it (4711) has ended\n"
    )
