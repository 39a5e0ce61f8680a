"""What hangs or is lost between ranks becomes an error that names the rank and the place."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import zygote
from torch.distributed import distributed_c10d

from stratagem.errors import CommunicationError
from stratagem.launch.rank import this_rank
from stratagem.trainer.loops.interruption import Interruption
from stratagem_torch.distributed.diagnosis import rank_status
from stratagem_torch.distributed.diagnosis.rank_status import COLLECTIVES, is_communication_error
from stratagem_torch.distributed.runs import GroupRuns, close_connections, event_loops

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

# Each kind of trouble in a loop of Lite, in two ranks with a timeout of some seconds.
TROUBLE = (SCRIPTS / "failure_trouble.py").read_text()


def line_of(script: str, what: str) -> int:
    return next(n for n, line in enumerate(script.splitlines(), 1) if f"LINE {what}" in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "different collectives",
            [
                "rank 0: in all_reduce, at {}:{all_reduce}",
                "rank 1: in broadcast, at {}:{broadcast}",
            ],
        ),
        (
            "asleep",
            [
                "rank 0: backward failed at {}:{backward} in step",
                "rank 1: in <module>(), at {}:{sleep}",
            ],
        ),
        (
            "one step more on rank 1",
            ["rank 1: in backward, at {}:{backward} in step"],
        ),
        (
            "one step more on rank 0",
            ["rank(s) 1 missing from backward, at {}:{backward}", "rank 1: has ended its script"],
        ),
        ("exit", ["rank(s) 1 missing from backward", "rank 1: has ended its script, in order"]),
    ],
)
def test_ranks_that_wait_for_one_another_end_with_where_each_is(
    kind: str, said: list[str], run_script: RunScript, tmp_path: Path
) -> None:
    finished = run_script(TROUBLE, kind, expect=1)
    names = ("all_reduce", "broadcast", "sleep", "backward")
    lines = {name: line_of(TROUBLE, name) for name in names}
    for text in said:
        expected = text.format(tmp_path / "script.py", **lines)
        assert expected in finished.stderr, finished.stderr
    assert finished.stderr.count("Where the ranks are:") == 1, finished.stderr
    last = "For an explanation: stratagem errors hang\n"
    assert finished.stderr.count(last) == 1, finished.stderr
    if kind == "one step more on rank 1":
        # By its answer, or by the mark that it has left, whichever is seen first.
        ends = ("rank 0: at the end of its script", "rank 0: has ended its script, in order")
        assert any(end in finished.stderr for end in ends), finished.stderr


@pytest.mark.slow
def test_the_failure_of_a_rank_is_not_lost_in_a_finalizer(run_script: RunScript) -> None:
    script = (SCRIPTS / "failure_finalizing.py").read_text()
    finished = run_script(script, expect=1)
    assert "begins" in finished.stdout
    assert "Exception ignored" not in finished.stderr, finished.stderr
    assert finished.stderr.count("rank 1 of 2 failed with exit code 3") == 1, finished.stderr
    assert "NOT REACHED" not in finished.stderr


@pytest.mark.slow
def test_collectives_of_different_sizes_print_the_aborting_stack(
    run_script: RunScript,
) -> None:
    # torch aborts one process, and which one is a matter of timing.
    finished = run_script(TROUBLE, "sizes", expect=None)
    assert finished.returncode != 0
    assert "Received data size doesn't match expected size" in finished.stderr
    assert 'script.py", line' in finished.stderr, finished.stderr


@pytest.mark.slow
def test_torchrun_exception_of_one_rank_reaches_the_others(
    run_script: RunScript,
) -> None:
    text = """
    import torch
    from stratagem import Lite

    def main(lite):
        lite.barrier()
        if lite.global_rank == 1:
            raise ValueError("only here")
        try:
            lite.all_reduce(torch.ones(2))
        except RuntimeError as error:
            # gloo's own; what run_as_rank makes of it comes after this frame.
            print("LOST", type(error).__name__)
            raise

    Lite(accelerator="cpu").launch(main)
    """
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    finished = run_script(text, before=before, expect=1)
    assert "ValueError: only here" in finished.stderr


# -- the next run after an error

NEXT_RUN = (SCRIPTS / "failure_next_run.py").read_text()


def outcomes(folder: Path) -> list[list[Any]]:
    """Return what each run of `failure_next_run.py` ended with, by rank."""
    found = [json.loads((folder / f"rank{rank}").read_text()) for rank in (0, 1)]
    # The first run waits for the other rank's imports.
    assert all(seconds < 20 for of_rank in found for *_, seconds in of_rank[1:])
    return [[(name, outcome) for _, name, outcome, _ in of_rank] for of_rank in found]


def test_the_next_run_after_an_error_of_one_rank_trains_on_all(
    run_script: RunScript, tmp_path: Path
) -> None:
    finished = run_script(NEXT_RUN)
    assert finished.stdout == ""
    first, second = outcomes(tmp_path)
    for of_rank in (first, second):
        # Between two failing runs, and after the last of them.
        assert of_rank[1:24:2] == [("", 4)] * 12
    for name, outcome in second[:24:2]:
        error = "KeyboardInterrupt: " if name == "interrupt" else f"ValueError: fails in {name}"
        assert outcome == (4 if name == "again" else error)
    heard = dict(first[:22:2])
    assert first[22] == (
        "validate",
        "CommunicationError: this rank (0) has no batch left for validation_step, and rank(s) 1 "
        "failed",
    )
    assert [heard[name] for name in ("on_fit_end", "after", "again")] == [4, 4, 4]
    for name in ("everywhere", "everywhere late"):
        assert heard[name] == f"ValueError: fails in {name}"
    assert heard["before"] == (
        "CommunicationError: rank(s) 1 skipped this run, and rank 0 begins it: every rank must "
        "start the same runs. The script may have caught an error of those ranks between making a "
        "Trainer and its run: let all ranks go on alike"
    )
    for name in ("training_step", "validation_step", "setup", "configure_optimizers"):
        assert f"ValueError: fails in {name}" in heard[name], heard[name]
        assert heard[name].startswith("CommunicationError: rank 0: ")
    assert first[24][1] == (
        "CommunicationError: rank 0 begins a run, and rank(s) 1 ended the script: every rank must "
        "start the same runs (timeout=600 s of the strategy)"
    )


@pytest.mark.slow
def test_next_run_is_refused_if_other_ranks_are_stuck(
    run_script: RunScript, tmp_path: Path
) -> None:
    run_script(NEXT_RUN, "stuck")
    first, second = outcomes(tmp_path)
    assert first[1][1] == (
        "CommunicationError: rank 1 waited for rank 0 to begin this run, and has given up: the "
        "script may have caught an error there; look at the output of that rank"
    )
    refused = second[1][1]
    assert refused.startswith(
        "CommunicationError: rank 1 failed in its last run and begins the next one, but others "
        "wait in a collective of the last one, which cannot be ended here:\n  rank 0: in backward, "
    )
    assert refused.endswith(
        "\nStart each run in processes of its own, or let the error end the script"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="connections of gloo are found in /proc")
def test_close_connections_keeps_sockets_of_python_servers() -> None:
    before = event_loops()
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.EpollSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
            selector.register(other, selectors.EVENT_READ)
            close_connections(before)
            client.sendall(b"x")
            assert other.recv(1) == b"x"
            poll = select.epoll()  # of no selector, as gloo's
            poll.register(server, select.EPOLLIN)
            poll.register(other, select.EPOLLIN)
            selector.close()
            close_connections(before)
            assert other.recv(1) == b""
            poll.close()


def test_a_rank_that_begins_a_run_alone_waits_as_long_as_for_a_collective() -> None:
    hash_store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store = SimpleNamespace(clone=lambda: hash_store)
    statuses: Any = SimpleNamespace(exchange=SimpleNamespace(ended=dict))
    runs = GroupRuns(
        store,
        0,
        2,
        timeout=0.6,
        join_again=lambda number: statuses,
        statuses=statuses,
        loops_before=set(),
    )
    with pytest.raises(CommunicationError) as caught:
        runs.begin(0)
    assert str(caught.value) == (
        "rank 0 begins a run, and others did not come: every rank must start the same runs "
        "(timeout=0.6 s of the strategy)"
    )


def test_a_rank_that_tells_that_its_run_has_failed_answers_where_it_failed() -> None:
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    statuses: Any = rank_status.RankStatuses(store, 0, 2, timeout=1.0)
    answers = []
    statuses.exchange.mark = lambda *_: answers.append(statuses.here())
    runs = GroupRuns(
        store,
        0,
        2,
        timeout=1.0,
        join_again=lambda number: statuses,
        statuses=statuses,
        loops_before=set(),
    )

    def wait_for_others() -> None:
        raise RuntimeError("Timed out")

    try:
        wait_for_others()
    except RuntimeError as error:
        runs.fail(error)
    assert [answer.operation for answer in answers] == ["wait_for_others()"]
    assert statuses.here().operation != "wait_for_others()"


# -- signals under the Trainer

TRAINING = (SCRIPTS / "failure_training.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "to"),
    [
        (["1", "auto"], 0),
        (["2", "ddp"], 1),
        (["2", "ddp", "slow_logger"], 1),
        (["2", "ddp_fork"], 1),
    ],
)
def test_sigterm_to_any_rank_saves_after_the_same_step_of_all_and_ends_in_order(
    arguments: list[str],
    to: int,
    tmp_path: Path,
    script_environment: dict[str, str],
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    program = zygote().start(script, *arguments, environment=script_environment, folder=tmp_path)
    deadline = time.monotonic() + 60
    files = [tmp_path / f"rank{rank}" for rank in range(int(arguments[0]))]
    while not all(f.exists() and f.read_text() for f in files):
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(files[to].read_text()), signal.SIGTERM)
    stdout, stderr = program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM, (stdout, stderr)
    assert "NOT REACHED" not in stdout
    assert "stratagem: SIGTERM: training ends here, saved as" in stdout
    assert stderr == ""
    (saved,) = (tmp_path / "checkpoints").glob("interrupted-*.ckpt")
    assert torch.load(saved, weights_only=True)["progress"]["global_step"] > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "limit", "step"),
    [
        ("on_train_batch_end", "max_steps=3", 3),
        ("on_train_batch_end", "max_epochs=1", 4),
        ("on_train_epoch_end", "max_epochs=1", 4),
    ],
)
def test_a_rank_may_stop_alone_where_all_end(
    hook: str, limit: str, step: int, run_script: RunScript
) -> None:
    script = (SCRIPTS / "failure_stop.py").read_text().replace("max_epochs=3", limit)
    finished = run_script(script.replace("global_step >= 3", f"global_step >= {step}"), hook)
    assert finished.stdout.count("ENDED") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "step", "where"),
    [
        # In its second step DDP sends the order of its buckets, before forward.
        ("on_train_batch_end", 1, "communication before forward"),
        ("on_train_batch_end", 3, "backward"),
        ("on_train_epoch_end", 4, "backward"),
    ],
)
def test_a_rank_that_stops_alone_says_so(
    hook: str, step: int, where: str, run_script: RunScript
) -> None:
    script = (SCRIPTS / "failure_stop.py").read_text()
    finished = run_script(
        script.replace("global_step >= 3", f"global_step >= {step}"), hook, expect=1
    )
    assert "ENDED" not in finished.stdout
    assert (
        f"this rank (1) stops after step {step} (Trainer.should_stop=True), and others wait for it "
        "in a collective:\n"
    ) in finished.stderr, finished.stderr
    assert f"  rank 0: in {where}, at " in finished.stderr, finished.stderr
    assert "For an explanation: stratagem errors hang\n" in finished.stderr, finished.stderr


class Environment:
    preemption_signals = ()

    def requeues_upon(self, number: int) -> bool:
        return False


def interruption_of(
    ranks: TwoRanks, stops: list[str], max_time: float | None = None
) -> Interruption:
    return Interruption(
        ranks,  # type: ignore[arg-type]
        Environment(),  # type: ignore[arg-type]
        None,
        stop=lambda: stops.append("stop"),
        save=lambda: stops.append("save"),
    )


class TwoRanks:
    """Two ranks of which the other one says what is given: enough for a look."""

    world_size = 2
    is_global_zero = True

    def __init__(self, other: list[list[int]]) -> None:
        self.other = other
        self.asked = 0

    def all_reduce_ints(self, numbers: list[int], op: str) -> list[int]:
        """Numbers, since a tensor would have to be waited for where it lies on a device."""
        assert op == "max"
        self.asked += 1
        other = self.other.pop(0) if self.other else [0, 0, 1000, 0]  # times in microseconds
        return list(map(max, numbers, other))


def test_ranks_ask_one_another_less_often_the_shorter_their_steps_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    clock_of_runs = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("stratagem.trainer.loops.interruption.time", clock_of_runs)
    ranks = TwoRanks([])
    stops: list[str] = []
    interruption = interruption_of(ranks, stops)
    for _ in range(2000):
        now += 0.001
        interruption.end_if_due()
    assert stops == []
    # 2 s of steps of 1 ms: after 1, 4, 16, 64, 256 steps, and then each 500.
    assert 5 <= ranks.asked <= 9


def test_a_signal_on_another_rank_ends_this_one_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(this_rank, "interrupted", False)
    ten = 10_000_000
    ranks = TwoRanks([[0, 0, ten, ten], [int(signal.SIGTERM), 0, ten, 2 * ten]])
    stops: list[str] = []
    interruption = interruption_of(ranks, stops)
    interruption.end_if_due()
    assert (interruption.agreed_time(), stops) == (10.0, [])
    with pytest.raises(SystemExit) as ended:
        interruption.end_if_due()
    assert ended.value.code == 128 + signal.SIGTERM
    assert (interruption.agreed_time(), stops) == (20.0, ["save"])
    assert interruption.signal is signal.SIGTERM


def test_max_time_of_another_rank_stops_this_one() -> None:
    stops: list[str] = []
    interruption_of(TwoRanks([[0, 1, 0, 0]]), stops).end_if_due()
    assert stops == ["stop"]


@pytest.mark.slow
def test_a_rank_that_was_stopped_for_a_while_ends_like_the_others(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING.replace("max_epochs=-1", "max_steps=150, max_epochs=-1"))
    program = zygote().start(script, "2", "ddp", environment=script_environment, folder=tmp_path)
    file = tmp_path / "rank0"
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(file.read_text()), signal.SIGSTOP)
    time.sleep(6)
    os.kill(int(file.read_text()), signal.SIGCONT)
    program.communicate(timeout=60)
    assert program.returncode == 0


def test_only_errors_of_communication_are_taken_for_such() -> None:
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")
    assert is_communication_error(lost)
    assert is_communication_error(torch.distributed.DistBackendError("NCCL timeout"))
    assert not is_communication_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_communication_error(ValueError("gloo/"))
    assert CommunicationError("text", (1,), "here").missing == (1,)


def _hanging(kind: str, folder: Path, environment: dict[str, str]) -> tuple[Any, Path, list[int]]:
    """Start TROUBLE; return the program, its script, and the processes of its two ranks."""
    script = folder / "script.py"
    script.write_text(TROUBLE.replace("timeout=8", "timeout=600"))
    program = zygote().start(script, kind, environment=environment, folder=folder)
    files = [folder / f"hangs{rank}" for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    return program, script, [int(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "to", "numbers", "seconds"),
    [
        ("in a fit", (0, 1), [signal.SIGTERM], 15),
        ("different collectives", (0, 1), [signal.SIGINT], 15),
        ("different collectives", (0,), [signal.SIGTERM], 15),
        ("asleep", (0,), [signal.SIGINT, signal.SIGINT], 12),
    ],
)
def test_hanging_ranks_end_on_a_signal_and_print_their_places(
    kind: str,
    to: tuple[int, ...],
    numbers: list[signal.Signals],
    seconds: float,
    tmp_path: Path,
    script_environment: dict[str, str],
) -> None:
    program, script, ranks = _hanging(kind, tmp_path, script_environment)
    for number in numbers:
        for rank in to:
            os.kill(ranks[rank], number)
        time.sleep(0.5)
    _, stderr = program.communicate(timeout=seconds)
    assert program.returncode == 128 + numbers[0], stderr
    name = numbers[0].name
    assert f"stratagem: {name} while the ranks wait in collectives. Where the ranks are:" in stderr
    assert stderr.count("Where the ranks are:") == 1, stderr
    waits = {"different collectives": "all_reduce", "in a fit": "all_gather"}.get(kind, "backward")
    place = f"{script}:{line_of(TROUBLE, waits)}"
    assert f"rank 0: in {waits}, at {place}" in stderr
    rule = "Every rank must call the same collectives in the same order"
    assert f"{rule}\nFor an explanation: stratagem errors hang\n" in stderr


@pytest.mark.slow
def test_second_sigterm_ends_waiting_ranks_with_their_places(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    """The rank that they wait for may be saving a checkpoint, so they wait on."""
    program, script, ranks = _hanging("asleep", tmp_path, script_environment)
    os.kill(ranks[0], signal.SIGTERM)
    time.sleep(9)
    assert program.poll() is None
    os.kill(ranks[0], signal.SIGTERM)
    _, stderr = program.communicate(timeout=15)
    waiting, _, ended = stderr.partition("A second signal ends the ranks that wait")
    for said in (waiting, ended):
        assert "stratagem: SIGTERM while the ranks wait in collectives. Where the ranks" in said
        assert f"rank 0: in backward, at {script}:{line_of(TROUBLE, 'backward')}" in said
        assert f"rank 1: in <module>(), at {script}:" in said


def test_a_hang_in_any_collective_of_this_torch_is_known() -> None:
    begins = ("all_", "barrier", "broadcast", "gather", "reduce_scatter", "scatter", "monitored")
    public = {
        name
        for name, value in vars(distributed_c10d).items()
        if name.startswith(begins) and callable(value) and "multigpu" not in name
    }
    assert len(public) > 12
    assert public <= COLLECTIVES


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_while_a_thread_reads_the_frames() -> None:
    reads = rank_status._reads_frames
    events: list[str] = []

    def read() -> None:
        events.append("read")
        reads.release()

    reads.acquire()
    timer = threading.Timer(0.3, read)
    timer.start()
    child = os.fork()
    if child == 0:
        os._exit(not reads.acquire(timeout=5))  # it is free in the child
    events.append("forked")
    assert os.waitpid(child, 0)[1] == 0
    timer.join()
    assert events == ["read", "forked"]
