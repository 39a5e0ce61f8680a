"""Ranks that communicate over a torch.distributed process group; how a rank joins and leaves it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.discovery import with_former_names
from stratagem.environments import ClusterEnvironment
from stratagem.errors import CommunicationError, ConfigurationError, UserCodeError, with_explanation
from stratagem.launch import at_end_of_rank, exit_with_error, record_failure, this_rank
from stratagem.state import bytes_of, decode, encode
from stratagem.strategies import Axis, DataSplit, Ranks, ReduceOp
from stratagem_torch.distributed.diagnosis.hang_watch import HangWatch
from stratagem_torch.distributed.diagnosis.rank_status import COLLECTIVES, RankStatuses
from stratagem_torch.distributed.diagnosis.status_exchange import (
    ANSWER_TIME,
    RankStatus,
    Survey,
    ranges,
)
from stratagem_torch.distributed.runs import FAILED, GroupRuns, event_loops
from stratagem_torch.distributed.socket_store import SocketStore, StoreServer, prefixed
from stratagem_torch.launch import network
from stratagem_torch.launch.network import allow_connections, warn_of_agents_limit

_PATIENCE = 10.0
"""Seconds that rank 0, at its end, waits for the others before it asks where they are."""
_MEETING_PATIENCE = (1.0, ANSWER_TIME + 0.5)
"""Seconds before ranks in `meet` first ask where the others are, and before they ask again: an
earlier second question would have the first answer."""


def leave_process_group(hang_watch: HangWatch) -> None:
    """Leave the group when all ranks are done, or at once where this one has failed."""
    statuses = hang_watch.statuses
    try:
        if not this_rank.failed:
            _leave_together(statuses)
    except RuntimeError:
        pass  # the store has gone with its rank: no rank is left to wait for
    hang_watch.stop()
    statuses.leave()
    if this_rank.device_is_lost:
        # The group would wait for pending work of its device. Threads of a live group cannot be
        # left to the end of the interpreter either.
        if this_rank.failed:
            this_rank.at_end.insert(0, exit_with_error)
        return
    if dist.is_initialized():
        dist.destroy_process_group()
        statuses.exchange.close()
        _wait_for_communication_threads()


def _leave_together(statuses: RankStatuses) -> None:
    """Mark this rank done; rank 0 waits for the others, which may need the store that it holds.

    A rank that waits in a collective waits for this one, in vain: then the run has failed.
    """
    if statuses.rank != 0:
        statuses.exchange.wait_for_all_to_join(_PATIENCE)
        # Last, since rank 0 may close the store as soon as it has finished.
        statuses.leave()
        statuses.mark_done()
        return
    statuses.mark_done()
    try:
        _wait_for_others(statuses, statuses.staying, "has ended its script")
    except CommunicationError as error:
        # This process is ending already: no caller can catch the error.
        record_failure(error)
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        exit_with_error()


def _wait_for_others(statuses: RankStatuses, staying: Callable[[], set[int]], did: str) -> None:
    """Wait until no other rank stays.

    Args:
        statuses: the statuses of the ranks.
        staying: returns the ranks to wait for.
        did: the last action of this rank, for messages.

    Raises:
        CommunicationError: a remaining rank waits in a collective, and so for this rank.
    """
    asked_at = time.monotonic() + _PATIENCE
    before: dict[int, RankStatus] = {}
    said = False
    while left := staying():
        if this_rank.lost_peer or this_rank.peers_are_gone():
            return  # whoever has started them reports it
        time.sleep(0.002 if time.monotonic() < asked_at - _PATIENCE + 1 else 0.1)
        if time.monotonic() < asked_at:
            continue
        asked_at = time.monotonic() + _PATIENCE
        survey = statuses.ask()
        now = {rank: status for rank, status in survey.answers.items() if rank in left}
        stuck = {rank: status for rank, status in now.items() if status == before.get(rank)}
        if any(status.operation in COLLECTIVES for status in stuck.values()):
            raise CommunicationError(
                f"this rank ({statuses.rank}) {did}, and others wait for it in a collective:\n"
                + "\n".join(f"  {line}" for line in statuses.described(Survey(stuck), []))
                + with_explanation(
                    "\nEvery rank must call the same collectives and take the same number of steps",
                    "hang",
                )
            )
        if before and not (now or before.keys() & left):
            return  # they have ended without a word, or cannot be reached
        before = {**now, statuses.rank: statuses.here()}
        if not said:
            said = True
            where = "; ".join(
                statuses.described(Survey(now, unknown=survey.unknown), sorted(left - now.keys()))
            )
            print(
                f"stratagem: rank {statuses.rank} {did}; it waits for the others. {where}",
                file=sys.stderr,
                flush=True,
            )


def _next_place() -> tuple[str, str]:
    """Return where ranks report that they have come here, and that their run has failed before."""
    run = 0 if _runs is None else _runs.number
    return f"end/{run}/{next(_meetings)}", f"{FAILED}/{run}"


def _staying(statuses: RankStatuses, place: str, failure: str) -> set[int]:
    """Return the other ranks that have not come to a place, and may still come."""
    return statuses.staying(place) & statuses.staying(failure)


def _wait_for_steps(statuses: RankStatuses, place: str, failure: str, did: str) -> None:
    """Wait until all ranks have reported their arrival at a place.

    Args:
        statuses: the statuses of the ranks.
        place: the place that ranks report on arrival.
        failure: where ranks report that their run has failed.
        did: the last action of this rank, for the error.

    Raises:
        CommunicationError: a rank has failed; or all missing ranks wait in a collective, and so for
            a rank that has arrived.
    """
    first, later = _MEETING_PATIENCE
    asked_at, pause = time.monotonic() + first, 0.0005
    before: dict[int, RankStatus] = {}
    while left := _staying(statuses, place, failure):
        if this_rank.lost_peer or this_rank.peers_are_gone():
            return  # whoever has started them reports it
        time.sleep(pause)
        pause = min(1.3 * pause, 0.1)
        if time.monotonic() < asked_at:
            continue
        survey = statuses.ask()
        asked_at = time.monotonic() + later
        answers = {rank: status for rank, status in survey.answers.items() if rank in left}
        waits = all(status.operation in COLLECTIVES for status in answers.values())
        if waits and answers == before and answers.keys() == left:
            raise CommunicationError(
                f"this rank ({statuses.rank}) {did}, and the others wait for it in a collective:\n"
                + "\n".join(f"  {line}" for line in statuses.described(Survey(answers), []))
                + "\nIn an evaluation, ranks may have different numbers of batches. In a step, use "
                "self.all_gather or the collectives of trainer.ranks, which run among the ranks "
                "that have a batch, or communicate in a hook of the epoch's end"
            )
        before = answers
    ended = statuses.exchange.ended(failure) | statuses.exchange.ended(place)
    if failed := tuple(rank for rank, how in ended.items() if how == "failed"):
        raise CommunicationError(
            f"this rank ({statuses.rank}) {did}, and rank(s) {ranges(failed)} failed", failed
        )


def _wait_for_communication_threads(timeout: float = 1.0) -> None:
    """Wait until gloo's threads are idle.

    A model that was wrapped by DDP keeps them alive. A thread that still releases a tensor while
    the interpreter shuts down aborts the process.
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


_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_own_store: SocketStore | None = None
"""The store for requests of Stratagem; None: they use that of the process group."""
_statuses: RankStatuses | None = None
"""Of this process: there is one process group, whatever the number of strategies."""
_runs: GroupRuns | None = None
_meetings = count(1)
"""Numbers of the places where the ranks meet in a run, from 1 in each run."""


@with_former_names
class ProcessGroupRanks(Ranks):
    """Ranks that communicate over torch.distributed's default process group.

    Args:
        environment: where this process learns its ranks.
        world_size: the number of ranks.
        data_splits, axes: see `Ranks`.

    Example:
        >>> from stratagem.environments import PlainEnvironment
        >>> from stratagem.strategies import ProcessGroupRanks
        >>> ranks = ProcessGroupRanks(PlainEnvironment(), 4, [(0, 2), (0, 2), (1, 2), (1, 2)])
        >>> ranks.data_split, ranks.data_groups
        ((0, 2), ((0, 1), (2, 3)))
    """

    size_dtype: ClassVar[torch.dtype] = torch.int64
    """Of the sizes of safe data, in bytes, that ranks tell each other on their devices."""

    def __init__(
        self,
        environment: ClusterEnvironment,
        world_size: int,
        data_splits: Sequence[DataSplit] | None = None,
        axes: Sequence[Axis] = (),
    ) -> None:
        super().__init__(
            global_rank=environment.global_rank(),
            local_rank=environment.local_rank(),
            node_rank=environment.node_rank(),
            world_size=world_size,
            data_splits=data_splits,
            axes=axes,
        )
        self._groups: dict[tuple[int, ...], Any] = {}
        """The process groups of `among`."""

    def _device(self) -> torch.device:
        if self.device is None:
            raise ConfigurationError(
                "ranks communicate once their processes are launched: call this in a run of the "
                "Trainer, after lite.launch(), in run() of a Lite, or in a strategy after "
                "super().setup_environment()"
            )
        return self.device

    def _data_device(self) -> torch.device:
        """Return where weights-only-safe data lies while it is exchanged.

        In host memory where the group communicates that too: it never waits for a device.
        """
        device = self._device()
        return torch.device("cpu") if "cpu:" in dist.get_backend_config() else device

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Return the reduction over ranks; see `Ranks.all_reduce`."""
        if op not in _OPERATIONS:
            raise ConfigurationError(
                f"all_reduce(op={op!r}): expected one of {', '.join(map(repr, _OPERATIONS))}"
            )
        # nccl takes contiguous tensors only.
        reduced = tensor.detach().to(
            self._device(), copy=True, memory_format=torch.contiguous_format
        )
        if op == "mean" and not (reduced.is_floating_point() or reduced.is_complex()):
            reduced = reduced.float()
        dist.all_reduce(reduced, op=_OPERATIONS[op], group=self._group)
        return reduced.div_(len(self.members)) if op == "mean" else reduced

    def all_reduce_ints(
        self, numbers: Sequence[int], op: Literal["sum", "max", "min"]
    ) -> list[int]:
        """Return integers reduced over ranks; see `Ranks.all_reduce_ints`."""
        reduced = torch.tensor(numbers, dtype=torch.long, device=self._data_device())
        dist.all_reduce(reduced, op=_OPERATIONS[op], group=self._group)
        result: list[int] = reduced.tolist()
        return result

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor, stacked; see `Ranks.all_gather`."""
        tensor = tensor.to(self._device()).contiguous()
        if sync_grads:
            # The public function around it raises a deprecation warning on every call (torch 2.13).
            from torch.distributed.nn.functional import _AllGather

            apply: Any = _AllGather.apply
            return torch.stack(apply(self._group or dist.group.WORLD, tensor))
        return torch.stack(self._gathered(tensor.detach()))

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self.members]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    @property
    def _group(self) -> Any:
        """The process group of the members; None: the default group."""
        return self._groups.get(self.members)

    def connect(self, members: Sequence[int]) -> None:
        """Make a process group of these ranks, which is kept; see `Ranks.connect`."""
        if tuple(members) not in self._groups and len(members) < self.world_size:
            timeout = None if _statuses is None else timedelta(seconds=_statuses.timeout)
            self._groups[tuple(members)] = _group_of(tuple(members), timeout)

    @contextmanager
    def among(self, members: Sequence[int]) -> Iterator[None]:
        """Let also torch.distributed's default group be these ranks; see `Ranks.among`.

        The collectives of metric objects, and of user code without a group of its own, use it.
        """
        with super().among(members):
            group, default = self._group, dist.group.WORLD
            # Torch takes a rank of the default group for its number among all ranks.
            keeps_numbers = self.members == tuple(range(len(self.members)))
            if group is not None and keeps_numbers:
                dist.group.WORLD = group
            try:
                yield
            finally:
                dist.group.WORLD = default

    def broadcast(self, data: Any, src: int = 0) -> Any:
        """Return rank `src`'s data; see `Ranks.broadcast`."""
        if src not in self.members:
            raise UserCodeError(
                f"broadcast(src={src}): expected a rank that has a batch left in this evaluation, "
                f"one of {', '.join(map(str, self.members))}; broadcast in a hook of the epoch, "
                "such as on_validation_epoch_end, which runs on all ranks"
            )
        source: dict[str, Any] = {"group": self._group, "group_src": self.members.index(src)}
        device, is_source = self._data_device(), self.global_rank == src
        encoded, size = self._encoded(data) if is_source else (torch.empty(0), 0)
        told = torch.tensor(size, dtype=self.size_dtype, device=device)
        dist.broadcast(told, **source)
        if is_source:
            message = encoded.to(device)
        else:
            size = int(told)
            message = torch.empty(abs(size), dtype=torch.uint8, device=device)
        dist.broadcast(message, **source)
        if size < 0:
            raise TypeError(bytes_of(message).decode())
        return data if is_source else decode(message)

    def gather_objects(self, data: Any) -> list[Any]:
        """Return every rank's weights-only-safe data; see `Ranks.gather_objects`."""
        device = self._data_device()
        encoded, size = self._encoded(data)
        told = self._gathered(torch.tensor(size, dtype=self.size_dtype, device=device))
        sizes = [int(of_rank) for of_rank in told]
        padded = torch.zeros(max(map(abs, sizes)), dtype=torch.uint8, device=device)
        padded[: encoded.numel()] = encoded.to(device)
        rows = self._gathered(padded)
        messages = [row[: abs(size)] for row, size in zip(rows, sizes, strict=True)]
        for message, size in zip(messages, sizes, strict=True):
            if size < 0:
                raise TypeError(bytes_of(message).decode())
        return [decode(message) for message in messages]

    def _encoded(self, data: Any) -> tuple[Tensor, int]:
        """Return data as bytes, and their number.

        If the data are not safe, return the text of the error and its negative number of bytes: all
        ranks raise, since the others would wait for a rank that raised alone.
        """
        try:
            encoded = encode(data)
        except Exception as error:
            text = bytearray(f"rank {self.global_rank}: {error}".encode(errors="replace"))
            return torch.frombuffer(text, dtype=torch.uint8), -len(text)
        return encoded, encoded.numel()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes on rank 0; see `Ranks.gather_bytes`."""
        device = self._data_device()
        size = torch.tensor(len(data), dtype=self.size_dtype, device=device)
        dist.all_reduce(size, dist.ReduceOp.MAX)
        message = _padded(data, int(size)).to(device)
        received = None
        if self.is_global_zero:
            received = [torch.empty_like(message) for _ in self.members]
        dist.gather(message, received)
        return [_unpadded(each) for each in received or ()]

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part of the bytes on rank 0; see `Ranks.scatter_bytes`."""
        device = self._data_device()
        longest = max(map(len, parts), default=0)
        size = torch.tensor(longest, dtype=self.size_dtype, device=device)
        dist.broadcast(size, 0)
        messages = None
        if self.is_global_zero:
            messages = [_padded(part, int(size)).to(device) for part in parts]
        message = torch.empty(_PREFIX + int(size), dtype=torch.uint8, device=device)
        dist.scatter(message, messages)
        return _unpadded(message)

    def barrier(self, name: str = "") -> None:
        """Wait for every rank; see `Ranks.barrier`."""
        self._device()
        dist.barrier(group=self._group)

    def end_together(self, did: str) -> None:
        """Wait for every rank, without a collective; see `Ranks.end_together`."""
        if _statuses is not None:
            place, failure = _next_place()
            _statuses.mark("done", place)
            _wait_for_others(_statuses, partial(_staying, _statuses, place, failure), did)

    def meet(self, did: str, *, failed: bool = False) -> None:
        """Wait for every rank, without a collective; see `Ranks.meet`."""
        if _statuses is not None:
            place, failure = _next_place()
            _statuses.mark("failed" if failed else "done", place)
            if not failed:
                _wait_for_steps(_statuses, place, failure, did)

    def store(self) -> Any:
        """Return a store of the ranks; see `Ranks.store`."""
        store: Any = _own_store or dist.distributed_c10d._get_default_store()
        return prefixed(store.clone(), "stratagem_threads")

    def report_status(self, doing: Callable[[], str]) -> None:
        """Include a front end's activity in this rank's status in errors."""
        if _statuses is not None:
            _statuses.doing = doing

    def report_step(self, doing: Callable[[], str]) -> None:
        """Include a strategy's activity within a step in this rank's status in errors.

        Args:
            doing: returns a description such as "forward of stage 1, micro-batch 2"; "" between
                steps. Another thread calls it.
        """
        if _statuses is not None:
            _statuses.within = doing


def _group_of(members: tuple[int, ...], timeout: timedelta | None) -> Any:
    """Return a group of some ranks; one for all strategies of a process."""
    made = _made.setdefault(dist.group.WORLD, {})
    key = members, timeout
    if key not in made:
        made[key] = dist.new_group(list(members), timeout=timeout)
    return made[key]


_made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""The groups of some ranks, for each default group: they have threads, which end with it."""


_PREFIX = 8
"""Bytes of the length before each message: all messages of a collective are padded to one size."""


def _padded(data: bytes, size: int) -> Tensor:
    message = len(data).to_bytes(_PREFIX, "little") + data.ljust(size, b"\0")
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _unpadded(message: Tensor) -> bytes:
    data = bytes_of(message)
    return data[_PREFIX : _PREFIX + int.from_bytes(data[:_PREFIX], "little")]


def join_process_group(
    backend: str,
    ranks: Ranks,
    environment: ClusterEnvironment,
    *,
    timeout: float,
    several_nodes: bool,
) -> None:
    """Join the default process group, or check the existing group; called on every rank.

    Args:
        backend: the backend of torch.distributed.
        ranks: this rank's number, and the number of ranks.
        environment: gives the address on which rank 0 listens.
        timeout: seconds after which a collective fails if a rank does not join it.
        several_nodes: whether the ranks are on more than one node.

    Raises:
        ConfigurationError: this process is already in a group of other ranks, or cannot open a
            connection for each rank.

    Example:
        >>> import inspect
        >>> from stratagem_torch.parallel import join_process_group
        >>> list(inspect.signature(join_process_group).parameters)[:3]
        ['backend', 'ranks', 'environment']
    """
    this_rank.place = ranks.place([ranks.global_rank])
    this_rank.place_of = lambda rank: ranks.place([rank])
    if dist.is_initialized():
        _check_existing_group(ranks, timeout)
        return
    limit = timedelta(seconds=timeout)
    joined: Any
    loops_before = event_loops()
    network.choose_gloo_interface(environment.main_address if several_nodes else None)
    if environment.holds_store:
        if ranks.is_global_zero:
            warn_of_agents_limit(ranks.world_size)
        # torchrun's agent holds the store; only torch's own rendezvous knows how to reach it.
        dist.init_process_group(backend, timeout=limit)
        joined = store = dist.distributed_c10d._get_default_store()
    else:
        joined, store = _join_store(ranks, environment, limit, several_nodes=several_nodes)
        loops_before = event_loops()  # includes the loop of the store, which stays
        # The prefix that env:// rendezvous uses, so that a rank may join by either way.
        with _naming_absent_ranks(store, ranks, timeout):
            _init(backend, joined, "default_pg", ranks, limit)
    statuses = _watch_status(store, ranks, timeout)
    hang_watch = HangWatch(statuses)
    if ranks.world_size > 1:
        statuses.exchange.mark_joined()
        hang_watch.start()
        runs = GroupRuns(
            store,
            ranks.global_rank,
            ranks.world_size,
            timeout=timeout,
            join_again=partial(_join_again, backend, joined, ranks, limit, hang_watch),
            statuses=statuses,
            loops_before=loops_before,
        )
        this_rank.begin_run, this_rank.fail_run = partial(_begin_run, runs), runs.fail
    # Threads of a live process group can abort the interpreter's shutdown.
    at_end_of_rank(partial(leave_process_group, hang_watch))


def _begin_run(runs: GroupRuns, trainer: int) -> int:
    """Begin a run; a rank that failed in the last one may have missed some of its meetings."""
    global _runs, _meetings
    group = runs.begin(trainer)
    _runs, _meetings = runs, count(1)
    return group


def _init(backend: str, store: Any, prefix: str, ranks: Ranks, limit: timedelta) -> None:
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),  # type: ignore[attr-defined]
        rank=ranks.global_rank,
        world_size=ranks.world_size,
        timeout=limit,
    )


@contextmanager
def _naming_absent_ranks(store: Any, ranks: Ranks, timeout: float) -> Iterator[None]:
    """Let the error of a join that has waited too long name the ranks that did not come."""
    store.append("stratagem_joining", f"{ranks.global_rank},")
    try:
        yield
    except RuntimeError as error:
        here = {int(one) for one in store.get("stratagem_joining").decode().split(",") if one}
        if not (absent := set(range(ranks.world_size)) - here):
            raise
        raise CommunicationError(
            f"rank {ranges(absent)} of {ranks.world_size} did not join the process group "
            f"within {timeout:g} s: if it has failed, its output says why; if it needs longer "
            "until it joins, give the strategy a larger timeout="
        ) from error


def _join_again(
    backend: str, store: Any, ranks: Ranks, limit: timedelta, hang_watch: HangWatch, number: int
) -> RankStatuses:
    """Leave the group of a failed run, and join a new one; called on every rank."""
    before = hang_watch.statuses
    before.leave()
    before.exchange.close()
    # Collectives that were begun are not waited for.
    dist.distributed_c10d._abort_process_group()
    _init(backend, store, f"stratagem_pg/{number}", ranks, limit)
    own = prefixed(_own_store or store, f"stratagem_group/{number}")
    statuses = hang_watch.statuses = _watch_status(own, ranks, limit.total_seconds())
    statuses.exchange.mark_joined()
    return statuses


def _join_store(
    ranks: Ranks, environment: ClusterEnvironment, limit: timedelta, *, several_nodes: bool
) -> tuple[Any, Any]:
    """Return the store of the process group, and the one for requests of Stratagem.

    On one node these are a file and a socket of this user. The file keeps all values that were
    set; torch sets few. Otherwise both are a port of rank 0.

    At a port the store accepts requests from any client. It therefore listens on loopback if all
    ranks are on one node, else only on the interface that leads to the other nodes.
    """
    global _own_store
    if not several_nodes and (path := environment.store_file) is not None:
        if _own_store is not None and _own_store.path == f"{path}.socket":
            raise ConfigurationError(
                "this process has already joined a process group, which failed or was destroyed: "
                "remove calls of torch.distributed.destroy_process_group() (Stratagem leaves the "
                "group at the end of the script), or start the next run in new processes"
            )
        if ranks.is_global_zero:
            StoreServer(f"{path}.socket")
        _own_store = SocketStore(f"{path}.socket", limit)
        file_store = dist.FileStore(path, ranks.world_size)  # type: ignore[attr-defined]
        file_store.set_timeout(limit)
        return file_store, _own_store
    main_address = environment.main_address if several_nodes else network.LOOPBACK
    main_port = environment.main_port
    listen_fd = None
    is_holder = ranks.is_global_zero
    if is_holder:
        allow_connections(ranks.world_size)
        # Rank 0 may already have a listening socket, so that no other program can take the port
        # after it was chosen.
        listen_fd = environment.take_listener()
        if listen_fd is None:
            address = network.address_to_listen_on(main_address)
            try:
                listen_fd = network.listen(address, main_port).detach()
            except OSError as error:
                raise ConfigurationError(
                    f"rank 0 cannot listen on port {main_port} of {address or 'this node'} "
                    f"({error.strerror}): set MASTER_PORT (or --main-port) to one that is free "
                    "there"
                ) from error
    store = network.make_store(dist.TCPStore)(  # type: ignore[attr-defined]
        network.address_to_connect_to(main_address),
        main_port,
        ranks.world_size,
        is_master=is_holder,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    return store, store


def _watch_status(store: Any, ranks: Ranks, timeout: float) -> RankStatuses:
    global _statuses
    _statuses = RankStatuses(store, ranks.global_rank, ranks.world_size, timeout=timeout)
    _statuses.place = ranks.place
    if ranks.world_size > 1:
        _statuses.exchange.listen()
    this_rank.where = _statuses.where
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
        # The user has made the group, and ends it with its store: a clone does not keep it alive.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        at_end_of_rank(_watch_status(store, ranks, timeout).leave)
    else:
        _statuses.place = ranks.place
