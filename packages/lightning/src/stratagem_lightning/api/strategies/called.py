"""What a user's strategy overrides of Lightning's, and where a run calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stratagem import strategies
from stratagem.errors import UserCodeError
from stratagem.strategies import Ranks

if TYPE_CHECKING:
    from stratagem.strategies import PreparedModel


# -- targets of `super()` in such an override


def _before_or_after_backward(self: Any, closure_loss: Tensor) -> None:
    """Nothing: what a subclass overrides."""


def _load_checkpoint(
    self: Any, checkpoint_path: Any, weights_only: bool | None = None
) -> dict[str, Any]:
    """Return the checkpoint at a path, by the strategy's CheckpointIO."""
    found: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
    return found


def _sampler_arguments(self: Any) -> dict[str, Any]:
    """Return which part of the data this rank reads, by a DistributedSampler's arguments."""
    index, count = self.ranks.eval_split
    return {"num_replicas": count, "rank": index}


# For the strategies of every distribution, once Lightning's names are in use.
_before_or_after_backward.for_users = True  # type: ignore[attr-defined]  # of any signature
_load_checkpoint.for_users = True  # type: ignore[attr-defined]
strategies.Strategy.pre_backward = _before_or_after_backward  # type: ignore[attr-defined]
strategies.Strategy.post_backward = _before_or_after_backward  # type: ignore[attr-defined]
strategies.Strategy.load_checkpoint = _load_checkpoint  # type: ignore[attr-defined]
strategies.ParallelStrategy.distributed_sampler_kwargs = property(  # type: ignore[attr-defined]
    _sampler_arguments
)


# -- where a run calls the overrides


def overrides(strategy: Any, name: str) -> bool:
    """Whether a user's class has a method of a strategy.

    Example:
        >>> from stratagem_lightning.pytorch.strategies import DDPStrategy
        >>> class Mine(DDPStrategy):
        ...     __module__ = "mine"
        ...
        ...     def post_backward(self, closure_loss):
        ...         pass
        >>> overrides(Mine(), "post_backward"), overrides(Mine(), "root_device")
        (True, False)
    """
    kind = next((one for one in type(strategy).__mro__ if name in vars(one)), None)
    return kind is not None and not kind.__module__.startswith("stratagem")


def call_in_setup(strategy: Any) -> None:
    """Let a strategy set up its environment with its overrides of where a rank works and reads.

    Args:
        strategy: one that is bound, and not launched yet.
    """
    if overrides(strategy, "root_device") or overrides(strategy, "distributed_sampler_kwargs"):
        strategy.setup_environment = partial(_set_up, strategy)


def _set_up(strategy: Any) -> None:
    accelerator = strategy.accelerator
    by_index, asked = accelerator.device, False

    def device(index: Any) -> Any:
        nonlocal asked
        if asked:  # by the override, which may call `super().root_device`
            return by_index(index)
        asked = True
        return strategy.root_device

    vars(strategy).pop("device", None)
    if overrides(strategy, "root_device"):
        accelerator.device = device
    try:
        type(strategy).setup_environment(strategy)
    finally:
        vars(accelerator).pop("device", None)
    if overrides(strategy, "distributed_sampler_kwargs"):
        _divide_data(strategy)


def _divide_data(strategy: Any) -> None:
    """Divide data between ranks by `distributed_sampler_kwargs`.

    Raises:
        UserCodeError: the value is not a rank and a number of ranks.
        ConfigurationError: the values of the ranks contradict each other.
    """
    ranks, given = strategy.ranks, strategy.distributed_sampler_kwargs
    if not isinstance(given, Mapping) or set(given) != {"num_replicas", "rank"}:
        raise UserCodeError(
            f"{type(strategy).__name__}.distributed_sampler_kwargs is {given!r}: expected a dict "
            "with num_replicas and rank; for another order of the samples, pass a loader with a "
            "sampler of your own and Trainer(use_distributed_sampler=False)"
        )
    own = (int(given["rank"]), int(given["num_replicas"]))
    splits = [(int(rank), int(count)) for rank, count in ranks.gather_objects(own)]
    checked = Ranks(world_size=ranks.world_size, data_splits=splits, axes=ranks.axes)
    for name in ("data_splits", "data_groups", "value_groups"):
        setattr(ranks, name, getattr(checked, name))


def overrides_backward_hooks(strategy: Any) -> bool:
    """Return whether a user's strategy overrides `pre_backward` or `post_backward`."""
    return any(overrides(strategy, name) for name in ("pre_backward", "post_backward"))


def run_backward(
    strategy: Any, prepared: PreparedModel, loss: Tensor, *args: Any, **options: Any
) -> None:
    """Run backward in manual optimization, with the strategy's hooks around it."""
    strategy.pre_backward(loss)
    type(strategy).backward(strategy, prepared, loss, *args, **options)
    strategy.post_backward(scaled_loss(strategy, loss).detach())


def scaled_loss(strategy: Any, loss: Tensor) -> Tensor:
    """Return a loss as the precision scales it."""
    precision = strategy.precision
    scaled: Tensor = precision.scale_loss(loss) if precision.scales_loss else loss
    return scaled


def call_at_load(strategy: Any) -> None:
    """Let a Trainer load checkpoints by a strategy's own `load_checkpoint`.

    Args:
        strategy: one that is launched.
    """
    io = strategy.checkpoint_io
    for name in ("load_checkpoint", "open_checkpoint"):
        vars(io).pop(name, None)
    if overrides(strategy, "load_checkpoint"):
        for name in ("load_checkpoint", "open_checkpoint"):
            setattr(io, name, _Load(strategy, getattr(io, name)))


class _Load:
    """Reads a checkpoint by a strategy's `load_checkpoint`, which may call this in turn.

    Args:
        strategy: the strategy.
        read: the CheckpointIO's method.
    """

    _depth = 0
    """0: the Trainer reads; 1: the strategy does; 2: the CheckpointIO does, by its methods."""
    _wanted: Callable[[Any], Any]
    """The method that the Trainer has called."""

    def __init__(self, strategy: Any, read: Callable[[Any], Any]) -> None:
        self.strategy, self.read = strategy, read

    def __call__(self, path: Any, **options: Any) -> Any:
        """Return the checkpoint; `map_location` and `weights_only` are not needed here.

        Raises:
            UserCodeError: the strategy returned something else.
        """
        depth = _Load._depth
        if depth == 0:
            _Load._wanted = self.read
        read = (self.strategy.load_checkpoint, _Load._wanted, self.read)[depth]
        _Load._depth = min(depth + 1, 2)
        try:
            found = read(path)
        finally:
            _Load._depth = depth
        if not isinstance(found, dict):
            raise UserCodeError(
                f"{type(self.strategy).__name__}.load_checkpoint({str(path)!r}) returned a "
                f"{type(found).__name__}: expected the checkpoint, a dict"
            )
        return found
