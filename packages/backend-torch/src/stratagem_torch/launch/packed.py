"""A function as bytes: packed in the launching process, run on every rank.

The bytes are a pickle, which executes code when it is read. This is intended: the bytes are the
user's own program, sent to the user's own processes. Both sides have to trust each other and the
channel that carries the bytes.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stratagem.discovery import get_registry
from stratagem.errors import ConfigurationError, RankFailedError
from stratagem.launch import (
    LAUNCH_VARIABLE,
    end_rank,
    open_standard_streams,
    own_variables,
    record_failure,
    run_as_rank,
    this_rank,
)
from stratagem_torch.launch.supervisor import Failure

if TYPE_CHECKING:
    from stratagem.discovery import ComponentSpec
    from stratagem.launch import RunPlan

_OF_SEEDS = ("STRATAGEM_SEED", "STRATAGEM_SEED_WORKERS")
"""Variables set by `seed_everything`, so that ranks shuffle alike; other machines do not inherit
them."""


@dataclass(frozen=True)
class Call:
    """A function call that a rank runs, with state of the launching process.

    Attributes:
        function, args, kwargs: the function and its arguments.
        registered: specs of the components registered at run time in the launching process.
        world_size: the world size of the plan.
        argv: the launching process's `sys.argv`, also used by the rank.
        variables: environment variables of the launching process, also set in the rank.
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
        """Return a call with the components registered in this process."""
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

    Components registered at run time (`StrategyRegistry.register`) are included. With cloudpickle,
    functions and classes defined in the script or notebook are included too. Without it, they have
    to be in modules that the ranks can import. The function and its arguments are pickled together,
    so that an object in both of them is one object in the rank too.

    Args:
        plan: the plan passed to `Launcher.launch`.
        function, args, kwargs: the function and arguments passed to `Launcher.launch`. The function
            holds the Trainer or Lite, and these hold the launcher: a launcher's attributes must be
            picklable.
        imports_main: the ranks import this process's script (as multiprocessing's do), so that
            plain pickle finds functions and classes defined there.

    Raises:
        ConfigurationError: an object cannot be pickled; names the object.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.launch import pack
        >>> plan = Trainer(accelerator="cpu", devices=2, logger=False).plan
        >>> isinstance(pack(plan, print, [1]), bytes)
        True
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
    r"""Make this process a rank, and run the call packed by `pack`.

    Call it in the main thread of a separate process, once for each launch. The process stays this
    rank. When the function returns, the rank has left its process group.

    Args:
        data: the bytes returned by `pack`: the user's own program, which is executed.
        environment: this rank's `rank_environment`.

    Returns:
        The function's return value on this rank.

    Raises:
        ConfigurationError: the environment's world size differs from the plan's, or the bytes
            cannot be unpickled here.
        Exception: the function's exception; if another rank's failure caused it, an error that says
            so. If TORCHELASTIC_ERROR_FILE is set, the error is also written to that file.

    Example:
        >>> import subprocess, sys, tempfile
        >>> from stratagem import Trainer
        >>> from stratagem.launch import free_port, pack, rank_environment
        >>> plan = Trainer(accelerator="cpu", devices=1, logger=False).plan
        >>> with tempfile.NamedTemporaryFile(delete=False) as file:
        ...     _ = file.write(pack(plan, max, [3, 1]))
        >>> code = (
        ...     "import ast, sys; from pathlib import Path;"
        ...     "from stratagem.launch import run_packed;"
        ...     "data, rank = Path(sys.argv[1]).read_bytes(), ast.literal_eval(sys.argv[2]);"
        ...     "print(run_packed(data, rank))"
        ... )
        >>> rank = rank_environment(local_rank=0, local_world_size=1, main_port=free_port())
        >>> command = [sys.executable, "-c", code, file.name, str(rank)]
        >>> subprocess.run(command, capture_output=True, text=True).stdout
        '3\n'
    """
    become_rank(environment)
    try:
        # Packed by the user's own program. SECURITY.md explains the trust that this needs.
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
    # Requests in this process belong to this launch, not to an earlier one.
    os.environ[LAUNCH_VARIABLE] = "0"
    own_variables()
    this_rank.is_launched = True


def run_call(call: Call) -> Any:
    """Run a call on this rank, report its exception, and leave the process group."""
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
        end_rank()  # an orderly end, as at the end of a script
        raise
    except Exception as error:
        this_rank.failed = True
        record_failure(error)
        end_rank()
        raise
    end_rank()
    return result


def rank_failure(
    rank: int, world_size: int, *, report: str = "", exit_code: int = 1, how: str = ""
) -> RankFailedError:
    """Return the error that a launcher raises if a rank has failed.

    Args:
        rank: the failed rank. If several failed, pass the first rank with an error other than
            CommunicationError.
        world_size: the world size of the plan.
        report: the rank's traceback; "": it left no traceback.
        exit_code: its exit code; the negated signal number if a signal ended it.
        how: how the rank ended, such as "was lost with node1"; "": described by the exit code.

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
            pass  # optional: without it, objects defined in __main__ cannot be pickled
        else:
            data: bytes = cloudpickle.dumps(thing)
            return data
    return pickle.dumps(thing)


def _find_unpicklable(thing: Any, path: str, depth: int = 0, *, imports_main: bool) -> str | None:
    """Return the part of an object that cannot be pickled.

    None: the whole object can be pickled.
    """
    try:
        _dumps(thing, imports_main=imports_main)
        return None
    except Exception:  # noqa: S110 - the cause is found below
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
