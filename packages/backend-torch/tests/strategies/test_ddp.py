"""ddp in two real processes: the numbers of one process, and one clear end when something fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import zygote
from torch import nn
from torch.nn.functional import mse_loss
from torch_output import without_torchs_own

from stratagem import Trainer

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

# What every script begins with, and what the reference runs in this process use too.
COMMON = (SCRIPTS / "ddp_common.py").read_text()

SCRIPT = (
    COMMON
    + """
import torch.distributed as dist
from torchmetrics import MeanMetric

from stratagem.callbacks import ModelCheckpoint
from stratagem.state.rank_states import gather_states
from stratagem.strategies import DDPStrategy

out = {}


class Custom(DDPStrategy):
    # Document 000's own strategy, with changed imports.
    def configure_ddp(self):
        out["wrapped"] = type(self.model).__name__
        self.model = nn.parallel.DistributedDataParallel(self.model)

    def setup(self, trainer):
        self.accelerator.setup()
        assert self.precision_plugin is self.precision
        out["parts"] = [type(trainer).__name__, type(self.checkpoint_io).__name__]


def ddp(**arguments):
    return quiet(strategy="ddp", devices=2, **arguments)


# -- the numbers of a run
model = Net()
trainer = quiet(
    max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, strategy=Custom(), devices=2
)
trainer.fit(model, loader())
weights = {"fit": model.net.state_dict()}
rank = trainer.global_rank
out["seen"] = model.seen
names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "RANK")
out["environment"] = {name: os.environ.get(name) for name in names}
out["threads"] = torch.get_num_threads()
ranks = trainer.ranks
out["ranks"] = [ranks.global_rank, ranks.local_rank, ranks.node_rank, ranks.world_size]
out["is_global_zero"] = trainer.is_global_zero

# -- who reads what
shuffling = Net()
orders = []


class Note(Callback):
    def on_train_epoch_end(self, trainer, module):
        orders.append(module.seen)
        module.seen = []


ddp(max_epochs=3, callbacks=Note()).fit(shuffling, loader(shuffle=True))
out["orders"] = orders

# -- a second fit of the same Trainer, then evaluation of 13 samples
trainer.fit(again := Net(), loader())
weights["again"] = again.net.state_dict()
out["validated"] = trainer.validate(again, loader(13), verbose=False)[0]
out["predicted"] = [part.tolist() for part in trainer.predict(again, loader(13))]

# -- batch statistics are those of rank 0, and 13 samples divide into 7 and 6
normed = Net(norm=True)
norm_trainer = ddp(max_epochs=1)
norm_trainer.fit(normed, loader(30, batch_size=3))
out["norm"] = norm_trainer.validate(normed, loader(13, batch_size=2), verbose=False)[0]
weights["norm"] = normed.net.state_dict()


# -- what is logged
class Logs(Net):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        self.log("epoch", rank + batch_idx, on_step=False, on_epoch=True)
        self.log("synced", 10.0 * rank + batch_idx, sync_dist=True, on_epoch=True)
        self.log("synced_sum", 1.0 + rank, sync_dist=True, reduce_fx="sum", on_epoch=True)
        self.log("own", 1.0 + rank, sync_dist=False, on_step=False, on_epoch=True)
        self.mean.update(batch[0])
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if rank == 1:
            self.log("of_rank_1", 5.0, on_step=False, on_epoch=True)
        if rank == 0:
            self.log("zero_only", 7.0, on_step=False, on_epoch=True, rank_zero_only=True)
        return super().training_step(batch, batch_idx)


logs = ddp(max_epochs=1)
logs.fit(Logs(), loader(16))
out["logged"] = {name: float(value) for name, value in logs.callback_metrics.items()}

# -- checkpoints across strategies
saver = ModelCheckpoint("ddp", save_last=True)
ddp(max_epochs=2, enable_checkpointing=True, callbacks=saver).fit(Net(), loader())
resumed = Net()
ddp(max_epochs=4).fit(resumed, loader(), ckpt_path="single/last.ckpt")
weights["resumed"] = resumed.net.state_dict()


# -- Lite
class Loop(Lite):
    def run(self, epochs):
        net = network()
        model, optimizer = self.setup(
            net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        )
        data = self.setup_dataloaders(loader())
        for _ in range(epochs):
            for index, (_, inputs, targets) in enumerate(data):
                accumulating = index % 2 == 0
                with self.no_backward_sync(model, enabled=accumulating):
                    self.backward(mse_loss(model(inputs), targets) / 2)
                if not accumulating:
                    self.clip_gradients(model, optimizer, max_norm=0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        mine = torch.tensor([1.0, 2.0]) * (self.global_rank + 1)
        number = torch.tensor(float(self.global_rank), requires_grad=True)
        gathered = self.all_gather(number, sync_grads=True)
        (gathered * torch.tensor([3.0, 4.0])).sum().backward()
        order = []
        with self.ranks.rank_zero_first():
            order.append(self.global_rank)
            Path("first").touch() if self.global_rank == 0 else order.append(
                Path("first").exists()
            )
        self.barrier("here")
        self.print("printed once")
        self.save("lite.ckpt", {"model": model, "optimizer": optimizer, "epochs": epochs})
        loaded = {"epochs": 0}
        self.load("lite.ckpt", loaded)
        out["collectives"] = {
            "gathered": self.all_gather({"a": [mine]})["a"][0].tolist(),
            "numbers": self.all_gather(self.global_rank).tolist(),
            "gradient": float(number.grad),
            "mean": self.all_reduce(mine).tolist(),
            "sum": self.all_reduce([mine, self.global_rank], "sum")[0].tolist(),
            "max": self.all_reduce(mine, "max").tolist(),
            "min": self.all_reduce(mine, "min").tolist(),
            "mean of ints": self.all_reduce(self.global_rank).item(),
            "kept": mine.tolist(),
            "from 1": self.broadcast({"rank": self.global_rank, "t": mine}, src=1)["t"].tolist(),
            "plain": self.strategy.ranks.gather_objects(["x" * self.global_rank]),
            "bytes": self.strategy.ranks.broadcast(
                [part.hex() for part in self.strategy.ranks.gather_bytes(bytes(self.global_rank))]
            ),
            "handed out": self.strategy.ranks.gather_objects(
                self.strategy.ranks.scatter_bytes(
                    [b"", b"for rank 1"] if self.global_rank == 0 else []
                ).decode()
            ),
            "order": order,
            "epochs": loaded["epochs"],
        }
        try:
            self.all_reduce(mine, "median")
        except Exception as error:
            out["median"] = f"{type(error).__name__}: {error}"
        ranks, is_second = self.strategy.ranks, self.global_rank == 1
        odd = object() if is_second else "safe"
        for name, exchange in {
            "odd on 1": lambda: ranks.gather_objects([odd]),
            "odd from 1": lambda: self.broadcast(odd, src=1),
            "odd metrics": lambda: self.gather_for_metrics(mine if is_second else 3),
            "odd states": lambda: gather_states(ranks, {"of loader": odd}),
        }.items():
            began = time.monotonic()
            try:
                exchange()
            except Exception as error:
                out[name] = f"{type(error).__name__}: {error}"
            assert time.monotonic() - began < 5
        return net


weights["lite"] = Loop(accelerator="cpu", strategy="ddp", devices=2).run(2).state_dict()
bf16 = Loop(accelerator="cpu", strategy="ddp", devices=2, precision="bf16").run(1).state_dict()
out["bf16 is float32"] = all(value.dtype is torch.float32 for value in bf16.values())

# -- another number of devices in the same script
try:
    quiet(strategy="ddp", devices=3)
except Exception as error:
    out["three"] = f"{type(error).__name__}: {error}"
try:
    quiet(strategy="single_device")
except Exception as error:
    out["single"] = f"{type(error).__name__}: {error}"

torch.save(weights, f"weights{rank}.pt")
Path(f"out{rank}.json").write_text(json.dumps(out))
"""
)

common: dict[str, Any] = {}
exec(COMMON, common)
loader, network, quiet, Net = (common[name] for name in ("loader", "network", "quiet", "Net"))


class Results:
    """What the ranks of a script wrote."""

    def __init__(
        self, folder: Path, launched_by: str, process: subprocess.CompletedProcess[str]
    ) -> None:
        self.folder = folder
        self.launched_by = launched_by
        self.process = process
        self.out = [json.loads((folder / f"out{rank}.json").read_text()) for rank in (0, 1)]
        self.weights = [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]

    def both(self, name: str) -> Any:
        """Return what both ranks agree about."""
        assert self.out[0][name] == self.out[1][name]
        return self.out[0][name]


def prepare(folder: Path) -> None:
    """A checkpoint of two epochs on one device, for ddp to go on from."""
    trainer = quiet(max_epochs=2)
    trainer.fit(Net(), loader(batch_size=8))
    trainer.save_checkpoint(folder / "single" / "last.ckpt")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    dropped = ("RANK", "WORLD", "MASTER", "NODE", "STRATAGEM", "OMP", "TORCHELASTIC")
    return {k: v for k, v in os.environ.items() if not any(part in k for part in dropped)}


@pytest.fixture(scope="module", params=["script", "torchrun"])
def results(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
) -> Results:
    """The one script, started by itself and by torchrun."""
    folder = tmp_path_factory.mktemp(request.param)
    prepare(folder)
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    if request.param == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
        environment = {**environment, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return Results(folder, request.param, finished)


def assert_close(weights: Mapping[str, Any], expected: nn.Module) -> None:
    wanted = expected.state_dict()
    assert list(weights) == list(wanted)
    for name, value in weights.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6, msg=name)


# ---------------------------------------------------------------- the numbers


def raw_fit(epochs: int) -> nn.Module:
    """Full batches of 8 in one process: two windows of two batches are one step of accumulation."""
    net: nn.Module = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for index, (_, inputs, targets) in enumerate(loader(batch_size=8)):
            (mse_loss(net(inputs), targets) / 2).backward()  # type: ignore[no-untyped-call]
            if index % 2:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return net


def test_two_ranks_train_like_one_process_with_the_whole_batch(results: Results) -> None:
    expected = Net()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(expected, loader(batch_size=8))
    for weights in results.weights:
        assert_close(weights["fit"], expected.net)
        assert_close(weights["again"], expected.net)
    assert results.both("wrapped") == "StepModule"
    assert results.both("parts") == ["Trainer", "SingleFileCheckpointIO"]


def test_a_loop_of_lite_trains_like_one_process_with_the_whole_batch(results: Results) -> None:
    for weights in results.weights:
        assert_close(weights["lite"], raw_fit(2))
    assert results.both("bf16 is float32")
    assert results.process.stdout.count("printed once") == 2  # one for each run


def test_each_sample_is_read_once_an_epoch_in_another_order_each_time(results: Results) -> None:
    assert [out["seen"] for out in results.out] == [
        [*range(0, 32, 2)] * 2,
        [*range(1, 32, 2)] * 2,
    ]
    epochs = list(zip(*(out["orders"] for out in results.out), strict=True))
    assert len(epochs) == 3
    for of_ranks in epochs:
        assert sorted([*of_ranks[0], *of_ranks[1]]) == list(range(32))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_uneven_evaluation_counts_each_sample_once(results: Results) -> None:
    for name, norm, weights in (("validated", False, "again"), ("norm", True, "norm")):
        net = network(norm)
        net.load_state_dict(results.weights[0][weights])
        net.eval()
        with torch.no_grad():
            _, inputs, targets = next(iter(loader(13, batch_size=13)))
            loss = float(mse_loss(net(inputs), targets))
        assert results.both(name) == {
            "loss": pytest.approx(loss, rel=1e-5),
            "count": 13.0,
            "largest": 12.0,
            "smallest": 1.0,
        }
    predicted = [[index for part in out["predicted"] for index in part] for out in results.out]
    assert predicted == [[*range(0, 13, 2)], [*range(1, 13, 2)]]


def test_batch_statistics_are_alike_on_all_ranks_after_an_evaluation(results: Results) -> None:
    first, second = (weights["norm"] for weights in results.weights)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_logged_values_are_reduced_over_ranks(results: Results) -> None:
    first, second = (out["logged"] for out in results.out)
    for logged in (first, second):
        # Two batches on each rank: 0 and 1 on rank 0, 1 and 2 on rank 1.
        assert logged["epoch"] == 1.0
        assert logged["synced_step"] == 6.0
        assert logged["synced"] == logged["synced_epoch"] == 5.5
        assert logged["synced_sum_step"] == 3.0
        assert logged["synced_sum"] == 6.0
        assert logged["mean"] == 7.5
    assert (first["own"], second["own"]) == (1.0, 2.0)
    # What one rank has logged all of them know, and decide alike.
    assert first["of_rank_1"] == second["of_rank_1"] == 5.0
    assert first["zero_only"] == 7.0
    assert "zero_only" not in second


def test_collectives(results: Results) -> None:
    for rank, out in enumerate(results.out):
        assert out["collectives"] == {
            "gathered": [[1.0, 2.0], [2.0, 4.0]],
            "numbers": [0, 1],
            "gradient": 2 * (3.0, 4.0)[rank],
            "mean": [1.5, 3.0],
            "sum": [3.0, 6.0],
            "max": [2.0, 4.0],
            "min": [1.0, 2.0],
            "mean of ints": 0.5,
            "kept": [[1.0, 2.0], [2.0, 4.0]][rank],
            "from 1": [2.0, 4.0],
            "plain": [[""], ["x"]],
            "bytes": ["", "00"],
            "handed out": ["", "for rank 1"],
            "order": [[0], [1, True]][rank],
            "epochs": 1,
        }
    assert results.both("median") == (
        "ConfigurationError: all_reduce(op='median'): expected one of 'mean', 'sum', 'max', 'min'"
    )


def test_data_that_cannot_be_sent_from_one_rank_raise_on_every_rank(results: Results) -> None:
    refused = (
        "TypeError: rank 1: only weights-only-safe data (numbers, strings, tensors, and dicts, "
        "lists, tuples and sets of them) can be sent to other ranks, but {} is of type "
        "builtins.object: convert it first"
    )
    assert results.both("odd on 1") == refused.format("[0]")
    assert results.both("odd from 1") == refused.format("it")
    assert results.both("odd states") == refused.format("['of loader']")
    assert results.both("odd metrics") == (
        "UserCodeError: rank 0: gather_for_metrics() received a int; expected tensors, lists of "
        "objects, and dicts, lists and tuples of them"
    )


def test_a_checkpoint_moves_between_ddp_and_a_single_device(results: Results) -> None:
    whole = Net()
    quiet(max_epochs=4).fit(whole, loader(batch_size=8))
    for weights in results.weights:
        assert_close(weights["resumed"], whole.net)
    on_one = Net()
    trainer: Trainer = quiet(max_epochs=4)
    trainer.fit(on_one, loader(batch_size=8), ckpt_path=results.folder / "ddp" / "last.ckpt")
    assert_close(on_one.net.state_dict(), whole.net)
    assert trainer.global_step == 16


def test_ddp_sets_the_ranks_and_their_environment(results: Results) -> None:
    ports = {out["environment"]["MASTER_PORT"] for out in results.out}
    assert len(ports) == 1
    for rank, out in enumerate(results.out):
        assert out["ranks"] == [rank, rank, 0, 2]
        assert out["is_global_zero"] is (rank == 0)
        environment = out["environment"]
        assert environment["WORLD_SIZE"] == "2"
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        if results.launched_by == "script":
            assert environment["MASTER_ADDR"] == "127.0.0.1"
            assert environment["NODE_RANK"] == "0"
            cores = len(os.sched_getaffinity(0))
            assert out["threads"] == max(1, cores // 2)


def test_another_number_of_processes_in_the_same_script_is_refused(results: Results) -> None:
    name = {"script": "plain", "torchrun": "TorchElastic"}[results.launched_by]
    assert results.both("three") == (
        "ConfigurationError: devices=3 means 3 process(es) on each node, but "
        f"{name} has started 2 here (LOCAL_WORLD_SIZE=2, WORLD_SIZE=2): make the two agree, or "
        "leave devices='auto'"
    )
    assert "single" not in results.out[0]
    assert results.out[1]["single"].startswith(
        f"ConfigurationError: this process is rank 1 of 2 ({name}), but the strategy "
        "'single_device' trains in one process"
    )


# ---------------------------------------------------------------- ways to launch

SMALL = (
    COMMON
    + """
trainer = quiet(strategy="ddp", devices=2, max_steps=1)
trainer.fit(Net(), loader())
# One write, so that the lines of two ranks do not mix.
os.write(1, f"rank {trainer.global_rank} of {trainer.world_size} {sys.argv[1:]}\\n".encode())
"""
)


def test_python_with_a_command_and_with_a_module_launch_too(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SMALL)
    for before in (["-c", SMALL], ["-m", "small"]):
        finished = subprocess.run(
            [sys.executable, *before, "--more", "x"],
            cwd=tmp_path,
            env=script_environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        assert sorted(without_torchs_own(finished.stdout).splitlines()) == [
            "rank 0 of 2 ['--more', 'x']",
            "rank 1 of 2 ['--more', 'x']",
        ]


def test_a_script_read_from_standard_input_cannot_be_launched(
    script_environment: dict[str, str],
) -> None:
    finished = subprocess.run(
        [sys.executable, "-"],
        input=SMALL,
        env=script_environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert finished.returncode == 1
    assert (
        "the launcher 'script' runs the script again for each rank, but this program was read from "
        "standard input: save it in a file and run that"
    ) in finished.stderr


def test_launches_at_the_same_time_do_not_meet(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(SMALL)
    launches = [
        zygote().start(
            tmp_path / "script.py", environment=script_environment, folder=tmp_path, merged=True
        )
        for _ in range(3)
    ]
    for launch in launches:
        shown, _ = launch.communicate(timeout=120)
        assert launch.returncode == 0, shown
        assert sorted(without_torchs_own(shown).splitlines()) == [
            "rank 0 of 2 []",
            "rank 1 of 2 []",
        ]


@pytest.mark.long
def test_ten_launches_in_a_row_end_well(run_script: RunScript) -> None:
    for _ in range(10):
        finished = run_script(SMALL)
        assert len(finished.stdout.splitlines()) == 2
        assert finished.stderr == ""


# ---------------------------------------------------------------- failures

FAILING = (
    COMMON
    + """
mode = sys.argv[1]


def note_pid(*args):
    Path(f"pid-{os.getpid()}").touch()


note_pid()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if index == BAD:
            raise ValueError(f"broken sample {index}")
        return torch.full((5,), float(index))


class Slow(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.002)
        if batch_idx == 20:
            Path(f"running-{self.global_rank}").touch()
            if mode == "exit" and self.global_rank == 1:
                os._exit(3)
            if mode == "sigkill" and self.global_rank == 1:
                os.kill(os.getpid(), 9)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


# Rank 0 reads the even samples, rank 1 the odd ones.
BAD = {"rank 1": 101, "worker": 101, "rank 0": 100}.get(mode, -1)
workers = 1 if mode in ("worker", "sigkill launcher") else 0
trainer = quiet(strategy="ddp", devices=2, max_epochs=1)
data = DataLoader(Data(), batch_size=2, num_workers=workers, worker_init_fn=note_pid)
trainer.fit(Slow(), data)
print("finished")
"""
)


class Failing:
    """A launch that is to fail, and the processes that it has started."""

    def __init__(self, folder: Path, environment: dict[str, str], mode: str) -> None:
        self.folder = folder
        (folder / "script.py").write_text(FAILING)
        self.process = zygote().start(
            folder / "script.py", mode, environment=environment, folder=folder, new_session=True
        )

    def wait_until_running(self) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / f"running-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, "the ranks did not come to their 20th step"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self, timeout: float = 60.0) -> str:
        """Return what it printed to standard error, once it has ended."""
        try:
            _, errors = self.process.communicate(timeout=timeout)
        finally:
            self.kill()
        return errors

    def pids(self) -> list[int]:
        return [int(path.name.partition("-")[2]) for path in self.folder.glob("pid-*")]

    def assert_gone(self, seconds: float = 15.0) -> None:
        """No process that it has started is there any more."""
        assert len(self.pids()) >= 2
        deadline = time.monotonic() + seconds
        while left := [pid for pid in self.pids() if is_running(pid)]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and nobody has asked how


@pytest.mark.parametrize("mode", ["rank 1", "rank 0", "worker"])
def test_a_datasets_exception_on_one_rank_ends_all_and_is_shown_once(
    mode: str, tmp_path: Path, script_environment: dict[str, str]
) -> None:
    launch = Failing(tmp_path, script_environment, mode)
    began = time.monotonic()
    errors = launch.process.communicate(timeout=60)[1]
    launch.assert_gone(max(0.0, 30.0 - (time.monotonic() - began)))
    assert launch.process.returncode == 1
    shown_once = (
        "Caught ValueError in DataLoader worker process"
        if mode == "worker"
        else "ValueError: broken sample"
    )
    assert errors.count(shown_once) == 1, errors
    assert "in __getitem__" in errors
    if mode == "rank 0":
        assert "RankFailedError" not in errors
        assert "broken sample 100" in errors
    else:
        assert "rank 1 of 2 failed with exit code 1; its traceback:" in errors
        assert "broken sample 101" in errors


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            "exit",
            "rank 1 of 2 failed with exit code 3; it exited without a Python traceback; its output "
            "is above\n[rank0]: For an explanation: stratagem errors rank-failed\n",
        ),
        (
            "sigkill",
            "rank 1 of 2 was ended by SIGKILL (as the system does when memory runs out); it "
            "exited without a Python traceback; its output is above",
        ),
    ],
)
def test_a_rank_that_dies_without_a_word_ends_the_others(
    mode: str, text: str, tmp_path: Path, script_environment: dict[str, str]
) -> None:
    launch = Failing(tmp_path, script_environment, mode)
    launch.wait_until_running()
    began = time.monotonic()
    errors = launch.process.communicate(timeout=60)[1]
    launch.assert_gone(15.0)
    assert time.monotonic() - began < 15.0
    assert launch.process.returncode == 1
    assert errors.count(text) == 1, errors


def test_ctrl_c_leaves_no_process(tmp_path: Path, script_environment: dict[str, str]) -> None:
    launch = Failing(tmp_path, script_environment, "none")
    launch.wait_until_running()
    os.killpg(launch.process.pid, signal.SIGINT)
    errors = launch.process.communicate(timeout=30)[1]
    launch.assert_gone()
    assert launch.process.returncode in (130, -signal.SIGINT, 1)
    assert "stratagem: interrupted in epoch 0, after step " in errors
    assert "Traceback" not in errors
    assert "RankFailedError" not in errors, errors


def test_killing_the_launcher_leaves_no_process(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    launch = Failing(tmp_path, script_environment, "sigkill launcher")
    launch.wait_until_running()
    assert len(launch.pids()) == 4, "two ranks with a worker each"
    launch.process.send_signal(signal.SIGKILL)
    launch.process.wait(timeout=10)
    launch.assert_gone()
    launch.end()


@pytest.mark.parametrize("is_ended", [False, True])
def test_an_error_that_all_ranks_share_is_shown_once(is_ended: bool, run_script: RunScript) -> None:
    """Also if the rank whose error is printed ends the other one, before that has ended its run."""
    finished = run_script(
        COMMON
        + textwrap.dedent(f"""
        import signal

        class Broken(Net):
            def training_step(self, batch, batch_idx):
                if {is_ended} and self.global_rank == 1:
                    signal.raise_signal(signal.SIGTERM)
                raise LookupError("the same everywhere")

        quiet(strategy="ddp", devices=2, max_epochs=1).fit(Broken(), loader())
        """),
        expect=1,
    )
    assert finished.stderr.count("LookupError: the same everywhere") == 1, finished.stderr


def test_a_caught_error_lets_the_script_go_on(run_script: RunScript) -> None:
    finished = run_script(
        COMMON
        + textwrap.dedent("""
        class Broken(Net):
            def training_step(self, batch, batch_idx):
                raise LookupError("the same everywhere")

        trainer = quiet(strategy="ddp", devices=2, max_epochs=1)
        try:
            trainer.fit(Broken(), loader())
        except LookupError:
            os.write(1, b"caught\\n")
        trainer.fit(Net(), loader())
        os.write(1, f"rank {trainer.global_rank} took {trainer.global_step} steps\\n".encode())
        """)
    )
    assert sorted(finished.stdout.splitlines()) == [
        "caught",
        "caught",
        "rank 0 took 4 steps",
        "rank 1 took 4 steps",
    ]


def test_ddp_refuses_skipped_steps_and_own_batch_samplers(run_script: RunScript) -> None:
    finished = run_script(
        COMMON
        + textwrap.dedent("""
        class Skips(Net):
            def training_step(self, batch, batch_idx):
                return None

        def attempt(action):
            try:
                action()
            except Exception as error:
                if trainer.is_global_zero:
                    print(f"{type(error).__name__}: {error}", flush=True)

        trainer = quiet(strategy="ddp", devices=2, max_epochs=1)
        attempt(lambda: trainer.fit(Skips(), loader()))

        class Batches(torch.utils.data.Sampler):
            def __iter__(self):
                return iter([[0, 1], [2, 3]])

        own = DataLoader(data(4), batch_sampler=Batches())
        attempt(lambda: trainer.fit(Net(), own))
        attempt(lambda: trainer.fit(Net(), DataLoader(data(3), batch_size=4, drop_last=True)))

        class Mixes(Net):
            def training_step(self, batch, batch_idx):
                name = f"rank{self.global_rank}/x" if batch_idx else "rank0/x"
                self.log(name, float("nan"), sync_dist=True, reduce_fx=fx)
                return super().training_step(batch, batch_idx)

        for fx in ("mean", "min"):
            attempt(lambda: trainer.fit(Mixes(), loader()))
        """)
    )
    assert finished.stdout.splitlines() == [
        "UserCodeError: Skips.training_step returned None for batch 0, which skips it; with 2 "
        "ranks the others would wait for its gradients: end the method with `return loss`. To skip "
        "a batch, return a loss on every rank, such as 0.0 times the output for an input of zeros "
        "(0.0 times NaN is NaN)",
        "UserCodeError: the training data loader has a batch sampler of its own (Batches), which "
        "cannot be divided between ranks: let it yield this rank's batches only and give it the "
        "attribute num_replicas, or pass use_distributed_sampler=False",
        "UserCodeError: the training data loader is empty: expected at least one batch; its "
        "dataset has 3 samples for 2 rank(s), batch_size=4, drop_last=True",
        *[
            "UserCodeError: self.log(..., sync_dist=True) expected one name on all ranks, received "
            "'rank0/x' and 'rank1/x': to log a value of each rank, log every element of "
            "self.all_gather(value) under a name of its own"
        ]
        * 2,
    ]


def test_an_evaluation_with_fewer_samples_than_ranks_is_known_to_all(
    run_script: RunScript, tmp_path: Path
) -> None:
    script = """
    from stratagem.callbacks import EarlyStopping, ModelCheckpoint

    class OneSample(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch[1]).sum())

    savers = [ModelCheckpoint("saved", monitor="val_loss"), EarlyStopping("val_loss")]
    trainer = Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=2, callbacks=savers,
        logger=False, enable_progress_bar=False,
    )
    trainer.fit(OneSample(), loader(8), loader(1))
    Path(f"rank{trainer.global_rank}").write_text(str(float(trainer.callback_metrics["val_loss"])))
    """
    run_script(COMMON + textwrap.dedent(script))
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()
    assert list((tmp_path / "saved").glob("*.ckpt"))


def test_trainer_before_a_ddp_trainer_stays_independent(
    run_script: RunScript, tmp_path: Path
) -> None:
    script = """
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False,
               "enable_checkpointing": False, "enable_progress_bar": False}
    alone = Trainer(**options)
    alone.fit(Net(), loader(8))
    folder = Path.cwd()
    os.chdir("/")
    together = Trainer(strategy="ddp", devices=2, **options)
    together.fit(Net(), loader(8))
    text = f"{alone.world_size} {together.world_size} {together.global_rank}"
    (folder / f"rank{together.global_rank}").write_text(text)
    """
    run_script(COMMON + textwrap.dedent(script))
    assert (tmp_path / "rank0").read_text() == "1 2 0"
    assert (tmp_path / "rank1").read_text() == "1 2 1"


MANUAL = (SCRIPTS / "ddp_manual.py").read_text()


def test_manual_optimization_has_the_numbers_of_one_process(run_script: RunScript) -> None:
    # Two optimizers, each with a backward of its own that leaves out the other's parameters.
    ways = (("single_device", "1"), ("ddp_find_unused_parameters_true", "2"))
    one, two = (json.loads(run_script(MANUAL, *way).stdout) for way in ways)
    assert len(one) == 8
    assert one[-2:] != one[:2]
    assert torch.allclose(torch.tensor(two), torch.tensor(one), rtol=0, atol=1e-5)


OTHER_METHOD = """
import sys, torch
from torch import nn
from stratagem import Lite
from stratagem.errors import UserCodeError

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, inputs):
        return self.layer(inputs)
    def loss(self, inputs):
        return self(inputs).square().mean()
    def count(self):
        return sum(p.numel() for p in self.parameters())

lite = Lite(accelerator="cpu", strategy=sys.argv[1], devices=2)
lite.launch()
torch.manual_seed(1)
net = Net()
model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
batch = torch.full((2, 4), 1.0 + lite.global_rank)
assert model.count() > 0  # what computes nothing is called as ever
if sys.argv[1] == "ddp":
    with torch.no_grad():
        model.loss(batch)  # and what needs no gradients, under a strategy that holds whole weights
try:
    model.loss(batch)
except UserCodeError as error:
    assert "Net.loss() computes with the model's layers outside of the strategy" in str(error)
    assert "call model.mark_forward_method('loss') after setup" in str(error)
else:
    raise SystemExit("it was not refused")
model.mark_forward_method("loss")
for _ in range(3):
    lite.backward(model.loss(batch))
    optimizer.step()
    optimizer.zero_grad()
state = model.state_dict()
if lite.is_global_zero:
    torch.manual_seed(1)
    reference = Net()
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        (sum(reference.loss(torch.full((2, 4), 1.0 + rank)) for rank in range(2)) / 2).backward()
        own.step()
        own.zero_grad()
    assert torch.allclose(state["layer.weight"], reference.layer.weight, atol=1e-6)
    print("alike")
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lite_method_past_the_strategy_must_be_marked(run_script: RunScript, strategy: str) -> None:
    assert "alike" in run_script(OTHER_METHOD, strategy).stdout


UNFROZEN = (SCRIPTS / "ddp_unfrozen.py").read_text()


def test_parameters_that_are_unfrozen_while_training_stay_alike(run_script: RunScript) -> None:
    one = json.loads(run_script(UNFROZEN, "single_device", "1").stdout)
    two = json.loads(run_script(UNFROZEN, "ddp", "2").stdout)
    # Each of three ways to train: the parameter sums of each rank.
    assert [len(of_ranks) for of_ranks in two] == [2, 2, 2]
    for (alone,), of_ranks in zip(one, two, strict=True):
        assert of_ranks[0] == of_ranks[1]
        assert of_ranks[0] == pytest.approx(alone, abs=1e-5)
