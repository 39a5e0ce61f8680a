"""A rank's side of a launch: reports to the process that started it. torch is not imported.

A rank that fails writes its exception into the file named by TORCHELASTIC_ERROR_FILE, in the format
of torch.distributed.elastic, so that the same code works under torchrun.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

from stratagem.errors import RankFailedError, hide_frames
from stratagem.system import parent_death_signal

Result = TypeVar("Result")

LISTEN_FD_VARIABLE = "STRATAGEM_LISTEN_FD"
"""For rank 0: the file descriptor of a socket that already listens on MASTER_PORT."""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
STORE_VARIABLE = "STRATAGEM_STORE"
"""The path of the file by which the ranks of one node meet; see `network.make_store_file`."""
PARENT_VARIABLE = "STRATAGEM_PARENT_PID"
LAUNCH_VARIABLE = "STRATAGEM_LAUNCH_ORDINAL"
"""For ranks that run a script again: the number of the script's request that launched them."""
OWNER_VARIABLE = "STRATAGEM_RANK_PID"
"""The process id of the rank and its MASTER_PORT. The rank's own children inherit the launch's
variables, but are not ranks."""

_SAID = "_stratagem_said"
"""The attribute that marks an error as printed."""


def record_failure(error: BaseException) -> bool:
    """Write this process's exception to its error file; return whether it was written."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or isinstance(error, SystemExit):
        return False
    hide_frames(error)
    report = "".join(traceback.format_exception(error))
    extra = {"py_callstack": report, "timestamp": str(int(time.time())), "place": this_rank.place}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"message": message}))
        temporary.replace(path)
    except OSError as problem:
        print(f"stratagem: cannot write {path}: {problem}", file=sys.stderr)
        return False
    return True


def show_raised_error() -> None:
    """Print the error that is being raised, unless a launcher of Stratagem prints its record.

    A process that a signal may end at once calls this first.
    """
    error = sys.exc_info()[1]
    if error is not None and not (record_failure(error) and has_parent()):
        traceback.print_exception(error)


def record_crashes() -> None:
    """Write the stack when a crash (SIGABRT, SIGSEGV) ends this process.

    If a collective does not match the peers' collective, a thread of torch aborts the process.
    Without the stack, nothing would show the position of the process.
    """
    if faulthandler.is_enabled():
        return
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        faulthandler.enable()
        return
    try:
        # Open until the process ends: a signal handler cannot open files.
        file = crash_file(path).open("w")
    except OSError:
        return
    faulthandler.enable(file)


def crash_file(error_file: str) -> Path:
    """Return the file for the stack of a crashed rank with this error file."""
    return Path(f"{error_file}.crash")


def has_parent() -> bool:
    """Whether a launcher of Stratagem started this rank; such a launcher prints its report."""
    return PARENT_VARIABLE in os.environ


def own_variables() -> None:
    """Mark the launch's environment variables as belonging to this process."""
    os.environ[OWNER_VARIABLE] = f"{os.getpid()}:{os.environ.get('MASTER_PORT', '')}"


def owns_variables() -> bool:
    """Whether this process has set the launch's environment variables itself."""
    return os.environ.get(OWNER_VARIABLE, "").partition(":")[0] == str(os.getpid())


def forget_foreign_variables(of_rank: Iterable[str]) -> None:
    """Remove a launch's environment variables if this process inherited them from a rank.

    Args:
        of_rank: variables with which launchers describe a rank. Variables that another launcher,
            such as torchrun, has set since are kept.
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
    """Mark an error as printed, so that its traceback is not printed if it ends this process.

    Its exit status stays. An exception hook that replaces Python's own is left unchanged.
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
    """Whether an error is marked as printed, so that its traceback is not printed again."""
    return hasattr(error, _SAID)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends for any reason, if it can do so.

    Otherwise a rank ends when it loses its connections to the others.
    """
    parent, arrange = os.environ.get(PARENT_VARIABLE), parent_death_signal()
    if parent is None or arrange is None:
        return
    arrange()
    # The parent may have ended before the call.
    if os.getppid() != int(parent):
        print(
            f"stratagem: this rank ends, since the process that started it ({parent}) has ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


Explain = Callable[[BaseException, Callable[[], bool]], "BaseException | None"]


class Watch(Protocol):
    """Watches the ranks that this process has started."""

    def resolve_cause(self, error: BaseException) -> BaseException:
        """Return the failure of the rank that caused an error here, or the explained error."""

    def end_after_error(self) -> None:
        """End the ranks, since an error ends this process."""


@dataclass
class ThisRank:
    """The state of this process as a rank.

    Attributes:
        failed: the rank ends with an error.
        lost_peer: a rank that this process started has failed.
        interrupted: a signal ends this rank and all others.
        ending: the functions in `at_end` are running; no caller catches their exceptions.
        device_is_lost: the rank's device has failed, and no code may wait for the device.
        explain: returns a better error for an error that ends this rank, or None. It may ask the
            other ranks, until its second argument returns True.
        report: sends an error that ends this rank to the other ranks.
        begin_run: waits for all ranks before a run, given the number of its Trainer or Lite;
            returns the number of their process group. None: no group was joined.
        fail_run: notes the error of a run, so that the next one joins a new group if necessary.
        at_end: functions to call at the end, the latest first.
        handlers: signal handlers of Stratagem, which a front end may replace.
        peers_are_gone: returns whether all ranks that this process started have ended.
        is_launched: a launcher runs a function in this process; a launch within it runs here too.
        prepared: `prepare_this_rank` has run.
        watch: the watch over the ranks that this process started; None: it has started no ranks.
        place: the rank's place in its mesh, "data 1, tensor 0"; "": the ranks form no mesh.
        place_of: returns the place of any rank.
        where: returns this rank's position, given the frame of its main thread, as a line of text.
    """

    failed: bool = False
    lost_peer: bool = False
    interrupted: bool = False
    ending: bool = False
    device_is_lost: bool = False
    explain: Explain | None = None
    report: Callable[[BaseException], None] | None = None
    begin_run: Callable[[int], int] | None = None
    fail_run: Callable[[BaseException], object] = id
    at_end: list[Callable[[], None]] = field(default_factory=list)
    handlers: set[Any] = field(default_factory=set)
    peers_are_gone: Callable[[], bool] = bool
    is_launched: bool = False
    prepared: bool = False
    watch: Watch | None = None
    place: str = ""
    place_of: Callable[[int], str] = lambda rank: ""
    where: Callable[[FrameType | None], str] = lambda frame: ""


this_rank = ThisRank()


def explained(error: BaseException, enough: Callable[[], bool] = bool) -> BaseException:
    """Return the error to raise when an error ends this rank: its cause if known, else the error.

    Args:
        error: the error.
        enough: returns whether the cause is known by other means.
    """
    if isinstance(error, SystemExit):
        return error  # an orderly end
    better = None if this_rank.explain is None else this_rank.explain(error, enough)
    if better is not None:
        return better
    if this_rank.report is not None:
        this_rank.report(error)
    return error


def at_end_of_rank(function: Callable[[], None]) -> None:
    """Call a function when this rank ends, the latest first.

    It replaces `atexit`, because a process of multiprocessing does not run the functions of
    `atexit`.
    """
    if not this_rank.at_end:
        atexit.register(end_rank)
    this_rank.at_end.append(function)


def end_rank() -> None:
    """Call each function registered with `at_end_of_rank` once."""
    this_rank.ending = True
    while this_rank.at_end:
        this_rank.at_end.pop()()


def fail_at_end(error: BaseException, what: str) -> None:
    """Print an error of a process that is already ending; the process then exits with status 1."""
    record_failure(error)
    shown = "".join(traceback.format_exception(error))
    print(f"stratagem: {what}:\n{shown}", end="", file=sys.stderr, flush=True)
    this_rank.failed = True
    # Functions are called from the last to the first.
    this_rank.at_end.insert(0, exit_with_error)


def exit_with_error() -> NoReturn:
    """End this process at once, with the exit status of an error."""
    sys.stdout.flush()
    os._exit(1)


def run_as_rank(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run a function on this rank and return its result.

    An exception is reported to the process that started this rank. If another rank's failure caused
    a communication error here, that failure is raised instead. Otherwise the error lists the
    position of each rank.
    """
    prepare_this_rank()
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        resolved = _resolved(error)
        if this_rank.watch is None:
            record_failure(resolved)
        # With a watch, the caller may handle the error, on every rank alike. Otherwise the hook
        # below ends the ranks.
        if resolved is error:
            raise
        raise resolved from (None if isinstance(resolved, RankFailedError) else error)


def _resolved(error: BaseException) -> BaseException:
    """Return the error to raise for an error that ends this rank, once its cause is known."""
    watch = this_rank.watch
    return explained(error) if watch is None else watch.resolve_cause(error)


def prepare_this_rank() -> None:
    """Make this rank end with its parent, and report uncaught exceptions; runs once per rank."""
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
            watch.end_after_error()
            return
        resolved = explained(error)
        if has_parent() and isinstance(error, KeyboardInterrupt):
            return  # Ctrl-C reaches every rank; only the first prints it
        if not (record_failure(resolved) and has_parent()):
            # A launcher of Stratagem prints the recorded traceback; another parent may not.
            print_exception(type(resolved), resolved, resolved.__traceback__)

    sys.excepthook = report


def _end_quickly() -> None:
    """Skip the garbage collection at the interpreter's end, which takes 0.5 s with torch loaded.

    Extensions of nanobind (such as triton, which torch imports for its compiler) check at the end
    that their types and functions were freed, and print each one left. Only this collection frees
    them. If such an extension is loaded, the collection runs as usual.
    """
    if not any(metaclass.__module__ == "nanobind" for metaclass in type.__subclasses__(type)):
        gc.freeze()


def forget_parent() -> None:
    """In a forked process, reset the state and the exception hook inherited from the parent."""
    this_rank.__dict__.update(ThisRank().__dict__)
    sys.excepthook = sys.__excepthook__


if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
    # At import, because a script may spend a long time on its data before the launch.
    (parent_death_signal() or bool)()
    own_variables()
