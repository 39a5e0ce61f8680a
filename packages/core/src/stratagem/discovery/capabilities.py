"""What a strategy can do, as data: resolve, the front ends and the docs read it, never a class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, final

from stratagem.discovery.former import with_former_names
from stratagem.errors import PluginError

START_METHODS = {"popen": "script", "script": "script", "spawn": "spawn", "fork": "fork"}
"""The values of `start_method`, and the launcher that each selects."""


@final
@with_former_names
@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The features of a strategy: supported components, and the parts of a step that it implements.

    A strategy's spec and its class hold the same object. A strategy selected by name and a strategy
    passed as an instance are therefore checked in the same way. Resolving reads the capabilities
    before torch is imported. The defaults describe one process on one device.

    Attributes:
        accelerators: names of the supported accelerators; None: any.
        precisions: names of the supported precisions; None: any.
        engine_precisions: names of the precisions that its engine implements itself. They use
            `stratagem.precision.EnginePrecision`, and no precision component is looked up.
        launchers: names of the launchers that can start it, the default first; None: any launcher
            that calls a function on each rank, also a third party's, and "script" by default.
        one_process: one process drives all devices (single device, XLA SPMD); False: one process
            per device.
        many_devices: it can use more than one device.
        multi_node: it can span several nodes.
        manual_backward: user code may call `backward` itself (Lite, manual optimization); False:
            such a call raises an error.
        lite_step: with `manual_backward=False`, `Lite.step` trains all the same: the strategy runs
            backward of each micro-batch, as a pipeline does. False: no loop under Lite trains.
        backward_in_forward: user code may call `backward` within the forward of the wrapped model,
            as a Module with manual optimization does in `training_step`.
        engine_clips: the engine clips gradients itself, by `Strategy.components.step.clip`; the
            user's own calls of `Lite.clip_gradients` are refused.
        engine_steps: the engine runs backward and the optimizer's step itself, and clears gradients
            only in its step. A Module's own `backward` and `optimizer_zero_grad` are refused, and
            so are optimizers that compute the loss again within a step. The function that its
            `PreparedModel.gradient_clearer` returns raises ConfigurationError when called between
            backward and step.
        gradient_clipping: gradients can be clipped before a step; False:
            `Trainer(gradient_clip_val=...)` is refused.
        accepts_existing_optimizers: `Lite.setup(model, optimizer)` works with an optimizer made
            before sharding.
        sharded_state: model and optimizer state are sharded over ranks. A load returns a
            `LazyTensor` for each tensor saved in shards, and each rank reads its part.
        parameters: how ranks compare in the parameters that are not sharded tensors (DTensor).
            "same": equal on all ranks after each step. "drift": each rank has a replica, and
            replicas differ between two averages (local SGD, gossip). "divided": each rank has other
            parameters (stages of a pipeline). `Trainer(detect_divergence=...)` needs "same", or
            "divided" with axes that say which ranks hold the same (`Ranks.axes`).
        checkpoint_io: the default checkpoint format.
        allows_uneven_eval: ranks may run different numbers of evaluation batches (no collective in
            a forward without gradients).
        follows_evaluation: a rank without a batch follows the collectives of the other ranks'
            evaluation steps (`Strategy.follow_evaluation_step`). If this and `allows_uneven_eval`
            are False, ranks repeat samples to run the same number of evaluation batches.
        compiles: the parts that `compile=...` may compile: ("model",), the forward of a model and
            its parts; or (), no part.

    Raises:
        PluginError: a field has the wrong type, such as a string instead of a tuple of names.

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
    lite_step: bool = False
    backward_in_forward: bool = True
    engine_clips: bool = False
    engine_steps: bool = False
    gradient_clipping: bool = True
    accepts_existing_optimizers: bool = True
    sharded_state: bool = False
    parameters: Literal["same", "drift", "divided"] = "same"
    checkpoint_io: str = "single_file"
    allows_uneven_eval: bool = True
    follows_evaluation: bool = False
    compiles: tuple[str, ...] = ("model",)

    def __post_init__(self) -> None:
        """Refuse wrong types: `("spawn")` is a string, and each of its letters would be a name."""
        check_fields(self, "Capabilities")

    @classmethod
    def parallel(cls, **fields: Any) -> Capabilities:
        """Return the capabilities of a strategy with one process per device, on one or more nodes.

        It sets `one_process=False`, `many_devices=True`, `multi_node=True` and `launchers=None`.

        Args:
            **fields: further fields, or other values for these four.
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
"""For each annotation: a check of a field's value, and the description of a valid value."""


def check_fields(described: Any, what: str) -> None:
    """Raise an error if a field of a dataclass instance does not have its annotated type.

    Args:
        described: a dataclass instance with annotations as strings.
        what: the name of the object in the error.

    Raises:
        PluginError: names the field, its value and the expected type.
    """
    for field in fields(described):
        holds, expected = _KINDS.get(str(field.type), (None, ""))
        value = getattr(described, field.name)
        if holds is not None and not holds(value):
            raise PluginError(f"{what} has {field.name}={value!r}; expected {expected}")


OWN_CLIPPING = ("train_step", "finish_step", "optimizer_step", "clip_gradients")
"""An engine that clips overrides at least one of these methods."""
OWN_STEP = ("train_step", "finish_step", "optimizer_step")
"""An engine that steps overrides at least one of these methods."""
OWN_BACKWARD = ("train_step", "accumulate_all", "accumulate", "backward")
"""An engine that runs backward overrides at least one of these methods."""
OWN_FOLLOWING = ("follow_evaluation_step",)
"""A strategy whose ranks follow an evaluation overrides this method."""


def contradictions(
    name: str,
    can: Capabilities,
    *,
    clips: bool,
    steps: bool,
    runs_backward: bool,
    follows: bool = True,
) -> Iterator[str]:
    """Yield a message for each capability that a class declares but does not implement.

    Args:
        name: the name of the class.
        can: its capabilities.
        clips: whether it overrides a method in OWN_CLIPPING.
        steps: whether it overrides a method in OWN_STEP.
        runs_backward: whether it overrides a method in OWN_BACKWARD.
        follows: whether it overrides a method in OWN_FOLLOWING.
    """
    problems: list[tuple[str, tuple[str, ...], str, str]] = []
    if can.engine_clips and not clips:
        problems.append(("engine_clips", OWN_CLIPPING, "nothing of its own clips", "clip in"))
    if can.engine_steps and not steps:
        problems.append(("engine_steps", OWN_STEP, "nothing of its own steps", "step in"))
    if not can.manual_backward and not runs_backward:
        effect = "it runs backward as user code does"
        problems.append(("manual_backward", OWN_BACKWARD, effect, "override"))
    if can.follows_evaluation and not follows:
        effect = "ranks without a batch leave the others waiting"
        problems.append(("follows_evaluation", OWN_FOLLOWING, effect, "override"))
    for field, methods, effect, remedy in problems:
        yield (
            f"{name}.capabilities has {field}={getattr(can, field)}, but the class overrides none "
            f"of {', '.join(methods)}, so that {effect}: leave {field} out, or {remedy} one of "
            "them"
        )


def one_process_of(name: str) -> str:
    """Return the error message for a ParallelStrategy that declares a process for many devices."""
    return (
        f"{name}.capabilities has one_process=True and many_devices=True, but a ParallelStrategy "
        "has a process for each device: set one_process=False"
    )


def difference(name: str, of_spec: Capabilities, of_class: Capabilities | None) -> str:
    """Return how the capabilities of a strategy's spec and of its class differ, or "" if equal.

    Args:
        name: the name of the class.
        of_spec: the capabilities of the spec.
        of_class: the capabilities of the class; None: the class has no capabilities.

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
