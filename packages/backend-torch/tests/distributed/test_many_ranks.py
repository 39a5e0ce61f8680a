"""What ranks ask of one another grows with their number and not with its square; simulated."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from stratagem.environments import PlainEnvironment
from stratagem.interfaces.ranks import Ranks
from stratagem.runtime.uneven_inputs import UnevenInputs
from stratagem.trainer.metrics.accumulator import ReducedMetric, over_ranks
from stratagem_torch.distributed.diagnosis import status_exchange
from stratagem_torch.distributed.diagnosis.rank_status import RankStatuses
from stratagem_torch.distributed.diagnosis.status_exchange import RankStatus, StatusExchange, Survey
from stratagem_torch.distributed.process_group import ProcessGroupRanks
from stratagem_torch.launch import network

MANY = 4096


class Clock:
    """Time that goes by where somebody sleeps, and only there."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Simulated:
    """Ranks of which nobody waits: a message is received as soon as it is sent."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: Counter[str] = Counter()
        self.silent: set[int] = set()
        self.places: dict[int, RankStatus] = {}
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        # A prefix, and the limit of a call's time, are C++ and a thread: nothing to be counted.
        monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
        monkeypatch.setattr(status_exchange, "BoundedStore", lambda store, seconds: store)
        clock = Clock()
        monkeypatch.setattr(status_exchange, "time", clock)
        # What each rank reads in a process of its own is read once here.
        monkeypatch.setattr(status_exchange, "_decode", lru_cache(status_exchange._decode))
        self.statuses = [
            RankStatuses(self, rank, world_size, timeout=600) for rank in range(world_size)
        ]
        for statuses in self.statuses:
            statuses.exchange._here = partial(self.place, statuses.rank)

    def place(self, rank: int) -> RankStatus:
        return self.places.get(rank) or RankStatus(
            rank, "all_reduce", "train.py:31", "fit, epoch 0"
        )

    def clone(self) -> Simulated:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.requests[name] += 1
            if self.store is None:
                raise RuntimeError("connection reset by peer")
            answer = getattr(self.store, name)(*args)
            if name == "multi_set":
                for statuses in self.statuses:
                    if statuses.rank not in self.silent:
                        self.requests["wait"] += 1
                        statuses.exchange.receive(self)
            return answer

        return call


def lost() -> RuntimeError:
    return RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1")


def test_a_rank_that_all_others_have_lost_is_named_by_each_of_them_for_o_of_n_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {}
    for world_size in (64, 512, MANY):
        ranks = Simulated(world_size, monkeypatch)
        ranks.silent.add(7)
        ranks.places[9] = RankStatus(9, "sleep()", "train.py:12")
        for statuses in ranks.statuses:
            if statuses.rank not in (7, 9, world_size - 1):
                statuses.exchange.ask(ranks.place(statuses.rank), bool)
                statuses.exchange.mark("failed")
        error = ranks.statuses[-1].explain(lost())
        assert error is not None
        assert error.missing == (7,)
        text = str(error)
        assert text.startswith("rank(s) 7 missing from ")
        assert f"  ranks 0-6, 8, 10-{world_size - 2}: in all_reduce, at train.py:31 (fit" in text
        assert "  rank 7: no answer within 4 s: it has died, is stopped, or cannot be" in text
        assert "  rank 9: in sleep(), at train.py:12" in text
        counts[world_size] = sum(ranks.requests.values())
    assert counts[MANY] <= 12 * MANY, "2 * MANY**2 in 4 s, when each rank read the others' answers"
    assert counts[MANY] < 9 * counts[512] < 81 * counts[64]


def test_the_error_of_the_rank_that_failed_by_itself_is_the_cause_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Simulated(512, monkeypatch)
    ranks.silent.add(300)
    ranks.statuses[300].report_failure(ValueError("only here"))
    for rank in (0, 1, 511):
        error = ranks.statuses[rank].explain(lost())
        assert error is not None
        assert error.missing == (300,)
        assert "because rank 300 failed:\n\nValueError: only here" in str(error)


def test_rank_answers_queries_during_its_own_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses = Simulated(2, monkeypatch).statuses[1]
    answers = []

    def ask(own: RankStatus, enough: Any) -> Survey:
        answers.append((own, statuses.here()))
        return Survey({1: own})

    monkeypatch.setattr(statuses.exchange, "ask", ask)
    assert statuses.explain(lost()) is not None
    ((own, its_answer),) = answers
    assert its_answer == own
    assert statuses.here() != own, "it is elsewhere once the error is raised"


def test_rank_reads_a_status_summary_sent_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Simulated(2, monkeypatch)
    ranks.places[1] = RankStatus(1, "broadcast", "train.py:29")
    ranks.silent.add(0)  # its waiting thread gets no processor
    ranks.statuses[1].exchange.ask(ranks.place(1), bool)
    ranks.statuses[1].exchange.mark("failed")
    ranks.silent.add(1)
    error = ranks.statuses[0].explain(lost())
    assert "rank 1: in broadcast, at train.py:29" in str(error)


def test_where_the_store_has_gone_living_ranks_are_not_called_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Simulated(512, monkeypatch)
    ranks.store = None
    error = ranks.statuses[5].explain(lost())
    assert error is not None
    assert error.missing == (0,)
    assert (
        "rank 0: no answer within 4 s: it has died, is stopped, or cannot be reached (it holds"
        in str(error)
    )
    assert (
        "ranks 1-4, 6-511: not known where: the store that the ranks meet at does not answer"
        in str(error)
    )


def test_rank_collects_statuses_if_the_collector_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Simulated(64, monkeypatch)
    monkeypatch.setattr(status_exchange, "_SPREAD_TIME", -4.0)
    ranks.store.add("asked/0/0", 1)
    error = ranks.statuses[5].explain(lost())
    assert error is not None
    assert error.missing == ()
    assert "ranks 0-4, 6-63: in all_reduce" in str(error)


def test_ranks_that_have_ended_are_known_by_one_request_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Simulated(MANY, monkeypatch)
    for statuses in ranks.statuses[:-1]:
        statuses.mark_done()
    assert sum(ranks.requests.values()) == MANY - 1
    ranks.requests.clear()
    assert ranks.statuses[0].staying() == {MANY - 1}
    assert sum(ranks.requests.values()) == 2
    ranks.silent.add(MANY - 1)
    error = ranks.statuses[0].explain(lost())
    assert f"ranks 1-{MANY - 2}: have ended their scripts, in order" not in str(error), (
        "they answer"
    )
    assert f"rank {MANY - 1}: no answer within 4 s" in str(error)


def test_more_places_than_a_summary_names_are_counted() -> None:
    answers = {rank: RankStatus(rank, f"operation {rank}", "") for rank in range(100)}
    survey = status_exchange._decode(status_exchange._encode(Survey(answers)).encode())
    assert survey.answers.keys() == answers.keys()
    assert survey.answers[3] == answers[3]
    assert survey.answers[99].operation == "one of 36 other places"


def test_a_rank_waits_for_its_thread_also_where_the_store_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    exchange = StatusExchange(store, 0, 2, here=lambda: RankStatus(0, "sleep()", ""))
    lost = threading.Event()

    class Waiting:
        """A connection whose loss torch tells its thread late."""

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            lost.wait()
            time.sleep(0.2)
            raise RuntimeError("the connection was closed")

    def refuse(key: str, value: str) -> None:
        lost.set()
        raise RuntimeError("the connection was closed")

    monkeypatch.setattr(exchange, "_waiting", Waiting())
    monkeypatch.setattr(exchange._store, "set", refuse)
    exchange.listen()
    exchange.leave()
    assert not exchange._thread.is_alive()


def test_an_idle_rank_sends_nothing_and_leaves_at_once() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    exchange = StatusExchange(store, 0, 2, here=lambda: RankStatus(0, "sleep()", ""))
    waits: list[Any] = []

    class Waiting:
        """The connection that a rank waits by."""

        def __init__(self, its_own: Any) -> None:
            self.its_own = its_own

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            waits.append(timeout)
            self.its_own.wait(keys, timeout)

    exchange._waiting = Waiting(exchange._waiting)
    exchange.listen()
    began = time.monotonic()
    exchange.leave()
    assert time.monotonic() - began < 2
    assert not exchange._thread.is_alive()
    # A request when a wait begins, and one when its time is over.
    assert waits
    assert all(2 / timeout.total_seconds() < 0.025 for timeout in waits)
    exchange.close()
    with pytest.raises(RuntimeError, match="the store has been closed"):
        exchange.ended()


def test_no_rank_leaves_while_another_still_makes_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchanges = [statuses.exchange for statuses in Simulated(3, monkeypatch).statuses]
    clock: Any = vars(status_exchange)["time"]
    for exchange in exchanges[:2]:
        exchange.mark_joined()
    exchanges[1].wait_for_all_to_join(10.0)
    assert clock.now >= 10.0  # not for ever: the third may be gone
    exchanges[2].mark_joined()
    before = clock.now
    for exchange in exchanges:
        exchange.wait_for_all_to_join(10.0)
    assert clock.now == before


# -- collectives


class Counting(ProcessGroupRanks):
    """Rank 0 of a fake process group; counts what it exchanges."""

    def __init__(self, world_size: int) -> None:
        super().__init__(PlainEnvironment(), world_size)
        self.device = torch.device("cpu")
        self.exchanged: list[tuple[str, int]] = []

    def all_reduce_ints(self, numbers: Any, op: Any) -> list[int]:
        self.exchanged.append(("reduce", len(numbers)))
        return super().all_reduce_ints(numbers, op)

    def all_gather(self, tensor: torch.Tensor, *, sync_grads: bool = False) -> torch.Tensor:
        self.exchanged.append(("gather", tensor.numel()))
        return super().all_gather(tensor, sync_grads=sync_grads)


@pytest.fixture
def ranks() -> Iterator[Counting]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MANY)
    yield Counting(MANY)
    dist.destroy_process_group()


def test_a_step_of_uneven_inputs_is_one_all_reduce_of_two_numbers(ranks: Counting) -> None:
    inputs = UnevenInputs("the loader", ranks, strategy="DDPStrategy", joins=True)
    for step in range(2):
        assert inputs.next_step(["batch"], step) == (["batch"], None)
    # The first has a checksum of its batch too.
    assert ranks.exchanged == [("reduce", 4), ("reduce", 2)]


def test_the_values_of_an_epoch_are_gathered_as_numbers(ranks: Counting) -> None:
    own = {
        f"value {n}": ReducedMetric("mean", 1.0, 2.0, f"value {n}", True, False) for n in range(20)
    }
    assert over_ranks(own, ranks)[0].keys() == own.keys()
    assert ranks.exchanged == [("reduce", 2), ("gather", 20 * 16)]
    ranks.exchanged.clear()
    assert over_ranks({}, ranks) == ({}, [])
    assert ranks.exchanged == [("reduce", 2)]


def test_a_value_that_is_nan_on_one_rank_is_nan_and_data_groups_count_once() -> None:
    class Four(Ranks):
        def all_gather(self, tensor: torch.Tensor, *, sync_grads: bool = False) -> torch.Tensor:
            others = [[3.0, 1.0], [7.0, 1.0]], [[100.0, 9.0], [1e9, 9.0]], [[5.0, 1.0], [nan, 1.0]]
            rows = [torch.tensor(o, dtype=torch.float64).view(torch.uint8) for o in others]
            return torch.stack([tensor, *rows])

    nan = float("nan")
    four = Four(world_size=4, data_splits=[(0, 3), (1, 3), (0, 3), (2, 3)])
    own = {
        "loss": ReducedMetric("mean", 4.0, 2.0, "loss", True, False),
        "peak": ReducedMetric("max", 9.0, 1.0, "peak", True, False),
    }
    reduced, _ = over_ranks(own, four)
    assert reduced["loss"].value().item() == (4 + 3 + 5) / (2 + 1 + 1)
    assert reduced["peak"].value().isnan()


# -- open files


def test_open_file_limit_is_raised_or_refused() -> None:
    text = """
import resource
from stratagem_torch.launch.network import allow_connections, warn_of_agents_limit

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
allow_connections(8)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
allow_connections(400)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
try:
    allow_connections(4096)
except Exception as error:
    print(type(error).__name__, error)
"""
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    few, many, refused = out.stdout.splitlines()
    assert (few, many) == (str(3 * 8 + 256), "1000")
    assert refused.startswith(
        "ConfigurationError 4096 ranks need 8208 open files in the process that holds the store "
        "that they meet at, and its hard limit is 1000: raise it"
    )


def test_a_limit_of_the_launcher_that_holds_the_store_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.prlimit", lambda pid, limit: (1024, 1024))
    network.warn_of_agents_limit(500)
    with pytest.warns(
        UserWarning, match=r"512 ranks need 1040 open files .* Call `ulimit -n 1040`"
    ):
        network.warn_of_agents_limit(512)
