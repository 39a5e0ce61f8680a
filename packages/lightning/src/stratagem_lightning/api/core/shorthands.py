"""What Lightning's arguments mean here: `gpus`, `tpu_cores`, and half precision on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.discovery import get_registry
from stratagem.errors import ConfigurationError
from stratagem.launch import RunRequest, rank_zero_warn
from stratagem.plan import resolve


def expand_shorthands(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a front end's arguments, with accelerator and devices for a shorthand.

    Raises:
        ConfigurationError: both spellings were used, or a number of devices that does not exist.

    Example:
        >>> expand_shorthands({"gpus": 2, "precision": 16})
        {'precision': 16, 'accelerator': 'gpu', 'devices': 2}
    """
    expanded = dict(options)
    if expanded.get("devices", 1) in (0, "0", []):
        raise ConfigurationError(
            f"devices={expanded['devices']!r}: expected a number of devices, their indices, or "
            "'auto'"
        )
    if expanded.get("devices") in (-1, "-1") and _accelerator_of(expanded) == "cpu":
        raise ConfigurationError(
            f"devices={expanded['devices']!r} means all devices, and a CPU has no number of them: "
            "expected the number of processes"
        )
    for shorthand, name in (("gpus", "gpu"), ("tpu_cores", "tpu")):
        value = expanded.pop(shorthand, None)
        if value == 0 and shorthand == "gpus" and expanded.get("accelerator") in ("auto", None):
            expanded["accelerator"] = "cpu"
        if not value:
            continue
        accelerator, devices = expanded.get("accelerator", "auto"), expanded.get("devices", "auto")
        if accelerator not in ("auto", name, None) or devices not in ("auto", None):
            raise ConfigurationError(
                f"{shorthand}={value!r} is short for accelerator={name!r} and devices={value!r}; "
                f"received accelerator={accelerator!r} and devices={devices!r} as well: give one "
                "or the other"
            )
        expanded |= {"accelerator": name, "devices": value}
    return expanded


def replace_half_on_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a front end's arguments with bfloat16 for mixed float16, if a CPU trains.

    Lightning does the same, with a warning.

    Example:
        >>> replace_half_on_cpu({"accelerator": "cpu", "precision": "bf16-mixed"})["precision"]
        'bf16-mixed'
    """
    if options.get("precision") not in (16, "16", "16-mixed"):
        return dict(options)
    if _accelerator_of(options) != "cpu":
        return dict(options)
    rank_zero_warn(
        f"precision={options['precision']!r} is for GPUs: this run uses a CPU, and trains with "
        "precision='bf16-mixed' instead"
    )
    return {**options, "precision": "bf16-mixed"}


def _accelerator_of(options: Mapping[str, Any]) -> str:
    """Return the name of the accelerator; "" if the front end will refuse the arguments."""
    chosen = {name: options[name] for name in ("accelerator", "devices") if name in options}
    try:
        return resolve(RunRequest(**chosen), get_registry()).accelerator.name
    except ConfigurationError:
        return ""
