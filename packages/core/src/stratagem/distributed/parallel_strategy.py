"""ParallelStrategy: several processes, one device each, that talk over a process group."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.discovery.capabilities import START_METHODS
from stratagem.distributed.rank_status import COLLECTIVES, RankStatus, RankStatuses
from stratagem.errors import CommunicationError, ConfigurationError
from stratagem.interfaces.strategy import Components, ReduceOp, Strategy
from stratagem.launch import network
from stratagem.launch.rank import STORE_VARIABLE, at_end_of_rank, record_failure, this_rank
from stratagem.launch.rank_environment import threads_per_rank
from stratagem.state import plain_data

_PATIENCE = 10.0
"""Seconds that rank 0, at its end, waits for the others before it asks where they are."""

_LONGEST_TIMEOUT = 10 * 365 * 86400.0

_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class ParallelStrategy(Strategy):
    """Trains in several processes with one device each.

    Holds what such strategies share: the process group, ranks and collectives. A subclass says how
    a model is prepared.

    Args:
        process_group_backend: "gloo", "nccl", ..., or one for each kind of device as in
            "cpu:gloo,cuda:nccl"; None takes the accelerator's.
        timeout: after how long (seconds, or a timedelta) a collective that a rank does not join
            ends in an error.
        start_method: "popen", "spawn" or "fork"; another spelling of `launcher`, which calls the
            first one "script".
        sync_batchnorm: batch norm layers take their statistics over all ranks; the same as
            `Trainer(sync_batchnorm=True)`, and the way to ask for it under Lite.
        join_uneven_inputs: under the Trainer, a rank whose batches run out trains on its last one
            again, with weight 0, until no rank has more; callbacks are told of it as of any batch,
            and values logged for the epoch leave it out. Otherwise ranks that do not have as many
            batches are refused: before training where lengths are known, else by an exchange of
            one number before each step. Lite has `Lite.join`.
        **components: see `Strategy`.

    Raises:
        ConfigurationError: the backend is not in this build of torch, or an argument is not what
            is said here.

    Example:
        >>> from stratagem.strategies import DDPStrategy, ParallelStrategy
        >>> issubclass(DDPStrategy, ParallelStrategy)
        True
        >>> DDPStrategy(process_group_backend="gloo", timeout=30).timeout
        30.0
    """

    _statuses: ClassVar[RankStatuses | None] = None
    """Of this process: there is one process group, whatever the number of strategies."""

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 600.0,
        start_method: str | None = None,
        sync_batchnorm: bool = False,
        join_uneven_inputs: bool = False,
        **components: Any,
    ) -> None:
        if start_method is not None:
            components["launcher"] = _launcher(start_method, components.get("launcher"))
        super().__init__(**components)
        if process_group_backend is not None and not (
            isinstance(process_group_backend, str) and _is_there(process_group_backend)
        ):
            raise ConfigurationError(
                f"process_group_backend={process_group_backend!r} is not in this build of torch; "
                f"expected one of {', '.join(filter(_is_there, dist.Backend.backend_list))}"
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"timeout={timeout!r}: expected seconds or a timedelta, more than 0 and at most "
                f"{_LONGEST_TIMEOUT:.0f} s"
            )
        self.process_group_backend = process_group_backend
        self.timeout = float(seconds)
        self.sync_batchnorm = sync_batchnorm
        self.join_uneven_inputs = join_uneven_inputs

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self._ranks[0]

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._ranks[1]

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self._ranks[2]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.components.devices) * self.components.num_nodes

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `Strategy.bind`.

        Raises:
            ConfigurationError: the process group's backend cannot move the accelerator's tensors.
        """
        super().bind(components)
        self._check_backend()
        self._read_ranks()

    @property
    def communication_backend(self) -> str:
        """The process group's backend: what was asked for, or the accelerator's."""
        return self.process_group_backend or self.accelerator.process_group_backend

    def _check_backend(self) -> None:
        backend = self.communication_backend
        takes = dist.Backend.backend_capability.get(backend)
        kind = self.accelerator.device(self.components.devices[0]).type
        if takes is not None and kind not in takes:
            raise ConfigurationError(
                f"process_group_backend={backend!r} communicates tensors on "
                f"{' or '.join(takes)}, and the accelerator {self.accelerator.name!r} has them on "
                f"{kind}: leave it out to take {self.accelerator.process_group_backend!r}"
            )

    def _read_ranks(self) -> None:
        environment = self.cluster_environment
        self._ranks = (
            environment.global_rank(),
            environment.local_rank(),
            environment.node_rank(),
        )

    def setup_environment(self) -> None:
        """Read the ranks, set up the device, then join the process group."""
        # The launcher may have changed them since `bind`.
        self._read_ranks()
        # Every rank of a node shares its cores: with all of them each, two ranks on two cores ran
        # 20 times slower.
        torch.set_num_threads(int(threads_per_rank(len(self.components.devices)).partition(",")[0]))
        super().setup_environment()
        if dist.is_initialized():
            self._check_existing_group()
        else:
            self._join_process_group()

    def _join_process_group(self) -> None:
        backend = self.communication_backend
        timeout = timedelta(seconds=self.timeout)
        environment = self.cluster_environment
        store: Any
        if self.components.num_nodes > 1:
            network.choose_gloo_interface(environment.main_address)
        if environment.holds_store:
            # torchrun's agent holds the store; only torch's own rendezvous knows how to reach it.
            dist.init_process_group(backend, timeout=timeout)
            store = dist.distributed_c10d._get_default_store()
        else:
            holder = "rank 0" if self.global_rank == 0 else ""
            main_port = environment.main_port
            # Rank 0 may have a socket that listens already, so that no other program can take the
            # port between its choice and its use.
            listen_fd = environment.take_listener()
            store = dist.TCPStore(  # type: ignore[attr-defined]
                environment.main_address,
                main_port,
                self.world_size,
                is_master=os.environ.get(STORE_VARIABLE, holder) == "rank 0",
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listen_fd,
            )
            dist.init_process_group(
                backend,
                # The prefix that env:// rendezvous uses, so that a rank may join by either way.
                store=dist.PrefixStore("default_pg", store),  # type: ignore[attr-defined]
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=timeout,
            )
        statuses = self._watch_status(store)
        # Threads of a live process group can abort the interpreter's shutdown.
        at_end_of_rank(partial(_leave_process_group, statuses))

    def _watch_status(self, store: Any) -> RankStatuses:
        statuses = RankStatuses(store, self.global_rank, self.world_size, timeout=self.timeout)
        this_rank.explain, this_rank.report = statuses.explain, statuses.report_failure
        ParallelStrategy._statuses = statuses
        return statuses

    def _check_existing_group(self) -> None:
        there = dist.get_world_size(), dist.get_rank()
        if there != (self.world_size, self.global_rank):
            raise ConfigurationError(
                f"this process is already rank {there[1]} of {there[0]} in a torch.distributed "
                f"group, but the plan makes it rank {self.global_rank} of {self.world_size}: use "
                "as many devices as the first launch in this process did"
            )
        if ParallelStrategy._statuses is None:
            # The user has made the group, and ends it.
            statuses = self._watch_status(dist.distributed_c10d._get_default_store())
            at_end_of_rank(statuses.leave)

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """Let batch norm layers take their statistics over all ranks; see the base class."""
        if self.world_size > 1:
            from stratagem.distributed.sync_batchnorm import synchronize_batch_norm

            synchronize_batch_norm(module, has_kernels=self.accelerator.sync_batchnorm_kernels)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Return the reduction over ranks; see `Strategy.all_reduce`."""
        if op not in _OPERATIONS:
            raise ConfigurationError(
                f"all_reduce(op={op!r}): expected one of {', '.join(map(repr, _OPERATIONS))}"
            )
        reduced = tensor.detach().to(self.device, copy=True)
        if op == "mean" and not (reduced.is_floating_point() or reduced.is_complex()):
            reduced = reduced.float()
        dist.all_reduce(reduced, op=_OPERATIONS[op])
        return reduced.div_(self.world_size) if op == "mean" else reduced

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor, stacked; see `Strategy.all_gather`."""
        tensor = tensor.to(self.device).contiguous()
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor))  # type: ignore[no-untyped-call]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.detach())
        return torch.stack(gathered)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data; see `Strategy.broadcast`."""
        encoded = plain_data.encode(data) if self.global_rank == src else torch.empty(0)
        size = torch.tensor(encoded.numel(), device=self.device)
        dist.broadcast(size, src)
        if self.global_rank == src:
            message = encoded.to(self.device)
        else:
            message = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(message, src)
        return data if self.global_rank == src else plain_data.decode(message)

    def gather_plain(self, data: Any) -> list[Any]:
        """Return every rank's plain data; see `Strategy.gather_plain`."""
        encoded = plain_data.encode(data).to(self.device)
        sizes = self.all_gather(torch.tensor(encoded.numel()))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        padded[: encoded.numel()] = encoded
        rows = self.all_gather(padded)
        return [plain_data.decode(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]

    def barrier(self, name: str = "") -> None:
        """Wait for every rank; see `Strategy.barrier`."""
        dist.barrier()

    def store(self) -> Any:
        """Return a store of the ranks; see `Strategy.store`."""
        store: Any = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore("stratagem_threads", store.clone())  # type: ignore[attr-defined]

    def report_status(self, doing: Callable[[], str]) -> None:
        """Let this rank's position in errors say what a front end is doing."""
        if ParallelStrategy._statuses is not None:
            ParallelStrategy._statuses.doing = doing


def _launcher(start_method: str, launcher: str | None) -> str:
    """Return the launcher that a start method stands for."""
    if start_method not in START_METHODS:
        raise ConfigurationError(
            f"start_method={start_method!r}: expected one of {', '.join(map(repr, START_METHODS))}"
        )
    meant = START_METHODS[start_method]
    if launcher not in (None, meant):
        raise ConfigurationError(
            f"start_method={start_method!r} stands for launcher={meant!r}, received launcher="
            f"{launcher!r} as well: give one of the two"
        )
    return meant


def _is_there(backend: str) -> bool:
    if ":" in backend:  # one for each kind of device, as in "cpu:gloo,cuda:nccl"
        return all(_is_there(part.partition(":")[2]) for part in backend.split(","))
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    known.update(mpi=dist.is_mpi_available, ucc=dist.is_ucc_available)
    known.update(xccl=dist.is_xccl_available, fake=bool, undefined=bool)
    if backend in known:
        return bool(known[backend]())
    return backend in dist.Backend.backend_list


def _leave_process_group(statuses: RankStatuses) -> None:
    try:
        if not this_rank.failed:
            _leave_together(statuses)
    except RuntimeError:
        pass  # the store has gone with the rank that held it: there is nobody to wait for
    statuses.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
        _wait_for_communication_threads()


def _leave_together(statuses: RankStatuses) -> None:
    """Say farewell; rank 0 waits for the others, which may need the store that it holds.

    A rank that waits in a collective waits for this one, in vain: then the run has failed.
    """
    statuses.mark_done()
    if statuses.rank != 0:
        return
    asked_at = time.monotonic() + _PATIENCE
    before: dict[int, RankStatus] = {}
    said = False
    while staying := [r for r in range(1, statuses.world_size) if not statuses.is_done(r)]:
        if this_rank.lost_peer or this_rank.peers_are_gone():
            return  # whoever has started them tells
        time.sleep(0.002 if time.monotonic() < asked_at - _PATIENCE + 1 else 0.1)
        if time.monotonic() < asked_at:
            continue
        asked_at = time.monotonic() + _PATIENCE
        now = statuses.ask()
        stuck = [r for r in staying if r in now and now[r] == before.get(r)]
        if any(now[r].operation in COLLECTIVES for r in stuck):
            _end_with_error(
                "this rank (0) has ended, and others wait for it in a collective:\n"
                + "\n".join(f"  {now[r]}" for r in stuck)
                + "\nEvery rank must call the same collectives and take the same number of steps"
            )
        if before and not any(r in now or r in before for r in staying):
            return  # they have ended without a word, or cannot be reached
        before = now
        if not said:
            said = True
            where = "; ".join(str(now[r]) if r in now else f"rank {r}: no answer" for r in staying)
            print(
                f"stratagem: rank 0 is done; it waits for the others. {where}",
                file=sys.stderr,
                flush=True,
            )


def _end_with_error(message: str) -> NoReturn:
    """End this process with an error while it is ending already, when nobody can catch one."""
    error = CommunicationError(message)
    record_failure(error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _wait_for_communication_threads(timeout: float = 1.0) -> None:
    """Wait until gloo's threads are idle.

    A model that was wrapped by DDP keeps them alive. One that still lets go of a tensor while the
    interpreter shuts down aborts the process (seen once in 25 runs on busy cores).
    """
    deadline = time.monotonic() + timeout
    idle_looks = 0
    # One that waits for the interpreter's lock at a look gets it during the sleep before the next.
    while idle_looks < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
        idle_looks = idle_looks + 1 if not _busy_threads("pt_gloo_runloop") else 0


def _busy_threads(name: str) -> int:
    """Return how many threads of this process with that name are not asleep; 0 if not on Linux."""
    busy = 0
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
        except OSError:
            continue  # ended since the listing
        busy += before.partition("(")[2] == name and after.split()[0] != "S"
    return busy
