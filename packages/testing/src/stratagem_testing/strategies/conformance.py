"""StrategyConformance: what a strategy's author subclasses, and nothing else has to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from stratagem_testing.conformance import Conformance
from stratagem_testing.places import place_of
from stratagem_testing.strategies.check import CHECKS
from stratagem_testing.strategies.checks import load_checks
from stratagem_testing.strategies.session import Outcome
from stratagem_testing.strategies.target import Target

load_checks()


class StrategyConformance(Conformance):
    """Tests of one strategy, in processes that its own launcher starts.

    A subclass in a test module is enough: its name begins with `Test`, and it names the strategy.
    Ranks are started once for all checks of a class, or for the checks that `-k` selects. The kit
    also tries features that the capabilities exclude: they must raise an error with the reason.

    Attributes:
        strategy: a discovered name; or a class, or a function without arguments that creates a
            strategy, at the top of a module; or its place, "package.module:name".
        accelerator: a discovered name.
        devices: the number of ranks; None: 2, or 1 if the capabilities have `one_process`.
        data_groups: the number of groups of ranks with different data; None: each rank is a group.
            Ranks with the same batches (tensor parallel, stages of a pipeline) are one group.
        group_grows: some checks have more ranks. True: they are in the same number of groups, if a
            group has several ranks; False: in more groups of the same size.
        tolerance: the largest difference of a loss from the loss of `single_device`, relative and
            absolute, in float32.
        models: functions without arguments that create a model of inputs (n, 6) and outputs (n, 1),
            which is trained besides the kit's own models.
        equal_to_single_device: whether losses equal the losses of `single_device`; None: by
            `capabilities.parameters`: replicas that drift apart have other losses. Then the first
            loss is compared, and training has to make losses smaller.
        zeros_for_unused: whether a parameter without a gradient is stepped as if it were zero, as
            flat buffers of gradients have it: weight decay and momentum move it on.
        allowed_leftovers: resources that a library of the strategy keeps until its process ends:
            the prefixes of the kit's descriptions, such as "the thread TimeoutManager".
        own_methods: names of public methods that only users call. Other public names of the
            strategy must have a caller, since a misspelled method has no caller.
        deadline: the time limit of a check in seconds.

    Example:
        >>> from stratagem_testing import StrategyConformance
        >>> class TestMine(StrategyConformance):
        ...     strategy = "ddp"
        >>> TestMine.target().devices
        2
    """

    strategy: ClassVar[str | Callable[..., Any]]
    accelerator: ClassVar[str] = "cpu"
    devices: ClassVar[int | None] = None
    data_groups: ClassVar[int | None] = None
    group_grows: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5
    models: ClassVar[Sequence[str | Callable[[], Any]]] = ()
    equal_to_single_device: ClassVar[bool | None] = None
    zeros_for_unused: ClassVar[bool] = False
    allowed_leftovers: ClassVar[Sequence[str]] = ()
    own_methods: ClassVar[Sequence[str]] = ()

    @classmethod
    def target(cls) -> Target:
        """Return the strategy to test, given by the attributes of this class."""
        strategy = place_of(cls.strategy)
        # Devices and the like follow from its capabilities.
        capabilities = Target(strategy=strategy, accelerator=cls.accelerator).capabilities()
        one = capabilities.one_process
        devices = (1 if one else 2) if cls.devices is None else cls.devices
        equal = cls.equal_to_single_device
        return Target(
            strategy=strategy,
            accelerator=cls.accelerator,
            devices=devices,
            data_groups=((1 if one else devices) if cls.data_groups is None else cls.data_groups),
            group_grows=cls.group_grows,
            tolerance=cls.tolerance,
            models=tuple(map(place_of, cls.models)),
            equal=capabilities.parameters != "drift" if equal is None else equal,
            zeros_for_unused=cls.zeros_for_unused,
            allowed_leftovers=tuple(cls.allowed_leftovers),
            own_methods=tuple(cls.own_methods),
        )

    @classmethod
    def checks(cls) -> Sequence[str]:
        """Return the names of all checks."""
        return list(CHECKS)

    def test_conforms(self, check: str, stratagem_outcomes: dict[str, Outcome]) -> None:
        """Judge the findings of the ranks; the check's name states the duty."""
        self.judge(lambda: stratagem_outcomes[check].judge(check))
