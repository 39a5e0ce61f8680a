"""The public names of the distributions, and where the reference describes each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

MODULES = {
    "stratagem": "",
    "stratagem.module": "DataHooks DataModule HyperParameters HyperParametersMixin Module "
    "ModuleHooks to_onnx to_torchscript",
    "stratagem.trainer": "Trainer TrainerOptions",
    "stratagem.lite": "Lite LiteDataLoader LiteModule",
    "stratagem.callbacks": "",
    "stratagem.loggers": "",
    "stratagem.profilers": "",
    "stratagem.strategies": "",
    "stratagem.accelerators": "",
    "stratagem.precision": "",
    "stratagem.checkpoint": "",
    "stratagem.environments": "",
    "stratagem.launch": "",
    "stratagem.data": "",
    "stratagem.state": "",
    "stratagem.storage": "",
    "stratagem.rng": "seed_everything seed_devices_by preserve_rng_state",
    "stratagem.cli": "LRSchedulerCallable OptimizerCallable SaveConfigCallback "
    "TrainerArgumentParser TrainerCLI",
    "stratagem.discovery": "PLUGIN_API_VERSION hookimpl Capabilities ComponentSpec StrategySpec "
    "AcceleratorSpec PrecisionSpec CheckpointIOSpec ClusterEnvironmentSpec LauncherSpec LoggerSpec "
    "CallbackSpec ProfilerSpec NameSpec Availability Check Command TorchBuild torch_build "
    "version_of read_text require_package Registry get_registry",
    "stratagem.errors": "",
    "stratagem_mesh": "",
    "stratagem_testing": "",
    "stratagem_deepspeed": "",
}
"""The modules of the reference, with the names to describe; "": all public ones. What other
distributions add to a module of core (`stratagem.callbacks.Timer`) is described there."""

HOMES = (
    "stratagem.trainer",
    "stratagem.module",
    "stratagem.lite",
    "stratagem.callbacks",
    "stratagem.strategies",
    "stratagem.accelerators",
    "stratagem.discovery",
    *MODULES,
)
"""The modules in the order in which one is chosen for an object that several have."""

INSTANCES = {
    "trainer": "Trainer",
    "self.trainer": "Trainer",
    "lite": "Lite",
    "module": "Module",
    "self": "Module",
}
"""What pages call an object, and its class: `trainer.fit`, `self.log`."""

BARE = ("Module", "Trainer", "Callback")
"""The classes whose members pages name alone: `max_epochs`, `training_step`, `on_exception`. The
first class that has the member is linked; of `Module`, methods only."""


@dataclass(frozen=True)
class Public:
    """A public name.

    Attributes:
        module: the module to import it from.
        name: the name in that module.
        value: the object.
        home: the path at which the reference describes it.
    """

    module: str
    name: str
    value: Any
    home: str

    @property
    def path(self) -> str:
        """The path to import it by."""
        return f"{self.module}.{self.name}"


def public_names() -> list[Public]:
    """Return all public names of MODULES, each with the one path that the reference describes."""
    found: list[tuple[str, str, Any]] = []
    for module_name, chosen in MODULES.items():
        module = importlib.import_module(module_name)
        listed = chosen.split() or vars(module).get("__all__") or dir(module)
        found += [
            (module_name, name, getattr(module, name))
            for name in sorted(listed)
            if not name.startswith("_") and name != "annotations"
        ]
    homes: dict[int, str] = {}
    for home in HOMES:
        for module_name, name, value in found:
            if module_name == home and _has_identity(value):
                homes.setdefault(id(value), f"{module_name}.{name}")
    return [
        Public(module, name, value, homes.get(id(value), f"{module}.{name}"))
        for module, name, value in found
    ]


def _has_identity(value: Any) -> bool:
    """Whether equal values are one object that has one description: a class or a function."""
    return isinstance(value, type) or hasattr(value, "__qualname__")


def internal_paths(names: list[Public]) -> dict[str, str]:
    """Return the public path of each object by the path of its definition."""
    paths = {}
    for each in names:
        if _has_identity(each.value):
            paths[f"{each.value.__module__}.{each.value.__qualname__}"] = each.home
        paths[each.path] = each.home
    return paths


def short_names(names: list[Public]) -> dict[str, str]:
    """Return the path of each class, and of each member of one, by the name that people write.

    `Trainer`, `Trainer.fit`, `trainer.fit`, `training_step`, `max_epochs`, `seed_everything()` and
    `stratagem.seed_everything` are such names. A name that several objects have is left out.
    """
    homes = {each.value: each.home for each in names if isinstance(each.value, type)}
    found: dict[str, set[str]] = {}
    bare: dict[str, str] = {}
    for each in sorted(names, key=lambda each: BARE.index(each.name) if each.name in BARE else -1):
        name = each.name if isinstance(each.value, type) else f"{each.name}()"
        found.setdefault(name, set()).add(each.home)
        found.setdefault(each.path, set()).add(each.home)
        if isinstance(each.value, type):
            for member in dir(each.value):
                if not member.startswith("_"):
                    path = f"{_home_of_member(each, member, homes)}.{member}"
                    for written in _names_of_member(each, member):
                        found.setdefault(written, set()).add(path)
                    is_method = callable(getattr(each.value, member))
                    if "_" in member and each.name in BARE[0 if is_method else 1 :]:
                        bare.setdefault(member, path)
    return bare | {name: paths.pop() for name, paths in found.items() if len(paths) == 1}


def _home_of_member(owner: Public, member: str, homes: dict[type, str]) -> str:
    """Return the path of the class that the reference describes a member of: its own, or a base."""
    definers = (each for each in owner.value.__mro__ if member in vars(each))
    return homes.get(next(definers, owner.value), owner.home)


def _names_of_member(owner: Public, member: str) -> list[str]:
    """Return what people write for a member of a class."""
    called = [each for each, kind in INSTANCES.items() if kind == owner.name]
    return [f"{each}.{member}" for each in (owner.name, *called)]
