"""A rank's side of a launch: what it does for whoever has started it. torch is not imported.

A rank that fails writes its exception into the file named by TORCHELASTIC_ERROR_FILE, in the format
of torch.distributed.elastic, so that the same code serves under torchrun.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from stratagem.errors import RankFailedError, hide_frames

if TYPE_CHECKING:
    from stratagem.launch.watch import Watch

Result = TypeVar("Result")

LISTEN_FD_VARIABLE = "STRATAGEM_LISTEN_FD"
"""For rank 0: the file descriptor of the socket that listens on MASTER_PORT already."""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
STORE_VARIABLE = "STRATAGEM_STORE"
""""parent": the process that started this rank holds the store at MASTER_PORT."""
PARENT_VARIABLE = "STRATAGEM_PARENT_PID"
LAUNCH_VARIABLE = "STRATAGEM_LAUNCH_ORDINAL"
"""For ranks that run a script again: which request of the script has launched them."""
OWNER_VARIABLE = "STRATAGEM_RANK_PID"
"""The process that the launch's variables are meant for, and their MASTER_PORT: its own children
inherit the variables, and are no ranks."""

_SAID = "_stratagem_said"
"""An attribute of an error that has been said."""


def record_failure(error: BaseException) -> bool:
    """Write this process's exception for whoever watches it; return whether anybody does."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or isinstance(error, SystemExit):
        return False
    hide_frames(error)
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


def record_crashes() -> None:
    """Let a signal that ends this process from within (SIGABRT, SIGSEGV) leave the stack.

    torch aborts a process whose collective does not match its peers', from a thread of its own;
    without this, nothing would say where the process was.
    """
    if faulthandler.is_enabled():
        return
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        faulthandler.enable()
        return
    try:
        # Open until the process ends: the handler of a signal can open nothing.
        file = crash_file(path).open("w")
    except OSError:
        return
    faulthandler.enable(file)


def crash_file(error_file: str) -> Path:
    """Return where a rank with this error file leaves its stack when a signal ends it."""
    return Path(f"{error_file}.crash")


def has_parent() -> bool:
    """Whether this rank was started by a launcher of ours, which shows what it reports."""
    return PARENT_VARIABLE in os.environ


def own_variables() -> None:
    """Say that the launch's variables are meant for this process."""
    os.environ[OWNER_VARIABLE] = f"{os.getpid()}:{os.environ.get('MASTER_PORT', '')}"


def forget_foreign_variables(of_rank: Iterable[str]) -> None:
    """Remove the variables of a launch whose rank is another process: one that has started this.

    Args:
        of_rank: variables by which any launcher describes a rank. They stay where another one has
            set them since, as torchrun does.
    """
    owner, _, port = os.environ.get(OWNER_VARIABLE, "").partition(":")
    if not owner or int(owner) == os.getpid():
        return
    ours = [LISTEN_FD_VARIABLE, STORE_VARIABLE, PARENT_VARIABLE, LAUNCH_VARIABLE, OWNER_VARIABLE]
    ours.append("STRATAGEM_CLUSTER")
    if os.environ.get("MASTER_PORT", "") == port:
        ours += [ERROR_FILE_VARIABLE, *of_rank]
    for variable in ours:
        os.environ.pop(variable, None)


def leave_unprinted(error: BaseException) -> None:
    """Say nothing more of an error, should it end this process: it has been said.

    Its traceback is not printed, and its exit status stays. A hook that somebody has put in the
    place of Python's own is left alone.
    """
    setattr(error, _SAID, True)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_unless_said


def _print_unless_said(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not was_said(error):
        sys.__excepthook__(kind, error, trace)


def was_said(error: BaseException) -> bool:
    """Whether an error has been said, so that its traceback is not printed."""
    return hasattr(error, _SAID)


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however it ends."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or not sys.platform.startswith("linux"):
        return
    parent_death_signal()()
    # It may have ended before the call.
    if os.getppid() != int(parent):
        print(
            f"stratagem: this rank ends, since the process that started it ({parent}) has ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def parent_death_signal() -> Callable[[], None]:
    """Return what makes the kernel kill a process when the thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes  # here, because a process that starts no ranks never needs it

    pr_set_pdeathsig = 1
    prctl: Any = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


Explain = Callable[[BaseException, Callable[[], bool]], "BaseException | None"]


@dataclass
class ThisRank:
    """What this process knows of its own end.

    Attributes:
        failed: it ends with an error.
        lost_peer: a rank that it has started has failed.
        interrupted: it ends, with all others, because a signal asks for it.
        ending: it is at its end, where nobody catches an exception.
        device_is_lost: its device has failed, and nothing may wait for it any more.
        explain: returns a better error for one that ends this rank, or None; it may ask the other
            ranks, until its second argument returns True.
        report: sends an error that ends this rank to the other ranks.
        at_end: what is called at the end, the latest first.
        handlers: handlers of signals that are ours, whose place a front end may take.
        peers_are_gone: whether all ranks that this process has started have ended.
        is_launched: a launcher runs a function here: what it launches again runs here as well.
        prepared: it ends with its parent, and reports what nobody catches.
        watch: the watch over the ranks that this process has started, if it has started any.
    """

    failed: bool = False
    lost_peer: bool = False
    interrupted: bool = False
    ending: bool = False
    device_is_lost: bool = False
    explain: Explain | None = None
    report: Callable[[BaseException], None] | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    handlers: set[Any] = field(default_factory=set)
    peers_are_gone: Callable[[], bool] = bool
    is_launched: bool = False
    prepared: bool = False
    watch: Watch | None = None


this_rank = ThisRank()


def explained(error: BaseException, enough: Callable[[], bool] = bool) -> BaseException:
    """Return the error to raise where an error ends this rank: the cause, if it is known.

    Args:
        error: what a call raised.
        enough: whether the cause is known by other means.
    """
    if isinstance(error, SystemExit):
        return error  # it ends in order
    better = None if this_rank.explain is None else this_rank.explain(error, enough)
    if better is not None:
        return better
    if this_rank.report is not None:
        this_rank.report(error)
    return error


def at_end_of_rank(function: Callable[[], None]) -> None:
    """Call a function when this rank ends, the latest first.

    In the place of `atexit`, whose functions a process of multiprocessing does not run.
    """
    if not this_rank.at_end:
        atexit.register(end_rank)
    this_rank.at_end.append(function)


def end_rank() -> None:
    """Call what `at_end_of_rank` was given; each once."""
    this_rank.ending = True
    while this_rank.at_end:
        this_rank.at_end.pop()()


def fail_at_end(error: BaseException, what: str) -> None:
    """Let this process, which is ending already, exit with an error once all else is done."""
    record_failure(error)
    shown = "".join(traceback.format_exception(error))
    print(f"stratagem: {what}:\n{shown}", end="", file=sys.stderr, flush=True)
    this_rank.failed = True
    # What is called at the end is called from the last to the first.
    this_rank.at_end.insert(0, exit_with_error)


def exit_with_error() -> NoReturn:
    """End this process at once, with the exit status of an error."""
    sys.stdout.flush()
    os._exit(1)


def run_as_rank(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run a function on this rank and return what it returns.

    What it raises is reported to whoever started this rank. Where a peer's failure is the cause of
    an error of communication here, that failure is raised in its place; otherwise the error says
    where each rank is.
    """
    prepare_this_rank()
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        resolved = _resolved(error)
        if this_rank.watch is None:
            record_failure(resolved)
        # With a watch: the caller may handle it, on every rank alike; if nobody does, the hook
        # below ends the ranks.
        if resolved is error:
            raise
        raise resolved from (None if isinstance(resolved, RankFailedError) else error)


def _resolved(error: BaseException) -> BaseException:
    """Return the cause of an error that ends this rank, once it is known: what is to be raised."""
    watch = this_rank.watch
    return explained(error) if watch is None else watch.resolve_cause(error)


def prepare_this_rank() -> None:
    """Once in each rank: end with the parent, and report what nobody catches."""
    if this_rank.prepared:
        return
    this_rank.prepared = True
    die_with_parent()
    record_crashes()
    atexit.register(_end_quickly)
    print_exception = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        this_rank.failed = True
        watch = this_rank.watch
        if watch is not None:
            resolved = watch.resolve_cause(error)
            if isinstance(resolved, RankFailedError):
                print(resolved, file=sys.stderr, flush=True)
            elif not was_said(error):
                print_exception(type(resolved), resolved, resolved.__traceback__)
            watch.crashed = True
            watch.ranks.end()
            return
        resolved = explained(error)
        if has_parent() and isinstance(error, KeyboardInterrupt):
            return  # Ctrl-C reaches every rank; the first one shows it
        if not (record_failure(resolved) and has_parent()):
            # A parent of ours shows the recorded traceback; anybody else may not.
            print_exception(type(resolved), resolved, resolved.__traceback__)

    sys.excepthook = report


def _end_quickly() -> None:
    """Spare the interpreter's end the search for garbage: half a second once torch is loaded.

    Extensions of nanobind (triton, which torch imports for its compiler) check at the very end that
    their types and functions have gone, which only that search removes, and print each one that has
    not. With one of them loaded, the interpreter ends as it would anywhere.
    """
    if not any(metaclass.__module__ == "nanobind" for metaclass in type.__subclasses__(type)):
        gc.freeze()


def forget_parent() -> None:
    """In a forked process: the parent's end, hooks and ranks are not this process's business."""
    this_rank.__dict__.update(ThisRank().__dict__)
    sys.excepthook = sys.__excepthook__


if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
    # Now, since a script may be long about its data before it comes to launch.
    parent_death_signal()()
    own_variables()
