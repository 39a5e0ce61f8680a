"""Float16Mixed: float16 in the forward pass, with losses scaled so that no gradient vanishes."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.accelerators import Accelerator
from stratagem.errors import ConfigurationError
from stratagem.precision import MixedPrecision


class Float16Mixed(MixedPrecision):
    """Parameters stay in float32; autocast runs operations in float16 where this is safe.

    float16 cannot represent values below 6e-8, where gradients often lie, so the loss is multiplied
    by a scale that `torch.amp.GradScaler` adapts: a step with an overflow in its gradients is
    skipped and halves the scale, and `growth_interval` steps without an overflow double it
    (Micikevicius et al., 2018, "Mixed Precision Training", section 3.2). A skipped step is not
    counted and steps no scheduler. The scale is part of a checkpoint.

    Each step waits for the device once, to learn whether gradients overflowed; 'bf16-mixed' does
    not, and is the better choice on a GPU that computes in bfloat16.

    Args:
        name: "16-mixed".
        init_scale: the first scale.
        growth_interval: the number of steps without an overflow that double the scale.
        scaler: a scaler of the loss, in place of the other two values.

    Raises:
        ConfigurationError: the name is different; or, from `bind`, the accelerator cannot autocast
            to float16.

    Example:
        >>> import torch
        >>> from stratagem_cuda.precision import Float16Mixed
        >>> Float16Mixed(growth_interval=100).name
        '16-mixed'
    """

    dtype = torch.float16
    scales_loss = True

    def __init__(
        self,
        name: str = "16-mixed",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if name != "16-mixed":
            raise ConfigurationError(f"Float16Mixed(name={name!r}): expected '16-mixed'")
        super().__init__()
        self.name = name
        self._device_type = "cuda"
        self._options = {"init_scale": init_scale, "growth_interval": growth_interval}
        if scaler is not None:
            self.scaler = scaler
        self._first_state = None if scaler is None else dict(scaler.state_dict())
        self._watched: WeakSet[Optimizer] = WeakSet()
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        self._stepped = self._has_steps = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out whose steps are watched: hooks of optimizers do not travel."""
        self._adapt()  # torch's scaler does not travel between a step and its update
        sets = ("_watched", "_unscaled")
        return {name: value for name, value in vars(self).items() if name not in sets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._watched, self._unscaled = WeakSet(), WeakSet()

    def bind(self, accelerator: Accelerator) -> None:
        super().bind(accelerator)
        self._device_type = accelerator.device(0).type

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler of the loss."""
        # The scaler is made on the rank: it queries CUDA, and a launching process that has queried
        # CUDA cannot fork.
        return torch.amp.GradScaler(self._device_type, **self._options)  # type: ignore[arg-type]

    def scale_loss(self, loss: Tensor) -> Tensor:
        self._adapt()
        # Gradients from this backward are scaled: torch refuses to unscale twice.
        self._unscaled.clear()
        return self.scaler.scale(loss)

    def _adapt(self) -> None:
        """Adapt the scale to the steps since the last backward pass."""
        # Not at the step: gradients of another optimizer may have the present scale still.
        if self._has_steps:
            self.scaler.update()
            self._has_steps = False

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if optimizer not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def optimizer_step(self, optimizer: Optimizer, **options: Any) -> None:
        """Step the optimizer if all gradients are finite; the next backward adapts the scale.

        Args:
            optimizer: the optimizer; its gradients were unscaled if a hook or clipping reads them.
            **options: options of its `step`.
        """
        scaler = self.scaler
        self._unscaled.discard(optimizer)
        self._has_steps = True
        # Fused optimizers look for an overflow on the device, and always step on the host's side.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.step(optimizer, **options)
            found = scaler._found_inf_per_device(optimizer).values()
            self.step_was_skipped = any(bool(value) for value in found)
            return
        if optimizer not in self._watched:
            optimizer.register_step_post_hook(self._note_step)
            self._watched.add(optimizer)
        self._stepped = False
        scaler.step(optimizer, **options)
        self.step_was_skipped = not self._stepped

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and how many steps ago it changed."""
        self._adapt()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale; a checkpoint of another precision begins with the first scale."""
        self._adapt()
        first = self._first_state
        if first is None:
            new = torch.amp.GradScaler(self._device_type, **self._options)  # type: ignore[arg-type]
            first = new.state_dict()
        self.scaler.load_state_dict(state or first)
