"""Setting up, accumulating and saving several objects at once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stratagem.checkpoint.forms import Count, require_form
from stratagem.data.sharding import divides_data
from stratagem.errors import CheckpointMismatchError, ConfigurationError, format_names, naming
from stratagem.lite.module import LiteModule
from stratagem.rng import rng_state, set_rng_state, try_rng_state
from stratagem.runtime.optimizer import LiteOptimizer
from stratagem.runtime.prepare import Compile
from stratagem.state.rank_states import RankStates, gather_states
from stratagem.state.state_checks import as_mismatch
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.lite.lite import Lite

_FILE = "state.ckpt"
_RANDOM, _MICRO_BATCHES = "random", "micro_batches"


def setup_objects(
    lite: Lite, objects: Sequence[Any], *, move_to_device: bool, compile: Compile
) -> Any:
    """Set up objects of any kind; see `Lite.setup`."""
    ready: dict[int, tuple[Any, ...]] = {id(None): (None,)}
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    for model in (one for one in objects if isinstance(one, nn.Module)):
        held = {id(p) for p in model.parameters()}
        own = [o for o in optimizers if id(o) not in ready and not held.isdisjoint(_held_by(o))]
        result = lite._setup_model(model, *own, move_to_device=move_to_device, compile=compile)
        first, *wrapped = result if isinstance(result, tuple) else (result,)
        ready[id(model)] = (first, *wrapped[len(own) :])
        ready.update({id(o): (w,) for o, w in zip(own, wrapped, strict=False)})
    for one in optimizers:
        if id(one) not in ready:
            ready[id(one)] = (lite.setup_optimizers(one),)
    parts = 1
    for one in objects:
        if id(one) not in ready and not isinstance(one, LRScheduler) and _is_loader(one):
            loader = lite.setup_dataloaders(one, move_to_device=move_to_device)
            ready[id(one)] = (loader,)
            if divides_data(loader.loader) and not divides_data(one):
                parts = lite.ranks.data_split[1]
    for one in objects:
        if isinstance(one, LRScheduler):
            replaced = ready.get(id(one.optimizer), (one.optimizer,))[0]
            _hold(one, replaced, lite._objects.of(LiteOptimizer), parts)
            lite._objects.add("scheduler", one)
        elif id(one) not in ready:
            is_class = isinstance(one, type)
            if is_class or not all(hasattr(one, n) for n in ("state_dict", "load_state_dict")):
                received = f"the class {one.__name__}" if is_class else f"a {type(one).__name__}"
                raise ConfigurationError(
                    "setup() expects models, optimizers, schedulers, data loaders and objects with "
                    f"state_dict() and load_state_dict(), received {received}"
                )
            lite._objects.add("object", one)
    flat = [part for one in objects for part in ready.get(id(one), (one,))]
    return flat[0] if len(flat) == 1 else tuple(flat)


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _is_loader(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping, Tensor, type))


def _hold(scheduler: LRScheduler, optimizer: Any, wrapped: Sequence[Any], parts: int) -> None:
    """Make a scheduler step only when its optimizer does.

    Args:
        scheduler: the scheduler. It keeps its attributes, which are its state; its class is
            replaced.
        optimizer: the scheduler's optimizer, as returned by `setup`.
        wrapped: all optimizers that were set up.
        parts: number of scheduler steps for each call of `step`.

    Raises:
        ConfigurationError: its optimizer was not set up.
    """
    found = [w for w in wrapped if optimizer in (w, w.optimizer)]
    if not found:
        raise ConfigurationError(
            f"setup() received a {type(scheduler).__name__} whose optimizer was not set up: pass "
            "the optimizer too, or set it up first"
        )
    own: Any = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        """Step, unless the optimizer is held."""
        if found[0].is_held:
            return
        for _ in range(parts):
            # The length of the undivided data may not be a multiple of the number of parts.
            if parts == 1 or self.last_epoch < getattr(self, "total_steps", float("inf")):
                own.step(self, *args, **kwargs)

    names = {"step": step, "__module__": own.__module__, "__doc__": own.__doc__}
    scheduler.__class__ = type(own.__name__, (own,), names)


@contextmanager
def accumulate(lite: Lite, models: Sequence[LiteModule]) -> Iterator[bool]:
    """Hold optimizers until a window ends; see `Lite.accumulate`."""
    is_at_end = lite._reading.is_last_batch
    lite._micro_batches = 0 if is_at_end else lite._micro_batches + 1
    is_last = lite._micro_batches % lite._window == 0
    optimizers = lite._objects.of(LiteOptimizer)
    lite._divisor = lite._window
    for optimizer in optimizers:
        optimizer.is_held = not is_last
    try:
        with ExitStack() as held:
            for model in models:
                held.enter_context(lite.no_backward_sync(model, enabled=not is_last))
            yield is_last
    finally:
        lite._divisor = 1
        for optimizer in optimizers:
            optimizer.is_held = False


def save_state(lite: Lite, folder: str | os.PathLike[str]) -> None:
    """Save everything that was set up; see `Lite.save_state`."""
    ranks, state = lite.ranks, lite._objects.state()
    names = [str(of_rank) for of_rank in ranks.gather_objects(list(state))]
    if different := [rank for rank, of_rank in enumerate(names) if of_rank != names[0]]:
        raise ConfigurationError(
            f"save_state(): rank 0 has set up {names[0]}, and rank {different[0]} "
            f"{names[different[0]]}; expected the same objects on every rank"
        )
    if lite._micro_batches % lite._window and lite.is_global_zero:
        warnings.warn(
            f"save_state() between the {lite._window} batches of a step: the gradients of "
            f"{lite._micro_batches % lite._window} batch(es) are not saved, and a run that resumes "
            "from it differs. Save after an optimizer step",
            stacklevel=3,
        )
    random = gather_states(ranks, rng_state(lite.strategy.accelerator, lite.device))
    numbers = {_RANDOM: random, _MICRO_BATCHES: lite._micro_batches}
    lite.save(paths.join(paths.parse_user_path(folder), _FILE), {**state, **numbers})


def load_state(lite: Lite, folder: str | os.PathLike[str]) -> None:
    """Load a state saved by `save_state`; see `Lite.load_state`."""
    left = lite.load(paths.join(paths.parse_user_path(folder), _FILE), lite._objects.state())
    with naming(folder), as_mismatch("a random number generator"):
        require_form(left, {_RANDOM: (list, dict), _MICRO_BATCHES: Count}, "")
        random, lite._micro_batches = RankStates(left.pop(_RANDOM)), left.pop(_MICRO_BATCHES)
        if lite.global_rank < len(random):
            try_rng_state(random[lite.global_rank])
    if left:
        raise CheckpointMismatchError(
            f"{os.fspath(folder)!r} has the state of {format_names(left, 20)}, and no such object "
            "was set up: set up the objects of the run that saved it, in the same order"
        )
    if lite.global_rank < len(random):
        set_rng_state(random[lite.global_rank], lite.strategy.accelerator, lite.device)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return values as floats.

    Raises:
        ConfigurationError: a value is neither a number nor a tensor of one element; names it.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = getattr(value, "shape", None)
            received = repr(value) if shape is None else f"one of shape {tuple(shape)}"
            raise ConfigurationError(
                f"log_dict: {name!r}: expected a number or a tensor of one element, received "
                f"{received}: log its mean, or each part by a name of its own"
            ) from error
    return numbers
