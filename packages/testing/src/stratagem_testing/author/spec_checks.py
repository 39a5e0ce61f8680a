"""What a spec promises that is not so: found without importing what it describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stratagem.discovery import (
    ComponentSpec,
    LauncherSpec,
    PrecisionSpec,
    Registry,
    StrategySpec,
    installation_hint,
    why_missing,
)
from stratagem.errors import ConfigurationError
from stratagem_testing.author.class_source import check_source


def check_spec(spec: ComponentSpec, registry: Registry) -> Iterator[str]:
    """Yield the mistakes of a spec: missing names, and contradictions to its class.

    A target's module is found and parsed, and not executed: it may need an SDK that is not here.
    """
    why = why_missing(spec.target)
    if why:
        yield why
    for field in ("probe", "incompatible_because", "local_world_size"):
        if missing := why_missing(getattr(spec, field, None), what=field):
            yield missing
    if isinstance(spec, PrecisionSpec):
        yield from _unknown(spec.accelerators or (), "accelerator", registry)
    if isinstance(spec, LauncherSpec):
        yield from _unknown((spec.cluster_environment,), "cluster_environment", registry)
    if not isinstance(spec, StrategySpec):
        return
    can = spec.capabilities
    yield from _unknown(can.launchers or (), "launcher", registry)
    yield from _unknown((can.checkpoint_io,), "checkpoint_io", registry)
    yield from _unknown(can.accelerators or (), "accelerator", registry)
    own = {name.casefold() for name in can.engine_precisions}
    wanted = [name for name in can.precisions or () if name.casefold() not in own]
    yield from _unknown(wanted, "precision", registry)
    taken = {name.casefold() for name in can.precisions or own}
    if left_out := sorted(own - taken):
        yield (
            f"it names the engine's precision(s) {', '.join(left_out)}, and not in precisions, so "
            "that nobody can choose them: name them there too"
        )
    if strange := [name for name in can.compiles if name != "model"]:
        yield f"it names {', '.join(map(repr, strange))} in compiles; expected 'model' or nothing"
    for kind in ("launcher", "checkpoint_io"):
        if isinstance(name := spec.init_args.get(kind), str) and name not in (
            *(can.launchers or ()),
            can.checkpoint_io,
        ):
            yield from _unknown((name,), kind, registry)
    if not why:
        yield from check_source(spec, registry)


def _unknown(names: Iterable[str], kind: str, registry: Registry) -> Iterator[str]:
    """Yield which names mean nothing here, unless a distribution that is known provides them."""
    for name in dict.fromkeys(names):
        try:
            meant = registry.find(kind, name).spec.name
            if kind == "precision" and meant != name:
                yield (
                    f"it names the precision {name!r}, which a plan calls otherwise: write "
                    f"{meant!r}"
                )
        except ConfigurationError as error:
            if not installation_hint(name, kind):
                what = kind.replace("_", " ")
                article = "an" if what[0] in "aeiou" else "a"
                yield f"it names {article} {what} that cannot be found: {error}"
