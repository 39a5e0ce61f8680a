"""Target: which strategy is tested, and how; it travels to the ranks as plain data."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.registry import get_registry
from stratagem.discovery.specs import StrategySpec
from stratagem.errors import ConfigurationError

REFERENCE = "single_device"
"""The strategy whose numbers are the right ones."""

FACTOR: Mapping[str, float] = {"64-true": 1e-4, "bf16-mixed": 5e3, "bf16-true": 1e4, "16-true": 1e3}
"""By what the tolerance is multiplied under a precision; 1 where none stands here."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A strategy under test.

    Attributes:
        strategy: a discovered name; or where a class or a function without arguments is that makes
            one, "package.module:name" or "/path/of/file.py:name".
        accelerator: a discovered name.
        devices: the number of ranks, or of the devices of the one process.
        parts: into how many parts the data is divided; ranks that share a part count once.
        tolerance: how far losses may be from those of `single_device`, relative and absolute.
        models: names of models of the kit, or places of functions that make one; see `models.py`.
        equal: whether losses are to be those of `single_device`.
        kept: beginnings of what may be left after the end, in the kit's words.
        search_path: folders that ranks search for modules, besides their own.
    """

    strategy: str
    accelerator: str = "cpu"
    devices: int = 1
    parts: int = 1
    tolerance: float = 1e-5
    models: tuple[str, ...] = ()
    equal: bool = True
    kept: tuple[str, ...] = ()
    search_path: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_place(self) -> bool:
        """Whether it is the place of a class or function, and not a name."""
        return ":" in self.strategy and "." in self.strategy

    def make(self) -> Any:
        """Return what a front end takes for `strategy=`: the name, or a new strategy."""
        return find(self.strategy)() if self.is_place else self.strategy

    def capabilities(self) -> Capabilities:
        """Return what the strategy says that it can do."""
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

    def tolerance_of(self, precision: str) -> float:
        """Return how far losses may be off under a precision."""
        return self.tolerance * FACTOR.get(precision, 1.0)


def find(place: str) -> Callable[..., Any]:
    """Return what stands at "package.module:name" or "/path/of/file.py:name"."""
    module, _, name = place.rpartition(":")
    found: Any = _load(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    result: Callable[..., Any] = found
    return result


def place_of(thing: Callable[..., Any]) -> str:
    """Return where a rank finds a class or function of this process.

    Raises:
        ConfigurationError: it was made in a function, where no other process can find it.
    """
    file, name = inspect.getfile(thing), thing.__qualname__
    if "<" in name:
        raise ConfigurationError(
            f"strategy={thing!r}: ranks are other processes, which cannot find it there; expected "
            "a name, or a class or function at the top of a module"
        )
    try:
        found = importlib.util.find_spec(thing.__module__)
    except (ImportError, ValueError):
        found = None
    # A test's module is often loaded from its file, under a name that nobody can import.
    return f"{thing.__module__ if found and _is_installed(found.name) else file}:{name}"


def _is_installed(module: str) -> bool:
    top = module.partition(".")[0]
    return top in importlib.metadata.packages_distributions()


def _load(file: Path) -> ModuleType:
    name = f"_stratagem_conformance_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: what it defines is pickled by this name
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
    return sys.modules[name]
