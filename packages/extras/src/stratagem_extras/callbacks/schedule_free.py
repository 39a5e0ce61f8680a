"""ScheduleFree: the modes of schedule-free optimizers around training and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stratagem.callbacks import Callback
from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError
from stratagem_extras.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from stratagem_extras.callbacks.weight_averaging import WeightAveraging

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class ScheduleFree(Callback):
    """Puts schedule-free optimizers into the mode of training or of evaluation.

    Optimizers of the package `schedulefree` keep two points of the weights. Gradients are computed
    at one point (`optimizer.train()`), and the other is the result (`optimizer.eval()`). Training
    runs in the mode of training. Validation runs in the mode of evaluation, and after a fit the
    model has the weights of evaluation.

    A checkpoint has the weights of evaluation as the model's weights. A checkpoint that is saved
    between steps has the weights of training too, so that a resumed run continues with the bits of
    the run that was not interrupted.

    Raises:
        ConfigurationError: when a fit begins, if no optimizer has both modes, or an engine steps
            the optimizer.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ScheduleFree
        >>> trainer = Trainer(callbacks=ScheduleFree(), logger=False)
        >>> any(isinstance(callback, ScheduleFree) for callback in trainer.callbacks)
        True
    """

    def _modes(self, trainer: Trainer) -> list[Any]:
        """Return the optimizers of the run that have both modes."""
        prepared = trainer.run.prepared
        if prepared is None:
            return []
        return [o for o in prepared.optimizers if _has_modes(o)]

    def _set(self, trainer: Trainer, *, train: bool) -> None:
        for optimizer in self._modes(trainer):
            trainer.run.require_prepared().reshard()
            # Validation is in inference mode, where parameters cannot be changed for training.
            with torch.inference_mode(False):
                optimizer.train() if train else optimizer.eval()

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Refuse optimizers without modes, and other averages."""
        name = trainer.plan.strategy.name
        if trainer.plan.capabilities.engine_steps:
            raise ConfigurationError(
                f"ScheduleFree changes weights between steps, and the engine of {name!r} keeps "
                "weights of its own: use strategy='fsdp' or 'ddp'"
            )
        for callback in trainer.callbacks:
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                raise ConfigurationError(
                    f"ScheduleFree and {type(callback).__name__} both average the weights of a "
                    "run, and would undo one another: leave one out"
                )
        optimizers = trainer.run.require_prepared().optimizers
        if not self._modes(trainer):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise ConfigurationError(
                f"ScheduleFree expected an optimizer with train() and eval(), such as "
                f"schedulefree.AdamWScheduleFree, received {kinds} under {name!r}: leave the "
                "callback out, or use strategy='ddp' in the place of 'ddp_sharded'"
            )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Begin the mode of training."""
        self._set(trainer, train=True)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Evaluate the weights of evaluation."""
        self._set(trainer, train=False)

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Return to the mode of training after a validation, once its checkpoints are saved."""
        if not all(group["train_mode"] for o in self._modes(trainer) for group in o.param_groups):
            self._set(trainer, train=True)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Let the model have the weights of evaluation."""
        self._set(trainer, train=False)

    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Save the weights of evaluation, and the weights of training for a resume."""
        optimizers = [
            o for o in self._modes(trainer) if any(group["train_mode"] for group in o.param_groups)
        ]
        if not optimizers:
            return
        prepared = trainer.run.require_prepared()
        prepared.reshard()
        with torch.inference_mode(False), torch.no_grad():
            held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
            trained = [p.detach().clone() for p in held]
            state = map_tensors(lambda t: t.detach().clone(), checkpoint["state_dict"])
            for optimizer in optimizers:
                optimizer.eval()
            evaluated = trainer.strategy.model_state(prepared)
            checkpoint["state_dict"] = map_tensors(lambda t: t.detach().clone(), evaluated)
            # Copied back and not computed back, which would round.
            for parameter, value in zip(held, trained, strict=True):
                parameter.copy_(value)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["train_mode"] = True
        if "progress" in checkpoint:
            checkpoint["current_model_state"] = state

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Resume with the weights of training."""
        trained = checkpoint.pop("current_model_state", None)
        if trained is not None and trainer.run.stage == "fit":
            checkpoint["state_dict"] = trained


def _has_modes(optimizer: Any) -> bool:
    return (
        callable(getattr(optimizer, "train", None))
        and callable(getattr(optimizer, "eval", None))
        and all("train_mode" in group for group in optimizer.param_groups)
    )
