"""Collectives as objects: of a run of one rank, and of torch.distributed within a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from stratagem.errors import ConfigurationError

CALLS = (
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier"),
    *("recv", "reduce", "reduce_scatter", "scatter", "scatter_object_list", "send"),
)
"""Functions of torch.distributed that are methods here, without the argument `group`."""


class SingleDeviceCollective:
    """The collectives of a run with a single rank: they return their argument.

    Example:
        >>> SingleDeviceCollective().broadcast([1, 2])
        [1, 2]
    """

    rank = 0
    world_size = 1

    def setup(self, **options: Any) -> SingleDeviceCollective:
        """Return the object: nothing is to be set up."""
        return self

    create_group = setup

    def teardown(self) -> SingleDeviceCollective:
        """Return the object: no group exists."""
        return self

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Return at once: no other rank exists."""

    def broadcast(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the data of the only rank."""
        return data

    all_reduce = reduce = broadcast_object_list = broadcast


class TorchCollective:
    """A group of ranks whose collectives are methods with the arguments of torch.distributed.

    Example:
        >>> collective = TorchCollective()
        >>> collective.group is None
        True
    """

    def __init__(self) -> None:
        self.group: Any = None
        """The process group; None: of all ranks."""

    def setup(self, **options: Any) -> TorchCollective:
        """Use the ranks of this run; options of `init_process_group` are not needed.

        Raises:
            ConfigurationError: the run has a single rank, without a process group.
        """
        if not dist.is_initialized():
            raise ConfigurationError(
                "TorchCollective.setup() expected several ranks, received a run of one: launch "
                "with devices=2 or more first"
            )
        return self

    def create_group(self, ranks: list[int] | None = None, **options: Any) -> TorchCollective:
        """Make a group of some ranks; every rank of the run calls it."""
        self.group = dist.new_group(ranks, **options)
        return self

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return dist.get_world_size(self.group)

    def teardown(self) -> TorchCollective:
        """Remove the group, but not the run's group."""
        if self.group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(self.group)
        self.group = None
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CALLS:
            raise AttributeError(
                f"TorchCollective has no {name!r}; expected one of {', '.join(CALLS)}"
            )
        return partial(getattr(dist, name), group=self.group)
