"""What this distribution offers for Graphcore: specs only, no torch and no SDK."""

from __future__ import annotations

from stratagem.discovery import (
    AcceleratorSpec,
    Capabilities,
    ComponentSpec,
    StrategySpec,
    hookimpl,
)

IPU = Capabilities(
    accelerators=("ipu",),
    precisions=("32-true",),
    many_devices=True,
    manual_backward=False,
    backward_in_forward=False,
    gradient_clipping=False,
    compiles=(),
)
"""What poptorch can do: a step is one call of a compiled program, which nobody can look into."""


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this backend provides for Graphcore."""
    return (
        AcceleratorSpec(
            name="ipu",
            target="stratagem_hpu_ipu.ipu_accelerator:IPUAccelerator",
            api_version=2,
            summary="Graphcore IPUs, by poptorch. Never run on hardware",
            probe="stratagem_hpu_ipu.ipu_probe:ipu_availability",
            priority=80,
            requires_dedicated_strategies=True,
        ),
        StrategySpec(
            name="ipu_strategy",
            target="stratagem_hpu_ipu.ipu_strategy:IPUStrategy",
            api_version=2,
            summary="The whole step compiled by poptorch, replicated over IPUs",
            capabilities=IPU,
        ),
    )


@hookimpl
def stratagem_choose_strategy(candidates: tuple[str, ...]) -> str | None:
    """Choose ours where it fits, which is on IPUs only; else leave the choice to others."""
    return "ipu_strategy" if "ipu_strategy" in candidates else None
