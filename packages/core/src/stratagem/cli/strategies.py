"""`stratagem strategies`: every strategy, who provides it, and whether it can be used here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratagem.discovery.registry import Candidate, Registry
from stratagem.discovery.specs import StrategySpec
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.plan.cluster import CLUSTER_VARIABLE
from stratagem.plan.plan import RunRequest
from stratagem.plan.resolve import resolve


@dataclass(frozen=True)
class ListedStrategy:
    """A strategy as the listing shows it.

    Attributes:
        name: what selects it; in the qualified form where the plain name means another one or is
            ambiguous.
        aliases: further names, in the same way.
        distribution, version: who provides it.
        accelerators: what it runs on; None: any.
        summary: one line.
        why_not: why it cannot be used on this machine; empty if it can.
    """

    name: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    accelerators: tuple[str, ...] | None
    summary: str
    why_not: str

    @property
    def usable(self) -> bool:
        """Whether a request for it can be met on this machine."""
        return not self.why_not


def listed_strategies(registry: Registry, environ: Mapping[str, str]) -> list[ListedStrategy]:
    """Return every strategy, sorted by name; those behind an ambiguous name as well.

    Args:
        registry: what there is.
        environ: environment variables.
    """
    return [
        _listed(candidate, candidate.spec, registry, environ)
        for candidate in registry.candidates("strategy")
        if isinstance(candidate.spec, StrategySpec)
    ]


def _listed(
    candidate: Candidate, spec: StrategySpec, registry: Registry, environ: Mapping[str, str]
) -> ListedStrategy:
    return ListedStrategy(
        name=selecting_name(registry, candidate, spec.name),
        aliases=tuple(selecting_name(registry, candidate, alias) for alias in spec.aliases),
        distribution=candidate.distribution,
        version=candidate.version,
        accelerators=spec.capabilities.accelerators,
        summary=spec.summary,
        why_not=_why_not(candidate.qualified_name, registry, environ),
    )


def selecting_name(registry: Registry, candidate: Candidate, name: str) -> str:
    """Return one of a component's names, qualified where it alone would not select it."""
    try:
        found = registry.find(candidate.spec.kind, name)
    except ConfigurationError:
        found = None
    return name if found is candidate else f"{candidate.distribution}:{name}"


def _why_not(name: str, registry: Registry, environ: Mapping[str, str]) -> str:
    """Return why no request for a strategy can be met here, or "" if one can."""
    # About this machine, not about the cluster job in which this program may run.
    environ = {**environ, CLUSTER_VARIABLE: "none"}
    reasons = []
    for devices in ("auto", 1, 2):
        request = RunRequest(strategy=name, devices=devices, environ=environ, interactive=False)
        try:
            resolve(request, registry)
        except StratagemError as error:
            reasons.append(str(error))
        else:
            return ""
    return reasons[0]
