"""The classes that authors of components subclass; nothing else has to be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from stratagem_testing.components.check import checks_of
from stratagem_testing.components.component import Component
from stratagem_testing.components.server import Server
from stratagem_testing.conformance import Conformance
from stratagem_testing.places import place_of

Named = str | Callable[..., Any]
"""A discovered name; or a class, or a function without arguments that makes one, at the top of a
module; or the place of one, "package.module:name"."""


class ComponentConformance(Conformance):
    """Tests of one component, each in a process of its own.

    A subclass says `kind`, and has an attribute of that name: what is tested.
    """

    kind: ClassVar[str]

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the options of this class for the checks; weights-only-safe data."""
        return {}

    @classmethod
    def target(cls) -> Component:
        """Return the component to test, given by the attributes of this class."""
        named: Named = getattr(cls, cls.kind)
        return Component(kind=cls.kind, name=place_of(named), options=cls.options())

    @classmethod
    def checks(cls) -> Sequence[str]:
        """Return the names of all checks of the kind."""
        return list(checks_of(cls.kind))

    def test_conforms(self, check: str, stratagem_server: Server) -> None:
        """Fail with the check's finding; the check's name states the duty."""
        failure = stratagem_server.failure(self.target(), check, self.deadline)
        if failure:
            pytest.fail(failure, pytrace=False)


class AcceleratorConformance(ComponentConformance):
    """Tests of an accelerator, on its devices.

    Attributes:
        accelerator: a name, class, function or place.
        without_devices: run only checks that need no device, such as the check of the reason.
        tolerance: the largest difference of losses from the CPU's losses, relative and absolute.
        devices: the largest number of devices to use.

    Example:
        >>> from stratagem_testing import AcceleratorConformance
        >>> class TestMine(AcceleratorConformance):
        ...     accelerator = "cpu"
        >>> TestMine.target().name
        'cpu'
    """

    kind = "accelerator"
    accelerator: ClassVar[Named]
    without_devices: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-5
    devices: ClassVar[int] = 2

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return how far losses may be off, and how many devices are used."""
        return {"tolerance": cls.tolerance, "devices": cls.devices}

    @classmethod
    def checks(cls) -> Sequence[str]:
        """Return the names of all checks that can run here."""
        return [
            name
            for name, check in checks_of(cls.kind).items()
            if not (check.needs_device and cls.without_devices)
        ]


class PrecisionConformance(ComponentConformance):
    """Tests of a precision.

    Attributes:
        precision: a name, class, function or place.
        accelerator: the discovered name of the accelerator that computes.
        tolerance: the largest difference of losses from losses of 32-true, relative and absolute;
            None: by `dtype`, 1e-5 in float64 and float32, 0.01 in float16, 0.05 in bfloat16.
        models: functions without arguments that create a model of inputs (n, 16) and outputs (n,
            16), which is trained besides the kit's own models.
    """

    kind = "precision"
    precision: ClassVar[Named]
    accelerator: ClassVar[str] = "cpu"
    tolerance: ClassVar[float | None] = None
    models: ClassVar[Sequence[Named]] = ()

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the accelerator, the tolerance and the models."""
        return {
            "accelerator": cls.accelerator,
            "tolerance": cls.tolerance,
            "models": [place_of(model) for model in cls.models],
        }


class CheckpointIOConformance(ComponentConformance):
    """Tests of a checkpoint format, with the durability scenarios of `stratagem checkpoint`.

    Attributes:
        checkpoint_io: a name, class, function or place.
        kills: how often a process is killed while it saves, on a fast and on a slow disk each.
        megabytes: size of the checkpoints of the durability scenarios.
    """

    kind = "checkpoint_io"
    checkpoint_io: ClassVar[Named]
    kills: ClassVar[int] = 4
    megabytes: ClassVar[float] = 1.0

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return how durability is tried."""
        return {"kills": cls.kills, "megabytes": cls.megabytes}


class ClusterEnvironmentConformance(ComponentConformance):
    """Tests of a cluster environment, in processes that have the variables of ranks.

    Attributes:
        cluster_environment: a name, class, function or place.
        ranks: the environment variables of each rank of one job, as the cluster sets them; at
            least two ranks. Rank 0's host has to be this one. If jobs can have several nodes, let
            a second class have two (`nodes = 2`): with one node, a local rank that is the global
            rank is right. Variables of a second node need no second machine.
        nodes: how many nodes that job has.
    """

    kind = "cluster_environment"
    cluster_environment: ClassVar[Named]
    ranks: ClassVar[Sequence[Mapping[str, str]]]
    nodes: ClassVar[int] = 1

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the variables and the number of nodes."""
        return {"ranks": [dict(variables) for variables in cls.ranks], "nodes": cls.nodes}


class LauncherConformance(ComponentConformance):
    """Tests of a launcher, which starts ranks for real.

    Attributes:
        launcher: a name, class, function or place.
        devices: the number of ranks; None: 2, or 1 for a launcher that starts no ranks
            (`starts_ranks=False`).
        plain_results: results are read without executing code. False: results are pickled between
            processes of one user, by a program that every rank trusts.
    """

    kind = "launcher"
    launcher: ClassVar[Named]
    deadline = 240.0
    devices: ClassVar[int | None] = None
    plain_results: ClassVar[bool] = True

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the number of ranks, and how results come back."""
        return {"devices": cls.devices, "plain_results": cls.plain_results}


class LoggerConformance(ComponentConformance):
    """Tests of a logger.

    Attributes:
        logger: a class, function or place. Each call runs in an empty folder, the current folder,
            and
            must write there. All calls write to the same run: the second logger continues it.
        read: a function (or its place) that takes a logger and returns the logged data of its run,
            as pairs of a step and a mapping of values, in the order of logging.
        library_stays: whether the library of the logger keeps threads, files and
            handlers until the process ends, as the clients of some services do.
    """

    kind = "logger"
    logger: ClassVar[Named]
    read: ClassVar[Named]
    library_stays: ClassVar[bool] = False

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return where the function that reads is, and whether the library stays.

        Raises:
            TypeError: the class has no `read`.
        """
        if not hasattr(cls, "read"):
            raise TypeError(
                f"{cls.__name__} has no `read`: set it to a function that takes a logger and "
                "returns what its run has logged, as pairs of a step and a mapping of values"
            )
        return {"read": place_of(cls.read), "library_stays": cls.library_stays}


class CallbackConformance(ComponentConformance):
    """Tests of a callback, under a Trainer that trains a small model on the CPU.

    Attributes:
        callback: a name, class, function or place.
        changes_training: whether weights may differ from a run without the callback, for example
            because the callback averages or prunes them.

    Example:
        >>> from stratagem_testing import CallbackConformance
        >>> class TestMine(CallbackConformance):
        ...     callback = "lr_monitor"
        >>> TestMine.options()
        {'changes_training': False}
    """

    kind = "callback"
    callback: ClassVar[Named]
    changes_training: ClassVar[bool] = False

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return whether weights may differ."""
        return {"changes_training": cls.changes_training}


class ProfilerConformance(ComponentConformance):
    """Tests of a profiler, by itself and under a Trainer.

    Attributes:
        profiler: a name, class, function or place.
    """

    kind = "profiler"
    profiler: ClassVar[Named]


class PluginConformance(ComponentConformance):
    """Tests of a distribution's plugin: the specs of its components, and its import cost.

    Attributes:
        plugin: the distribution's name, such as "my-backend".
        cpu_seconds: processor time that the import of the plugin module may take.
    """

    kind = "plugin"
    plugin: ClassVar[str]
    cpu_seconds: ClassVar[float] = 0.1

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the limits of an import's cost."""
        return {"cpu_seconds": cls.cpu_seconds}
