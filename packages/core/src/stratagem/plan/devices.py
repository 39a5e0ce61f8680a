"""Devices and nodes: how many processes run where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.specs import Availability
from stratagem.errors import ConfigurationError
from stratagem.plan.cluster import PLAIN, Cluster
from stratagem.plan.selection import Resolution, Selection, supports


def choose_devices(
    resolution: Resolution,
    accelerator: Selection,
    found: Availability,
    wanted: Capabilities | None,
    cluster: Cluster,
) -> tuple[tuple[int, ...], str]:
    """Return device indices on this node, and why these.

    Args:
        resolution: what is to be resolved.
        accelerator: what was chosen.
        found: what its probe found on this machine: some device is free.
        wanted: capabilities of the strategy that was named; None: none was.
        cluster: what the environment says.

    Raises:
        ConfigurationError: what was asked for is not there, or is no number of devices.
    """
    asked = resolution.asked("devices", "auto")
    if is_zero(asked) and found.indexed:
        raise ConfigurationError(
            f"devices=0 leaves nothing to train on with accelerator={accelerator.name!r}: pass "
            "a number of devices, or accelerator='cpu'"
        )
    if asked is None or asked == "auto" or is_zero(asked):
        return _automatic_devices(resolution, accelerator, found, wanted, cluster)
    indices = parse_devices(asked, found, accelerator.name)
    if found.indexed and max(indices) >= found.count:
        raise ConfigurationError(
            f"devices={asked!r} asks for {accelerator.name} device {max(indices)}, but there "
            f"are {found.count} here ({found.reason}), counted from 0"
        )
    return _usable(asked, indices, found, accelerator.name), "you asked for it"


def _usable(
    asked: Any, indices: tuple[int, ...], found: Availability, accelerator: str
) -> tuple[int, ...]:
    """Return indices of devices that can be used: those that were named, or as many others.

    Raises:
        ConfigurationError: one that was named cannot be used, or there are too few that can.
    """
    taken = {index: why for index, why in found.problems if index in indices}
    if not taken:
        return indices
    free = found.free
    is_number = isinstance(asked, int) or (isinstance(asked, str) and "," not in asked)
    if is_number and len(free) >= len(indices) and asked not in (-1, "-1"):
        return free[: len(indices)]
    why = "; ".join(f"device {index} {taken[index]}" for index in sorted(taken))
    raise ConfigurationError(
        f"devices={asked!r} asks for {len(indices)} {accelerator} device(s), and {why}: pass "
        f"devices={list(free)}"
    )


def _automatic_devices(
    resolution: Resolution,
    accelerator: Selection,
    found: Availability,
    wanted: Capabilities | None,
    cluster: Cluster,
) -> tuple[tuple[int, ...], str]:
    local = None
    if cluster.launched_this_process:
        local = cluster.local_world_size
        if local is None and (world := cluster.world_size):
            local = world // resolution.request.num_nodes
    if wanted is not None and not wanted.many_devices:
        return found.free[:1], f"the strategy uses one {accelerator.name} device"
    if local and not (wanted is not None and wanted.one_process):
        return tuple(range(local)), f"as {cluster.name} says"
    return found.free[: found.auto_count], f"automatic for {accelerator.name}: {found.reason}"


def devices_elsewhere(
    resolution: Resolution, accelerator: Selection, launcher: Selection
) -> tuple[tuple[int, ...], str]:
    """Return device indices on each of the nodes that a launcher reaches; nothing is probed.

    Raises:
        ConfigurationError: it was left to this machine to count them.
    """
    asked = resolution.request.devices
    if asked in (None, "auto", -1, "-1") or is_zero(asked):
        raise ConfigurationError(
            f"devices={asked!r} counts the devices of this machine, but the launcher "
            f"{launcher.name!r} starts ranks elsewhere: pass the number of "
            f"{accelerator.name} devices to use on each node"
        )
    unknown = Availability(0, "not looked for here")
    return parse_devices(asked, unknown, accelerator.name), "you asked for it"


def choose_num_nodes(
    resolution: Resolution,
    local: int,
    cluster: Cluster,
    capabilities: Capabilities,
    launcher: Selection | None,
) -> int:
    """Return how many nodes take part.

    Args:
        resolution: what is to be resolved.
        local: ranks on each node.
        cluster: what the environment says.
        capabilities: of the strategy.
        launcher: the one that was asked for; None: none was.

    Raises:
        ConfigurationError: it is no number of nodes, or nothing starts ranks on all of them.
    """
    asked = resolution.request.num_nodes
    if not is_index(asked) or asked < 1:
        raise ConfigurationError(f"num_nodes={asked!r}: expected a whole number of at least 1")
    if asked > 1 and not capabilities.multi_node:
        return asked  # which is refused in any cluster
    spans_nodes = supports(launcher, "spans_nodes")
    if (
        asked > 1
        and not cluster.launched_this_process
        and cluster.name == PLAIN
        and not spans_nodes
    ):
        missing = [
            variable
            for variable in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
            if variable not in resolution.request.environ
        ]
        if missing:
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
