"""Start the ranks of one node and watch them. Standard library only.

Two launchers use it. The launcher that re-runs a script watches the other ranks from rank 0.
`stratagem run` watches all ranks, and never imports torch, so that all ranks start at once.
Restarts are left to torch.distributed.elastic.

`rank.py` is a rank's side of a launch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stratagem.errors import ConfigurationError, RankFailedError, with_explanation
from stratagem.launch import ERROR_FILE_VARIABLE, OWNER_VARIABLE, PARENT_VARIABLE, crash_file
from stratagem.system import ENDING, KILL, parent_death_signal, send_signal

_END_GRACE = 3.0
"""When a rank has failed, seconds within which other ranks that reported an error must end."""
_TERM_GRACE = 5.0
"""Seconds that a rank has between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Output:
    """The destination of the ranks' stdout and stderr.

    Attributes:
        log_dir: a folder for the files rank<n>.log; None: the output of this process.
        prefix: put "[rank n] " before each line on the terminal.

    Example:
        >>> from stratagem_torch.launch import Output
        >>> Output.of({"STRATAGEM_PREFIX_OUTPUT": "1"}).prefix
        True
    """

    log_dir: Path | None = None
    prefix: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Output:
        """Return the output selected by STRATAGEM_LOG_DIR and STRATAGEM_PREFIX_OUTPUT (1)."""
        named = environ.get("STRATAGEM_LOG_DIR")
        return cls(Path(named) if named else None, environ.get("STRATAGEM_PREFIX_OUTPUT") == "1")

    def variables(self) -> dict[str, str]:
        """Return the environment variables that make a rank's output unbuffered."""
        return {"PYTHONUNBUFFERED": "1"} if self.log_dir or self.prefix else {}


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: the failed rank.
        exit_code: its exit code; the negated signal number if a signal ended it.
        report: its traceback; "": it left no traceback.
        time: the time of the failure, in seconds since the epoch.
        log_file: the file with its output; None: the terminal.
        how: how the rank ended; "": described by the exit code.
        place: the rank's place in its mesh, "data 1, tensor 0"; "": not known, or no mesh.

    Example:
        >>> from stratagem_torch.launch import Failure
        >>> str(Failure(1, -15, "", 0.0).error(4)).partition(";")[0]
        'rank 1 of 4 was ended by SIGTERM'
    """

    rank: int
    exit_code: int
    report: str
    time: float
    log_file: Path | None = None
    how: str = ""
    place: str = ""

    def error(self, world_size: int, where: str = "") -> RankFailedError:
        """Return the error to raise for this failure.

        Args:
            world_size: the world size of the launch.
            where: the position of another rank when it lost this rank.
        """
        if self.how:
            how = self.how
        elif self.exit_code < 0:
            how = f"was ended by {_signal_name(-self.exit_code)}"
            if self.exit_code == -KILL:
                how += " (as the system does when memory runs out)"
        else:
            how = f"failed with exit code {self.exit_code}"
        if self.report:
            what = f"; its traceback:\n\n{self.report.rstrip()}"
        else:
            output = "above" if self.log_file is None else f"in {self.log_file}"
            what = f"; it exited without a Python traceback; its output is {output}"
            what = with_explanation(what, "rank-failed")
        place = f" ({self.place})" if self.place else ""
        return RankFailedError(
            f"{where}rank {self.rank} of {world_size}{place} {how}{what}",
            rank=self.rank,
            exit_code=self.exit_code,
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most of the real-time signals have no name.
        return f"signal {number}"


class RankProcess(Protocol):
    """A child process, with the interface of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """Return the process's exit code; a negated signal number if a signal ended it.

        None: the process is running.
        """

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process's end; raises subprocess.TimeoutExpired."""


StartRank = Callable[[int, Mapping[str, str], "Path | None"], RankProcess]
"""Starts a rank's process: (rank, additional environment variables, output file or None)."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Starts every rank with the same command line.

    Attributes:
        command: the program and its arguments.
        pass_fds: by rank, file descriptors that the child inherits.
        new_sessions: start each child in a new session.
        cwd: the folder that the children start in; None: this process's.
        die_with_this: let the kernel end a child when this process ends, whatever the child runs.
            Only for a process without other threads.

    Example:
        >>> import sys
        >>> from stratagem_torch.launch import Command
        >>> program = [sys.executable, "-c", "import os; exit(int(os.environ['RANK']))"]
        >>> Command(command=program)(3, {"RANK": "3"}, None).wait()
        3
    """

    command: Sequence[str]
    pass_fds: Mapping[int, Sequence[int]] | None = None
    new_sessions: bool = False
    cwd: str | None = None
    die_with_this: bool = False

    def __call__(
        self, rank: int, environment: Mapping[str, str], output: Path | None
    ) -> RankProcess:
        """Start the process of one rank."""
        inherited = () if self.pass_fds is None else tuple(self.pass_fds.get(rank, ()))
        opened: Any = nullcontext() if output is None else output.open("wb")
        with opened as file:
            return subprocess.Popen(
                self.command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                cwd=self.cwd,
                stdout=file,
                stderr=file,
                pass_fds=inherited,
                start_new_session=self.new_sessions,
                preexec_fn=parent_death_signal() if self.die_with_this else None,
            )


class RankProcesses:
    """Child processes, one per rank, and a thread that watches them.

    Use it as a context manager: leaving it ends the running children.

    Args:
        start: starts a child.
        environments: by rank, the environment variables of a child in addition to this process's.
        on_failure: called once, in the watching thread, when the first child fails; the other
            children have been asked to end before.
        own_sessions: each child leads a session. Ctrl-C on the terminal then reaches this process
            only, and signals sent to a child also reach the child's own child processes.
        output: the destination of the children's output.

    Example:
        >>> import sys
        >>> from stratagem_torch.launch import Command, RankProcesses
        >>> program = [sys.executable, "-c", "import os; exit(int(os.environ['RANK']))"]
        >>> start, failures = Command(command=program), []
        >>> with RankProcesses(start, {3: {"RANK": "3"}}, on_failure=failures.append) as ranks:
        ...     _ = ranks.wait()
        >>> failures[0].exit_code
        3
    """

    def __init__(
        self,
        start: StartRank,
        environments: Mapping[int, Mapping[str, str]],
        *,
        on_failure: Callable[[Failure], None],
        own_sessions: bool = False,
        output: Output = Output(),
    ) -> None:
        self.failure: Failure | None = None
        self._on_failure = on_failure
        self._own_sessions = own_sessions
        self._error_files = tempfile.TemporaryDirectory(prefix="stratagem-ranks-")
        self._output = output
        self._log_files: dict[int, Path] = {}
        if output.log_dir is not None:
            output.log_dir.mkdir(parents=True, exist_ok=True)
            self._log_files = {rank: output.log_dir / f"rank{rank}.log" for rank in environments}
        self._prefixers: list[threading.Thread] = []
        self._processes: dict[int, RankProcess] = {}
        self._ending = threading.Event()
        self._told_to_end = False
        # Instead of joining the thread: before Python 3.13, Ctrl-C makes a thread look ended.
        self._over = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._start_all(start, environments)
            self._watch_by(self._watch)
            return
        # A child ends with the thread that started it (see `die_with_parent`). This thread may end
        # before the children, so the watching thread starts them.
        problems: list[BaseException] = []
        begun = threading.Event()

        def start_and_watch() -> None:
            try:
                self._start_all(start, environments)
            except BaseException as error:
                problems.append(error)
                return
            finally:
                begun.set()
            self._watch()

        self._watch_by(start_and_watch)
        begun.wait()
        if problems:
            raise problems[0]

    def _watch_by(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name="stratagem-ranks", daemon=True).start()

    def _start_all(self, start: StartRank, environments: Mapping[int, Mapping[str, str]]) -> None:
        try:
            for rank, environment in environments.items():
                own = {
                    **self._output.variables(),
                    **environment,
                    ERROR_FILE_VARIABLE: str(self._error_file(rank)),
                    PARENT_VARIABLE: str(os.getpid()),
                    OWNER_VARIABLE: "",
                }
                self._processes[rank] = start(rank, own, self._output_file(rank))
        except BaseException:
            # The system may allow no more processes. The started children must not stay.
            self.kill()
            for process in self._processes.values():
                process.wait()
            self._error_files.cleanup()
            raise

    def _output_file(self, rank: int) -> Path | None:
        if self._output.log_dir is not None or not self._output.prefix:
            return self._log_files.get(rank)
        # A named pipe, so that every kind of rank process opens it like a log file.
        make_pipe: Any = getattr(os, "mkfifo", None)
        if make_pipe is None:
            raise ConfigurationError(
                "a prefix before each line of output needs named pipes, which this system does not "
                "have: pass a folder for log files instead (--log-dir or STRATAGEM_LOG_DIR)"
            )
        pipe = Path(self._error_files.name) / f"rank{rank}.pipe"
        make_pipe(pipe)
        prefixer = threading.Thread(target=_prefix_lines, args=(pipe, rank), daemon=True)
        prefixer.start()
        self._prefixers.append(prefixer)
        return pipe

    def _error_file(self, rank: int) -> Path:
        return Path(self._error_files.name) / f"rank{rank}.json"

    def _watch(self) -> None:
        try:
            self._watch_until_the_end()
        finally:
            self._over.set()

    def _watch_until_the_end(self) -> None:
        running = dict(self._processes)
        while running and not self._ending.is_set():
            failures = []
            for rank, process in list(running.items()):
                exit_code = process.poll()
                if exit_code is not None:
                    del running[rank]
                    if exit_code != 0:
                        failures.append(self._failure(rank, exit_code))
            if failures and self._told_to_end:
                # Each rank ends by itself. The sender of the signal sets the time limit.
                self.failure = self.failure or failures[0]
            elif failures and not self._ending.is_set():
                # Several may have ended since the last poll: the first to report is the cause.
                failures += self._failing(running)
                self.failure = min(failures, key=lambda failure: (not failure.report, failure.time))
                self._signal(signal.SIGTERM)
                self._on_failure(self.failure)
                self._end_all()
                return
            self._ending.wait(0.05)

    def _failing(self, running: Mapping[int, RankProcess]) -> Iterator[Failure]:
        """Yield the failures of ranks that have reported one and are about to end."""
        deadline = time.monotonic() + _END_GRACE
        for rank, process in running.items():
            if self._error_file(rank).exists():
                try:
                    exit_code = process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
                if exit_code != 0:
                    yield self._failure(rank, exit_code)

    def _failure(self, rank: int, exit_code: int) -> Failure:
        file, log_file = self._error_file(rank), self._log_files.get(rank)
        try:
            message = json.loads(file.read_text())["message"]
            extra = message["extraInfo"] if isinstance(message, dict) else {"py_callstack": message}
            report, place = str(extra["py_callstack"]), str(extra.get("place", ""))
            written = file.stat().st_mtime
            return Failure(rank, exit_code, report, written, log_file, place=place)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the rank had no time to write a report
        try:
            report = crash_file(str(file)).read_text()
        except OSError:
            report = ""
        return Failure(rank, exit_code, report, time.time(), log_file)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                # A child with a session leads a process group with the child's process id.
                send_signal(process.pid, number, group=self._own_sessions)

    def _end_all(self) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal(KILL)
                process.wait()

    def forward_signal(self, number: signal.Signals) -> None:
        """Send a signal to every running child."""
        if number in ENDING:
            self._told_to_end = True
        self._signal(number)

    def forget(self) -> None:
        """Remove the children's error files."""
        self._error_files.cleanup()

    def kill(self) -> None:
        """Kill every running child at once."""
        self._signal(KILL)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all children have ended or a child has failed; False: the timeout expired."""
        return self._over.wait(timeout)

    def end(self) -> None:
        """End the running children, and remove their error files."""
        self._ending.set()
        self._over.wait()
        self._end_all()
        for prefixer in self._prefixers:
            prefixer.join(1.0)  # without any output of its rank, the thread does not end
        self._error_files.cleanup()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def _prefix_lines(pipe: Path, rank: int) -> None:
    """Copy a rank's lines to this process's output, with the rank before each line."""
    prefix = f"[rank {rank}] ".encode()
    with pipe.open("rb") as lines:
        for line in lines:
            # In one write, so that the lines of two ranks do not mix.
            os.write(1, prefix + line)
