"""RunRequest and RunPlan: what the user typed, and what will run, with a reason for each choice."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from stratagem.discovery.capabilities import Capabilities
from stratagem.plan.selection import Selection
from stratagem.plan.step_options import StepOptions


def is_interactive() -> bool:
    """Whether this process is a notebook kernel or an interactive interpreter."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


@final
@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the user typed. Each component is a discovered name or an object.

    Attributes:
        accelerator: a name, an Accelerator, or "auto".
        devices: how many (an int), which ("1, 4" or [1, 4]), all (-1), or "auto". None and 0 mean
            the CPU, as in the documents.
        num_nodes: machines taking part; 1 also means "as the cluster says".
        strategy: a name, a Strategy, or "auto".
        precision: a name, a Precision, or one of 64, 32, 16, "bf16".
        checkpoint_io: a name, a CheckpointIO, or None for the default.
        async_save: whether it shall write while training goes on.
        cluster_environment: a name, a ClusterEnvironment, or None to detect it.
        launcher: a name, a Launcher, or None for the strategy's own.
        environ: environment variables at the time of the request.
        step_options: how the Trainer takes its steps; None under Lite.
        ordinal: how many requests this process made before: a rank that runs the script again
            knows by it which of them came before the launch.
        interactive: whether this is a notebook or an interactive interpreter.
    """

    accelerator: Any = "auto"
    devices: int | str | list[int] | tuple[int, ...] | None = "auto"
    num_nodes: int = 1
    strategy: Any = "auto"
    precision: Any = "32-true"
    checkpoint_io: Any = None
    async_save: bool = False
    step_options: StepOptions | None = None
    cluster_environment: Any = None
    launcher: Any = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    ordinal: int = 0
    interactive: bool = field(default_factory=is_interactive)


@final
@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What will run, and why. Made by `resolve`; nothing changes it."""

    request: RunRequest
    accelerator: Selection
    devices: tuple[int, ...]
    """Device indices on this node, one for each local process or virtual device."""
    devices_why: str
    strategy: Selection
    capabilities: Capabilities
    precision: Selection
    cluster_environment: Selection
    launcher: Selection
    checkpoint_io: Selection
    num_nodes: int
    rejected_environments: tuple[Selection, ...] = ()
    """The cluster environments that were looked for and not taken, with the reason of each."""

    @property
    def processes_per_node(self) -> int:
        """How many ranks run on each node."""
        return 1 if self.capabilities.one_process else len(self.devices)

    @property
    def world_size(self) -> int:
        """How many ranks run in all."""
        return self.processes_per_node * (1 if self.capabilities.one_process else self.num_nodes)

    @property
    def remote(self) -> bool:
        """Whether ranks are new processes and the one that launches them is none of them."""
        return bool(getattr(self.launcher.source, "new_processes", False))

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return (what, choice, provider, why) for each choice."""
        selected = [
            self.strategy,
            self.accelerator,
            self.precision,
            self.cluster_environment,
            self.launcher,
            self.checkpoint_io,
        ]
        rows = [(s.kind, s.name, s.provider, s.why) for s in selected]
        after = 1 + selected.index(self.cluster_environment)
        rows[after:after] = [
            ("  not taken", s.name, s.provider, s.why) for s in self.rejected_environments
        ]
        rows.insert(2, ("devices", _indices(self.devices), "", self.devices_why))
        world = f"{self.num_nodes} node(s) of {self.processes_per_node} process(es)"
        rows.insert(3, ("world_size", str(self.world_size), "", world))
        return rows

    def explain(self) -> str:
        """Return the plan as text, a line for each choice and its reason."""
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True))
            for row in rows
        )


def _indices(devices: tuple[int, ...]) -> str:
    return ", ".join(str(index) for index in devices)
