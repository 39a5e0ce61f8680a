"""Starting the ranks of one node and watching them: the standard library only.

Used by the launcher that re-runs a script (the watching process is rank 0 itself) and by
`stratagem run` (which watches all of them and never imports torch, so that all ranks start at
once). Restarts are left to torch.distributed.elastic.

A rank that fails writes its exception into the file named by TORCHELASTIC_ERROR_FILE, in the format
of torch.distributed.elastic, so that the same code serves under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stratagem.errors import RankFailedError

LISTEN_FD_VARIABLE = "STRATAGEM_LISTEN_FD"
"""For rank 0: the file descriptor of the socket that listens on MASTER_PORT already."""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
PARENT_VARIABLE = "STRATAGEM_PARENT_PID"
LAUNCH_VARIABLE = "STRATAGEM_LAUNCH_ORDINAL"
"""For ranks that run a script again: which request of the script has launched them."""

_TERM_GRACE = 5.0
"""Seconds that a rank has between SIGTERM and SIGKILL."""


def _present_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib would be imported for nothing
    except OSError:
        return None


STARTED_IN = _present_folder()
"""Where this process was when Stratagem was imported; a script may go elsewhere later."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def listening_socket() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    return listener


def threads_per_rank(local_world_size: int) -> str:
    """Return OMP_NUM_THREADS for each of the ranks that share this node's cores."""
    threads = max(1, available_cores() // local_world_size)
    return os.environ.get("OMP_NUM_THREADS", str(threads))


def rank_environment(
    *,
    local_rank: int,
    local_world_size: int,
    node_rank: int = 0,
    num_nodes: int = 1,
    main_address: str = "127.0.0.1",
    main_port: int,
) -> dict[str, str]:
    """Return the variables that tell a rank who it is."""
    network = {}
    if num_nodes == 1 and sys.platform.startswith("linux"):
        # gloo listens on the address of the host's name, unless it is told otherwise.
        network["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {
        **network,
        "MASTER_ADDR": main_address,
        "MASTER_PORT": str(main_port),
        "WORLD_SIZE": str(local_world_size * num_nodes),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "LOCAL_RANK": str(local_rank),
        "RANK": str(node_rank * local_world_size + local_rank),
        "STRATAGEM_CLUSTER": "plain",
        "OMP_NUM_THREADS": threads_per_rank(local_world_size),
    }


def environment_of_request(ordinal: int) -> dict[str, str]:
    """Return the environment for the n-th request of this process, counted from 0.

    A rank that runs its script again comes by the requests that were made before the launch. They
    are met as they were in the first process, which was no rank yet.
    """
    environ = dict(os.environ)
    if ordinal < int(environ.get(LAUNCH_VARIABLE, "0")):
        for variable in rank_environment(local_rank=0, local_world_size=1, main_port=0):
            environ.pop(variable, None)
    return environ


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: which one.
        exit_code: its exit code; the negated signal number if a signal ended it.
        report: its traceback, or "" if it left none.
        time: when, in seconds since the epoch.
        log_file: what holds its output; None: the terminal.
    """

    rank: int
    exit_code: int
    report: str
    time: float
    log_file: Path | None = None

    def error(self, world_size: int) -> RankFailedError:
        """Return the one error that stands for it."""
        if self.exit_code < 0:
            how = f"was ended by {_signal_name(-self.exit_code)}"
            if self.exit_code == -signal.SIGKILL:
                how += " (as the system does when memory runs out)"
        else:
            how = f"failed with exit code {self.exit_code}"
        if self.report:
            what = f"; its traceback:\n\n{self.report.rstrip()}"
        else:
            output = "above" if self.log_file is None else f"in {self.log_file}"
            what = f"; it left no traceback: see its output {output}"
        return RankFailedError(
            f"rank {self.rank} of {world_size} {how}{what}",
            rank=self.rank,
            exit_code=self.exit_code,
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most of the real-time signals have no name.
        return f"signal {number}"


class Ranks:
    """Child processes, one a rank, and a thread that watches them.

    Use as a context: leaving it ends whatever still runs.

    Args:
        command: the program and its arguments, the same for every child.
        environments: by rank, the variables that a child has beyond this process's own.
        on_failure: called once, in the watching thread, when the first child fails; the others
            have been told to end by then.
        pass_fds: by rank, file descriptors that the child inherits.
        new_sessions: give each child a session of its own, so that Ctrl-C on the terminal reaches
            this process alone, and signals sent to a child reach those that it has started too.
        log_files: by rank, where a child's output goes; the others write where this process does.
        cwd: the folder that the children start in; None: this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        *,
        on_failure: Callable[[Failure], None],
        pass_fds: Mapping[int, Sequence[int]] | None = None,
        new_sessions: bool = False,
        log_files: Mapping[int, Path] | None = None,
        cwd: str | None = None,
    ) -> None:
        self.failure: Failure | None = None
        self._on_failure = on_failure
        self._error_files = tempfile.TemporaryDirectory(prefix="stratagem-ranks-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = threading.Event()
        self._new_sessions = new_sessions
        self._log_files = log_files or {}
        self._cwd = cwd
        try:
            for rank, environment in environments.items():
                inherited = () if pass_fds is None else tuple(pass_fds.get(rank, ()))
                self._processes[rank] = self._start(rank, command, environment, inherited)
        except BaseException:
            # No more processes allowed, perhaps: those that started must not stay.
            self.kill()
            for process in self._processes.values():
                process.wait()
            self._error_files.cleanup()
            raise
        self._watcher = threading.Thread(target=self._watch, name="stratagem-ranks", daemon=True)
        self._watcher.start()

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: tuple[int, ...],
    ) -> subprocess.Popen[bytes]:
        extra = {
            ERROR_FILE_VARIABLE: str(self._error_file(rank)),
            PARENT_VARIABLE: str(os.getpid()),
        }
        log_file = self._log_files.get(rank)
        with nullcontext() if log_file is None else log_file.open("wb") as output:
            return subprocess.Popen(
                command,
                env={**os.environ, **environment, **extra},
                stdin=subprocess.DEVNULL,
                cwd=self._cwd,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=self._new_sessions,
            )

    def _error_file(self, rank: int) -> Path:
        return Path(self._error_files.name) / f"rank{rank}.json"

    def _watch(self) -> None:
        running = dict(self._processes)
        while running and not self._ending.is_set():
            failures = []
            for rank, process in list(running.items()):
                exit_code = process.poll()
                if exit_code is not None:
                    del running[rank]
                    if exit_code != 0:
                        failures.append(self._failure(rank, exit_code))
            if failures and not self._ending.is_set():
                # Several may have ended between two looks: the first to report is the cause.
                self.failure = min(failures, key=lambda failure: (not failure.report, failure.time))
                self._signal(signal.SIGTERM)
                self._on_failure(self.failure)
                self._end_all()
                return
            self._ending.wait(0.05)

    def _failure(self, rank: int, exit_code: int) -> Failure:
        file, log_file = self._error_file(rank), self._log_files.get(rank)
        try:
            message = json.loads(file.read_text())["message"]
            report = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
            return Failure(rank, exit_code, str(report), file.stat().st_mtime, log_file)
        except (OSError, ValueError, KeyError, TypeError):
            return Failure(rank, exit_code, "", time.time(), log_file)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is not None:
                continue
            if not self._new_sessions:
                process.send_signal(number)
                continue
            try:
                # Each child leads a process group, which has its process id.
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass  # ended since the look at it

    def _end_all(self) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                process.wait()

    def forward_signal(self, number: signal.Signals) -> None:
        """Send a signal to every child that still runs."""
        self._signal(number)

    def forget(self) -> None:
        """Remove what the children have written about their failures."""
        self._error_files.cleanup()

    def kill(self) -> None:
        """Kill every child that still runs, at once."""
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all children have ended or one has failed; return whether that is so."""
        self._watcher.join(timeout)
        return not self._watcher.is_alive()

    def end(self) -> None:
        """End the children that still run, and forget their error files."""
        self._ending.set()
        self._watcher.join()
        self._end_all()
        self._error_files.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def record_failure(error: BaseException) -> bool:
    """Write this process's exception for whoever watches it; return whether anybody does."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    report = "".join(traceback.format_exception(error))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": report, "timestamp": str(int(time.time()))},
    }
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"message": message}))
        temporary.replace(path)
    except OSError as problem:
        print(f"stratagem: cannot write {path}: {problem}", file=sys.stderr)
        return False
    return True


def has_parent() -> bool:
    """Whether this rank was started by a launcher of ours, which shows what it reports."""
    return PARENT_VARIABLE in os.environ


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however it ends."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or not sys.platform.startswith("linux"):
        return
    import ctypes  # here, because the process that starts the ranks never needs it

    pr_set_pdeathsig = 1
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    # It may have ended before the call.
    if os.getppid() != int(parent):
        os._exit(1)
