"""StochasticWeightAveraging: the average of the weights of the last epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_info, rank_zero_warn
from stratagem_extras.callbacks.weight_averaging import (
    Average,
    Averages,
    one_by_one,
    save_both,
    take_trained,
)

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class StochasticWeightAveraging(Callback):
    """Averages the weights in the last epochs, at a separate learning rate (SWA).

    From `swa_epoch_start` on the learning rate is annealed to `swa_lrs` and stays constant;
    schedulers have no effect. At the end of training the model gets the average. If the model has
    batch norm, one more pass over the training data, without gradients, computes its statistics
    again.

    A checkpoint that is saved after the fit has the average as the model's weights, and the trained
    weights beside it for resuming. Both are kept until the next fit, or until the Trainer runs
    another model. An epoch that `max_steps` or a stop cuts short does not anneal the learning rate.

    Reference: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization.

    Args:
        swa_lrs: the learning rate, or a list with a rate for each parameter group.
        swa_epoch_start: the first epoch with averaging, counted from 1 (int), or the fraction of
            `max_epochs` before averaging (float from 0 to 1).
        annealing_epochs: the number of epochs in which the learning rate changes to `swa_lrs`; 0:
            immediately.
        annealing_strategy: "cos" or "linear".
        avg_fn: returns the new average from the average, a value and the number of averaged values;
            None: all values have equal weight.
        device: the device of the average; None: the device of the model.

    Raises:
        ConfigurationError: an argument is out of its range; when a fit begins, it has several
            optimizers, sharded parameters, or a fraction of epochs without a last epoch.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import StochasticWeightAveraging
        >>> swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=0.75)
        >>> swa in Trainer(max_epochs=20, callbacks=swa, logger=False).callbacks
        True
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[[Tensor, Tensor, int], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        rates = [swa_lrs] if isinstance(swa_lrs, (int, float)) else list(swa_lrs)
        is_part = isinstance(swa_epoch_start, float)
        checks = {
            f"swa_lrs={swa_lrs!r}: expected numbers above 0": (
                bool(rates) and all(rate > 0 for rate in rates)
            ),
            f"swa_epoch_start={swa_epoch_start!r}: expected an int above 0, or a float between 0 "
            "and 1": (0 <= swa_epoch_start <= 1 if is_part else swa_epoch_start >= 1),
            f"annealing_epochs={annealing_epochs!r}: expected at least 0": annealing_epochs >= 0,
            f"annealing_strategy={annealing_strategy!r}: expected 'cos' or 'linear'": (
                annealing_strategy in ("cos", "linear")
            ),
        }
        for problem, is_right in checks.items():
            if not is_right:
                raise ConfigurationError(f"StochasticWeightAveraging({problem})")
        self._rates = rates
        self._start = swa_epoch_start
        self._annealing = (annealing_epochs, annealing_strategy)
        self._average: Average | None = None if avg_fn is None else one_by_one(avg_fn)
        self._device = device
        self._averages: Averages | None = None
        self._trained: Averages | None = None
        """The trained weights, once the model has the average."""
        self._schedule: Any = None
        self._last_epoch = -1
        self._restored: dict[str, Any] = {}
        self.swa_start = 0
        """The first epoch at whose start the weights are averaged, counted from 0."""
        self.n_averaged = 0
        """How many times the weights were taken into the average of the last fit."""

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Free what the last fit has left, if no checkpoint can be saved of it any more."""
        if stage == "fit" or trainer.run.prepared is None:
            self._averages = self._trained = None

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Look whether it can be done; go on where the run that is resumed was."""
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"StochasticWeightAveraging takes one optimizer; configure_optimizers() returned "
                f"{len(trainer.optimizers)}"
            )
        if trainer.options.max_epochs == -1 and isinstance(self._start, float):
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_epoch_start={self._start!r}) is a part of "
                "max_epochs, and there is no last epoch: pass max_epochs, or the epoch to start "
                "with as an int"
            )
        if trainer.plan.capabilities.sharded_state:
            raise ConfigurationError(
                f"StochasticWeightAveraging needs whole weights on each rank, and "
                f"{trainer.plan.strategy.name!r} shards them: use EMAWeightAveraging or "
                "WeightAveraging, which average shards"
            )
        start = self._start
        first = int(trainer.options.max_epochs * start) if isinstance(start, float) else start
        self.swa_start = max(first - 1, 0)
        self._averages = self._trained = self._schedule = None
        self.n_averaged = 0
        restored, self._restored = self._restored, {}
        self._last_epoch = restored.get("last_epoch", -1)
        if "averages" in restored:
            self._begin(trainer, module)
            assert self._averages is not None
            self._averages.tensors = {
                name: tensor.to(self._averages.tensors[name].device)
                for name, tensor in restored["averages"].items()
            }
            self.n_averaged = self._averages.count = restored["count"]
            self._schedule.load_state_dict(restored["schedule"])
            # Values set at construction differ from the checkpoint's.
            for group, rate in zip(
                trainer.optimizers[0].param_groups, restored["rates"], strict=True
            ):
                group["lr"] = rate

    def _begin(self, trainer: Trainer, module: Module) -> None:
        optimizer = trainer.optimizers[0]
        epochs, strategy = self._annealing
        groups = len(optimizer.param_groups)
        rates = self._rates * groups if len(self._rates) == 1 else self._rates
        if len(rates) != groups:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs=...) has {len(rates)} learning rates, and the "
                f"optimizer has {groups} parameter groups: expected one, or one for each"
            )
        for config in trainer.lr_scheduler_configs:
            rank_zero_info(f"Swapping scheduler `{type(config.scheduler).__name__}` for `SWALR`")
            if config.interval != "epoch":
                rank_zero_warn(
                    "SWA is currently only supported every epoch: the scheduler with "
                    f"interval={config.interval!r} is replaced by one of epochs"
                )
        trainer.run.schedulers.suspend()
        self._averages = Averages(module, self._device)
        self._schedule = SWALR(
            optimizer,
            swa_lr=rates,  # type: ignore[arg-type]  # torch takes a list, too
            anneal_epochs=epochs,
            anneal_strategy=strategy,
        )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Take the weights in; not again where a run resumes in the middle of the epoch."""
        epoch = trainer.current_epoch
        if epoch < self.swa_start or epoch <= self._last_epoch:
            return
        if self._averages is None:
            self._begin(trainer, module)
        assert self._averages is not None
        self._averages.update(module, self._average)
        self.n_averaged = self._averages.count
        self._last_epoch = epoch

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Anneal the learning rate; a run that resumes in a cut epoch does so at its end."""
        if self._schedule is not None and trainer.run.state.epoch_is_done:
            self._schedule.step()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Let the model have the average, and take the statistics of batch norm anew."""
        averages = self._averages
        if averages is None:
            return
        self._trained = Averages(module, self._device)
        averages.copy_to(module)
        norms = [
            (part, part.momentum)
            for part in module.modules()
            if isinstance(part, _BatchNorm) and part.track_running_stats
        ]
        if not norms or not module.automatic_optimization:
            return
        for part, _ in norms:
            part.reset_running_stats()
            part.momentum = None  # all batches count the same
        try:
            trainer.run.run_training_data_without_grad()
        finally:
            for part, momentum in norms:
                part.momentum = momentum

    def state_dict(self) -> dict[str, Any]:
        """Return the average, and where the learning rate is."""
        if self._averages is None:
            return {}
        optimizer = self._schedule.optimizer
        schedule = {k: v for k, v in self._schedule.state_dict().items() if not callable(v)}
        return {
            "averages": dict(self._averages.tensors),
            "count": self._averages.count,
            "last_epoch": self._last_epoch,
            "schedule": schedule,
            "rates": [float(group["lr"]) for group in optimizer.param_groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it when the fit begins."""
        self._restored = dict(state)

    def load_remote_state(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the model has the average."""

    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """After training, save the average as the weights, and the trained weights beside it."""
        if self._trained is not None:
            save_both(trainer, module, checkpoint, self._trained, average_is_in_model=True)

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Resume with the trained weights; evaluate with the average."""
        take_trained(trainer, checkpoint)
