"""The floating-point operations of a step, and the peak of a device."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stratagem_extras.planner.devices import DEVICES

_OURS = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "symm_mem"}
_HEAVY = re.compile(r"_mm|attention|lstm|gru|rnn_layer|cudnn_rnn|linear_cross_entropy")
"""Names of operations that compute products. torch counts most of them."""
_ATEN = torch.ops.aten
_COUNTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # torch does not list attention's kernels for CPUs, which take the same arguments.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}
_WITH_FLOAT8 = {"L4", "L40S", "RTX4090", "H100", "H200", "B200", "MI300X"}
_WITH_TF32 = {*_WITH_FLOAT8, "A10", "A100-40GB", "A100-80GB", "RTX3090"} - {"MI300X"}


class StepFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of this rank in a context.

    Products of matrices, convolutions and attention count. Operations that activation
    checkpointing runs again do not count as the model's.

    Attributes:
        model: the operations of the model.
        recomputed: the operations that were run again in a backward pass.
        missed: the names of operations without a formula.

    Example:
        >>> import torch
        >>> from stratagem_extras.callbacks.step_flops import StepFlops
        >>> with StepFlops() as flops:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> flops.model
        48
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = self.recomputed = 0
        self.missed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it; of sharded tensors, count the local operations."""
        if any(hasattr(one, "full_tensor") for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        count = _COUNTS.get(getattr(func, "overloadpacket", func))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, FakeTensor):
            return result  # DTensor derives a shape
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=result)
            # A backward pass runs without gradients, but checkpointing recomputes with gradients.
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward and torch.is_grad_enabled():
                self.recomputed += flops
            else:
                self.model += flops
        elif _may_compute(func):
            self.missed.add(str(func).removesuffix(".default"))
        return result


def _may_compute(func: Any) -> bool:
    """Return whether an operation that has no count may take much time."""
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace not in _OURS or bool(_HEAVY.search(func._schema.name))
    return True


@contextmanager
def counting() -> Iterator[StepFlops]:
    """Count in a context, in which compiled functions run as they were written."""
    # A compiled graph calls kernels that no mode sees.
    is_loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()
    with eager, StepFlops() as flops:
        yield flops


def peak_of(device: torch.device, precision: str) -> float | None:
    """Return the peak of a device in a precision, in operations per second; None if unknown."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device), precision)


def peak_by_name(device: str, precision: str) -> float | None:
    """Return the peak of a GPU by its name; None if the table lacks it.

    Args:
        device: the name that the driver reports.
        precision: the name of the precision, such as "bf16-mixed".

    Example:
        >>> peak_by_name("NVIDIA H100 80GB HBM3", "bf16-mixed")
        989000000000000.0
    """
    name = next((name for name in DEVICES if re.search(_pattern(name), device)), None)
    if name is None:
        return None
    flops = DEVICES[name].flops
    if "float8" in precision or "fp8" in precision:
        return 2 * flops if name in _WITH_FLOAT8 else None
    if precision.startswith(("bf16", "16")):
        return flops or None
    is_tf32 = torch.get_float32_matmul_precision() != "highest" and name in _WITH_TF32
    return flops / 2 if precision.startswith("32") and is_tf32 else None


def _pattern(name: str) -> str:
    # Sizes of memory have the same peak.
    letters, number = re.findall(r"^([A-Z]+)(\w+)", name.partition("-")[0])[0]
    return rf"\b{letters} ?{number}(?![0-9A-Z])"
