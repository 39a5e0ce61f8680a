"""What is installed: versions, torch's build, and whether a target exists. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from importlib.machinery import ModuleSpec

from stratagem.discovery.entry_points import (
    folders_of_metadata,
    header_values,
    normalise,
    read_text,
)
from stratagem.errors import MissingPackageError, format_text


def require_package(who: str, package: str, extra: str) -> None:
    """Check that a package is installed, without importing it.

    Args:
        who: the feature that needs the package, for the error.
        package: the package's import name.
        extra: the extra of stratagem-core that installs the package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module that a program has put there itself
        return
    if found is None:
        raise MissingPackageError(
            f"{who} needs the package {package!r}, which is not installed here: "
            f"pip install 'stratagem-core[{extra}]'"
        )


@dataclass(frozen=True)
class TorchBuild:
    """The version of the installed torch, and the libraries that it was built for.

    Attributes:
        version: as in `torch.__version__`.
        cuda: the version of CUDA, such as "13.0"; None: without CUDA.
        hip: the version of ROCm's HIP, such as "7.0.51831"; None: without ROCm.
        xpu: the version of Intel's SYCL compiler, such as "20250301"; None: without XPU.
    """

    version: str
    cuda: str | None
    hip: str | None = None
    xpu: str | None = None


def version_of(distribution: str, path: Iterable[str] | None = None) -> str | None:
    """Return an installed distribution's version, from its metadata, in a form safe to show.

    None: the distribution is not installed.

    Like `installed_entries`, it reads folders directly: importing the metadata library takes longer
    than all of `stratagem doctor`. An interrupted upgrade may leave two versions in one folder; the
    first one found is returned.

    Args:
        distribution: its name, in any spelling.
        path: the places to search, in order; None: `sys.path`.

    Example:
        >>> from stratagem.discovery.installed import version_of
        >>> version_of("no-such-distribution") is None
        True
    """
    wanted = normalise(distribution)
    for place in sys.path if path is None else path:
        try:
            folders = _folders_by_name(place or ".", os.stat(place or ".").st_mtime_ns)  # noqa: PTH116 - pathlib is slow to import
        except NotADirectoryError:
            from importlib_metadata import distributions  # a zip file

            own = distributions(name=distribution, path=[place])
            found = next((format_text(one.version) for one in own), None)
        except OSError:
            continue  # nothing is there
        else:
            found = next(_versions(folders.get(wanted, ())), None)
        if found is not None:
            return found
    return None


@functools.cache
def _folders_by_name(place: str, changed: int) -> dict[str, list[str]]:
    """Return the metadata folders in a place, by distribution; cached until the place changes.

    Args:
        place: an element of `sys.path`.
        changed: its modification time, in nanoseconds.
    """
    found: dict[str, list[str]] = {}
    for folder in folders_of_metadata(place):
        name = normalise(folder.rpartition(".")[0].partition("-")[0])
        found.setdefault(name, []).append(f"{place}/{folder}")
    return found


def _versions(folders: Iterable[str]) -> Iterator[str]:
    """Yield the versions in metadata folders; in an old form of metadata, the path is a file."""
    for folder in folders:
        for file in (f"{folder}/METADATA", f"{folder}/PKG-INFO", folder):
            yield from map(format_text, header_values(read_text(file), "Version"))


def torch_build() -> TorchBuild | None:
    """Return the versions of torch and of the libraries of its build, from its `version.py`.

    None: torch is not installed.

    Example:
        >>> import torch
        >>> from stratagem.discovery.installed import torch_build
        >>> torch_build().version == torch.__version__
        True
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = read_text(os.path.join(os.path.dirname(found.origin), "version.py"))  # noqa: PTH118, PTH120 - pathlib is slow to import
    said = dict(re.findall(r"^(\w+)(?:: .+?)? = '(.+?)'", text, re.MULTILINE))
    version = said.get("__version__", "?")
    return TorchBuild(version, *map(said.get, ("cuda", "hip", "xpu")))


_DEFINED = re.compile(rb"^(?:class|def) (\w+)", re.MULTILINE)
_IMPORTED = re.compile(rb"^(?:import|from) (\w+)", re.MULTILINE)


def find_module(module: str) -> ModuleSpec | str:
    """Return a module's import spec without running the module, or why it cannot be found."""
    try:
        found = importlib.util.find_spec(module)
    # A package above it may raise whatever a vendor's SDK raises.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return f"there is no module {module}" if found is None else found


def why_missing(target: object, *, what: str = "target") -> str:
    """Return why a target `"package.module:Class"` is missing, as far as its source shows.

    "": the target exists, or only an import could show that the target is missing.

    Args:
        target: the target of a spec; a target that is not a string always exists.
        what: the name of the spec's field.

    Example:
        >>> from stratagem.discovery.installed import why_missing
        >>> why_missing("stratagem_torch.strategies.ddp:DPDStrategy")
        "its target's module stratagem_torch.strategies.ddp defines no 'DPDStrategy'"
    """
    if not isinstance(target, str):
        return ""
    module, _, attribute = target.partition(":")
    found = find_module(module)
    if isinstance(found, str):
        return f"its {what} {target!r} cannot be found: {found}"
    if found.origin is None or not found.origin.endswith(".py"):
        return ""
    name = attribute.partition(".")[0]
    try:
        changed = os.stat(found.origin).st_mtime_ns  # noqa: PTH116 - pathlib is slow to import
        imported, defined = _names_in(found.origin, changed)
        if missing := _missing(imported):
            return (
                f"its {what}'s module {module} imports {' and '.join(missing)}, which is not "
                "installed"
            )
        # The usual case. Parsing a module takes longer than the rest of doctor together.
        if name in defined:
            return ""
        names = set(_defined(ast.parse(_read(found.origin))))
    except (OSError, SyntaxError, ValueError) as error:
        return f"its {what}'s module {module} cannot be read: {type(error).__name__}: {error}"
    # Only an import would show the names that these define.
    if {"*", "__getattr__", name} & names:
        return ""
    return f"its {what}'s module {module} defines no {name!r}"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow to import
        return file.read()


@functools.lru_cache(maxsize=64)
def _names_in(path: str, changed: int) -> tuple[set[str], set[str]]:
    """Return the packages that a module imports at its top level, and its functions and classes.

    Args:
        path: the module's file.
        changed: its modification time, for the cache: several specs may name one file.
    """
    source = _read(path)
    imported = {name.decode() for name in _IMPORTED.findall(source)}
    return imported, {name.decode() for name in _DEFINED.findall(source)}


def _missing(imported: Set[str]) -> list[str]:
    """Return the packages that are not installed."""
    unknown = sorted(imported - sys.stdlib_module_names - sys.modules.keys())
    return [name for name in unknown if isinstance(find_module(name), str)]


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds, also within `if`, `try` and `with`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        else:
            yield from _defined(node)
