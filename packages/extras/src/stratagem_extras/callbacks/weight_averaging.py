"""WeightAveraging and EMAWeightAveraging: averages of the weights, taken while they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.callbacks import Callback
from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError
from stratagem.strategies import Strategy

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

Average = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]
"""Changes averages in place, given the present values and how many are in the averages by now."""


class Averages:
    """Averages of a model's parameters and buffers.

    Args:
        module: the model.
        device: the device of the averages; None: the device of each tensor of the model.
        use_buffers: average buffers too; otherwise buffers are copied. Integers are always copied.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> averages = Averages(layer)
        >>> for value in (1.0, 3.0):
        ...     _ = torch.nn.init.constant_(layer.weight, value)
        ...     averages.update(layer)
        >>> averages.tensors["weight"]
        tensor([[2.]])
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | int | None = None,
        *,
        use_buffers: bool = True,
    ) -> None:
        self._use_buffers = use_buffers
        self.count = 0
        """How many values are in the averages."""
        self.tensors: dict[str, Tensor] = {
            name: (tensor if device is None else tensor.to(device)).detach().clone()
            for name, tensor in _tensors(module)
        }

    @torch.no_grad()
    def update(self, module: nn.Module, average: Average | None = None) -> None:
        """Take the present values in.

        Args:
            module: the model.
            average: how; None: all values count the same.
        """
        averages, values = [], []
        averaged = {name for name, _ in module.named_parameters()}
        for name, tensor in _tensors(module):
            own = self.tensors[name]
            averages_it = name in averaged or self._use_buffers
            if self.count and averages_it and (own.is_floating_point() or own.is_complex()):
                averages.append(own)
                values.append(tensor.detach().to(own.device))
            else:
                own.copy_(tensor)
        if averages:
            (average or equal_average)(averages, values, self.count)
        self.count += 1

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Let the model have the averages."""
        for name, tensor in _tensors(module):
            tensor.copy_(self.tensors[name])

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Let the model have the averages in this context."""
        self.swap(module)
        try:
            yield
        finally:
            self.swap(module)

    # Validation is in inference mode, where a sharded parameter cannot be detached.
    @torch.inference_mode(False)
    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        """Exchange the averages and the model's values."""
        for name, tensor in _tensors(module):
            own = self.tensors[name]
            value = tensor.detach().clone()
            tensor.copy_(own)
            own.copy_(value)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def equal_average(averages: Sequence[Tensor], values: Sequence[Tensor], count: int) -> None:
    """Average so that all values count the same."""
    for average, value in zip(averages, values, strict=True):
        average.lerp_(value.to(average.dtype), 1.0 / (count + 1))


class WeightAveraging(Callback):
    """Keeps an average of the weights, for validation and as the result of training.

    A checkpoint has the average as the model's weights, so that `load_from_checkpoint`, `validate`,
    `test` and `predict` use the average. The checkpoint also has the trained weights: a resumed run
    continues with them and with the average, as without an interruption. The same holds for a
    resume from a checkpoint that was saved after the fit: the trained weights are kept until the
    next fit, or until the Trainer runs another model.

    Args:
        device: the device of the average; None: the device of the model.
        use_buffers: average buffers (such as batch norm's) too; otherwise buffers are copied.
        avg_fn: returns the new average from the average, a value and the number of averaged values;
            None: all values have equal weight.
        multi_avg_fn: the same for lists of tensors, in place, as in `torch.optim.swa_utils`.

    Raises:
        ConfigurationError: both functions are given.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import WeightAveraging
        >>> class EveryTenSteps(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return step_idx is not None and step_idx >= 100 and step_idx % 10 == 0
        >>> trainer = Trainer(callbacks=EveryTenSteps(), logger=False)
        >>> EveryTenSteps().should_update(step_idx=110)
        True
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: Callable[[Tensor, Tensor, int], Tensor] | None = None,
        multi_avg_fn: Average | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: received avg_fn and multi_avg_fn; expected one of them"
            )
        self._device = device
        self._use_buffers = use_buffers
        self._average = multi_avg_fn if avg_fn is None else one_by_one(avg_fn)
        self._averages: Averages | None = None
        self._loaded: Mapping[str, Any] | None = None
        """The average's state in the checkpoint that is resumed, until the model is filled."""
        self._restored: dict[str, int] = {}
        self._last_step = self._last_epoch = 0
        self._is_in_model = False
        """Whether the model has the average, and `_averages` the trained weights."""
        self._has_ended = False
        """Whether training has, so that the model keeps the average."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the average is to take the weights in.

        Asked after each optimizer step and after each whole epoch, on every rank; the answer must
        be the same there. By default after each step.

        Args:
            step_idx: of the step that was taken, from 0; None: an epoch has ended.
            epoch_idx: of the epoch that has ended, from 0; None: a step was taken.
        """
        return step_idx is not None

    # -- training

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Free what the last fit has left, if no checkpoint can be saved of it any more."""
        if stage == "fit" or trainer.run.prepared is None:
            self._averages, self._is_in_model, self._has_ended = None, False, False

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Begin with the present weights, or with the average of the resumed run."""
        if trainer.plan.capabilities.sharded_state:
            _check_shards(module, type(self).__name__, trainer.plan.strategy.name)
        averages = self._averages = Averages(module, self._device, use_buffers=self._use_buffers)
        self._last_step, self._last_epoch = trainer.global_step, trainer.current_epoch
        self._is_in_model = self._has_ended = False
        loaded, self._loaded = self._loaded, None
        restored, self._restored = self._restored, {}
        if loaded is not None:
            # By way of the model, since the strategy knows how a state is spread over ranks.
            prepared, methods = trainer.run.require_prepared(), _state_methods(trainer)
            methods.load_model_state(trainer.strategy, prepared, dict(loaded))
            averages.swap(module)
            averages.count = restored.get("n_averaged", 1)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the weights in, once a step was taken."""
        step = trainer.global_step
        if step > self._last_step:
            self._last_step = step
            if self.should_update(step_idx=step - 1):
                self._update(module)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Take the weights in; a run that resumes in a cut epoch does so at its end."""
        is_whole = trainer.run.state.epoch_is_done
        if is_whole and self.should_update(epoch_idx=trainer.current_epoch):
            self._update(module)

    def _update(self, module: Module) -> None:
        assert self._averages is not None
        self._averages.update(module, self._average)

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Validate with the average, once it has a value."""
        if trainer.state.fn == "fit":
            self._enter_model(trainer, module)

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Go on with the trained weights."""
        self._leave_model(trainer, module)

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Leave the trained weights in the model, where validation has failed."""
        self._leave_model(trainer, module)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Let the model have the average; keep the trained weights for a later checkpoint."""
        self._enter_model(trainer, module)
        self._has_ended = True

    def _enter_model(self, trainer: Trainer, module: Module) -> None:
        averages = self._averages
        if averages is not None and averages.count and not self._is_in_model:
            trainer.run.require_prepared().reshard()
            averages.swap(module)
            self._is_in_model = True

    def _leave_model(self, trainer: Trainer, module: Module) -> None:
        if self._is_in_model and not self._has_ended and self._averages is not None:
            trainer.run.require_prepared().reshard()
            self._averages.swap(module)
            self._is_in_model = False

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return how many values are in the average; the average itself is the model's state."""
        return {} if self._averages is None else {"n_averaged": self._averages.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it when the fit begins.

        Raises:
            ValueError: `n_averaged` is no number of values.
        """
        count = state.get("n_averaged", 1)
        if type(count) is not int or count < 0:
            raise ValueError(
                f"n_averaged is a {type(count).__name__}, expected a whole number of at least 0"
            )
        self._restored = dict(state)

    def load_remote_state(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the model has the average."""

    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Save the average as the weights, and the trained weights beside it for resuming."""
        averages = self._averages
        if averages is not None and averages.count:
            save_both(trainer, module, checkpoint, averages, average_is_in_model=self._is_in_model)

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Resume with the trained weights; evaluate with the average."""
        self._loaded = take_trained(trainer, checkpoint)


def save_both(
    trainer: Trainer,
    module: nn.Module,
    checkpoint: dict[str, Any],
    averages: Averages,
    *,
    average_is_in_model: bool,
) -> None:
    """Save the average as the weights, and the trained weights beside it for resuming.

    Args:
        trainer, module: the objects of the run.
        checkpoint: contains the state that the strategy saves as the weights.
        averages: the tensors that the model does not have: the average, or the trained weights.
        average_is_in_model: whether the model has the average, and `averages` the trained weights.
    """
    prepared, saved = trainer.run.require_prepared(), checkpoint["state_dict"]
    # An engine that takes the steps has saved its own copy, the trained weights, in any case.
    average_is_saved = average_is_in_model and not trainer.plan.capabilities.engine_steps
    if average_is_saved and "progress" not in checkpoint:
        return
    prepared.reshard()
    has_other = average_is_in_model and not average_is_saved
    with nullcontext() if has_other else averages.in_place(module):
        state = _state_methods(trainer).model_state(trainer.strategy, prepared)
        # Copied with the tensors in `Shards`: they alias the weights, which change back.
        other = map_tensors(lambda tensor: tensor.detach().clone(), state)
    checkpoint["state_dict"], trained = (saved, other) if average_is_saved else (other, saved)
    if "progress" in checkpoint:
        checkpoint["current_model_state"] = trained


def take_trained(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """In a fit, make the trained weights of `save_both` the checkpoint's; return the average.

    Args:
        trainer: runs.
        checkpoint: which it loads.
    """
    trained = checkpoint.pop("current_model_state", None)
    if trained is None or trainer.run.stage != "fit":
        return None
    average: dict[str, Any] = checkpoint["state_dict"]
    checkpoint["state_dict"] = trained
    return average


def _state_methods(trainer: Trainer) -> type[Strategy]:
    """Return the class whose methods save and load what the model holds.

    Those of a strategy whose engine takes the steps save the engine's own copy of the weights.
    """
    return Strategy if trainer.plan.capabilities.engine_steps else type(trainer.strategy)


def _check_shards(module: nn.Module, who: str, strategy: str) -> None:
    """Refuse a strategy that takes the weights out of the model between two steps."""
    taken = next((name for name, p in module.named_parameters() if p.numel() == 0), None)
    if taken is not None:
        raise ConfigurationError(
            f"{who} reads the weights after each step, and {strategy!r} takes them out of the "
            f"model then: {taken!r} has no element there. Use a strategy whose shards stay in the "
            "model, such as 'fsdp', or leave the callback out"
        )


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights; see `WeightAveraging`.

    Args:
        device, use_buffers: as for `WeightAveraging`.
        decay: the weight of the old average in an update, from 0 to 1.
        update_every_n_steps: update after steps 0, n, 2n...
        update_starting_at_step: the first step with an update; None: the first step.
        update_starting_at_epoch: the first epoch with an update; None: the first epoch.

    Raises:
        ConfigurationError: `decay` is not from 0 to 1, or n is less than 1.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import EMAWeightAveraging
        >>> average = EMAWeightAveraging(decay=0.99, update_every_n_steps=5)
        >>> [step for step in range(12) if average.should_update(step_idx=step)]
        [0, 5, 10]
        >>> trainer = Trainer(callbacks=average, logger=False)
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0 or update_every_n_steps < 1:
            raise ConfigurationError(
                f"EMAWeightAveraging(decay={decay!r}, update_every_n_steps="
                f"{update_every_n_steps!r}): expected a decay from 0.0 to 1.0, and at least 1 step"
            )
        super().__init__(device, use_buffers, multi_avg_fn=_decaying(decay))
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._epoch = 0

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Note the epoch."""
        self._epoch = trainer.current_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the average is updated after a step."""
        has_begun = self._epoch >= (self.update_starting_at_epoch or 0)
        return has_begun and step_idx is not None and self._is_due(step_idx)

    def _is_due(self, step_idx: int) -> bool:
        """Whether a step is one of those after which the average is updated."""
        has_begun = step_idx >= (self.update_starting_at_step or 0)
        return has_begun and step_idx % self.update_every_n_steps == 0


def _decaying(decay: float) -> Average:
    def average(averages: Sequence[Tensor], values: Sequence[Tensor], count: int) -> None:
        for one, value in zip(averages, values, strict=True):
            one.lerp_(value.to(one.dtype), 1.0 - decay)

    return average


def one_by_one(function: Callable[[Tensor, Tensor, int], Tensor]) -> Average:
    """Return a function that averages lists of tensors with a function for single tensors.

    Args:
        function: returns the new average, given average, value and how many are in it.
    """

    def average(averages: Sequence[Tensor], values: Sequence[Tensor], count: int) -> None:
        for one, value in zip(averages, values, strict=True):
            one.copy_(function(one, value, count))

    return average
