"""Devices, accelerator, launcher, precision and checkpoint format: each chosen, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.hints import missing_backend
from stratagem.discovery.registry import Candidate
from stratagem.discovery.specs import AcceleratorSpec, Availability, PrecisionSpec, load_target
from stratagem.errors import ConfigurationError, format_text
from stratagem.plan.cluster import PLAIN
from stratagem.plan.plan import (
    GIVEN,
    NAMED,
    Cluster,
    Draft,
    Selection,
    accepts,
    capabilities_of,
    either,
    given,
    is_compatible,
    selection_of,
    supports,
)


def choose_devices(draft: Draft) -> tuple[tuple[int, ...], str]:
    """Return device indices on this node, and the reason for them.

    Raises:
        ConfigurationError: the requested devices are not available, or the value is no number of
            devices.
    """
    if draft.elsewhere is not None:
        return _devices_elsewhere(draft, draft.elsewhere)
    accelerator, found, cluster = draft.accelerator, draft.availability, draft.cluster
    wanted = draft.wanted
    asked = draft.asked("devices", "auto")
    if is_zero(asked):
        raise ConfigurationError(
            "devices=0 leaves nothing to train on: pass a number of devices, -1 for all, or "
            "accelerator='cpu' to train without a GPU"
        )
    if asked is None or asked == "auto":
        if wanted is not None and not wanted.many_devices:
            return found.free[:1], f"the strategy uses one {accelerator.name} device"
        local = 0
        if cluster.launched_this_process:
            nodes = draft.request.num_nodes
            local = cluster.local_world_size or (cluster.world_size or 0) // nodes
        if local and not (wanted is not None and wanted.one_process):
            return tuple(range(local)), f"as {cluster.name} says"
        return found.free[: found.auto_count], f"automatic for {accelerator.name}: {found.reason}"
    indices = parse_devices(asked, found, accelerator.name)
    # A cluster may show each of its processes one device of its own, which is the first there.
    own = cluster.launched_this_process and found.count == 1 and indices == (*range(len(indices)),)
    if found.indexed and max(indices) >= found.count and not own:
        raise ConfigurationError(
            f"devices={asked!r} asks for {accelerator.name} device {max(indices)}, but there "
            f"are {found.count} here ({found.reason}), counted from 0: "
            "name those, or pass devices=-1 for all"
        )
    why = "your argument"
    if not found.indexed and len(indices) > 2 * found.count and not cluster.launched_this_process:
        why += f"; so many processes share {found.reason} and are slow"
    return _usable(draft, asked, indices), why


def _usable(draft: Draft, asked: Any, indices: tuple[int, ...]) -> tuple[int, ...]:
    """Return indices of usable devices: the requested indices, or as many other indices.

    Raises:
        ConfigurationError: a requested device is unusable, or too few devices are usable.
    """
    free, problems = draft.availability.free, draft.availability.problems
    taken = {index: why for index, why in problems if index in indices}
    if not taken:
        return indices
    is_number = isinstance(asked, int) or (isinstance(asked, str) and "," not in asked)
    if is_number and len(free) >= len(indices) and asked not in (-1, "-1"):
        return free[: len(indices)]
    why = "; ".join(f"device {index} {taken[index]}" for index in sorted(taken))
    raise ConfigurationError(
        f"devices={asked!r} asks for {len(indices)} {draft.accelerator.name} device(s), and {why}: "
        f"pass devices={list(free)}"
    )


def _devices_elsewhere(draft: Draft, launcher: Selection) -> tuple[tuple[int, ...], str]:
    """Return device indices on each node of a launcher, without probing devices.

    Raises:
        ConfigurationError: the request leaves the number of devices to this machine.
    """
    asked = draft.request.devices
    if asked in (None, "auto", -1, "-1") or is_zero(asked):
        raise ConfigurationError(
            f"devices={asked!r} counts the devices of this machine, but the launcher "
            f"{launcher.name!r} starts ranks elsewhere: pass the number of "
            f"{draft.accelerator.name} devices to use on each node"
        )
    unknown = Availability(0, "not looked for here")
    return parse_devices(asked, unknown, draft.accelerator.name), "your argument"


def choose_num_nodes(draft: Draft) -> int:
    """Return the number of nodes.

    Raises:
        ConfigurationError: the value is not a number of nodes, or no launcher or cluster starts
            ranks on all nodes.
    """
    cluster, capabilities, local = draft.cluster, draft.capabilities, len(draft.devices)
    asked = draft.request.num_nodes
    if not is_index(asked) or asked < 1:
        raise ConfigurationError(f"num_nodes={asked!r}: expected a whole number of at least 1")
    if asked > 1 and not capabilities.multi_node:
        return asked  # which is refused in any cluster
    spans_nodes = supports(draft.requested_launcher, "spans_nodes")
    has_cluster = spans_nodes or cluster.launched_this_process or cluster.name != PLAIN
    if asked > 1 and not has_cluster:
        needed = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
        if missing := [name for name in needed if name not in draft.request.environ]:
            raise ConfigurationError(
                f"num_nodes={asked} needs a cluster, and none was detected: start the script "
                "with torchrun or a cluster's launcher, or set MASTER_ADDR, MASTER_PORT and "
                f"NODE_RANK on each node (not set: {', '.join(missing)})"
            )
    if asked == 1 and cluster.launched_this_process and not capabilities.one_process:
        world = cluster.world_size or local
        return max(1, world // (cluster.local_world_size or local))
    return asked


def parse_devices(asked: Any, found: Availability, accelerator: str) -> tuple[int, ...]:
    """Return device indices for a number of devices, a list of them, or a string of either."""
    value = asked
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        value = numbers if "," in value else (numbers[0] if numbers else None)
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0):
        return tuple(range(found.count if value == -1 else value))
    if isinstance(value, Sequence) and value and all(is_index(index) for index in value):
        if len(set(value)) < len(value):
            raise ConfigurationError(f"devices={asked!r} names a device twice; name each once")
        if not found.indexed:
            raise ConfigurationError(
                f"devices={asked!r} chooses devices by index, but {accelerator} devices have none: "
                f"pass a number, such as devices={len(value)}"
            )
        return tuple(value)
    raise ConfigurationError(
        f"devices={asked!r}: expected a number of devices, -1 for all, a list of indices such as "
        "[1, 4] or '1, 4', or 'auto'"
    )


def is_index(value: object) -> bool:
    """Whether a value is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_zero(value: object) -> bool:
    """Whether a value is the number 0, not False."""
    return value == 0 and is_index(value)


ASYNC = "async"
DEFAULT_LAUNCHER = "script"
"""What starts the ranks of a strategy that takes any launcher, where none is asked for."""

# -- accelerator


def choose_accelerator(draft: Draft) -> tuple[Selection, Availability]:
    """Return the accelerator and the result of its probe.

    No accelerator is probed if the launcher's devices are not on this machine.

    Raises:
        ConfigurationError: the accelerator is not available here, or no accelerator is.
    """
    elsewhere = draft.elsewhere
    asked = draft.asked("accelerator", "auto")
    if not isinstance(asked, str):
        name = getattr(asked, "name", None)
        if not isinstance(name, str) or isinstance(asked, type):
            raise ConfigurationError(
                f"accelerator={asked!r}: expected a name or an instance of "
                "stratagem.accelerators.Accelerator" + _of_device(str(asked))
            )
        selected = Selection("accelerator", name, GIVEN, "you passed it", asked)
    elif asked != "auto":
        if advice := _of_device(asked) if ":" in asked else "":
            raise ConfigurationError(f"accelerator={asked!r}: expected a name{advice}")
        sharing = draft.registry.sharing("accelerator", asked)
        if sharing and elsewhere is None:
            return _present_accelerator(draft, asked, sharing)
        selected = draft.find("accelerator", asked, NAMED)
    elif draft.request.devices is None:
        selected = draft.find("accelerator", "cpu", "devices=None")
    elif elsewhere is not None:
        raise ConfigurationError(
            "accelerator='auto' takes the best of this machine, but the launcher "
            f"{elsewhere.name!r} starts ranks elsewhere: name the accelerator that is there"
        )
    else:
        return _best_accelerator(draft)
    if elsewhere is not None:
        return selected, Availability(0, f"not looked for: {elsewhere.name} starts ranks elsewhere")
    found = draft.probe(selected.source)
    if not found.free:
        name = asked if isinstance(asked, str) else selected.name
        raise ConfigurationError(
            f"accelerator={name!r} is not available on this machine: {_why_not(found)}; "
            "pass accelerator='auto' to take what there is"
        )
    return selected, found


def _present_accelerator(
    draft: Draft, alias: str, sharing: Sequence[Candidate]
) -> tuple[Selection, Availability]:
    """Return the accelerator that is on this machine, of those that share an alias ("gpu")."""
    probed = [(each, draft.probe(each.spec)) for each in sharing]
    here = [(each, found) for each, found in probed if found.free]
    if len(here) == 1:
        return selection_of(here[0][0], f"the {alias} of this machine"), here[0][1]
    said = "; ".join(f"{each.spec.name!r} ({_why_not(found)})" for each, found in here or probed)
    raise ConfigurationError(
        f"accelerator={alias!r} means one of several that are on this machine: name it: {said}"
        if here
        else f"accelerator={alias!r} is not available on this machine: {said}; "
        "pass accelerator='auto' to take what there is"
    )


def _of_device(device: str) -> str:
    """Return how to ask for a device of torch such as "cuda:0"; "": it is none."""
    name, _, index = device.partition(":")
    if not name.isidentifier() or (index and not index.isdecimal()):
        return ""
    return f": write accelerator={name!r}" + (f", devices=[{index}]" if index else "")


def _best_accelerator(draft: Draft) -> tuple[Selection, Availability]:
    wanted = draft.wanted
    accelerators = [
        (candidate, candidate.spec)
        for candidate in draft.registry.candidates("accelerator")
        if isinstance(candidate.spec, AcceleratorSpec)
    ]
    accelerators.sort(key=lambda each: each[1].priority, reverse=True)
    refused = []
    for candidate, spec in accelerators:
        if wanted is not None and not is_compatible(wanted, selection_of(candidate, "")):
            refused.append(f"{spec.name} (not for this strategy)")
            continue
        found = draft.probe(spec)
        if found.free:
            why = f"the best that is available here ({found.reason})"
            missing = missing_backend("auto", draft.registry.names("accelerator"))
            return selection_of(candidate, "; ".join(filter(None, (why, missing)))), found
        refused.append(f"{spec.name} ({_why_not(found)})")
    raise ConfigurationError(
        "no accelerator is available for this request: "
        + ("; ".join(refused) or "none is known")
        + ". Name another strategy, or run where there is one (`stratagem doctor` lists them)"
    )


def _why_not(found: Availability) -> str:
    """Return why no device of an accelerator can be used."""
    return "; ".join((found.reason, *(f"device {i} {why}" for i, why in found.problems)))


def probe_accelerator(accelerator: Any) -> Availability:
    """Return the devices that an accelerator (its spec, or an object) finds on this machine.

    A probe that fails finds nothing, and its error is the reason: a vendor's broken SDK must not
    stop a request that can be met without it.
    """
    try:
        if isinstance(accelerator, AcceleratorSpec):
            function = load_target(accelerator.probe, what=f"probe of {accelerator.name!r}")
        else:
            function = accelerator.availability
        found = function()
    except (Exception, SystemExit) as error:
        return Availability(
            0, f"its probe failed with {format_text(f'{type(error).__name__}: {error}', 1000)}"
        )
    if not isinstance(found, Availability):
        return Availability(
            0, f"its probe returned {found!r}; expected stratagem.discovery.Availability"
        )
    return replace(found, reason=format_text(str(found.reason), 1000))


# -- launcher


def find_requested_launcher(draft: Draft, strategy: Selection | None) -> Selection | None:
    """Return the requested launcher, unless ranks already run.

    Args:
        draft: the choices so far.
        strategy: the strategy to launch, or None before its choice.

    Raises:
        ConfigurationError: the launcher cannot start ranks, or not for this strategy.
    """
    asked = draft.asked("launcher", None)
    if asked is None or draft.cluster.launched_this_process:
        return None
    if strategy is not None:
        _check_starts(draft, strategy, asked)
    if not isinstance(asked, str):
        return given("launcher", asked, method="launch", base="stratagem.launch.Launcher")
    of_strategy = draft.request.launcher is None
    selected = draft.find("launcher", asked, "as the strategy asks" if of_strategy else NAMED)
    if not supports(selected, "starts_ranks"):
        raise ConfigurationError(
            f"launcher={asked!r} starts no ranks: expected one that does, such as "
            f"{DEFAULT_LAUNCHER!r} (`stratagem doctor` lists them)"
        )
    return selected


def _check_starts(draft: Draft, strategy: Selection, asked: Any) -> None:
    """Refuse a launcher that does not go with a strategy."""
    capabilities = capabilities_of(strategy)
    if capabilities.one_process:
        if draft.request.launcher is None:
            return
        raise ConfigurationError(
            f"the strategy {strategy.name!r} trains in one process, so the launcher "
            f"{_name_of(asked)!r} has no ranks to start: pass a strategy for several processes "
            "such as 'ddp', or no launcher"
        )
    accepted = capabilities.launchers
    if accepted is not None and _name_of(asked) not in accepted:
        raise ConfigurationError(
            f"the strategy {strategy.name!r} is started by {either(accepted)}, received "
            f"launcher={asked!r}"
        )


def choose_launcher(draft: Draft) -> Selection:
    """Return the launcher.

    Raises:
        ConfigurationError: the launcher needs a script, and this is a notebook or an interpreter.
    """
    strategy, capabilities, cluster = draft.strategy, draft.capabilities, draft.cluster
    asked = draft.requested_launcher
    if capabilities.one_process:
        return draft.find("launcher", "in_process", "the strategy needs one process")
    if cluster.launched_this_process:
        return draft.find("launcher", "external", f"{cluster.name} has started the processes")
    how = f"how {strategy.name} starts its processes"
    if asked is None:
        names = capabilities.launchers or (DEFAULT_LAUNCHER,)
        selected = draft.find("launcher", names[0], how)
    elif draft.request.launcher is None:
        selected = replace(asked, why=how)
    else:
        selected = asked
    if draft.request.interactive and not supports(selected, "interactive"):
        notebook = "ddp_notebook" in draft.registry.names("strategy")
        fork = capabilities.launchers is None or "fork" in capabilities.launchers
        raise ConfigurationError(
            f"the strategy {strategy.name!r} starts its processes by the launcher "
            f"{selected.name!r}, which needs a script and cannot work in a notebook or an "
            "interactive interpreter: move the code to a script, or pass devices=1"
            + (", or strategy='ddp_notebook'" if notebook else "")
            + (", or start_method='fork' to the strategy" if fork else "")
        )
    return selected


def cluster_of_ranks(draft: Draft) -> Cluster:
    """Return the running cluster, or one with the environment of the launcher's ranks."""
    launcher, cluster = draft.launcher, draft.cluster
    named = getattr(launcher.source, "cluster_environment", PLAIN)
    was_asked = draft.asked("cluster_environment", None) is not None
    if named == PLAIN or was_asked or cluster.launched_this_process or cluster.name != PLAIN:
        return cluster
    environment = draft.find("cluster_environment", named, f"that of {launcher.name}'s ranks")
    others = tuple(other for other in cluster.rejected if other.name != environment.name)
    return replace(cluster, environment=environment, rejected=others)


def _name_of(component: Any) -> str:
    return component if isinstance(component, str) else type(component).__name__


# -- precision


def choose_precision(draft: Draft) -> Selection:
    """Return the precision.

    Raises:
        ConfigurationError: the value is no precision, or does not fit the strategy or the
            accelerator.
    """
    strategy, capabilities, accelerator = draft.strategy, draft.capabilities, draft.accelerator
    asked = draft.asked("precision", "32-true")
    selected = _asked_precision(draft, asked)
    if capabilities.precisions is not None and selected.name not in capabilities.precisions:
        received = asked if isinstance(asked, (str, int)) else selected.name
        raise ConfigurationError(
            f"the strategy {strategy.name!r} takes the precisions "
            f"{either(capabilities.precisions)}, received precision={received!r}: change one of "
            "the two"
        )
    spec = selected.spec
    if isinstance(spec, PrecisionSpec) and not accepts(spec.accelerators, accelerator):
        instead = "change one of the two"
        if selected.name.startswith("16-"):
            instead = f"pass precision='bf{selected.name}', or another accelerator"
        raise ConfigurationError(
            f"precision={asked!r} works on {either(spec.accelerators)}, received "
            f"accelerator={accelerator.name!r}: {instead}"
        )
    if capabilities.sharded_state and not getattr(selected.source, "shardable", True):
        raise ConfigurationError(
            f"the strategy {strategy.name!r} divides parameters between ranks, which those of "
            f"precision={selected.name!r} cannot be: pass strategy='ddp', or another precision"
        )
    return selected


def _asked_precision(draft: Draft, asked: Any) -> Selection:
    if not isinstance(asked, (str, int)):
        name = getattr(asked, "name", None)
        if not isinstance(name, str):
            raise ConfigurationError(
                f"precision={asked!r}: expected a name, 64, 32, 16, 'bf16', or an instance of "
                "stratagem.precision.Precision"
            )
        return Selection("precision", name, GIVEN, "you passed it", asked)
    why = "the default" if asked == "32-true" else NAMED
    of_engine = _of_engine(str(asked), draft.capabilities)
    if of_engine is None:
        return draft.find("precision", str(asked), why)
    why += f"; {draft.strategy.name} does it itself"
    return Selection("precision", of_engine.name, draft.strategy.provider, why, of_engine)


def _of_engine(asked: str, capabilities: Capabilities) -> PrecisionSpec | None:
    """Return the spec of a precision that the strategy's engine implements, or None."""
    name = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}.get(asked, asked).casefold()
    if name not in capabilities.engine_precisions:
        return None
    return PrecisionSpec(
        name=name,
        target="stratagem.interfaces.precision:EnginePrecision",
        api_version=2,
        summary="by the strategy's engine",
        init_args={"name": name},
    )


# -- checkpoint format


def choose_checkpoint_io(draft: Draft) -> Selection:
    """Return the checkpoint format, asynchronous if that was asked for.

    Raises:
        ConfigurationError: the value is no checkpoint format.
    """
    asked = draft.asked("checkpoint_io", None)
    if asked is None:
        selected = draft.find("checkpoint_io", draft.capabilities.checkpoint_io, "the default")
    elif isinstance(asked, str):
        selected = draft.find("checkpoint_io", asked, NAMED)
    else:
        base = "stratagem.checkpoint.CheckpointIO"
        selected = given("checkpoint_io", asked, method="save_checkpoint", base=base)
    if not draft.request.async_save or selected.name == ASYNC:
        return selected
    why = f"async_save=True; it writes {selected.name}"
    asynchronous = draft.find("checkpoint_io", ASYNC, why)
    assert asynchronous.spec is not None
    inner = selected.name if selected.spec is not None else selected.source
    return replace(asynchronous, source=replace(asynchronous.spec, init_args={"inner": inner}))
