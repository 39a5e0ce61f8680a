"""What thousands of ranks cost, simulated on one machine.

    python benchmarks/scale.py [--ranks 8 64 512 4096]

Real are the store, each rank's connections to it and the thread that waits on one of them; the
ranks are simulated by eight processes, each of which plays the main threads of its ranks one after
another. Collectives are those of torch's fake process group: what is timed is a rank's own work,
not the network. The last column is the exponent of ranks in a power law fitted to the row.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stratagem.accelerators import CPUAccelerator
from stratagem.environments import PlainEnvironment
from stratagem.module.module import LogOptions
from stratagem.runtime.uneven_inputs import UnevenInputs
from stratagem.trainer.metrics.log_buffer import LogBuffer
from stratagem.trainer.metrics.metrics import LatestMetrics, Metrics
from stratagem_torch.distributed.diagnosis import status_exchange
from stratagem_torch.distributed.diagnosis.rank_status import RankStatuses
from stratagem_torch.distributed.process_group import ProcessGroupRanks
from stratagem_torch.launch.network import allow_connections

if TYPE_CHECKING:
    from collections.abc import Iterator

Measures = dict[str, Callable[[int], float]]

PROCESSES = 8
IDLE = 3.0
"""Seconds that an idle store is looked at."""
VALUES = 20
"""Values logged in an epoch."""


# -- ranks of a real store


def play_ranks(ranks: Sequence[int], world_size: int, orders: Any) -> None:
    """In a process of its own: be these ranks, and do what is ordered."""
    threading.stack_size(1 << 20)
    # Hundreds of threads that are woken at once would ask for the interpreter each 5 ms.
    sys.setswitchinterval(1.0)
    # A summary is read by each rank in a process of its own; here by each of eight.
    status_exchange._decode = lru_cache(status_exchange._decode)
    statuses: list[RankStatuses] = []
    while (order := orders.recv()) != "exit":
        if isinstance(order, int):
            for rank in ranks:
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    "127.0.0.1", order, world_size, is_master=False, wait_for_workers=False
                )
                statuses.append(_join(world_size, store, rank))
        elif order == "fail":  # at once, or as good as
            for rank, status in zip(ranks, statuses, strict=True):
                # It waits for no answer: the next rank of this process fails at the same time.
                status.exchange.ask(
                    status_exchange.RankStatus(rank, "all_reduce", "train.py:31"), lambda: True
                )
            while not all(status.exchange.summary for status in statuses):
                time.sleep(0.01)
        elif order == "end":
            for status in statuses:
                status.leave()
                status.mark_done()
        orders.send("done")
    os._exit(0)


def _join(world_size: int, store: Any, rank: int) -> RankStatuses:
    statuses = RankStatuses(store, rank, world_size, timeout=600)
    statuses.exchange.listen()
    return statuses


class Simulation:
    """A store in this process, which is rank 0, and the other ranks in others.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        allow_connections(world_size)
        context = multiprocessing.get_context("fork")
        self.world_size = world_size
        self.orders = []
        for index in range(min(PROCESSES, world_size - 1)):
            ours, theirs = context.Pipe()
            ranks = range(1 + index, world_size, PROCESSES)
            process = context.Process(target=play_ranks, args=(ranks, world_size, theirs))
            process.daemon = True
            process.start()
            theirs.close()  # so that a process that ends early is noticed
            self.orders.append(ours)
        self.figures = self._measure()
        self.order("exit", wait=False)

    def order(self, order: object, *, wait: bool = True) -> None:
        for pipe in self.orders:
            pipe.send(order)
        if wait:
            self.wait()

    def wait(self) -> None:
        for pipe in self.orders:
            pipe.recv()

    def _measure(self) -> dict[str, float]:
        files = _open_files()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False
        )
        began = time.process_time()
        self.order(store.port)
        rank_0 = _join(self.world_size, store, 0)
        figures = {"start": time.process_time() - began}
        # Of rank 0's own connections, both ends are open here.
        figures["connections"] = (_open_files() - files - 2) / self.world_size
        woken = _wake_ups()
        time.sleep(IDLE)
        figures["idle"] = (_wake_ups() - woken) / IDLE

        began = time.perf_counter()
        # Rank 0 is the first to ask, and collects; the others do so from its first look on.
        others: list[object] = ["fail"]

        def enough() -> bool:
            while others:
                self.order(others.pop(), wait=False)
            return False

        survey = rank_0.exchange.ask(
            status_exchange.RankStatus(0, "all_reduce", "train.py:31"), enough
        )
        enough()  # few ranks have answered before its first look is over
        self.wait()
        figures["status"] = time.perf_counter() - began
        if len(survey.answers) != self.world_size:
            print(f"{self.world_size - len(survey.answers)} living rank(s) without an answer")
            figures["status"] = math.inf

        began = time.perf_counter()
        self.order("end", wait=False)
        rank_0.mark_done()
        while rank_0.staying():
            time.sleep(0.002)
        figures["end"] = time.perf_counter() - began
        self.wait()
        rank_0.leave()
        rank_0.exchange.close()
        return figures


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _wake_ups() -> int:
    """Return how often threads of this process other than this one have been woken."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(threading.get_native_id()):
            status = (task / "status").read_text()
            total += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


_simulations: dict[int, dict[str, float]] = {}


def simulated(figure: str) -> Callable[[int], float]:
    """Return a measure: one figure of the simulation that they share."""

    def measure(world_size: int) -> float:
        if world_size not in _simulations:
            _simulations[world_size] = Simulation(world_size).figures
        return _simulations[world_size][figure]

    return measure


# -- one rank's own work


@contextmanager
def fake_ranks(world_size: int) -> Iterator[ProcessGroupRanks]:
    """Rank 0 of a process group without others, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        ranks = ProcessGroupRanks(PlainEnvironment(), world_size)
        ranks.device = torch.device("cpu")
        yield ranks
    finally:
        dist.destroy_process_group()


def best(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the seconds that a call takes, the shortest of some."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def uneven_inputs(world_size: int) -> float:
    with fake_ranks(world_size) as ranks:
        inputs = UnevenInputs("the loader", ranks, strategy="DDPStrategy", joins=True)
        return 1e3 * best(lambda: inputs.next_step([0], 0), 100)


def epoch_values(world_size: int) -> float:
    with fake_ranks(world_size) as ranks:
        on_cpu = CPUAccelerator()
        strategy: Any = SimpleNamespace(ranks=ranks, accelerator=on_cpu)
        metrics = Metrics(strategy, LogBuffer([], on_cpu), LatestMetrics())
        options = LogOptions(False, False, False, True, "mean", None, True)

        def epoch() -> None:
            for index in range(VALUES):
                metrics.log(f"value_{index}", 1.0, options, batch_size=1)
            metrics.end_epoch()

        return 1e3 * best(epoch)


MEASURES: Measures = {
    "start, connections: rank 0's CPU time, s": simulated("start"),
    "connections of a rank to the store": simulated("connections"),
    "idle: requests a second, all ranks": simulated("idle"),
    "status of ranks, after all failed at once, s": simulated("status"),
    "end of a run, s": simulated("end"),
    "uneven inputs, a step, ms": uneven_inputs,
    f"epoch's end, {VALUES} values, ms": epoch_values,
}


# -- the table


def exponent(sizes: Sequence[int], figures: Sequence[float]) -> float:
    """Return b of a * size**b, by least squares of the logarithms; NaN where there is none."""
    points = [
        (math.log(size), math.log(figure))
        for size, figure in zip(sizes, figures, strict=True)
        if 0 < figure < math.inf
    ]
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in points)
    spread: float = sum((x - mean_x) ** 2 for x, _ in points)
    return slope / spread


def print_table(what: str, sizes: Sequence[int], measures: Measures) -> None:
    """Measure, and print a row for each measure."""
    width = max(map(len, measures), default=0)
    print(f"{what:<{width}}" + "".join(f"{size:>15,}" for size in sizes) + "    exponent")
    for title, measure in measures.items():
        figures = [measure(size) for size in sizes]
        row = "".join(f"{figure:>15.3g}" for figure in figures)
        print(f"{title:<{width}}{row}{exponent(sizes, figures):>12.2f}", flush=True)


def of_sibling(name: str) -> Measures:
    """Return the measures of a script beside this one; none where it is not there."""
    if not Path(__file__).with_name(f"{name}.py").exists():
        return {}
    measures: Measures = importlib.import_module(name).MEASURES
    return measures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**7, 10**8, 10**9])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # torch's store looks up the name of each client's address, one after another: here nobody is
    # asked for it, so that no name server is measured.
    os.environ["RES_OPTIONS"] = "attempts:0"
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    # Processes are forked before any thread is started here.
    print_table("ranks", arguments.ranks, MEASURES | of_sibling("scale_save"))
    if orders := of_sibling("scale_orders"):
        print()
        print_table("samples", arguments.samples, orders)


if __name__ == "__main__":
    main()
