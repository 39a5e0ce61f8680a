"""The tables in docs/reference/strategies.md, from the specs of our distributions.

python packages/core/scripts/strategies_table.py    # writes them; all five have to be installed
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from stratagem.discovery import Capabilities, LauncherSpec, StrategySpec
from stratagem.discovery.entry_points import FIRST
from stratagem.discovery.registry import Candidate, Registry, get_registry

GUIDE = Path(__file__).parents[3] / "docs/reference/strategies.md"
OURS = (
    *FIRST,
    "stratagem-mesh",
    "stratagem-backend-deepspeed",
    "stratagem-backend-xla",
    "stratagem-backend-hpu-ipu",
)
DDP = ("DDPStrategy", "DDPShardedStrategy")


def tables(registry: Registry) -> dict[str, str]:
    """Return each table by the name that its place in the guide has."""
    classes = _by_class(registry)
    return {
        "strategies": _strategies(classes),
        "capabilities": _capabilities(classes),
        "variants of ddp": _variants_of_ddp(registry),
    }


def _by_class(registry: Registry) -> dict[str, list[Candidate]]:
    """Return the names of each class, those without a preset first; core's classes first."""
    found: dict[str, list[Candidate]] = {}
    ours = [each for each in registry.candidates("strategy") if each.distribution in OURS]
    for each in sorted(ours, key=lambda each: (OURS.index(each.distribution), each.spec.name)):
        found.setdefault(each.spec.class_name, []).append(each)
    for names in found.values():
        names.sort(key=lambda each: (len(each.spec.init_args), len(each.spec.name)))
    return found


def _strategies(classes: dict[str, list[Candidate]]) -> str:
    rows = []
    for name, candidates in classes.items():
        spec = candidates[0].spec
        assert isinstance(spec, StrategySpec)
        can = spec.capabilities
        further = [f"`{each.spec.name}`" for each in candidates[1:] if name not in DDP]
        further += [f"`{alias}`" for each in candidates for alias in each.spec.aliases]
        if name in DDP:
            further.append("see below")
        rows.append(
            (
                f"`{spec.name}`",
                spec.summary,
                f"`{name}`; {', '.join(further)}" if further else f"`{name}`",
                "one" if can.one_process else "one a device",
                _yes(can.many_devices),
                _yes(can.multi_node),
                _shards(candidates),
                ", ".join(f"`{each}`" for each in can.accelerators or ()) or "any",
            )
        )
    headers = ("name", "what it is", "class; further names", "processes", "several devices")
    return _table((*headers, "several nodes", "each rank has a part of", "accelerators"), rows)


def _shards(candidates: list[Candidate]) -> str:
    """Return what each rank has a part of, and under which further names that differs."""
    parts: dict[str, list[str]] = {}
    for each in candidates:
        assert isinstance(each.spec, StrategySpec)
        parts.setdefault(", ".join(each.spec.shards) or "nothing", []).append(each.spec.name)
    first, *others = parts
    return "; ".join([first, *(f"{' and '.join(f'`{n}`' for n in parts[o])}: {o}" for o in others)])


def _capabilities(classes: dict[str, list[Candidate]]) -> str:
    rows = []
    for candidates in classes.values():
        spec = candidates[0].spec
        assert isinstance(spec, StrategySpec)
        can = spec.capabilities
        rows.append(
            (
                f"`{spec.name}`",
                _yes(can.manual_backward),
                _yes(can.manual_backward and can.backward_in_forward),
                _clipping(can),
                _yes(can.accepts_existing_optimizers),
                _yes(can.allows_uneven_eval or can.follows_evaluation),
                ", ".join(can.compiles) or "no",
                "any" if can.precisions is None else ", ".join(f"`{p}`" for p in can.precisions),
            )
        )
    headers = ("name", "a loop of your own (Lite)", "manual optimization", "clipping")
    more = ("optimizers made before", "evaluation of uneven lengths", "`compile=`", "precisions")
    return _table((*headers, *more), rows)


def _clipping(can: Capabilities) -> str:
    if not can.gradient_clipping:
        return "no"
    return "by the engine, under the Trainer" if can.engine_clips else "yes"


def _variants_of_ddp(registry: Registry) -> str:
    launchers = {each.spec.name: each.spec for each in registry.candidates("launcher")}
    rows = []
    for each in registry.candidates("strategy"):
        spec = each.spec
        if each.distribution not in FIRST or spec.class_name not in DDP:
            continue
        assert isinstance(spec, StrategySpec)
        name = str(spec.init_args.get("launcher", "script"))
        launcher = launchers[name]
        assert isinstance(launcher, LauncherSpec)
        rows.append(
            (
                f"`{spec.name}`",
                f"`{name}`",
                _yes(launcher.interactive),
                "new processes; weights come back"
                if launcher.new_processes
                else "this process and new ones",
                str(spec.init_args.get("find_unused_parameters", False)),
                "one rank for each parameter" if "optimizer" in spec.shards else "every rank",
            )
        )
    headers = ("name", "launcher", "in a notebook", "ranks are", "`find_unused_parameters`")
    return _table((*headers, "optimizer state is on"), rows)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headers, tuple("---" for _ in headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(guide: str, registry: Registry) -> str:
    """Return the guide with each table as the specs now are."""
    for name, table in tables(registry).items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        assert pattern.search(guide), f"{GUIDE.name} has no place for the table {name!r}"
        guide = pattern.sub(lambda _, text=begin + table + end: text, guide, count=1)  # type: ignore[misc]
    return guide


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text(), get_registry()))
