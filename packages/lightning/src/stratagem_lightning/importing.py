"""The import hook: modules of Lightning's names, whose contents are found when they are used."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from stratagem import __version__
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.launch import rank_zero_only
from stratagem_lightning.absent import explain
from stratagem_lightning.api.placeholders import Placeholder, placeholder
from stratagem_lightning.layout import LAYOUT
from stratagem_lightning_plugin.installed import check_installation, installed_lightning

HERE = "stratagem_lightning"
ROOTS = {
    "lightning": HERE,
    "pytorch_lightning": f"{HERE}.pytorch",
    "lightning_fabric": f"{HERE}.fabric",
}
"""Lightning's packages, and the modules here that they are."""


def install() -> None:
    """Replace Lightning's names by Stratagem's in this process, and print a note on rank 0.

    Raises:
        ConfigurationError: Lightning was imported before, or a required distribution is missing or
            incompatible.
    """
    check_installation()
    for root in ROOTS:
        if root in sys.modules:
            file = getattr(sys.modules[root], "__file__", None)
            raise ConfigurationError(
                f"{root!r} was imported before stratagem_lightning, from {file}: what was made of "
                "it would not be Stratagem's. Expected `import stratagem_lightning` to come first: "
                "make it the script's first line, or start it by "
                "`stratagem run --as-lightning SCRIPT`"
            )
    sys.meta_path.insert(0, Finder())
    _share_rank()
    # A process of multiprocessing runs the main module again; the one that began has said so.
    if multiprocessing.current_process().name == "MainProcess":
        _say()


def _share_rank() -> None:
    """Tell lightning_utilities the rank: others use it too, and it expects that of Lightning."""
    try:
        helpers = importlib.import_module("lightning_utilities.core.rank_zero")
    except ImportError:
        return
    helpers.rank_zero_only.rank = rank_zero_only.rank


@rank_zero_only
def _say() -> None:
    others = " and ".join(f"{name} {number}" for name, number in installed_lightning().items())
    verb = "are" if " and " in others else "is"
    unused = f" (the installed {others} {verb} not used)" if others else ""
    print(
        f"stratagem: in this process `lightning` is Stratagem {__version__}{unused}",
        file=sys.stderr,
    )


def find(module: str, name: str) -> Any:
    """Return the object that a module here serves under a name.

    Args:
        module: "stratagem_lightning", or a module in it.
        name: the name of an attribute, or of a submodule.

    Raises:
        AttributeError: the name is unknown; the message names the replacement.
    """
    names = LAYOUT[_key(module)]
    if name == "__all__":
        return [known for known in names if known[0] != "_" and _is_there(module, known)]
    if name in names:
        value = _load(name, *names[name].split(":"))
    elif _key(f"{module}.{name}") in LAYOUT:
        value = importlib.import_module(f"{module}.{name}")
    else:
        raise AttributeError(explain(module, name), name=name)
    vars(sys.modules[module])[name] = value
    return value


def _load(name: str, home: str, attribute: str) -> Any:
    """Return an object; for a class of a backend that is not installed, a placeholder."""
    try:
        return getattr(importlib.import_module(home), attribute)
    except ImportError as error:
        return placeholder(name, error)


def _is_there(module: str, name: str) -> bool:
    """Whether a name is more than a placeholder."""
    try:
        return type(find(module, name)) is not Placeholder
    except (AttributeError, StratagemError):
        return False


def names_in(module: str) -> list[str]:
    """Return the names that a module here serves, sorted, with its modules."""
    key = _key(module)
    within = f"{key}." if key else ""
    modules = (other.removeprefix(within) for other in LAYOUT if other.startswith(within) and other)
    return sorted({*LAYOUT[key], *(other for other in modules if "." not in other)})


class Mirror(ModuleType):
    """A module with Lightning's name, which imports an object when the object is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Stratagem's, under the name that Lightning has for it: {name}.")
        # A package: the import system asks the finder for missing names, and `from ... import` does
        # not show the text of an AttributeError.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return find(self.__name__, name)

    def __dir__(self) -> list[str]:
        return names_in(self.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        # For cloudpickle, which sends functions that use this module to other processes.
        return importlib.import_module, (self.__name__,)


class Finder(MetaPathFinder):
    """Finds the modules of the layout under Stratagem's names and under Lightning's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None for a module that this finder does not handle.

        Raises:
            ImportError: the module of Lightning is not provided; the message names the replacement.
        """
        root, _, rest = fullname.partition(".")
        own = fullname.startswith(f"{HERE}.")
        if not own and root not in ROOTS:
            return None
        name = fullname if own else ROOTS[root] + (f".{rest}" if rest else "")
        if _key(name) in LAYOUT:
            loader = _MirrorLoader() if own else _AliasLoader(name)
            return ModuleSpec(fullname, loader, is_package=True)
        if own and (found := PathFinder.find_spec(fullname, path)):
            return found  # a file beside the layout
        raise ImportError(explain(*name.rsplit(".", 1)), name=fullname)


class _MirrorLoader(Loader):
    """Makes the modules here that are no files."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Mirror(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Apply the environment, also if the module is loaded again; a mirror fills itself."""
        if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
            importlib.import_module(
                f"{HERE}.api.utilities.warnings"
            ).disable_possible_user_warnings()


class _AliasLoader(Loader):
    """Gives a module a further name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced."""
        module.__spec__ = self._spec


def _key(module: str) -> str:
    """Return a module's key in the layout, from its name here."""
    return module.removeprefix(HERE).removeprefix(".")
