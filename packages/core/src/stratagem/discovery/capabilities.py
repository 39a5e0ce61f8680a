"""What a strategy can do, as data: resolve, the front ends and the docs read it, never a class."""

from __future__ import annotations

from dataclasses import dataclass

START_METHODS = {"popen": "script", "script": "script", "spawn": "spawn", "fork": "fork"}
"""What `start_method` may be, and the launcher that each stands for."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a strategy takes and which parts of a training step it does itself.

    A strategy's spec carries one, and its class holds the same object, so that a strategy selected
    by name and one passed as an instance are judged alike. It lives in the light zone because
    resolving reads it before anything that needs torch is imported.
    """

    accelerators: tuple[str, ...] | None = None
    """Names of the accelerators that it runs on; None: any."""
    precisions: tuple[str, ...] | None = None
    """Names of the precisions that it takes; None: any."""
    engine_precisions: tuple[str, ...] = ()
    """Names of those that its engine implements itself, so that no other component is looked for
    (`stratagem.precision.EnginePrecision` takes its place)."""
    launchers: tuple[str, ...] | None = ("in_process",)
    """Launchers that it can be started by, the default first. None: any that calls a function on
    each rank, also one that somebody else provides; by default the script is run again for each."""
    one_process: bool = True
    """One process drives all devices (single device, XLA SPMD); False: one process a device."""
    many_devices: bool = False
    """It can use more than one device."""
    multi_node: bool = False
    """It can span several nodes."""
    manual_backward: bool = True
    """User code may call `backward` itself (Lite, manual optimization)."""
    backward_in_forward: bool = True
    """User code may call `backward` within the forward of what the strategy wraps, as a Module with
    manual optimization does in `training_step`."""
    owns_clipping: bool = False
    """The engine clips gradients itself, by a value given at `prepare`."""
    rebinds_optimizers: bool = True
    """`Lite.setup(model, optimizer)` works with an optimizer made before sharding."""
    sharded_state: bool = False
    """Model and optimizer state are spread over ranks: a load leaves a `LazyTensor` for what was
    saved in shards, of which each rank reads its part."""
    replicated: bool = True
    """Parameters that are not sharded tensors (DTensor) are the same on all ranks after each step;
    False: ranks hold different ones (stages of a pipeline, replicas between two averages), so that
    `Trainer(detect_divergence=...)` is refused."""
    checkpoint_io: str = "single_file"
    """The checkpoint format that it takes where none is asked for."""
    uneven_evaluation: bool = True
    """Ranks may run different numbers of evaluation batches (no collective in an eval forward)."""
