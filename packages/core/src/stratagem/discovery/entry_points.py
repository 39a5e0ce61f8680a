"""Find plugins: their entry points, distributions, and compatibility with the installed core."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stratagem import __version__
from stratagem.errors import format_text, format_value

GROUP = "stratagem.backends"
CORE = "stratagem-core"
FIRST = (CORE, "stratagem-backend-torch")
"""Distributions whose names are reserved: others reach a component of the same name by its
qualified name."""
_PACKAGES = ("stratagem", "stratagem_torch")
# Name and value of core's own entry, as its pyproject.toml has it.
_OWN = ("one_device", "stratagem.one_device.plugin")
DISABLE_VARIABLE = "STRATAGEM_DISABLE_PLUGINS"
ONLY_VARIABLE = "STRATAGEM_ONLY_PLUGINS"


def is_ours(module: str) -> bool:
    """Return whether a module belongs to a distribution of `FIRST`."""
    return module.partition(".")[0] in _PACKAGES


@dataclass(frozen=True)
class PluginEntry:
    """An entry point with the metadata of its distribution, before its module is imported.

    Attributes:
        name: the entry point's name.
        value: the module (or `module:object`) that it names.
        distribution: normalised name of the distribution that declares it.
        version: version of that distribution.
        requires_core: its requirement on stratagem-core ("<0.2,>=0.1"), or "" without a
            requirement.
        load: imports the plugin module or object.
        false_core: the location of a distribution that only calls itself stratagem-core; "" for
            any other distribution.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires_core: str
    load: Callable[[], Any]
    false_core: str = ""


def installed_entries(path: Iterable[str] | None = None) -> list[PluginEntry]:
    """Return every entry of the group in the installed distributions, sorted.

    If a distribution is on the path twice, only the first counts, as in an import. Every
    distribution named stratagem-core counts: core's own plugin is a module of the running package,
    and the others are reported as false.

    Args:
        path: the places to search, in order; None: `sys.path`.
    """
    entries: dict[tuple[str, ...], PluginEntry] = {}
    seen: set[str] = set()
    for place in sys.path if path is None else path:
        for name, declared, read_metadata in _distributions(place or ".", seen):
            metadata = read_metadata()
            version = _version(metadata)
            requires_core = _requirement_on_core(metadata)
            for group, entry, value in _entries(declared):
                if group != GROUP:
                    continue
                own = name == CORE and (entry, value) == _OWN
                false_core = name == CORE and not own
                entries.setdefault(
                    (name, entry, value if false_core else ""),
                    PluginEntry(
                        name=format_text(entry),
                        value=format_text(value),
                        distribution=name,
                        # The version of the running package, even if another one is on the path.
                        version=__version__ if own else format_text(version),
                        requires_core="" if own else format_text(requires_core),
                        load=functools.partial(_load, value),
                        false_core=(place or ".") if false_core else "",
                    ),
                )
    return [entries[key] for key in sorted(entries)]


def misplaced_entries(path: Iterable[str] | None = None) -> list[str]:
    """Return a sentence for each entry point in a group with a misspelled name.

    It also returns a sentence for each stratagem-core with another version than the running
    version.

    Args:
        path: the places to search; None: `sys.path`.
    """
    found = []
    seen: set[str] = set()
    for place in sys.path if path is None else path:
        for name, declared, read_metadata in _distributions(place or ".", seen, marker="["):
            if name == CORE and (version := _version(read_metadata())) != __version__:
                found.append(
                    f"{CORE} {format_text(version)} lies in {place or '.'!r}, but {__version__} "
                    f"runs: remove it there, or reinstall {CORE}."
                )
            for group, entry, _ in _entries(declared):
                if group != GROUP and _looks_like_ours(group):
                    found.append(
                        f"{name} declares the entry point {format_value(entry)} in the group "
                        f"{format_value(group)}, which nobody reads: expected the group {GROUP!r}."
                    )
    return found


@functools.cache
def _looks_like_ours(group: str) -> bool:
    """Whether a group's name contains "stratagem", or is nearly equal to that or to our group."""
    ours, name = GROUP.partition(".")[0], group.casefold()
    # Few groups share most of their letters with ours, and importing difflib takes 3 ms.
    shared = [(Counter(name) & Counter(one)).total() / len(name + one) for one in (ours, GROUP)]
    if max(shared) < 0.4 and ours not in name:
        return False
    import difflib

    return ours in name or bool(difflib.get_close_matches(name, (ours, GROUP), cutoff=0.8))


def why_disabled(entry: PluginEntry, environ: Mapping[str, str]) -> str | None:
    """Return why an environment variable disables this entry.

    None: the entry is enabled. Both variables hold names of entry points or distributions,
    separated by commas. `STRATAGEM_ONLY_PLUGINS` never disables a plugin of `FIRST`, which a list
    of other plugins takes for granted. `STRATAGEM_DISABLE_PLUGINS` disables it if it is named.
    """
    names = {normalise(entry.name), entry.distribution}
    if names & _listed(environ.get(DISABLE_VARIABLE, "")):
        return f"disabled by {DISABLE_VARIABLE}"
    only = _listed(environ.get(ONLY_VARIABLE, ""))
    if only and not names & only and entry.distribution not in FIRST:
        return f"left out of {ONLY_VARIABLE}"
    return None


def why_incompatible(entry: PluginEntry, core_version: str) -> str | None:
    """Return why this entry's distribution is incompatible with the given version of core.

    None: the distribution is compatible. The answer comes from metadata, before any import, because
    pip installs an incompatible distribution with only a warning.
    """
    if entry.false_core:
        return (
            f"a distribution in {entry.false_core!r} calls itself {CORE} too; core's own plugin is "
            f"{_OWN[1]!r} of the package that runs: remove that distribution"
        )
    holds = fits(entry.requires_core, core_version)
    if holds is None:
        return (
            f"its requirement {CORE}{entry.requires_core} cannot be read: pip install --upgrade "
            f"{entry.distribution}"
        )
    if holds:
        return None
    return (
        f"requires {CORE}{entry.requires_core}, but {CORE} {core_version} is installed: "
        f"pip install --upgrade {entry.distribution} {CORE}"
    )


def normalise(name: str) -> str:
    """Return a distribution's name, normalised as in PEP 503."""
    return re.sub(r"[-_.]+", "-", format_text(name.strip())).casefold()


def _listed(value: str) -> set[str]:
    return {normalise(part) for part in value.split(",") if part.strip()}


# -- installed distributions


def _distributions(
    place: str, seen: set[str], *, marker: str = GROUP
) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yield (name, entry_points.txt, function that reads METADATA) of distributions with a marker.

    Nearly every place on the path is a folder. Folders are read directly: importing
    `importlib_metadata` costs as much as reading several hundred distributions, and its email
    parser takes a millisecond for each.

    Args:
        place: an element of `sys.path`.
        seen: normalised names of the distributions found so far; the names found here are added.
        marker: the text that entry_points.txt must contain.
    """
    try:
        folders = folders_of_metadata(place)
    except NotADirectoryError:
        yield from _distributions_by_library(place, seen, marker=marker)
        return
    for folder in folders:
        name = normalise(folder.rpartition(".")[0].partition("-")[0])
        # "~" marks a folder that an interrupted pip has left behind.
        if (name in seen and name != CORE) or name.startswith("~"):
            continue
        seen.add(name)
        declared = read_text(f"{place}/{folder}/entry_points.txt")
        if marker not in declared:
            continue
        if folder.endswith(".egg-info"):  # requirements are in another file and form
            yield from _distributions_by_library(place, seen - {name}, only=name, marker=marker)
            continue
        yield name, declared, functools.partial(read_text, f"{place}/{folder}/METADATA")


def folders_of_metadata(place: str) -> list[str]:
    """Return the metadata folders of the distributions in a place, sorted.

    Raises:
        NotADirectoryError: the place is a file, such as a zip file.
    """
    try:
        with os.scandir(place) as found:
            return sorted(f.name for f in found if f.name.endswith((".dist-info", ".egg-info")))
    except NotADirectoryError:
        raise
    except OSError:
        return []  # nothing is there, or nothing that an import could read


def _distributions_by_library(
    place: str, seen: set[str], only: str | None = None, *, marker: str = GROUP
) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Do the same as `_distributions` for zip files and for older forms of metadata."""
    from importlib_metadata import distributions

    for distribution in distributions(path=[place]):
        headers: Any = distribution.metadata
        name = normalise(headers["Name"] or "unknown")
        declared = distribution.read_text("entry_points.txt") or ""
        if (name in seen and name != CORE) or (only is not None and name != only):
            continue
        seen.add(name)
        if marker in declared:
            lines = [f"Version: {headers['Version'] or 'unknown'}"]
            lines += [f"Requires-Dist: {clause}" for clause in distribution.requires or ()]
            yield name, declared, functools.partial("\n".join, lines)


def read_text(path: str) -> str:
    """Return a file's text, or "" if the file cannot be read."""
    try:
        # Not by pathlib, which is slow to import.
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


def _entries(declared: str) -> Iterator[tuple[str, str, str]]:
    """Yield (group, name, value) of the entries in an entry_points.txt."""
    group = ""
    for line in map(str.strip, declared.splitlines()):
        if line.startswith("["):
            group = line[1:-1].strip()
        elif line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield group, name.strip(), value.strip()


def _load(value: str) -> Any:
    """Import what an entry's value names: `module`, `module:object`, with or without `[extra]`."""
    module, _, attribute = value.partition("[")[0].partition(":")
    found: Any = importlib.import_module(module.strip())
    for part in filter(None, attribute.strip().split(".")):
        found = getattr(found, part)
    return found


# -- metadata


def header_values(metadata: str, key: str) -> Iterator[str]:
    """Yield the values of a header of METADATA that is never folded."""
    head = metadata.partition("\n\n")[0]
    for line in head.splitlines():
        if line.startswith(f"{key}:"):
            yield line.partition(":")[2].strip()


def _version(metadata: str) -> str:
    return next(header_values(metadata, "Version"), "unknown")


def _requirement_on_core(metadata: str) -> str:
    """Return the clauses on the version of core that apply here, or ""."""
    clauses = []
    for text in header_values(metadata, "Requires-Dist"):
        if not normalise(text).startswith(CORE):
            continue
        clause = text[len(CORE) :].strip(" ()")
        if not clause.strip("<>=., 0123456789"):
            clauses.append(clause)
            continue
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            clauses.append(clause)  # it cannot be read, which the report says
            continue
        # A requirement of an extra or of another platform does not hold.
        if normalise(requirement.name) == CORE and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            clauses.append(str(requirement.specifier))
    return ",".join(filter(None, clauses))


def fits(clauses: str, version: str) -> bool | None:
    """Return whether a version meets clauses such as "<0.2,>=0.1".

    None: the clauses cannot be parsed.
    """
    # Plain numbers are compared here: importing `packaging` would use a quarter of the time limit
    # for listing strategies.
    try:
        return all(
            _holds(clause.strip(), _numbers(version)) for clause in clauses.split(",") if clause
        )
    except ValueError:
        pass
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(clauses).contains(version, prereleases=True)
    except InvalidSpecifier:
        return None


def why_not_lasting(clauses: str) -> str:
    """Return why a distribution should change its requirement on core, or "" if suitable.

    Args:
        clauses: the requirement, such as "<0.2,>=0.1"; "": the distribution has no requirement.

    Example:
        >>> from stratagem.discovery.entry_points import why_not_lasting
        >>> why_not_lasting(">=0.1,<9")[:48]
        'stratagem-core>=0.1,<9 takes the next minor rele'
    """
    major, minor = __version__.split(".")[:2]
    if not clauses:
        why = f"it requires no release of {CORE} in particular"
    elif "==" in clauses:
        why = f"{CORE}{clauses} is one release, and pip refuses every other"
    elif fits(clauses, __version__) is False:
        why = f"{CORE}{clauses} excludes the installed release {__version__}"
    elif fits(clauses, f"{major}.{int(minor) + 1}"):
        why = (
            f"{CORE}{clauses} takes the next minor release, so that pip installs it beside a core "
            "whose plugin API it does not know"
        )
    else:
        return ""
    return f"{why}: expected a range such as {CORE}{core_range(__version__)}"


def core_range(version: str) -> str:
    """Return the range of core releases that a plugin written for `version` should require.

    Example:
        >>> from stratagem.discovery.entry_points import core_range
        >>> core_range("0.1.3")
        '>=0.1,<0.2'
    """
    major, minor = version.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _holds(clause: str, version: tuple[int, ...]) -> bool:
    """Whether a version meets a clause; raises ValueError if the clause is not simple."""
    operator = clause[:2] if clause[1:2] == "=" else clause[:1]
    limit = _numbers(clause[len(operator) :])
    if operator == ">=":
        return version >= limit
    if operator == "<":
        return version < limit
    raise ValueError(f"the operator {operator!r} needs rules of its own")


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers without zeros at the end: 0.1 and 0.1.0 are the same version."""
    numbers = tuple(map(int, version.split(".")))
    while numbers and not numbers[-1]:
        numbers = numbers[:-1]
    return numbers
