"""`stratagem strategies`: which strategies work here. stratagem-extras says more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.cli.console import print_reasons, print_table
from stratagem.cli.program import full_form, parse_short_form
from stratagem.discovery import Availability
from stratagem.discovery.registry import Registry, get_registry, says_its_preset
from stratagem.errors import StratagemError, format_names
from stratagem.plan.cluster import CLUSTER_VARIABLE
from stratagem.plan.components import probe_accelerator
from stratagem.plan.plan import RunRequest
from stratagem.plan.resolution import resolve

SUMMARY = "List strategies, and what is usable here."

Probe = Callable[[Any], Availability]
"""Returns the devices that an accelerator (its spec, or an object) finds on this machine."""


def run(arguments: Sequence[str]) -> int:
    """Print the listing; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    code = full_form("strategies", arguments)
    if code is not None:
        return code
    parse_short_form("strategies", SUMMARY, arguments)
    registry, probe, environ = get_registry(), asked_once(), environ_of_machine(os.environ)
    rows = []
    for candidate in registry.candidates("strategy"):
        if not says_its_preset(candidate.spec):
            why = why_not(candidate.qualified_name, registry, environ, probe)
            rows.append((candidate.spec.name, why, candidate.spec.summary))
    rows.sort(key=lambda row: bool(row[1]))
    print_table(
        ("strategy", "usable here", "summary"),
        [(name, "no" if why else "yes", summary) for name, why, summary in rows],
    )
    print_reasons("not usable here", ((name, why) for name, why, _ in rows))
    print_failed_plugins(registry)
    return 0


def print_failed_plugins(registry: Registry) -> None:
    """Print the names of plugins that could not be loaded, to standard error."""
    failed = [r.distribution for r in registry.reports if r.status in ("broken", "incompatible")]
    if failed:
        print(
            f"could not be loaded: {format_names(failed)} (`stratagem doctor` says why)",
            file=sys.stderr,
        )


def environ_of_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a request is for this machine, not for the job around it."""
    return {**environ, CLUSTER_VARIABLE: "none"}


def asked_once() -> Probe:
    """Return a probe that caches the result of each accelerator, since drivers may be slow."""
    found: dict[int, tuple[Any, Availability]] = {}

    def probe(accelerator: Any) -> Availability:
        key = id(accelerator)  # the accelerator is kept, so that its id stays unique
        if key not in found:
            found[key] = accelerator, probe_accelerator(accelerator)
        return found[key][1]

    return probe


def why_not(name: str, registry: Registry, environ: Mapping[str, str], probe: Probe) -> str:
    """Return why no request for a strategy can be met here, or "" if one can.

    Args:
        name: the qualified name of the strategy.
        registry: the registry of plugins.
        environ: environment variables.
        probe: returns the devices of an accelerator.
    """
    reasons = []
    spec = registry.find("strategy", name).spec
    can = getattr(spec, "capabilities", None)
    # A strategy that divides a batch over the devices of one process is of no use with one device.
    divides = can is not None and can.one_process and can.many_devices and not can.accelerators
    for devices in (2,) if divides else ("auto", 1, 2):
        request = RunRequest(strategy=name, devices=devices, environ=environ, interactive=False)
        try:
            resolve(request, registry, probe=probe)
        except StratagemError as error:
            reasons.append(str(error))
        else:
            return ""
    return reasons[0]
