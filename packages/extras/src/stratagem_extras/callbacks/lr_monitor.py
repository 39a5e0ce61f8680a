"""LearningRateMonitor: the learning rates of all parameter groups, in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.module import Module
    from stratagem.trainer import Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate of each parameter group, with which the next step is taken.

    Values are named after the optimizer's class (`lr-SGD`), or after the scheduler's `name` in
    `configure_optimizers`. Optimizers with a scheduler come first, once for each of their
    schedulers; a repeated name is numbered (`lr-SGD`, `lr-SGD-1`). The `name` of a group is
    appended (`lr-SGD/backbone`); of several groups, groups without a name get a number
    (`lr-SGD/pg1`). Names of momentum and weight decay end in `-momentum` and `-weight_decay`.

    Args:
        logging_interval: "step": with every logged row; "epoch": at the start of each epoch; None:
            whenever the scheduler steps, and both for optimizers without a scheduler.
        log_momentum: log momentum (betas[0] of Adam) too.
        log_weight_decay: log weight decay too.

    Attributes:
        lrs: all learning rates that were logged, by name.
        last_momentum_values: by name, where momentum is logged.
        last_weight_decay_values: by name, where weight decay is logged.

    Raises:
        ConfigurationError: another interval; when a fit begins, the Trainer has no logger, or two
            groups of an optimizer have the same name.

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
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Reset the values; refuse a Trainer without a logger."""
        if not trainer.loggers:
            raise ConfigurationError(
                "LearningRateMonitor has nowhere to log to: received a Trainer with logger=False; "
                "pass a logger, or leave the callback out"
            )
        if self.log_momentum:
            _warn_of_none(trainer)
        watched = _watched(trainer)
        names = [name for one, base, _ in watched for name in self._of_groups(one, base)]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values, self.last_weight_decay_values = {}, {}

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Log before a batch, where this step's values are logged."""
        every, step = trainer.options.log_every_n_steps, trainer.global_step
        # In manual optimization each optimizer may take a step of this batch.
        steps = 1 if module.automatic_optimization else len(trainer.optimizers)
        logs = every and (step + steps) // every > step // every
        if logs and self.logging_interval != "epoch":
            trainer.run.metrics.row.update(self._read(trainer, "step"))

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Log before an epoch."""
        # A run that resumes within an epoch begins it a second time.
        if self.logging_interval == "step" or trainer.run.state.batches:
            return
        values = self._read(trainer, "epoch")
        trainer.run.rows.write(values, trainer.global_step, trainer.current_epoch)

    def _read(self, trainer: Trainer, interval: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for optimizer, base, own in _watched(trainer):
            # A rate that no scheduler changes is logged with both.
            if self.logging_interval is None and own not in (None, interval):
                continue
            names = self._of_groups(optimizer, base)
            values |= self._get_optimizer_stats(optimizer, names)
            for name in names:
                self.lrs.setdefault(name, []).append(values[name])
        trainer.run.latest.values.update(values)
        return values

    def _get_optimizer_stats(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        """Return the values of the parameter groups; libraries override it.

        Args:
            optimizer: the optimizer with the groups.
            names: the names of the groups.
        """
        values, momenta, decays = {}, {}, {}
        for name, group in zip(names, optimizer.param_groups, strict=True):
            values[name] = float(group["lr"])
            if self.log_momentum:
                momenta[f"{name}-momentum"] = float(_momentum_of(group) or 0.0)
            if self.log_weight_decay:
                decays[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        self.last_momentum_values.update(momenta)
        self.last_weight_decay_values.update(decays)
        return values | momenta | decays

    def _of_groups(self, optimizer: Optimizer, name: str) -> list[str]:
        """Return the names of an optimizer's parameter groups, which may have become more.

        Raises:
            ConfigurationError: two are the same.
        """
        groups = optimizer.param_groups
        if len(groups) == 1 and "name" not in groups[0]:
            return [name]
        names = [f"{name}/{group.get('name', f'pg{i + 1}')}" for i, group in enumerate(groups)]
        if twice := sorted({one for one in names if names.count(one) > 1}):
            raise ConfigurationError(
                f"LearningRateMonitor logs a value for each parameter group, and several groups "
                f"of an optimizer are called {twice[0]!r}: give each a 'name' of its own"
            )
        if name in self.lrs:  # it was the only group so far
            self.lrs[names[0]] = self.lrs.pop(name)
        return names


def _watched(trainer: Trainer) -> list[tuple[Optimizer, str, str | None]]:
    """Return each optimizer with its name and the interval of its scheduler, for each scheduler.

    An optimizer without a scheduler follows those that have one; its interval is None.
    """
    optimizers = {id(optimizer): optimizer for optimizer in trainer.optimizers}
    of_schedulers = [
        (optimizers[id(config.scheduler.optimizer)], config.name, config.interval)
        for config in trainer.lr_scheduler_configs
        if id(getattr(config.scheduler, "optimizer", None)) in optimizers
    ]
    scheduled = {id(optimizer) for optimizer, _, _ in of_schedulers}
    alone = [(one, None, None) for number, one in optimizers.items() if number not in scheduled]
    watched: list[tuple[Optimizer, str, str | None]] = []
    names: list[str] = []
    for optimizer, given, interval in [*of_schedulers, *alone]:
        name = given or f"lr-{type(optimizer).__name__}"
        same = names.count(name)
        names.append(name)
        watched.append((optimizer, f"{name}-{same}" if same else name, interval))
    return watched


def _momentum_of(group: dict[str, Any]) -> Any:
    """Return the momentum of a parameter group; None: its optimizer has none."""
    return group.get("momentum", (*group.get("betas", ()), None)[0])


def _warn_of_none(trainer: Trainer) -> None:
    """Say which optimizers have no momentum that could be logged."""
    without = [
        type(optimizer).__name__
        for optimizer in trainer.optimizers
        if all(_momentum_of(group) is None for group in optimizer.param_groups)
    ]
    if without:
        rank_zero_warn(
            f"LearningRateMonitor(log_momentum=True) logs 0.0 for {', '.join(without)}: these "
            "optimizers do not have momentum. Leave log_momentum out, or take another optimizer",
            category=RuntimeWarning,
        )
