"""TrainerOptions: the options of runs, checked, with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import torch

from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.plan.step_options import StepOptions, seconds
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.callbacks import Callback

Limit = int | float
"""A number of batches (int), or a fraction of them (float)."""
Interval = int | float | str | timedelta | Mapping[str, int] | None
"""The argument `val_check_interval`: batches, a fraction of an epoch, or a time."""
P = ParamSpec("P")

_LEAST = {
    "fast_dev_run": 0,
    "max_epochs": -1,
    "max_steps": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "detect_divergence": 0,
    "reload_dataloaders_every_n_epochs": 0,
}
"""The smallest value of each option that is an integer."""
_LIMITS = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The options of a Trainer's runs, in normalized form.

    `dataclasses.replace` returns changed options, and checks them too. A Trainer reads its
    `options` each time that it needs a value, so a user may replace them between two runs.

    Attributes:
        max_epochs, max_steps: the limits of training; -1: no limit.
        max_time: the time limit in seconds. None: no limit.
        fast_dev_run: the number of batches of a quick run; 0: a full run.
        detect_divergence: the number of optimizer steps between two comparisons of the ranks; 0:
            never.
        step_options: the options of optimizer steps, for the strategy.
        weights: the PretrainedWeights that a run starts from; None: the model's own.
        the others: as in `Trainer`.

    Raises:
        ConfigurationError: if a value is out of its range.

    Example:
        >>> from dataclasses import replace
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_time="00:01:00:00")
        >>> trainer.options.max_epochs, trainer.options.max_time
        (-1, 3600.0)
        >>> trainer.options = replace(trainer.options, max_epochs=20)
    """

    max_epochs: int
    min_epochs: int
    max_steps: int
    min_steps: int
    max_time: float | None
    fast_dev_run: int = 0
    limit_train_batches: Limit
    limit_val_batches: Limit
    limit_test_batches: Limit
    limit_predict_batches: Limit
    val_check_interval: Limit | timedelta
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    log_every_n_steps: int
    step_options: StepOptions
    deterministic: bool | str
    benchmark: bool
    inference_mode: bool
    use_distributed_sampler: bool
    detect_anomaly: bool
    detect_divergence: int
    enable_autolog_hparams: bool
    overfit_batches: Limit
    reload_dataloaders_every_n_epochs: int
    default_root_dir: paths.Location
    weights: Any = None

    def __post_init__(self) -> None:
        """Check and normalize the options."""
        for name, least in _LEAST.items():
            check_whole(name, getattr(self, name), least)
        for name in _LIMITS:
            object.__setattr__(self, name, check_limit(name, getattr(self, name)))
        object.__setattr__(self, "default_root_dir", root_folder(self.default_root_dir))
        if self.deterministic not in (True, False, "warn"):
            raise ConfigurationError(
                f"deterministic={self.deterministic!r}: expected True, False or 'warn'"
            )
        if self.check_val_every_n_epoch is not None:
            check_whole("check_val_every_n_epoch", self.check_val_every_n_epoch, 1)
        elif isinstance(self.val_check_interval, float):
            raise ConfigurationError(
                f"check_val_every_n_epoch=None counts batches over epochs, and "
                f"val_check_interval={self.val_check_interval} is a fraction of an epoch: pass a "
                "number of batches (int) or a time"
            )

    def for_quick_run(self, batches: int) -> TrainerOptions:
        """Return the options of a `fast_dev_run` with this number of batches."""
        return replace(
            self,
            fast_dev_run=batches,
            limit_train_batches=self.overfit_batches or batches,
            limit_val_batches=self.overfit_batches or batches,
            limit_test_batches=batches,
            limit_predict_batches=batches,
            max_epochs=1,
            max_steps=batches,
            val_check_interval=1.0,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=1,
        )


def none_means_default(function: Callable[P, None]) -> Callable[P, None]:
    """Replace keyword arguments that are None by their defaults, for config files.

    `check_val_every_n_epoch` is left alone, since None is a value of its own there.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        passed = {
            name: value
            for name, value in kwargs.items()
            if value is not None or name == "check_val_every_n_epoch"
        }
        function(*args, **passed)  # type: ignore[arg-type]

    return call


def check_limit(name: str, limit: int | float | None) -> int | float:
    """Return a limit: a number of batches (int) or a fraction of them (float from 0 to 1).

    Raises:
        ConfigurationError: if the limit is neither.
    """
    if limit is None:
        return 1.0
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise ConfigurationError(
            f"{name}={limit!r}: expected a number of batches (int) or a fraction (float)"
        )
    if 0 <= limit <= 1 or (isinstance(limit, int) and limit > 1):
        return limit
    if isinstance(limit, float) and limit > 1.0 and limit.is_integer():
        return int(limit)
    raise ConfigurationError(
        f"{name}={limit!r}: expected a number of batches of at least 0 (int), or a fraction from "
        "0.0 to 1.0 (float)"
    )


def check_interval(interval: Interval) -> Limit | timedelta:
    """Return the interval between validations: batches, a fraction of them, or a time.

    Args:
        interval: a number that `check_limit` accepts, a timedelta, "DD:HH:MM:SS", or a dict of
            timedelta's arguments.

    Raises:
        ConfigurationError: if the interval has another form, or is 0.
    """
    if isinstance(interval, (str, timedelta, Mapping)):
        time = seconds(interval, "val_check_interval") or 0.0
        if time > 0:
            return timedelta(seconds=time)
        raise ConfigurationError(f"val_check_interval={interval!r}: expected a time above 0")
    batches = check_limit("val_check_interval", interval)
    if batches == 0:
        raise ConfigurationError(
            "val_check_interval=0: expected at least one batch (int) or a fraction above 0"
        )
    return batches


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise if a value is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least {least}")


def check_switch(name: str, value: bool | int, *, unit: str, on: int) -> int:
    """Return a number, with True replaced by `on` and False by 0."""
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name}={value!r}: expected True, False, or a number of {unit}")
    return on if value is True else int(value)


def check_accumulation(
    value: int | Mapping[int, int], callbacks: Sequence[Callback]
) -> dict[int, int]:
    """Return the accumulation schedule: the number of batches in an optimizer step, by first epoch.

    Args:
        value: the argument `accumulate_grad_batches`.
        callbacks: the Trainer's callbacks. The schedule of a GradientAccumulationScheduler replaces
            `value`.

    Raises:
        ConfigurationError: if a number is too small, or if two schedules are given.
    """
    scheduled = [one.accumulation for one in callbacks if hasattr(one, "accumulation")]
    if scheduled and (value != 1 or len(scheduled) > 1):
        raise ConfigurationError(
            f"accumulate_grad_batches={value!r} beside {len(scheduled)} "
            "GradientAccumulationScheduler: expected one of them"
        )
    value = scheduled[0] if scheduled else value
    schedule = {0: value} if isinstance(value, int) else dict(value)
    for first, count in schedule.items():
        check_whole("accumulate_grad_batches (an epoch)", first, 0)
        check_whole("accumulate_grad_batches", count, 1)
    schedule.setdefault(0, 1)
    return schedule


def root_folder(folder: str | Path | None) -> paths.Location:
    """Return the folder for logs and checkpoints; by default the current folder."""
    if folder is not None:
        return paths.parse_user_path(folder)
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigurationError(
            f"default_root_dir=None means the current folder, which is gone ({error}): change to "
            "one that is there, or pass default_root_dir"
        ) from error


def set_determinism(accelerator: Accelerator, options: TrainerOptions) -> Callable[[], None]:
    """Set the deterministic and benchmark modes; return a function that restores them."""
    deterministic, benchmark = options.deterministic, options.benchmark
    if not deterministic and not benchmark:
        return lambda: None
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    restore_kernels = accelerator.configure_kernels(
        benchmark=benchmark and not deterministic, deterministic=bool(deterministic)
    )
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        restore_kernels()

    return restore
