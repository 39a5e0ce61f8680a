"""A function as bytes: packed where a launcher is called, run on every rank.

The bytes are a pickle, which executes code when it is read. That is as it should be, since they are
the user's own program on its way to the user's own processes; but both sides have to trust each
other and what carries the bytes.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError, RankFailedError
from stratagem.launch import rank
from stratagem.launch.process import open_standard_streams
from stratagem.launch.rank import run_as_rank
from stratagem.launch.supervisor import Failure

if TYPE_CHECKING:
    from stratagem.discovery.specs import ComponentSpec
    from stratagem.plan.plan import RunPlan

_OF_SEEDS = ("STRATAGEM_SEED", "STRATAGEM_SEED_WORKERS")
"""What `seed_everything` sets, by which ranks shuffle alike; other machines do not inherit it."""


@dataclass(frozen=True)
class Call:
    """What a rank runs.

    Attributes:
        function, args, kwargs: what is called.
        registered: specs of what was registered at run time in the launching process.
        world_size: of the plan.
        argv: the launching process's `sys.argv`, which is the rank's as well.
        variables: environment variables of the launching process that are the rank's as well.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    registered: tuple[ComponentSpec, ...]
    world_size: int
    argv: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Call:
        """Return the call, with what this process has registered."""
        registered = tuple(get_registry().registered())
        variables = {name: os.environ[name] for name in _OF_SEEDS if name in os.environ}
        argv, size = tuple(sys.argv), plan.world_size
        return cls(function, tuple(args), dict(kwargs), registered, size, argv, variables)


def pack(
    plan: RunPlan,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    imports_main: bool = False,
) -> bytes:
    """Return a call as bytes, for `run_packed` on every rank.

    Names that were registered at run time (`StrategyRegistry.register`) go along. What is defined
    in the script or notebook itself goes along where cloudpickle is installed; otherwise functions
    and classes have to be in modules that the ranks can import. The function and its arguments are
    pickled together, so that an object in both of them is one object in the rank too.

    Args:
        plan: what `Launcher.launch` was given.
        function, args, kwargs: what it was given as well. The function holds the Trainer or Lite,
            and those the launcher: keep out of its attributes what cannot be pickled.
        imports_main: the ranks import the script of this process (as multiprocessing's do), so that
            plain pickle finds what is defined there.

    Raises:
        ConfigurationError: something cannot be pickled; says what.
    """
    call = Call.of(plan, function, args, {} if kwargs is None else kwargs)
    try:
        return _dumps(call, imports_main=imports_main)
    except Exception as error:
        held = (call.function, *call.args, *call.kwargs.values())
        unpicklable = (
            _find_unpicklable(one, type(one).__name__, imports_main=imports_main) for one in held
        )
        what = next(filter(None, unpicklable), "what it was given")
        remedy = ""
        if plan.launcher.name == "spawn":
            remedy = "; or use strategy='ddp' (or 'ddp_fork'), which pickles nothing"
        raise ConfigurationError(
            f"strategy={plan.strategy.name!r} pickles your objects (launcher "
            f"{plan.launcher.name!r}), and {what} cannot be pickled ({type(error).__name__}: "
            f"{error}): define functions and classes at the top of a module, and leave out open "
            f"files and locks{remedy}"
        ) from None


def run_packed(data: bytes, environment: Mapping[str, str]) -> Any:
    """Run what `pack` returned, as one rank; the whole process is that rank from here on.

    Call it in the main thread of a process of its own, once for each launch. When it returns, the
    rank has left its process group.

    Args:
        data: what `pack` returned; it is the user's own program, and is executed.
        environment: this rank's `rank_environment`.

    Returns:
        What the function returns on this rank.

    Raises:
        ConfigurationError: the environment is of another world size than the plan.
        Exception: what the function raised, or, where another rank's failure is the cause, an error
            that says so. With TORCHELASTIC_ERROR_FILE set it is in that file as well.
    """
    become_rank(environment)
    try:
        # The user's own program packed it, on this machine; SECURITY.md says what that means.
        call: Call = pickle.loads(data)  # noqa: S301
    except Exception as error:
        raise ConfigurationError(
            "a rank cannot read what was packed for it "
            f"({type(error).__name__}: {error}): functions and classes have to be in modules that "
            "the ranks can import, or install cloudpickle where they are launched and here"
        ) from error
    sys.argv[:] = call.argv
    os.environ.update(call.variables)
    registry = get_registry()
    for spec in call.registered:
        registry.add(spec, override=True)
    return run_call(call)


def become_rank(environment: Mapping[str, str]) -> None:
    """Make this process the rank of these environment variables."""
    open_standard_streams()
    os.environ.update(environment)
    # The requests that come here were made for this launch, whatever was launched before.
    os.environ[rank.LAUNCH_VARIABLE] = "0"
    rank.own_variables()
    rank.this_rank.is_launched = True


def run_call(call: Call) -> Any:
    """Run a call on this rank; report what it raises, and leave the process group."""
    started = int(os.environ["WORLD_SIZE"])
    if started != call.world_size:
        raise ConfigurationError(
            f"WORLD_SIZE={started} in this rank's environment, but the plan has "
            f"{call.world_size} ranks: start as many as plan.world_size says, each with the "
            "variables that rank_environment returns"
        )
    try:
        result = run_as_rank(call.function, *call.args, **call.kwargs)
    except SystemExit:
        rank.end_rank()  # in order, as at the end of a script
        raise
    except Exception as error:
        rank.this_rank.failed = True
        rank.record_failure(error)
        rank.end_rank()
        raise
    rank.end_rank()
    return result


def rank_failure(
    rank: int, world_size: int, *, report: str = "", exit_code: int = 1, how: str = ""
) -> RankFailedError:
    """Return the error that a launcher raises where a rank has failed.

    Args:
        rank: which one; of several, the first whose error is no CommunicationError is the cause.
        world_size: of the plan.
        report: its traceback; "" if it left none.
        exit_code: its exit code; the negated signal number if a signal ended it.
        how: in the place of what the exit code says, such as "was lost with node1".

    Example:
        >>> from stratagem.launch import rank_failure
        >>> str(rank_failure(1, 4, exit_code=-15)).partition(";")[0]
        'rank 1 of 4 was ended by SIGTERM'
    """
    return Failure(rank, exit_code, report, 0.0, how=how).error(world_size)


def _dumps(thing: Any, *, imports_main: bool) -> bytes:
    if not imports_main:
        try:
            import cloudpickle
        except ImportError:
            pass  # optional: what is defined in __main__ cannot go along then
        else:
            data: bytes = cloudpickle.dumps(thing)
            return data
    return pickle.dumps(thing)


def _find_unpicklable(thing: Any, path: str, depth: int = 0, *, imports_main: bool) -> str | None:
    """Return which part of an object cannot be pickled, or None if all of it can."""
    try:
        _dumps(thing, imports_main=imports_main)
        return None
    except Exception:  # noqa: S110 - why it cannot is found below
        pass
    if depth < 12:
        if isinstance(thing, Mapping):
            held = [(f"{path}[{key!r}]", value) for key, value in thing.items()]
        elif isinstance(thing, (list, tuple, set, frozenset)):
            held = [(f"{path}[{index}]", value) for index, value in enumerate(thing)]
        elif inspect.ismethod(thing):
            held = [(type(thing.__self__).__name__, thing.__self__)]
        else:
            attributes = getattr(thing, "__dict__", {})
            held = [(f"{path}.{name}", value) for name, value in attributes.items()]
        for name, value in held:
            if found := _find_unpicklable(value, name, depth + 1, imports_main=imports_main):
                return found
    is_lambda = getattr(thing, "__name__", "") == "<lambda>"
    return f"{path.removeprefix('Job.')} ({'a lambda' if is_lambda else repr(thing)})"
