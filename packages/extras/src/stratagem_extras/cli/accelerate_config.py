"""A config file of Accelerate's, as options of `stratagem run` and arguments of Lite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stratagem.errors import ConfigurationError

_PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_TYPES: dict[str, str | None] = {"NO": None, "MULTI_CPU": "cpu", "MULTI_GPU": "cuda"}
_ANY = object()
_HONOURED = {
    "distributed_type": _ANY,
    "gpu_ids": _ANY,
    "gradient_accumulation_steps": _ANY,
    "machine_rank": _ANY,
    "main_process_ip": _ANY,
    "main_process_port": _ANY,
    "main_training_function": _ANY,  # notebooks and TPUs alone use it
    "mixed_precision": _ANY,
    "num_machines": _ANY,
    "num_processes": _ANY,
    "same_network": _ANY,  # chooses between stores of a rendezvous that is not used here
    "use_cpu": _ANY,
    "compute_environment": "LOCAL_MACHINE",
    "rdzv_backend": "static",
}
"""Keys by the one value that changes nothing here, if only that one can be honoured."""
_OFF: tuple[Any, ...] = (None, False, "no", "NO", {}, [], "")
"""Values by which any key says that it is not used."""
_REMEDIES = {
    "deepspeed_config": "pass strategy=DeepSpeedStrategy(...) to Lite",
    "dynamo_config": "pass compile=True to lite.setup",
    "fsdp_config": "pass strategy=FSDPStrategy(...) to Lite",
    "mpirun_config": "start the script with mpirun",
    "parallelism_config": "pass strategy=ModelParallelStrategy(...) to Lite",
}


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options of `stratagem run`, and environment variables of its ranks.

    Args:
        path: of a YAML or JSON file, as `accelerate config` writes it.

    Raises:
        ConfigurationError: the file cannot be read, or it asks for something that Stratagem cannot
            honour; names the key.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "config.yaml"
        >>> _ = path.write_text("{distributed_type: MULTI_CPU, num_processes: 2}")
        >>> read_config(path)
        ({'devices': 2}, {'STRATAGEM_LITE': '{"accelerator": "cpu"}'})
    """
    config = _parsed(path)
    for key, value in config.items():
        honoured = _HONOURED.get(key)
        if value in _OFF or honoured is _ANY or value == honoured:
            continue
        remedy = f": {_REMEDIES[key]}, and remove the key" if key in _REMEDIES else ""
        raise ConfigurationError(f"{path}: {key}: {value!r} cannot be honoured{remedy}")

    def choice(key: str, known: dict[str, Any]) -> Any:
        value = config.get(key)
        value = "no" if value in (None, False) else str(value)
        found = {name.casefold(): one for name, one in known.items()}
        if value.casefold() not in found:
            raise ConfigurationError(
                f"{path}: {key}: {value} cannot be honoured; expected one of {', '.join(known)}. "
                "A strategy or precision of your own choice is an argument of Lite: leave the key "
                "out"
            )
        return found[value.casefold()]

    def number(key: str, default: int, fewest: int) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < fewest:
            raise ConfigurationError(
                f"{path}: {key}: {value!r}; expected a whole number of at least {fewest}"
            )
        return value

    accelerator, precision = (
        choice("distributed_type", _TYPES),
        choice("mixed_precision", _PRECISIONS),
    )
    nodes, ranks = number("num_machines", 1, 1), number("num_processes", 1, 1)
    if ranks % nodes:
        raise ConfigurationError(
            f"{path}: num_processes: {ranks}; expected a multiple of num_machines: {nodes}, since "
            "every machine has as many ranks"
        )
    if ranks > 1 and str(config.get("distributed_type")).upper() == "NO":
        raise ConfigurationError(
            f"{path}: num_processes: {ranks} with distributed_type: NO, which starts one; expected "
            "MULTI_CPU or MULTI_GPU"
        )
    options: dict[str, Any] = {"devices": ranks // nodes}
    if config.get("main_process_port"):
        options["main_port"] = number("main_process_port", 0, 1)
    if nodes > 1:
        options["num_nodes"] = nodes
        options["node_rank"] = number("machine_rank", 0, 0)
        options["main_address"] = config.get("main_process_ip")
    lite: dict[str, Any] = {}
    if config.get("use_cpu"):
        accelerator = "cpu"
    if accelerator is not None:
        lite["accelerator"] = accelerator
    if config.get("mixed_precision") is not None:
        lite["precision"] = precision
    if config.get("gradient_accumulation_steps") is not None:
        lite["accumulate_grad_batches"] = number("gradient_accumulation_steps", 1, 1)
    variables = {"STRATAGEM_LITE": json.dumps(lite)}
    if config.get("gpu_ids") not in (None, "all"):
        variables["CUDA_VISIBLE_DEVICES"] = str(config["gpu_ids"])
    return options, variables


def _parsed(path: Path) -> dict[str, Any]:
    load: Callable[[str], Any] = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        config = load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: expected keys and values, received {config!r:.80}")
    return config
