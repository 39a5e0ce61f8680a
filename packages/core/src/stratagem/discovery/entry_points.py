"""Finding plugins: entry points, who declares them, and whether they fit this core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import importlib_metadata

GROUP = "stratagem.backends"
CORE = "stratagem-core"
DISABLE_VARIABLE = "STRATAGEM_DISABLE_PLUGINS"
ONLY_VARIABLE = "STRATAGEM_ONLY_PLUGINS"


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """An entry point, with what its distribution's metadata says; nothing is imported yet.

    Attributes:
        name: the entry point's name.
        value: the module (or `module:object`) that it names.
        distribution: normalised name of the distribution that declares it.
        version: version of that distribution.
        requires_core: its requirement on stratagem-core ("<0.2,>=0.1"), or "" if it has none.
        load: imports the plugin module or object.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires_core: str
    load: Callable[[], Any]


def installed_entries() -> list[PluginEntry]:
    """Return every entry of the group in the installed distributions, sorted.

    A distribution that stands on the path twice counts once: the first, which is the one that an
    import would take.
    """
    entries: dict[tuple[str, str], PluginEntry] = {}
    for distribution in importlib_metadata.distributions():
        # Most distributions declare no entry point: this read avoids parsing their metadata.
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name, version, requirements = _headers(distribution.read_text("METADATA") or "")
        for entry_point in distribution.entry_points.select(group=GROUP):
            entries.setdefault(
                (name, entry_point.name),
                PluginEntry(
                    name=entry_point.name,
                    value=entry_point.value,
                    distribution=name,
                    version=version,
                    requires_core=_requirement_on_core(requirements),
                    load=entry_point.load,
                ),
            )
    return [entries[key] for key in sorted(entries)]


def why_disabled(entry: PluginEntry, environ: Mapping[str, str]) -> str | None:
    """Return why the environment switches this entry off, or None if it does not.

    Both variables hold names of entry points or distributions, separated by commas.
    """
    names = {entry.name.casefold(), entry.distribution}
    if names & _listed(environ.get(DISABLE_VARIABLE, "")):
        return f"disabled by {DISABLE_VARIABLE}"
    only = _listed(environ.get(ONLY_VARIABLE, ""))
    if only and not names & only:
        return f"left out of {ONLY_VARIABLE}"
    return None


def why_incompatible(entry: PluginEntry, core_version: str) -> str | None:
    """Return why this entry's distribution does not fit this core, or None if it does.

    Read from metadata, before any import: pip installs a mismatch with only a warning.
    """
    if not entry.requires_core:
        return None
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = SpecifierSet(entry.requires_core).contains(core_version, prereleases=True)
    except InvalidSpecifier:
        return f"its requirement {CORE}{entry.requires_core} cannot be read"
    if fits:
        return None
    return (
        f"requires {CORE}{entry.requires_core}, but {CORE} {core_version} is installed: "
        f"pip install --upgrade {entry.distribution} {CORE}"
    )


def normalise(name: str) -> str:
    """Return a distribution's name in the form that PEP 503 gives it."""
    return name.strip().replace("_", "-").replace(".", "-").casefold()


def _listed(value: str) -> set[str]:
    return {normalise(part) for part in value.split(",") if part.strip()} | {
        part.strip().casefold() for part in value.split(",") if part.strip()
    }


def _headers(metadata: str) -> tuple[str, str, list[str]]:
    """Return name, version and requirements from METADATA.

    By lines, since the email parser behind `Distribution.requires` costs about a millisecond a
    distribution; these three headers are never folded.
    """
    name, version = "unknown", "unknown"
    requirements: list[str] = []
    for line in metadata.splitlines():
        if not line:
            break
        key, _, value = line.partition(": ")
        if key == "Name":
            name = normalise(value)
        elif key == "Version":
            version = value.strip()
        elif key == "Requires-Dist":
            requirements.append(value)
    return name, version, requirements


def _requirement_on_core(requirements: Iterable[str]) -> str:
    for text in requirements:
        if not normalise(text).startswith(CORE):
            continue
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if normalise(requirement.name) == CORE:
            return str(requirement.specifier)
    return ""
