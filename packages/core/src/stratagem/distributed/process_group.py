"""Ranks that communicate over a torch.distributed process group, and how a rank joins it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.distributed.leave_group import leave_process_group
from stratagem.distributed.rank_status import RankStatuses
from stratagem.errors import ConfigurationError
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.ranks import DataShard, Ranks, ReduceOp
from stratagem.launch import network
from stratagem.launch.rank import STORE_VARIABLE, at_end_of_rank, this_rank
from stratagem.state import plain_data

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_statuses: RankStatuses | None = None
"""Of this process: there is one process group, whatever the number of strategies."""


class ProcessGroupRanks(Ranks):
    """Ranks that communicate over torch.distributed's default process group.

    Args:
        environment: where this process learns its ranks.
        world_size: the number of ranks.
        data_shards: see `Ranks`.

    Example:
        >>> from stratagem.environments import PlainEnvironment
        >>> from stratagem.strategies import ProcessGroupRanks
        >>> ranks = ProcessGroupRanks(PlainEnvironment(), 4, [(0, 2), (0, 2), (1, 2), (1, 2)])
        >>> ranks.data_shard, ranks.data_groups
        ((0, 2), ((0, 1), (2, 3)))
    """

    size_dtype: ClassVar[torch.dtype] = torch.int64
    """Of the sizes of plain data, in bytes, that ranks tell each other on their devices."""

    def __init__(
        self,
        environment: ClusterEnvironment,
        world_size: int,
        data_shards: Sequence[DataShard] | None = None,
    ) -> None:
        super().__init__(
            global_rank=environment.global_rank(),
            local_rank=environment.local_rank(),
            node_rank=environment.node_rank(),
            world_size=world_size,
            data_shards=data_shards,
        )

    def _device(self) -> torch.device:
        if self.device is None:
            raise ConfigurationError(
                "ranks communicate once their processes are launched: call this in a run of the "
                "Trainer, after lite.launch(), or in run() of a Lite"
            )
        return self.device

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Return the reduction over ranks; see `Ranks.all_reduce`."""
        if op not in _OPERATIONS:
            raise ConfigurationError(
                f"all_reduce(op={op!r}): expected one of {', '.join(map(repr, _OPERATIONS))}"
            )
        reduced = tensor.detach().to(self._device(), copy=True)
        if op == "mean" and not (reduced.is_floating_point() or reduced.is_complex()):
            reduced = reduced.float()
        dist.all_reduce(reduced, op=_OPERATIONS[op])
        return reduced.div_(self.world_size) if op == "mean" else reduced

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor, stacked; see `Ranks.all_gather`."""
        tensor = tensor.to(self._device()).contiguous()
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor))  # type: ignore[no-untyped-call]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.detach())
        return torch.stack(gathered)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data; see `Ranks.broadcast`."""
        device = self._device()
        encoded = plain_data.encode(data) if self.global_rank == src else torch.empty(0)
        size = torch.tensor(encoded.numel(), dtype=self.size_dtype, device=device)
        dist.broadcast(size, src)
        if self.global_rank == src:
            message = encoded.to(device)
        else:
            message = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(message, src)
        return data if self.global_rank == src else plain_data.decode(message)

    def gather_plain(self, data: Any) -> list[Any]:
        """Return every rank's plain data; see `Ranks.gather_plain`."""
        device = self._device()
        encoded = plain_data.encode(data).to(device)
        sizes = self.all_gather(torch.tensor(encoded.numel(), dtype=self.size_dtype))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
        padded[: encoded.numel()] = encoded
        rows = self.all_gather(padded)
        return [plain_data.decode(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]

    def barrier(self, name: str = "") -> None:
        """Wait for every rank; see `Ranks.barrier`."""
        self._device()
        dist.barrier()

    def store(self) -> Any:
        """Return a store of the ranks; see `Ranks.store`."""
        store: Any = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore("stratagem_threads", store.clone())  # type: ignore[attr-defined]

    def report_status(self, doing: Callable[[], str]) -> None:
        """Let this rank's status in errors say what a front end is doing."""
        if _statuses is not None:
            _statuses.doing = doing


def join_process_group(
    backend: str,
    ranks: Ranks,
    environment: ClusterEnvironment,
    *,
    timeout: float,
    several_nodes: bool,
) -> None:
    """Join the default process group, or check the one that there is; on every rank.

    Args:
        backend: of torch.distributed.
        ranks: this one's number, and how many there are.
        environment: says where rank 0 listens.
        timeout: seconds after which a collective that a rank does not join ends in an error.
        several_nodes: whether the ranks are on more than one.

    Raises:
        ConfigurationError: this process is in a group of other ranks already.
    """
    if dist.is_initialized():
        _check_existing_group(ranks, timeout)
        return
    limit = timedelta(seconds=timeout)
    store: Any
    if several_nodes:
        network.choose_gloo_interface(environment.main_address)
    if environment.holds_store:
        # torchrun's agent holds the store; only torch's own rendezvous knows how to reach it.
        dist.init_process_group(backend, timeout=limit)
        store = dist.distributed_c10d._get_default_store()
    else:
        holder = "rank 0" if ranks.is_global_zero else ""
        main_port = environment.main_port
        # Rank 0 may have a socket that listens already, so that no other program can take the
        # port between its choice and its use.
        listen_fd = environment.take_listener()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            environment.main_address,
            main_port,
            ranks.world_size,
            is_master=os.environ.get(STORE_VARIABLE, holder) == "rank 0",
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        dist.init_process_group(
            backend,
            # The prefix that env:// rendezvous uses, so that a rank may join by either way.
            store=dist.PrefixStore("default_pg", store),  # type: ignore[attr-defined]
            rank=ranks.global_rank,
            world_size=ranks.world_size,
            timeout=limit,
        )
    # Threads of a live process group can abort the interpreter's shutdown.
    at_end_of_rank(partial(leave_process_group, _watch_status(store, ranks, timeout)))


def _watch_status(store: Any, ranks: Ranks, timeout: float) -> RankStatuses:
    global _statuses
    _statuses = RankStatuses(store, ranks.global_rank, ranks.world_size, timeout=timeout)
    this_rank.explain, this_rank.report = _statuses.explain, _statuses.report_failure
    return _statuses


def _check_existing_group(ranks: Ranks, timeout: float) -> None:
    there = dist.get_world_size(), dist.get_rank()
    if there != (ranks.world_size, ranks.global_rank):
        raise ConfigurationError(
            f"this process is already rank {there[1]} of {there[0]} in a torch.distributed "
            f"group, but the plan makes it rank {ranks.global_rank} of {ranks.world_size}: use "
            "as many devices as the first launch in this process did"
        )
    if _statuses is None:
        # The user has made the group, and ends it.
        store = dist.distributed_c10d._get_default_store()
        at_end_of_rank(_watch_status(store, ranks, timeout).leave)
