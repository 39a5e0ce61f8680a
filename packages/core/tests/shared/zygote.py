"""Scripts run in forks of one process that has imported torch, as `python SCRIPT` would run them.

Importing torch, and the modules that the first optimizer step needs, takes seconds of CPU time. A
fork takes milliseconds. Where a script starts a further script, or a process of multiprocessing's
"spawn", a fork from before the script becomes that process. A test of an interpreter's start asks
for a new one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import multiprocessing.util
import os
import random
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

READ_AT_START = (
    *("PYTHON", "OMP_", "MKL_", "KMP_", "LD_", "MALLOC", "THP_"),
    *("TORCH", "PYTORCH", "CUDA", "NCCL"),
)
"""Prefixes of variables that an interpreter, its libraries or torch read when they start."""


def can_fork(variables: Iterable[str]) -> bool:
    """Return whether a fork takes these variables as a new interpreter would."""
    if not hasattr(os, "fork"):
        return False
    return not any(v.startswith(READ_AT_START) for v in variables if v != "PYTHONPATH")


DEFAULT_FILTERS = len(warnings.filters)
"""How many filters of warnings an interpreter starts with."""
SET_BY_IMPORTS: dict[str, str] = {}
"""Variables that torch sets when it is imported."""
SPARES = 3
"""Processes that wait to become what a script starts."""


class Zygote:
    """A process that forks once for each script.

    Args:
        environment: variables of that process.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._answers = self._socket.makefile("r")
        atexit.register(self.close)

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def start(
        self,
        script: Path,
        *arguments: str,
        environment: dict[str, str],
        folder: Path,
        options: tuple[str, ...] = (),
        merged: bool = False,
        new_session: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a script; what it prints goes into pipes.

        Args:
            script: where it lies.
            *arguments: those of the script.
            environment: its variables.
            folder: the working directory.
            options: of the interpreter; ("-W", "error") is the only one.
            merged: one pipe for both streams.
            new_session: make it the leader of a session.
        """
        assert options in ((), ("-W", "error"))
        whole = [str(script), *arguments]
        request = {
            "options": options,
            "arguments": whole,
            "environment": environment,
            "folder": str(folder),
            "new_session": new_session,
        }
        data = json.dumps(request).encode()
        (out, out_end), (error, error_end), (status, status_end) = os.pipe(), os.pipe(), os.pipe()
        ends = [out_end, out_end if merged else error_end, status_end]
        socket.send_fds(self._socket, [len(data).to_bytes(8, "big")], ends)
        self._socket.sendall(data)
        for fd in (out_end, error_end, status_end):
            os.close(fd)
        command = [sys.executable, *options, *whole]
        return _Started(command, int(self._answers.readline()), out, error, status)


class _Started(subprocess.Popen[str]):
    """A process that the zygote has started, and of whose end it tells."""

    def __init__(self, command: list[str], pid: int, out: int, error: int, status: int) -> None:
        self._status: int | None = None
        super().__init__([sys.executable, "-S", "-c", ""], stdin=subprocess.DEVNULL, text=True)
        self.wait()  # its fields are those of a process that ran; they become those of the fork
        self.args, self.pid, self.returncode = command, pid, None
        self.stdout, self.stderr = open(out), open(error)  # noqa: SIM115 - Popen closes them
        self._status = status

    def _internal_poll(self, *arguments: Any, **more: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*arguments, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end(self._status)
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if not wait_flags & os.WNOHANG or select.select([self._status], [], [], 0)[0]:
            return self.pid, self._end(self._status)
        return 0, 0

    def _end(self, descriptor: int) -> int:
        status = int(os.read(descriptor, 20))
        os.close(descriptor)
        self.returncode = os.waitstatus_to_exitcode(status)
        return status


def main(connection: socket.socket) -> None:
    """Fork for each request; return only in a fork, where the script is to run."""
    before = dict(os.environ)
    import torch  # what every script imports first
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.optim

    _warm_up(torch)
    SET_BY_IMPORTS.update({k: v for k, v in os.environ.items() if k not in before})
    gc.collect()
    gc.freeze()
    if "triton" in sys.modules:  # its library prints what is left of it at the end
        atexit.register(gc.unfreeze)
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _tell_of_ends(statuses))
    while True:
        request, (out, error, status) = _receive(connection)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            connection.close()
            for fd in (status, *statuses.values()):
                os.close(fd)
            _become(request, out, error)
            return
        statuses[pid] = status
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(out)
        os.close(error)
        connection.sendall(f"{pid}\n".encode())


def _tell_of_ends(statuses: dict[int, int]) -> None:
    """Write the status of each fork that has ended to its pipe."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = statuses.pop(pid)
        os.write(fd, str(status).encode())
        os.close(fd)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its descriptors; end this process if there are no more."""
    header, fds, _, _ = socket.recv_fds(connection, 8, 16)
    if not header:
        os._exit(0)
    size, data = int.from_bytes(header, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return json.loads(data), fds


def _warm_up(torch: Any) -> None:
    """Import what the first step of a fit imports; it starts no thread and draws no number."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    optimizer.step()


def _become(request: dict[str, Any], out: int, error: int) -> None:
    """Give a fork what a new interpreter would have."""
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.close(out)
    os.close(error)
    if request["new_session"]:
        os.setsid()
    _begin(request)
    spares: list[tuple[int, int]] = []
    for _ in range(SPARES):
        spare = _spare()
        if spare is None:  # this is one of them, and has its task
            for _, fd in spares:
                os.close(fd)
            return
        spares.append(spare)
    _serve(spares)


def _begin(request: dict[str, Any]) -> None:
    # The old streams know what the descriptors were before: whether they can seek, for one.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    if request["options"] and not sys.warnoptions:
        sys.warnoptions[:] = ["error"]
        # In front of the interpreter's own filters, and behind those that modules have added.
        del warnings.filters[-DEFAULT_FILTERS:]  # type: ignore[attr-defined]
        warnings.simplefilter("error", append=True)
    os.environ.clear()
    os.environ.update({**SET_BY_IMPORTS, **request["environment"]})
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.orig_argv = [sys.executable, *request["options"], *sys.argv]
    script = Path(sys.argv[0])
    added = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(script.parent), *(path for path in added if path not in {"", *sys.path})]
    random.seed()
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module


def _spare() -> tuple[int, int] | None:
    """Fork a process that waits for what it is to become; return None in it, once it knows.

    Returns:
        Its pid, and the descriptor of the socket on which it waits.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours.detach()
    ours.close()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the script's to answer
    request, fds = _receive(theirs)
    signal.signal(signal.SIGINT, interrupt)
    theirs.close()
    if os.getppid() != parent:
        os._exit(0)
    if request["new_session"]:
        os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Above all numbers that they are to have, so that none takes another's place.
    above = max([3, *request["numbers"]]) + 1
    for number, fd in zip(request["numbers"], [_move(fd, above) for fd in fds], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _begin(request)
    if request["spawn"]:
        exec(request["spawn"], {})
        raise AssertionError("spawn_main() returned")
    return None


def _move(fd: int, above: int) -> int:
    """Return another number of a descriptor, which is `above` or more."""
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD, above)
    os.close(fd)
    return moved


def _serve(spares: list[tuple[int, int]]) -> None:
    """Let scripts that this one starts, and multiprocessing's "spawn", take spare processes."""
    start, spawn = subprocess.Popen.__init__, multiprocessing.util.spawnv_passfds

    def take(fds: dict[int, int], arguments: list[str], **request: Any) -> int:
        """Give a spare its descriptors, by the numbers that it shall have, and its task."""
        pid, descriptor = spares.pop()
        options = ("-W", "error") if sys.warnoptions else ()
        whole = {"spawn": "", "new_session": False, "folder": str(Path.cwd()), "options": options}
        whole |= {"numbers": list(fds), "arguments": arguments, **request}
        data = json.dumps(whole).encode()
        with socket.socket(fileno=descriptor) as connection:
            socket.send_fds(connection, [len(data).to_bytes(8, "big")], list(fds.values()))
            connection.sendall(data)
        return pid

    def popen(self: Any, args: Any, **options: Any) -> None:
        given = {name for name, value in options.items() if value}
        script = _script_of(args)
        known = given <= {"env", "stdin", "cwd", "stdout", "stderr", "start_new_session"}
        files = [options.get(name) for name in ("stdout", "stderr")]
        known &= options.get("stdin") in (None, subprocess.DEVNULL)
        known &= all(file is None or hasattr(file, "fileno") for file in files)
        if not (script and known and spares):
            start(self, args, **options)
            return
        start(self, [sys.executable, "-S", "-c", ""], stdin=subprocess.DEVNULL)
        self.wait()  # its fields are those of a process that ran; they become those of the spare
        numbered = zip((1, 2), files, strict=True)
        pid = take(
            {number: number if file is None else file.fileno() for number, file in numbered},
            script,
            environment=dict(options.get("env") or os.environ),
            folder=str(options.get("cwd") or Path.cwd()),
            new_session=bool(options.get("start_new_session")),
        )
        self.args, self.pid, self.returncode = args, pid, None

    def spawnv_passfds(path: bytes, args: list[Any], passfds: list[int]) -> int:
        command = [os.fsdecode(part) for part in args]
        if not (spares and command[-1] == "--multiprocessing-fork"):
            return spawn(path, args, passfds)
        code = command[command.index("-c") + 1]
        fds = {fd: fd for fd in (1, 2, *passfds)}
        return take(fds, ["-c", command[-1]], environment=dict(os.environ), spawn=code)

    subprocess.Popen.__init__ = popen  # type: ignore[assignment, method-assign]
    multiprocessing.util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def _script_of(command: Any) -> list[str] | None:
    """Return the script and its arguments of a command that differs in nothing else from this."""
    if isinstance(command, str | bytes) or sys.executable != command[0]:
        return None
    options = ["-W", "error"] if sys.warnoptions else []
    rest = [os.fspath(part) for part in command[1 + len(options) :]]
    same = command[1 : 1 + len(options)] == options and bool(rest) and rest[0].endswith(".py")
    return rest if same else None


def _run() -> None:
    """Run the script; an error shows its own frames only."""
    module = sys.modules["__main__"]
    assert module.__file__ is not None
    try:
        exec(compile(Path(module.__file__).read_bytes(), module.__file__, "exec"), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        sys.exit(1)


def _end_by_interrupt() -> NoReturn:
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("a process that was interrupted goes on")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    _run()
