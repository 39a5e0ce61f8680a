"""What a strategy can do, as data: resolve, the front ends and the docs read it, never a class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, final

from stratagem.errors import PluginError

START_METHODS = {"popen": "script", "script": "script", "spawn": "spawn", "fork": "fork"}
"""What `start_method` may be, and the launcher that each stands for."""


@final
@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a strategy takes and which parts of a training step it does itself.

    A strategy's spec carries one, and its class holds the same object, so that a strategy selected
    by name and one passed as an instance are judged alike. It lives in the light zone because
    resolving reads it before anything that needs torch is imported. The defaults are those of one
    process on one device.

    Attributes:
        accelerators: names of the accelerators that it runs on; None: any.
        precisions: names of the precisions that it takes; None: any.
        engine_precisions: names of those that its engine implements itself, so that no other
            component is looked for (`stratagem.precision.EnginePrecision` takes its place).
        launchers: names of the launchers that it can be started by, the default first; None: any
            that calls a function on each rank, also a third party's, and "script" by default.
        one_process: one process drives all devices (single device, XLA SPMD); False: one process
            a device.
        many_devices: it can use more than one device.
        multi_node: it can span several nodes.
        manual_backward: user code may call `backward` itself (Lite, manual optimization); False: it
            is refused there.
        backward_in_forward: user code may call `backward` within the forward of what the strategy
            wraps, as a Module with manual optimization does in `training_step`.
        engine_clips: the engine clips gradients itself, by `Strategy.components.step.clip`; the
            user's own calls of `Lite.clip_gradients` are refused.
        engine_steps: the engine runs backward and the optimizer's step itself, and clears gradients
            only in its step: a Module's own `backward` and `optimizer_zero_grad`, and optimizers
            that compute the loss again within a step, are refused. What its
            `PreparedModel.gradient_clearer` returns raises ConfigurationError between the two.
        gradient_clipping: gradients can be clipped before a step; False:
            `Trainer(gradient_clip_val=...)` is refused.
        accepts_existing_optimizers: `Lite.setup(model, optimizer)` works with an optimizer made
            before sharding.
        sharded_state: model and optimizer state are spread over ranks: a load leaves a `LazyTensor`
            for what was saved in shards, of which each rank reads its part.
        parameters: how ranks compare in the parameters that are not sharded tensors (DTensor).
            "same": equal on all ranks after each step. "drift": each rank has a replica, and they
            differ between two averages (local SGD, gossip). "divided": each rank has other
            parameters (stages of a pipeline). `Trainer(detect_divergence=...)` needs "same".
        checkpoint_io: the checkpoint format that it takes where none is asked for.
        allows_uneven_eval: ranks may run different numbers of evaluation batches (no collective in
            a forward without gradients).
        compiles: what `compile=...` may take: "model" (the forward of a model and its parts),
            "step" (a whole step as one graph).

    Raises:
        PluginError: a field is of another type, such as a string in the place of a tuple of names.

    Example:
        >>> from stratagem.strategies import Capabilities
        >>> Capabilities.parallel(parameters="drift").one_process
        False
    """

    accelerators: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    engine_precisions: tuple[str, ...] = ()
    launchers: tuple[str, ...] | None = ("in_process",)
    one_process: bool = True
    many_devices: bool = False
    multi_node: bool = False
    manual_backward: bool = True
    backward_in_forward: bool = True
    engine_clips: bool = False
    engine_steps: bool = False
    gradient_clipping: bool = True
    accepts_existing_optimizers: bool = True
    sharded_state: bool = False
    parameters: Literal["same", "drift", "divided"] = "same"
    checkpoint_io: str = "single_file"
    allows_uneven_eval: bool = True
    compiles: tuple[str, ...] = ("model",)

    def __post_init__(self) -> None:
        """Refuse what would be misread: `("spawn")` is no tuple, and each letter a name."""
        check_fields(self, "Capabilities")

    @classmethod
    def parallel(cls, **fields: Any) -> Capabilities:
        """Return the capabilities of a process for each device, on one node or several.

        It sets `one_process=False`, `many_devices=True`, `multi_node=True` and `launchers=None`.

        Args:
            **fields: further fields, or other values of these four.
        """
        common = {"one_process": False, "many_devices": True, "multi_node": True}
        return cls(**{"launchers": None, **common, **fields})


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tuple[str, ...]": (_are_names, "a tuple of names; of one it is ('name',)"),
    "tuple[str, ...] | None": (
        lambda value: value is None or _are_names(value),
        "a tuple of names or None; of one it is ('name',)",
    ),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "Literal['same', 'drift', 'divided']": (
        lambda value: value in ("same", "drift", "divided"),
        "'same', 'drift' or 'divided'",
    ),
    "int": (lambda value: isinstance(value, int), "a number"),
    "str": (lambda value: isinstance(value, str), "a string"),
}
"""What a field's annotation demands, and how that is said."""


def check_fields(described: Any, what: str) -> None:
    """Refuse a description with a field of another type than its annotation says.

    Args:
        described: a dataclass instance, whose annotations are strings.
        what: how the error names it.

    Raises:
        PluginError: names the field, what it has and what was expected.
    """
    for field in fields(described):
        holds, expected = _KINDS.get(str(field.type), (None, ""))
        value = getattr(described, field.name)
        if holds is not None and not holds(value):
            raise PluginError(f"{what} has {field.name}={value!r}; expected {expected}")


OWN_CLIPPING = ("train_step", "finish_step", "optimizer_step", "clip_gradients")
"""The methods of which an engine that clips overrides one."""
OWN_STEP = ("train_step", "finish_step", "optimizer_step")
"""The methods of which an engine that steps overrides one."""
OWN_BACKWARD = ("train_step", "accumulate_all", "accumulate", "backward")
"""The methods of which an engine that runs backward overrides one."""


def contradictions(
    name: str, can: Capabilities, *, clips: bool, steps: bool, runs_backward: bool
) -> Iterator[str]:
    """Yield what a class says of itself that it leaves to a base class which does not do it.

    Args:
        name: of the class.
        can: its capabilities.
        clips: whether it overrides one of OWN_CLIPPING.
        steps: whether it overrides one of OWN_STEP.
        runs_backward: whether it overrides one of OWN_BACKWARD.
    """
    problems: list[tuple[str, tuple[str, ...], str, str]] = []
    if can.engine_clips and not clips:
        problems.append(("engine_clips", OWN_CLIPPING, "nothing of its own clips", "clip in"))
    if can.engine_steps and not steps:
        problems.append(("engine_steps", OWN_STEP, "nothing of its own steps", "step in"))
    if not can.manual_backward and not runs_backward:
        follows = "it runs backward as user code does"
        problems.append(("manual_backward", OWN_BACKWARD, follows, "override"))
    for field, methods, follows, remedy in problems:
        yield (
            f"{name}.capabilities has {field}={getattr(can, field)}, but the class overrides none "
            f"of {', '.join(methods)}, so that {follows}: leave {field} out, or {remedy} one of "
            "them"
        )


def one_process_of(name: str) -> str:
    """Return what is said of a ParallelStrategy whose one process is to drive many devices."""
    return (
        f"{name}.capabilities has one_process=True and many_devices=True, but a ParallelStrategy "
        "has a process for each device: set one_process=False"
    )


def difference(name: str, of_spec: Capabilities, of_class: Capabilities | None) -> str:
    """Return how the capabilities of a strategy's spec and of its class differ; "": they do not.

    Args:
        name: of the class.
        of_spec: those of the spec.
        of_class: those of the class; None: it has none.

    Example:
        >>> from stratagem.discovery import difference
        >>> difference("Mine", Capabilities(), Capabilities(multi_node=True))[:58]
        "the spec's capabilities and those of Mine differ (multi_no"
    """
    if of_class is None:
        return f"{name} has no capabilities: set them in the class, to the object that its spec has"
    if of_class == of_spec:
        return ""
    theirs = asdict(of_class)
    differing = [
        f"{field}={value!r} and {theirs[field]!r}"
        for field, value in asdict(of_spec).items()
        if value != theirs[field]
    ]
    return (
        f"the spec's capabilities and those of {name} differ ({'; '.join(differing)}): let both "
        "hold one object"
    )
