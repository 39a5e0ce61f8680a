"""LearningRateMonitor: the learning rates of all parameter groups, in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate of each parameter group, with which the next step is taken.

    It is named after the optimizer's class (`lr-SGD`; several of a class: `lr-SGD`, `lr-SGD-1`), or
    after the scheduler's `name` in `configure_optimizers`; of several groups each has its number or
    its own `name` (`lr-SGD/pg1`, `lr-SGD/backbone`). Where momentum or weight decay is logged, they
    end in `-momentum` and `-weight_decay`.

    Args:
        logging_interval: "step": with every row that is logged; "epoch": at the start of each
            epoch; None: as often as the schedulers step, both where they differ.
        log_momentum: log momentum (betas[0] of Adam) too.
        log_weight_decay: log weight decay too.

    Attributes:
        lrs: all values that were logged, by name.

    Raises:
        ConfigurationError: another interval; when a fit begins, the Trainer has no logger.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import LearningRateMonitor
        >>> monitor = LearningRateMonitor(logging_interval="step")
        >>> monitor in Trainer(callbacks=monitor).callbacks
        True
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): expected 'step', "
                "'epoch' or None"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self._names: list[str] = []

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Find names; refuse a Trainer without a logger."""
        if not trainer.loggers:
            raise ConfigurationError(
                "LearningRateMonitor has nowhere to log to: received a Trainer with logger=False; "
                "pass a logger, or leave the callback out"
            )
        by_scheduler = {
            id(config.scheduler.optimizer): config.name
            for config in trainer.lr_scheduler_configs
            if config.name is not None and hasattr(config.scheduler, "optimizer")
        }
        self._names = []
        for optimizer in trainer.optimizers:
            name = by_scheduler.get(id(optimizer)) or f"lr-{type(optimizer).__name__}"
            same = sum(one == name or one.rpartition("-")[0] == name for one in self._names)
            self._names.append(f"{name}-{same}" if same else name)
        self.lrs = {}

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Log before a batch, where this step's values are logged."""
        every = trainer.log_every_n_steps
        if every and not (trainer.global_step + 1) % every and self._is_due(trainer, "step"):
            trainer.run.metrics.row.update(self._read(trainer, "step"))

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Log before an epoch."""
        if self._is_due(trainer, "epoch"):
            values = {"epoch": trainer.current_epoch, **self._read(trainer, "epoch")}
            trainer.run.rows.write(values, trainer.global_step)

    def _is_due(self, trainer: Trainer, interval: str) -> bool:
        if self.logging_interval is not None:
            return self.logging_interval == interval
        # A rate that no scheduler changes is logged with each step, as one that changes there.
        intervals = {config.interval for config in trainer.lr_scheduler_configs} or {"step"}
        return interval in intervals

    def _read(self, trainer: Trainer, interval: str) -> dict[str, float]:
        only = {
            id(config.scheduler.optimizer)
            for config in trainer.lr_scheduler_configs
            if config.interval == interval and hasattr(config.scheduler, "optimizer")
        }
        values: dict[str, float] = {}
        for optimizer, name in zip(trainer.optimizers, self._names, strict=True):
            if self.logging_interval is None and only and id(optimizer) not in only:
                continue
            for index, group in enumerate(optimizer.param_groups):
                own = group.get("name", f"pg{index + 1}")
                full = f"{name}/{own}" if len(optimizer.param_groups) > 1 else name
                values[full] = float(group["lr"])
                if self.log_momentum:
                    momentum = group.get("momentum", (*group.get("betas", ()), 0.0)[0])
                    values[f"{full}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    values[f"{full}-weight_decay"] = float(group.get("weight_decay", 0.0))
        for name, value in values.items():
            self.lrs.setdefault(name, []).append(value)
        trainer.run.latest.values.update(values)
        return values
