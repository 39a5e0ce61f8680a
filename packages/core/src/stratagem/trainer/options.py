"""TrainerOptions: the Trainer's arguments that say how runs go, checked and with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.plan.compilation import Compilation
from stratagem.plan.step_options import StepOptions, gradient_clip, seconds
from stratagem.storage import paths
from stratagem.trainer.loops.divergence import DEFAULT_INTERVAL

Limit = int | float


class OptionAttributes:
    """The options as attributes of a Trainer, where users may set them between runs."""

    max_epochs: int
    min_epochs: int
    max_steps: int
    min_steps: int
    max_time: float | None
    fast_dev_run: int
    limits: Mapping[str, Limit]
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
    default_root_dir: paths.Location
    overfit_batches: Limit
    reload_dataloaders_every_n_epochs: int
    enable_autolog_hparams: bool
    barebones: bool


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The Trainer's arguments that say how runs go, in the form in which runs read them.

    Attributes:
        fast_dev_run: batches of a quick run; 0: it is none.
        max_epochs, max_steps: -1: no limit.
        max_time: seconds; None: no limit.
        limits: how many batches of "train", "val", "test" and "predict" to take.
        detect_divergence: after how many steps ranks are compared; 0: never.
        step_options: how optimizer steps are taken, for the strategy.
        the others: as `Trainer` describes them.
    """

    fast_dev_run: int
    max_epochs: int
    min_epochs: int
    max_steps: int
    min_steps: int
    max_time: float | None
    limits: Mapping[str, Limit]
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
    default_root_dir: paths.Location
    overfit_batches: Limit
    reload_dataloaders_every_n_epochs: int
    enable_autolog_hparams: bool
    barebones: bool

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TrainerOptions:
        """Check the Trainer's arguments and put defaults in the place of None.

        Args:
            given: all of them, by name.

        Raises:
            ConfigurationError: one is out of its range.

        Example:
            >>> import inspect
            >>> from stratagem import Trainer
            >>> defaults = inspect.signature(Trainer).parameters.values()
            >>> given = {parameter.name: parameter.default for parameter in defaults}
            >>> TrainerOptions.parse({**given, "max_time": "00:01:00:00"}).max_time
            3600.0
        """
        given = {**given, **_of_quick_run(check_fast_dev_run(given["fast_dev_run"]))}
        overfit = check_limit("overfit_batches", given["overfit_batches"])
        if overfit:
            given |= {"limit_train_batches": overfit, "limit_val_batches": overfit}
        max_time = seconds(given["max_time"])
        if given["max_epochs"] is None:
            unlimited = given["max_steps"] != -1 or max_time is not None
            given["max_epochs"] = -1 if unlimited else 1000
        for name in ("min_epochs", "min_steps"):
            given[name] = given[name] or 0
        for name, least in _WHOLE.items():
            check_whole(name, given[name], least)
        interval = check_interval(given["val_check_interval"])
        if given["check_val_every_n_epoch"] is None:
            if isinstance(interval, float):
                raise ConfigurationError(
                    f"check_val_every_n_epoch=None counts batches over epochs, and "
                    f"val_check_interval={interval} is a fraction of an epoch: pass a number of "
                    "batches (int) or a time"
                )
        else:
            check_whole("check_val_every_n_epoch", given["check_val_every_n_epoch"], 1)
        return cls(
            fast_dev_run=check_fast_dev_run(given["fast_dev_run"]),
            overfit_batches=overfit,
            max_time=max_time,
            limits={
                what: check_limit(f"limit_{what}_batches", given[f"limit_{what}_batches"])
                for what in ("train", "val", "test", "predict")
            },
            val_check_interval=interval,
            step_options=StepOptions(
                clip=gradient_clip(given["gradient_clip_val"], given["gradient_clip_algorithm"]),
                accumulation=check_accumulation(given["accumulate_grad_batches"]),
                sync_batchnorm=given["sync_batchnorm"],
                compilation=Compilation.parse(given["compile"]),
            ),
            deterministic=check_deterministic(given["deterministic"]),
            detect_divergence=check_divergence(given["detect_divergence"]),
            default_root_dir=root_folder(given["default_root_dir"]),
            **{name: given[name] for name in (*_WHOLE, *_AS_THEY_ARE)},
        )


_BAREBONES = {
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "detect_anomaly": False,
    "profiler": None,
    "log_every_n_steps": 0,
}
"""What `barebones` turns off."""


def of_barebones(arguments: Mapping[str, Any], function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the Trainer's arguments without what `barebones` turns off.

    Args:
        arguments: all of them, by name.
        function: whose defaults say which of them the user has given.

    Raises:
        ConfigurationError: one of those was asked for beside it.
    """
    if not arguments["barebones"]:
        return arguments
    defaults: Any = function.__kwdefaults__
    for name, off in _BAREBONES.items():
        given = arguments[name]
        if given is not None and given != defaults[name] and given != off:
            raise ConfigurationError(
                f"barebones=True turns off what does not train, and {name}={given!r} asks for it: "
                "leave one of the two out"
            )
    return {**arguments, **_BAREBONES}


def with_defaults(arguments: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only arguments of a call, each with its default in the place of None.

    None is what a config says of an option that it leaves alone.

    Args:
        arguments: the function's `locals()`, before it has any others.
        function: that was called.
    """
    defaults: Any = function.__kwdefaults__
    given = ((name, arguments[name]) for name in defaults)
    return {name: defaults[name] if value is None else value for name, value in given}


_WHOLE = {
    "max_epochs": -1,
    "max_steps": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
}
"""Options that are whole numbers, and the least that each may be."""
_AS_THEY_ARE = (
    *("barebones", "benchmark", "detect_anomaly", "inference_mode"),
    *("check_val_every_n_epoch", "use_distributed_sampler", "enable_autolog_hparams"),
)


def _of_quick_run(batches: int) -> dict[str, Any]:
    """Return the options that `fast_dev_run` sets."""
    if not batches:
        return {}
    return {
        "limit_train_batches": batches,
        "limit_val_batches": batches,
        "limit_test_batches": batches,
        "limit_predict_batches": batches,
        "max_epochs": 1,
        "max_steps": batches,
        "val_check_interval": 1.0,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
    }


def check_limit(name: str, limit: int | float | None) -> int | float:
    """Return a limit: a number of batches (int) or a fraction of them (float from 0 to 1).

    Raises:
        ConfigurationError: it is neither.
    """
    if limit is None:
        return 1.0
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise ConfigurationError(
            f"{name}={limit!r}: expected a number of batches (int) or a fraction (float)"
        )
    if isinstance(limit, int) and limit >= 0:
        return limit
    if isinstance(limit, float) and 0.0 <= limit <= 1.0:
        return limit
    if isinstance(limit, float) and limit > 1.0 and limit.is_integer():
        return int(limit)
    raise ConfigurationError(
        f"{name}={limit!r}: expected a number of batches of at least 0 (int), or a fraction from "
        "0.0 to 1.0 (float)"
    )


def check_interval(given: Any) -> Limit | timedelta:
    """Return after what validation comes: batches, a fraction of them, or a time.

    Args:
        given: a number as `check_limit` takes it, a timedelta, "DD:HH:MM:SS" or a dict of
            timedelta's arguments.

    Raises:
        ConfigurationError: it is none of these, or no time at all.
    """
    if isinstance(given, (str, timedelta, Mapping)):
        time = seconds(given, "val_check_interval") or 0.0
        if time > 0:
            return timedelta(seconds=time)
        raise ConfigurationError(f"val_check_interval={given!r}: expected a time above 0")
    interval = check_limit("val_check_interval", given)
    if interval == 0:
        raise ConfigurationError(
            "val_check_interval=0: expected at least one batch (int) or a fraction above 0"
        )
    return interval


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least {least}")


def check_fast_dev_run(value: bool | int) -> int:
    """Return the number of batches of a quick run; 0: none."""
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"fast_dev_run={value!r}: expected True, False, or a number of batches"
        )
    return int(value)


def check_divergence(value: bool | int) -> int:
    """Return after how many steps ranks are compared; 0: never."""
    if value is True:
        return DEFAULT_INTERVAL
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"detect_divergence={value!r}: expected True, False, or a number of steps"
        )
    return int(value)


def check_accumulation(value: int | Mapping[int, int]) -> dict[int, int]:
    """Return the number of batches in an optimizer step, by first epoch."""
    schedule = {0: value} if isinstance(value, int) else dict(value)
    for first, count in schedule.items():
        check_whole("accumulate_grad_batches (an epoch)", first, 0)
        check_whole("accumulate_grad_batches", count, 1)
    schedule.setdefault(0, 1)
    return schedule


def root_folder(given: str | Path | None) -> paths.Location:
    """Return the folder for logs and checkpoints; by default the current one."""
    if given is not None:
        return paths.parse_user_path(given)
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigurationError(
            f"default_root_dir=None means the current folder, which is gone ({error}): change to "
            "one that is there, or pass default_root_dir"
        ) from error


def check_deterministic(value: bool | str) -> bool | str:
    """Return a bool or "warn"; refuse anything else."""
    if value not in (True, False, "warn"):
        raise ConfigurationError(f"deterministic={value!r}: expected True, False or 'warn'")
    return value


def set_determinism(
    accelerator: Accelerator, *, deterministic: bool | str, benchmark: bool
) -> Callable[[], None]:
    """Set torch's modes and the accelerator's; return what restores them."""
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
