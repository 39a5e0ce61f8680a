"""What this distribution offers for PyTorch/XLA: specs only, no torch and no SDK."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from stratagem.discovery import (
    AcceleratorSpec,
    Capabilities,
    Check,
    ComponentSpec,
    StrategySpec,
    hookimpl,
)

if TYPE_CHECKING:
    from stratagem.launch import RunPlan, RunRequest

TPU = "tpu"
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")

SINGLE = Capabilities(accelerators=(TPU,), precisions=_PRECISIONS, compiles=())
"""One device of one process."""

SPMD = Capabilities(accelerators=(TPU,), precisions=_PRECISIONS, many_devices=True, compiles=())
"""All devices of one process, which the compiler divides one program over."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return the accelerator and the strategies."""
    return (
        AcceleratorSpec(
            name=TPU,
            target="stratagem_xla.accelerator:XLAAccelerator",
            api_version=2,
            summary="TPUs, or PJRT's CPU client, through PyTorch/XLA",
            aliases=("xla",),
            probe="stratagem_xla.installation:availability",
            priority=100,
            requires_dedicated_strategies=True,
        ),
        _strategy("xla", "XLAStrategy", "Batches divided over all XLA devices (SPMD)", "tpu_spawn"),
        _strategy("xla_debug", "XLAStrategy", "xla, with PyTorch/XLA's reports of compilations"),
        _strategy("xla_fsdp", "XLAFSDPStrategy", "xla, with parameters and optimizer sharded"),
        _strategy("single_xla", "SingleXLAStrategy", "One process, one XLA device"),
    )


def _strategy(name: str, kind: str, summary: str, *aliases: str) -> StrategySpec:
    return StrategySpec(
        name=name,
        target=f"stratagem_xla.strategy:{kind}",
        api_version=2,
        summary=summary,
        capabilities=SINGLE if name == "single_xla" else SPMD,
        shards=("parameters", "optimizer") if name == "xla_fsdp" else (),
        init_args={"debug": True} if name == "xla_debug" else {},
        aliases=aliases,
    )


@hookimpl
def stratagem_choose_strategy(request: RunRequest, candidates: tuple[str, ...]) -> str | None:
    """Choose for XLA devices, which no strategy of core drives; nothing elsewhere."""
    if "xla" not in candidates:
        return None
    # With one device the strategies for several are candidates as well.
    return "single_xla" if "single_xla" in candidates else "xla"


@hookimpl
def stratagem_run_planned(plan: RunPlan) -> None:
    """Refuse numbers of devices that cannot be given."""
    if plan.accelerator.name != TPU:
        return
    import_module("stratagem_xla.installation").check_devices(
        plan.strategy.name, len(plan.devices), all_of_them=plan.capabilities.many_devices
    )


@hookimpl
def stratagem_doctor() -> Iterable[Check]:
    """Examine the versions and the devices; imports neither torch nor torch_xla."""
    found: Iterable[Check] = import_module("stratagem_xla.installation").checks()
    return found
