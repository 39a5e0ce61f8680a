"""Target: which strategy is tested, and how; it travels to the ranks as weights-only-safe data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stratagem.discovery import Capabilities, StrategySpec, get_registry
from stratagem.errors import ConfigurationError
from stratagem_testing.places import find, is_place

REFERENCE = "single_device"
"""The strategy whose numbers are the right ones."""

FACTOR: Mapping[str, float] = {"64-true": 1e-4, "bf16-mixed": 5e3, "bf16-true": 1e4, "16-true": 1e3}
"""By what the tolerance is multiplied under a precision; 1 where none stands here."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A strategy under test.

    Attributes:
        strategy: a discovered name; or the place of a class, or of a function without arguments
            that creates a strategy: "package.module:name" or "/path/of/file.py:name".
        accelerator: a discovered name.
        devices: the number of ranks, or of the devices of the one process.
        nodes: the number of nodes; each node has equally many of these ranks.
        data_groups: the number of parts of the data; ranks that share a part count once.
        group_grows: whether more ranks make the groups larger; False: they make more groups.
        tolerance: the largest difference of losses from `single_device`, relative and absolute.
        models: names of models of the kit, or places of functions that create a model; see
            `models.py`.
        equal: whether losses must equal the losses of `single_device`.
        zeros_for_unused: whether a parameter without a gradient is stepped as if it were zero.
        allowed_leftovers: prefixes of the kit's descriptions of resources that may remain after the
            end.
        own_methods: names of public methods that only users call.
        search_path: folders that ranks search for modules, besides their own.
    """

    strategy: str
    accelerator: str = "cpu"
    devices: int = 1
    nodes: int = 1
    data_groups: int = 1
    group_grows: bool = True
    tolerance: float = 1e-5
    models: tuple[str, ...] = ()
    equal: bool = True
    zeros_for_unused: bool = False
    allowed_leftovers: tuple[str, ...] = ()
    own_methods: tuple[str, ...] = ()
    search_path: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Target:
        """Return a target that went through JSON, which knows no tuples."""
        fields: dict[str, Any] = dict(told)
        for name in ("models", "allowed_leftovers", "own_methods", "search_path"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @property
    def is_place(self) -> bool:
        """Whether it names the place of a class or function, not a strategy."""
        return is_place(self.strategy)

    def make(self) -> Any:
        """Return the value for `strategy=`: the name, or a new strategy."""
        return find(self.strategy)() if self.is_place else self.strategy

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the strategy."""
        if self.is_place:
            made = self.make()
            found: object = getattr(made, "capabilities", None)
            if not isinstance(found, Capabilities):
                raise ConfigurationError(
                    f"{self.strategy} made {made!r}: expected a strategy with capabilities"
                )
            return found
        spec = get_registry().find("strategy", self.strategy).spec
        assert isinstance(spec, StrategySpec)
        return spec.capabilities

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self.capabilities().one_process else self.devices

    def with_devices(self, devices: int) -> Target | None:
        """Return the target on more devices, each of which is a rank, or on one.

        None: it has no more ranks; or it has one already, or shares its data between ranks.
        """
        can = self.capabilities()
        if devices == 1:
            alone = replace(self, devices=1, data_groups=1)
            return alone if 1 < self.devices == self.data_groups else None
        if can.one_process or not can.many_devices or self.devices >= devices:
            return None
        return replace(self, devices=devices, data_groups=self._groups_of(devices))

    def on_nodes(self, nodes: int, devices: int) -> Target | None:
        """Return the target on several nodes, with as many ranks in all.

        None: it is for one node or one process, needs more ranks, or has devices that only one
        node has.
        """
        can = self.capabilities()
        if can.one_process or not can.multi_node or self.accelerator != "cpu":
            return None
        if self.devices > devices:
            return None
        groups = self._groups_of(devices)
        return replace(self, devices=devices, nodes=nodes, data_groups=groups)

    def _groups_of(self, devices: int) -> int:
        if self.group_grows and self.data_groups < self.devices:
            return self.data_groups
        return self.data_groups * devices // self.devices

    def tolerance_of(self, precision: str) -> float:
        """Return how far losses may be off under a precision."""
        return self.tolerance * FACTOR.get(precision, 1.0)
