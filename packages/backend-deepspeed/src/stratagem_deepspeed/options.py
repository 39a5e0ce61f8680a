"""The strategy's options, each with its place in DeepSpeed's config."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from stratagem.errors import ConfigurationError

ZERO = "zero_optimization"
_PARAM, _OPTIMIZER = (ZERO, "offload_param"), (ZERO, "offload_optimizer")
_CHECKPOINTING = "activation_checkpointing"


def _option(*path: str, size: bool = False, default: Any = None, doc: str = "") -> Any:
    """Describe an option.

    Args:
        *path: its place in the config; if empty, `config` places it depending on other options.
        size: whether the value is an integer of at least 1.
        default: the default value.
        doc: its documentation; empty: the previous option documents it.
    """
    return field(default=default, metadata={"path": path, "size": size, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The strategy's arguments that end up in the config.

    None: not given.

    The one list of them: tests compare the strategy's signature and its documentation with it.
    """

    stage: int | None = _option(
        *(ZERO, "stage"),
        doc="1 shards optimizer state, 2 (the default) gradients too, 3 parameters too; 0 nothing.",
    )
    offload_optimizer: bool = _option(
        default=False,
        doc="keep optimizer state in host memory, and step there; torch's Adam and AdamW become "
        "DeepSpeedCPUAdam, unless the config has zero_force_ds_cpu_optimizer=false.",
    )
    offload_parameters: bool = _option(
        default=False,
        doc="keep parameters in host memory too; only at stage 3, ignored below.",
    )
    offload_optimizer_device: str | None = _option(doc='"cpu" (the default) or "nvme".')
    offload_params_device: str | None = _option()
    nvme_path: str | None = _option(doc='a folder on the NVMe device; default "/local_nvme".')
    params_buffer_count: int | None = _option(
        *(*_PARAM, "buffer_count"),
        size=True,
        doc="buffers for parameters on NVMe, their elements, and elements of parameters that stay "
        "in host memory.",
    )
    params_buffer_size: int | None = _option(*_PARAM, "buffer_size", size=True)
    max_in_cpu: int | None = _option(*_PARAM, "max_in_cpu", size=True)
    optimizer_buffer_count: int | None = _option(
        *(*_OPTIMIZER, "buffer_count"), size=True, doc="buffers for optimizer state on NVMe."
    )
    pin_memory: bool | None = _option(
        doc="keep offloaded tensors in page-locked memory; default False."
    )
    block_size: int | None = _option(
        *("aio", "block_size"),
        size=True,
        doc="options of reads and writes on NVMe; see DeepSpeed's `aio`.",
    )
    queue_depth: int | None = _option("aio", "queue_depth", size=True)
    single_submit: bool | None = _option("aio", "single_submit")
    overlap_events: bool | None = _option("aio", "overlap_events")
    thread_count: int | None = _option("aio", "intra_op_parallelism", size=True)
    sub_group_size: int | None = _option(
        *(ZERO, "sub_group_size"),
        size=True,
        doc="elements that a step works on at a time; stage 3; default 1e9, and 1e7 on the CPU.",
    )
    allgather_bucket_size: int | None = _option(
        *(ZERO, "allgather_bucket_size"),
        size=True,
        doc="elements communicated at a time; default 2e8, and 1e7 on the CPU.",
    )
    reduce_bucket_size: int | None = _option(ZERO, "reduce_bucket_size", size=True)
    allgather_partitions: bool | None = _option(
        *(ZERO, "allgather_partitions"),
        doc="see DeepSpeed's `zero_optimization`; the last two are on by default.",
    )
    reduce_scatter: bool | None = _option(ZERO, "reduce_scatter")
    overlap_comm: bool | None = _option(ZERO, "overlap_comm")
    contiguous_gradients: bool | None = _option(ZERO, "contiguous_gradients")
    loss_scale: float | None = _option(
        "fp16", "loss_scale", doc="the loss scale of float16; 0: dynamic."
    )
    initial_scale_power: int | None = _option(
        "fp16", "initial_scale_power", doc="options of a dynamic loss scale."
    )
    loss_scale_window: int | None = _option("fp16", "loss_scale_window", size=True)
    hysteresis: int | None = _option("fp16", "hysteresis")
    min_loss_scale: float | None = _option("fp16", "min_loss_scale")
    partition_activations: bool | None = _option(
        *(_CHECKPOINTING, "partition_activations"),
        doc="options of `deepspeed.checkpointing.checkpoint`, which user code calls.",
    )
    cpu_checkpointing: bool | None = _option(_CHECKPOINTING, "cpu_checkpointing")
    contiguous_memory_optimization: bool | None = _option(
        _CHECKPOINTING, "contiguous_memory_optimization"
    )
    synchronize_checkpoint_boundary: bool | None = _option(
        _CHECKPOINTING, "synchronize_checkpoint_boundary"
    )

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options that are among the arguments of a call."""
        given = {option.name: arguments[option.name] for option in fields(cls)}
        if given["nvme_path"] is not None:
            given["nvme_path"] = os.fspath(given["nvme_path"])
        return cls(**given)

    def placed(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        """Yield (name, path, value) of the given options with a fixed place in the config.

        Raises:
            ConfigurationError: a size is not an integer of at least 1.
        """
        for option in fields(self):
            value, path = getattr(self, option.name), option.metadata["path"]
            if value is None or not path:
                continue
            if option.metadata["size"]:
                _check_size(option.name, value)
            yield option.name, path, value


def documentation() -> list[tuple[list[str], str]]:
    """Return the names and texts of the options, with names of the same text together."""
    entries: list[tuple[list[str], str]] = []
    for option in fields(Options):
        if option.metadata["doc"]:
            entries.append(([option.name], option.metadata["doc"]))
        else:
            entries[-1][0].append(option.name)
    return entries


def _check_size(name: str, value: Any) -> None:
    """Raise for a size that DeepSpeed would reject in the ranks.

    Raises:
        ConfigurationError: the value is not a positive integer.
    """
    # 2e8 is how DeepSpeed's own pages write 200 million.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value % 1:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least 1")
