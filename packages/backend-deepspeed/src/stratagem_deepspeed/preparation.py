"""What precedes an engine: facts and checks of the run and the model, ops, rank 0's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.precision import EnginePrecision, Precision
from stratagem.strategies import StepOptions
from stratagem_deepspeed import op_builds, ops
from stratagem_deepspeed.config import offload_device
from stratagem_deepspeed.optimizers import wants_cpu_adam, wants_fused_adam


def facts_of_steps(step: StepOptions | None) -> dict[str, Any]:
    """Return the facts of the Trainer's steps for the engine's config; {} under Lite."""
    if step is None:
        return {}
    clip = step.clip
    if clip is not None and (clip.algorithm != "norm" or clip.norm_type != 2.0):
        raise ConfigurationError(
            f"gradient_clip_algorithm={clip.algorithm!r}: DeepSpeed's engine clips by the "
            "Euclidean norm only: pass gradient_clip_algorithm='norm', or strategy='fsdp'"
        )
    return {
        "loop": "Trainer",
        "clip": None if clip is None else clip.value,
        "accumulation": step.most_micro_batches,
    }


def check_float16(config: Mapping[str, Any], device_type: str, precision: str) -> None:
    """Raise for float16 on a processor without float16, where DeepSpeed would fail in the ranks.

    Raises:
        ConfigurationError: names the precision.
    """
    if config.get("fp16", {}).get("enabled") and device_type == "cpu" and not _cpu_has_float16():
        raise ConfigurationError(
            f"precision={precision!r}: this processor has no float16 arithmetic, and DeepSpeed "
            "refuses to emulate it: pass precision='bf16-mixed'"
        )


def build_ops(config: Mapping[str, Any], device_type: str) -> None:
    """Build the ops that a config needs, in the process that the user started.

    Raises:
        ConfigurationError: one cannot be built here, or NVMe's folder cannot be written.
    """
    for what in ("offload_optimizer", "offload_param"):
        if offload_device(config, what) == "nvme":
            op_builds.check_nvme_path(config["zero_optimization"][what]["nvme_path"])
            op_builds.build("async_io", device_type)
    if wants_cpu_adam(config):
        op_builds.build("cpu_adam", device_type)
    if wants_fused_adam(config) and can_fuse_adam(device_type):
        op_builds.build("fused_adam", device_type)


def can_fuse_adam(device_type: str) -> bool:
    """Whether DeepSpeed has kernels for Adam on a device, which are or can be built here."""
    return device_type == "cuda" and not ops.what_is_missing("fused_adam")


def share_start(model: nn.Module, precision: Precision) -> None:
    """Give every rank rank 0's buffers, and its parameters that were not built in shards.

    The engine does the latter only to models none of whose parameters were built in shards. It
    sends parameters as they lie in memory, so that they become contiguous.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    tensors = [buffer.detach() for buffer in model.buffers()]
    if is_sharded(model):
        for parameter in model.parameters():
            if not hasattr(parameter, "ds_id"):
                if isinstance(precision, EnginePrecision) and parameter.is_floating_point():
                    parameter.data = parameter.data.to(precision.dtype)
                tensors.append(parameter.detach())
    for tensor in tensors:
        dist.broadcast(tensor, 0)


def check_parameters(model: nn.Module, precision: Precision) -> None:
    """Raise for parameters that an engine cannot train: complex, float64, and without a dimension.

    Args:
        model: the user's.
        precision: the engine's own ones convert float64.

    Raises:
        ConfigurationError: names a parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigurationError(
                f"the parameter {name!r} is complex ({parameter.dtype}), and DeepSpeed expects real"
                " numbers: pass strategy='ddp' or 'fsdp', or make a real parameter with a last "
                "dimension of 2 and call torch.view_as_complex in forward"
            )
        is_double = parameter.requires_grad and parameter.dtype == torch.float64
        if is_double and not isinstance(precision, EnginePrecision):
            raise ConfigurationError(
                f"the parameter {name!r} is of torch.float64, and DeepSpeed rounds gradients to "
                "float32: expected torch.float32 or a lower precision; call model.float(), or pass "
                "strategy='ddp'"
            )
        if not getattr(parameter, "ds_shape", parameter.shape):
            raise ConfigurationError(
                f"the parameter {name!r} has no dimension, which DeepSpeed cannot handle: expected "
                "shape (1,) or larger: nn.Parameter(torch.tensor([1.0])) in the place of "
                "nn.Parameter(torch.tensor(1.0))"
            )


def check_elements(model: nn.Module) -> None:
    """Raise for parameters without elements, which stage 3 cannot divide, trained or frozen.

    Raises:
        ConfigurationError: names a parameter.
    """
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "ds_numel", parameter.numel()):
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            raise ConfigurationError(
                f"the parameter {name!r} has no elements (shape {shape}), which stage 3 of "
                "DeepSpeed cannot divide: leave the parameter out, or pass strategy='fsdp' or "
                "'deepspeed_stage_2'"
            )


def checkpointing_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section as arguments of `deepspeed.checkpointing.configure`."""
    renamed = {
        "partition_activations": "partition_activations",
        "contiguous_memory_optimization": "contiguous_checkpointing",
        "number_checkpoints": "num_checkpoints",
        "cpu_checkpointing": "checkpoint_in_cpu",
        "synchronize_checkpoint_boundary": "synchronize",
        "profile": "profile",
    }
    return {renamed[key]: value for key, value in section.items()}


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters were sharded when they were built, by `deepspeed.zero.Init`."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _cpu_has_float16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False
