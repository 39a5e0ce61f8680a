"""Launchers: ranks that start, fail, are killed and end, in a program as a user would write it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from stratagem.discovery import LauncherSpec, get_registry
from stratagem.launch import Launcher, RunRequest
from stratagem.plan import resolve
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.launched import GIVEN, PLANTED, Launch
from stratagem_testing.processes import clean_environment, end_children, end_session

KIND = "launcher"
_PATIENCE = 150.0
"""Seconds for a program whose ranks import torch on a machine under load."""
_SOON = 45.0
"""Seconds after which ranks that wait for a failed one have waited too long."""
_FIELDS = ("interactive", "new_processes", "spans_nodes", "devices_elsewhere")
_SCRIPT = """\
import sys

from stratagem_testing.components.launched import main

if __name__ == "__main__":
    main(sys.argv[1])
"""


def _spec(bench: Bench) -> LauncherSpec | None:
    spec = bench.component.spec
    assert spec is None or isinstance(spec, LauncherSpec)
    return spec


def _devices(bench: Bench) -> int:
    stated: int | None = bench.option("devices")
    if stated is not None:
        return stated
    spec = _spec(bench)
    return 2 if spec is None or spec.starts_ranks else 1


def _can(bench: Bench, field: str) -> bool:
    spec = _spec(bench)
    return bool(getattr(bench.make() if spec is None else spec, field))


def _start(bench: Bench, what: str) -> subprocess.Popen[str]:
    """Start a program that launches a function of `launched.py`."""
    launch = Launch(
        what=what,
        kind=bench.component.name,
        devices=_devices(bench),
        folder=str(bench.folder),
        new_processes=_can(bench, "new_processes"),
        search_path=bench.component.search_path,
    )
    (bench.folder / "launch.json").write_text(launch.text())
    (bench.folder / "program.py").write_text(_SCRIPT)
    (bench.folder / "temporary").mkdir()
    spec = _spec(bench)
    # A launcher that starts no ranks runs as a rank.
    of_rank = {} if spec is None or spec.starts_ranks or spec.name != "external" else _ONE_RANK
    return subprocess.Popen(
        [sys.executable, "program.py", "launch.json"],
        cwd=bench.folder,
        env={
            **clean_environment(bench.component.search_path),
            **of_rank,
            "TMPDIR": str(bench.folder / "temporary"),
        },
        stdin=subprocess.DEVNULL,
        stdout=(bench.folder / "stdout").open("w"),
        stderr=(bench.folder / "stderr").open("w"),
        text=True,
        start_new_session=True,
    )


_ONE_RANK: Mapping[str, str] = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"},
}


def _wait(process: subprocess.Popen[str], patience: float = _PATIENCE) -> int | None:
    """Wait for a program's end; None: it did not end, and was killed."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        end_session(process.pid, 0.0)
        process.wait()
        return None


def _run(bench: Bench, what: str) -> tuple[int | None, str]:
    """Run a program to its end; return its exit code and what it printed as errors."""
    process = _start(bench, what)
    code = _wait(process)
    stderr = (bench.folder / "stderr").read_text()
    left = end_session(process.pid, 2.0) + end_children(2.0)
    assert not left, f"the launching program has ended, and left running: {'; '.join(left)}"
    assert code is not None, (
        f"the launching program did not end in {_PATIENCE:.0f} s: its ranks wait for one that was "
        f"not started, or does not end\n{stderr[-3000:]}"
    )
    return code, stderr


def _notes(bench: Bench, name: str) -> list[dict[str, Any]]:
    """Return what processes have noted, by rank where they were one."""
    found = [json.loads(path.read_text()) for path in bench.folder.glob(f"{name}.*.json")]
    return sorted(found, key=lambda note: str(note.get("rank", "")))


@check(KIND, "itself/spec and class")
def _itself(bench: Bench) -> None:
    """It is a Launcher, and its spec agrees with its class."""
    launcher = bench.make()
    assert isinstance(launcher, Launcher), (
        f"{bench.component.name} made {launcher!r}: subclass stratagem.launch.Launcher"
    )
    spec = _spec(bench)
    if spec is None:
        return
    # A class may serve several names: its fields are the minimum of all names.
    for field in _FIELDS:
        if getattr(type(launcher), field):
            assert getattr(spec, field), (
                f"the class says {field}=True, and its spec {field}={getattr(spec, field)}: an "
                "object and a name would be judged differently"
            )


@check(KIND, "itself/refusals")
def _refusals(bench: Bench) -> None:
    """If the launcher declares that it lacks support, an error says so before a process starts."""
    given = bench.component.given

    def plan(*, interactive: bool = False, nodes: int = 1, devices: int = 2) -> Any:
        request = RunRequest(
            accelerator="cpu",
            strategy="ddp_spawn" if devices > 1 and _can(bench, "interactive") else "auto",
            devices=devices,
            num_nodes=nodes,
            launcher=given,
            environ={},
            interactive=interactive,
        )
        return resolve(request, get_registry())

    name = getattr(_spec(bench), "name", type(bench.make()).__name__)
    if not _can(bench, "interactive"):
        error = bench.error(lambda: plan(interactive=True))
        _refused(error, "a notebook", "interactive=False", (name, "notebook", "interactive"))
    if not _can(bench, "spans_nodes"):
        error = bench.error(lambda: plan(nodes=2))
        _refused(error, "num_nodes=2", "spans_nodes=False", (name, "num_nodes", "node"))
    spec = _spec(bench)
    if spec is not None and not spec.starts_ranks:
        error = bench.error(plan)
        _refused(error, "devices=2", "starts_ranks=False", (name,))


def _refused(error: Exception | None, what: str, capability: str, names: tuple[str, ...]) -> None:
    assert type(error).__name__ == "ConfigurationError", (
        f"{capability}, and {what} was not refused: {brief(error)}"
    )
    assert any(name in str(error) for name in names), (
        f"the refusal of {what} names none of {', '.join(names)}: {error}"
    )


@check(KIND, "launch/ranks", slow=True)
def _ranks(bench: Bench) -> None:
    """A launch calls the function once on each rank, with its arguments.

    Each rank has its environment variables, besides those of the program, and may print much. The
    processes agree with `new_processes`. A second launch works, with another port if it starts new
    processes. No process, handler of a signal or temporary file is left.
    """
    code, stderr = _run(bench, "note")
    assert code == 0, f"the launching program ended with exit code {code}:\n{stderr[-3000:]}"
    left = sorted(path.name for path in (bench.folder / "temporary").iterdir())
    assert not left, f"two launches left {', '.join(left)} in the folder for temporary files"
    devices = _devices(bench)
    for number in range(2):
        notes = _notes(bench, f"rank{number}")
        ranks = [note["variables"]["RANK"] for note in notes]
        alone = devices == 1 and ranks == [None]
        assert alone or sorted(map(str, ranks)) == [str(rank) for rank in range(devices)], (
            f"launch number {number + 1} called the function on the ranks {ranks}, expected each "
            f"of 0 to {devices - 1} once"
        )
        for note in notes:
            assert note["calls"] == 1, (
                f"the function was called {note['calls']} times on rank {note['rank']}"
            )
            assert note["arguments"] == [[1, "two"], {"three": 3.0, "four": [4.0]}], (
                f"rank {note['rank']} was given {note['arguments']}, expected the arguments of "
                "launch"
            )
            if not alone:
                _judge_variables(note["variables"], devices)
            if not _can(bench, "devices_elsewhere"):
                assert note["variables"][GIVEN] == PLANTED, (
                    f"rank {note['rank']} has no variable {GIVEN}, which the program had set: give "
                    "ranks the variables of the launching process, too"
                )
                assert note["folder"] == str(bench.folder), (
                    f"rank {note['rank']} works in {note['folder']}, and the program in "
                    f"{bench.folder}: relative paths would mean others"
                )
        pids = {note["pid"] for note in notes}
        assert len(pids) == devices, f"{devices} ranks ran in {len(pids)} process(es)"
        starter = _notes(bench, f"program{number}")
        for program in starter:
            assert program["returned"] == 0.0, (
                f"launch returned {program['returned']!r} where the function had returned 0.0"
            )
            assert not program["left"], (
                f"after a launch the launching process has {'; '.join(program['left'])}: undo it"
            )
        inside = {note["pid"] for note in starter} & pids
        if _can(bench, "new_processes"):
            assert not inside, "new_processes=True, and the launching process is a rank itself"
            assert starter[0]["changed"] == [], (
                "new_processes=True, and the launching process has other environment variables "
                f"afterwards: {', '.join(starter[0]['changed'])}"
            )
        else:
            assert inside, (
                "new_processes=False, and no rank is a process that calls launch: the front end "
                "would look for results there"
            )

    if _can(bench, "new_processes"):
        first, second = (
            {note["variables"]["MASTER_PORT"] for note in _notes(bench, f"rank{number}")}
            for number in range(2)
        )
        assert not first & second, (
            f"two launches have the port MASTER_PORT={', '.join(first)}: two programs on one "
            "machine would meet there. Ask stratagem.launch.free_port() at each launch"
        )


def _judge_variables(variables: Mapping[str, Any], devices: int) -> None:
    expected = {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices), "NODE_RANK": "0"}
    for name, value in expected.items():
        assert variables[name] in (value, None), (
            f"rank {variables['RANK']} has {name}={variables[name]}, expected {value}: give it "
            "stratagem.launch.rank_environment(...)"
        )
    assert variables["LOCAL_RANK"] in (variables["RANK"], None), (
        f"rank {variables['RANK']} of one node has LOCAL_RANK={variables['LOCAL_RANK']}: ranks "
        "would share a device"
    )
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert variables[name], f"rank {variables['RANK']} has no {name}"


@check(KIND, "launch/result", slow=True)
def _result(bench: Bench) -> None:
    """A launch returns the function's result, including tensors.

    From new processes, it is the result of rank 0.
    """
    code, stderr = _run(bench, "return")
    assert code == 0, f"the launching program ended with exit code {code}:\n{stderr[-3000:]}"
    for note in _notes(bench, "returned"):
        assert note["returned"] == [note["rank"] or 0, "text", [1.0, 2.0]], (
            f"launch returned {note['returned']} where the function had returned "
            f"[{note['rank']}, 'text', [1.0, 2.0]]"
        )


@check(KIND, "launch/result not executed", slow=True)
def _executed(bench: Bench) -> None:
    """An unsafe result of new processes raises an error, and is not executed."""
    if not (_can(bench, "new_processes") and bench.option("plain_results")):
        return  # it never leaves the process, or the test's class declares pickling
    code, stderr = _run(bench, "hostile")
    assert not (bench.folder / "executed").exists(), (
        "a result that has code of its own was unpickled in the launching process: send "
        "weights-only-safe data (stratagem.launch.pack_result) and read it by "
        "stratagem.launch.unpack_result, or say plain_results = False"
    )
    assert code != 0, "a result that is not weights-only-safe data came back as something else"
    assert "weights-only-safe data" in stderr, f"the refusal does not say why:\n{stderr[-2000:]}"


@check(KIND, "failure/error of a rank", slow=True)
def _failure(bench: Bench) -> None:
    """An exception on one rank ends all ranks soon, also those that do not wait for it.

    The error starts with the exception and its traceback.
    """
    code, stderr = _run(bench, "fail")
    ended = time.time()
    last = _devices(bench) - 1
    assert code != 0, f"rank {last} raised an error, and the program ended with exit code 0"
    assert PLANTED in stderr, (
        f"rank {last} raised ValueError({PLANTED!r}), and what is printed does not show it:\n"
        f"{stderr[-3000:]}"
    )
    assert "fails_here" in stderr, (
        f"the error shows no traceback of rank {last}, with the line that failed:\n{stderr[-3000:]}"
    )
    (failed,) = _notes(bench, "failed")
    seconds = ended - failed["at"]
    assert seconds < _SOON, (
        f"the program ended {seconds:.0f} s after a rank had failed: end the others then, which "
        "may compute for long before they miss it"
    )
    if _can(bench, "new_processes"):
        assert "RankFailedError" in stderr, (
            f"the launch raised no RankFailedError, which programs expect:\n{stderr[-2000:]}"
        )
    if _devices(bench) > 1 and _can(bench, "new_processes"):
        assert f"rank {last}" in stderr, f"the error does not name rank {last}:\n{stderr[-2000:]}"


@check(KIND, "failure/error after the others", slow=True)
def _failure_late(bench: Bench) -> None:
    """An exception on one rank is reported, also if all other ranks have returned."""
    if _devices(bench) < 2:
        return
    code, stderr = _run(bench, "fail late")
    last = _devices(bench) - 1
    assert code != 0, (
        f"rank {last} raised an error when the other ranks had returned, and the program ended "
        "with exit code 0: wait for all ranks, and look at how each has ended"
    )
    assert PLANTED in stderr, (
        f"rank {last} raised ValueError({PLANTED!r}) when the other ranks had returned, and what "
        f"is printed does not show it:\n{stderr[-3000:]}"
    )


@check(KIND, "failure/a rank that is killed", slow=True)
def _killed(bench: Bench) -> None:
    """If a signal ends one rank, all ranks end, and the error names the rank and the signal."""
    if _devices(bench) < 2:
        return
    code, stderr = _run(bench, "killed")
    last = _devices(bench) - 1
    assert code != 0, f"rank {last} was killed, and the program ended with exit code 0"
    for word in (f"rank {last}", "SIGKILL"):
        assert word in stderr, (
            f"rank {last} was ended by SIGKILL, and the error does not say {word!r} "
            f"(stratagem.launch.rank_failure does):\n{stderr[-3000:]}"
        )


@check(KIND, "signals/SIGTERM", slow=True)
def _terminated(bench: Bench) -> None:
    """SIGTERM to the launching process also ends the ranks, and no process is left."""
    _end_by(bench, signal.SIGTERM)


@check(KIND, "signals/SIGKILL", slow=True)
def _orphaned(bench: Bench) -> None:
    """If the launching process is killed, its ranks end soon."""
    _end_by(bench, signal.SIGKILL)


def _end_by(bench: Bench, number: signal.Signals) -> None:
    process = _start(bench, "wait")
    _wait_for_ranks(bench, process)
    process.send_signal(number)
    code, name = _wait(process, _SOON), number.name
    left = end_session(process.pid, 5.0) + end_children(5.0)
    assert code is not None, f"{name} did not end the launching process in {_SOON:.0f} s"
    assert code != 0, f"the launching process ended with exit code 0 after {name}"
    assert not left, (
        f"after {name} to the launching process these run on: {'; '.join(left)}: on Linux, "
        "prctl(PR_SET_PDEATHSIG) ends a process with its parent. Elsewhere, a thread of a rank can "
        "wait for the end of a pipe"
    )


@check(KIND, "signals/SIGUSR1", slow=True)
def _forwarded(bench: Bench) -> None:
    """SIGUSR1, which clusters send before a job's end, reaches a rank and does not end it."""
    process = _start(bench, "wait")
    _wait_for_ranks(bench, process)
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 30.0
    while not _notes(bench, "signal") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    reached = bool(_notes(bench, "signal"))
    (bench.folder / "end").touch()
    code = _wait(process, _SOON)
    end_session(process.pid, 2.0)
    # The Trainer's ranks share a signal that reached a single rank.
    assert reached, (
        "SIGUSR1 to the launching process reached no rank: forward it, or no checkpoint is saved "
        "before the job's time is over"
    )
    assert code == 0, f"after SIGUSR1 the program ended with exit code {code}, expected 0"


def _wait_for_ranks(bench: Bench, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while len(_notes(bench, "waiting")) < _devices(bench):
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            _wait(process, 0.0)
            stderr = (bench.folder / "stderr").read_text()
            when = "before the program ended" if ended else f"in {_PATIENCE:.0f} s"
            raise AssertionError(
                f"{len(_notes(bench, 'waiting'))} of {_devices(bench)} ranks came to the function "
                f"{when}:\n{stderr[-3000:]}"
            )
        time.sleep(0.05)
