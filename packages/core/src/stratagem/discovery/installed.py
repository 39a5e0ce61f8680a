"""Versions of what is installed, and what torch was built for: read, with nothing imported."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stratagem.discovery.entry_points import (
    folders_of_metadata,
    header_values,
    normalise,
    read_text,
)
from stratagem.errors import MissingPackageError


def require_package(who: str, package: str, extra: str) -> None:
    """Look for a package, without importing it.

    Args:
        who: needs it.
        package: its import name.
        extra: of stratagem-core, which installs it.

    Raises:
        MissingPackageError: it is not installed.
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
    """What the installed torch was built for.

    Attributes:
        version: as in `torch.__version__`.
        cuda: the version of CUDA, such as "13.0"; None: without CUDA.
    """

    version: str
    cuda: str | None


def version_of(distribution: str, path: Iterable[str] | None = None) -> str | None:
    """Return an installed distribution's version, from its metadata; None: it is not installed.

    Reads folders directly, as `installed_entries` does: importing the library for metadata costs
    more than all of `stratagem doctor`. Of two in one folder, as an interrupted upgrade leaves
    them, whichever comes first.

    Args:
        distribution: its name, in any spelling.
        path: where to look, in this order; None: `sys.path`.

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
            found = _version_by_library(distribution, place)
        except OSError:
            continue  # nothing is there
        else:
            found = next(_versions(folders.get(wanted, ())), None)
        if found is not None:
            return found
    return None


@functools.cache
def _folders_by_name(place: str, changed: int) -> dict[str, list[str]]:
    """Return the folders of metadata in a place, by distribution; read once while it is the same.

    Args:
        place: an element of `sys.path`.
        changed: when it was changed last.
    """
    found: dict[str, list[str]] = {}
    for folder in folders_of_metadata(place):
        name = normalise(folder.rpartition(".")[0].partition("-")[0])
        found.setdefault(name, []).append(f"{place}/{folder}")
    return found


def _versions(folders: Iterable[str]) -> Iterator[str]:
    """Yield the versions that folders of metadata say; an old form is a file."""
    for folder in folders:
        for file in (f"{folder}/METADATA", f"{folder}/PKG-INFO", folder):
            yield from header_values(read_text(file), "Version")


def _version_by_library(distribution: str, place: str) -> str | None:
    """Return the same of a zip file."""
    from importlib_metadata import distributions

    versions = (found.version for found in distributions(name=distribution, path=[place]))
    return next(versions, None)


def torch_build() -> TorchBuild | None:
    """Return what the installed torch was built for, by its `version.py`; None: there is none.

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
    version = re.search(r"^__version__ = '(.+?)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: Optional\[str\])? = '(.+?)'", text, re.MULTILINE)
    return TorchBuild(version[1] if version else "?", cuda[1] if cuda else None)
