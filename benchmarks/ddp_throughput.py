"""What training costs over raw DistributedDataParallel, in two processes.

    python benchmarks/ddp_throughput.py [--rounds 15] [--steps 200] [--threads 1]

Two models on the CPU over gloo, SGD: tiny, Linear(32, 2) with batches of 4, where all is overhead;
and mid, three Linear(512, 512) with batches of 64. Raw DDP, the Trainer and Lite take turns in the
same two processes, in an order that changes; a figure is the median over rounds of the wall time a
step divided by raw DDP's in the same round, with quartiles, and of the CPU time of rank 0's main
thread above raw DDP's (which a busy machine disturbs less). `agreement` is the Trainer on data
without a length, where ranks exchange a number before each step. Lightning takes part where it is
installed.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stratagem import Lite, Module, Trainer

WARM_UP = 30
TINY, MID = "tiny", "mid"
Times = tuple[float, float]


class Batches:
    """The same batch again and again; notes when the steps that count begin and end."""

    def __init__(self, size: str, steps: int) -> None:
        self.steps = steps
        self.batch = torch.randn(4, 32) if size == TINY else torch.randn(64, 512)
        self.times = (0.0, 0.0)
        """Seconds for the steps that count: of the clock, and of this thread's CPU."""

    def __len__(self) -> int:
        return WARM_UP + self.steps + 1

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(WARM_UP):
            yield self.batch
        torch.distributed.barrier()
        began, cpu_began = time.perf_counter(), time.thread_time()
        for _ in range(self.steps):
            yield self.batch
        self.times = time.perf_counter() - began, time.thread_time() - cpu_began
        yield self.batch


class Stream(Batches):
    """The same without a length."""

    __len__ = None  # type: ignore[assignment]


def network(size: str) -> nn.Module:
    torch.manual_seed(0)
    if size == TINY:
        return nn.Linear(32, 2)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def raw(size: str, steps: int) -> Times:
    batches = Batches(size, steps)
    model = DistributedDataParallel(network(size))
    optimizer = sgd(model)
    for batch in batches:
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return batches.times


class Bare(Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.net = network(size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def trainer(size: str, steps: int, kind: type[Batches] = Batches) -> Times:
    batches = kind(size, steps)
    Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Bare(size), batches)
    return batches.times


def agreement(size: str, steps: int) -> Times:
    return trainer(size, steps, Stream)


def lite(size: str, steps: int) -> Times:
    batches = Batches(size, steps)
    front = Lite(accelerator="cpu", strategy="ddp", devices=2)
    front.launch()
    net = network(size)
    model, optimizer = front.setup(net, sgd(net))
    for batch in front.setup_dataloaders(batches):
        loss = model(batch).mean()
        optimizer.zero_grad()
        front.backward(loss)
        optimizer.step()
    return batches.times


def lightning_variants() -> dict[str, Callable[[str, int], Times]]:
    try:
        import lightning.pytorch as pl
    except ImportError:
        return {}
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Peer(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, size: str) -> None:
            super().__init__()
            self.net = network(size)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    def fit(size: str, steps: int) -> Times:
        batches = Batches(size, steps)
        # It finds the process group and the ranks' variables, joins them, and takes some away.
        before = dict(os.environ)
        pl.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Peer(size), batches)
        os.environ.update(before)
        return batches.times

    return {f"Lightning {pl.__version__} Trainer": fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    ranks = Lite(accelerator="cpu", strategy="ddp", devices=2)
    ranks.launch()
    torch.set_num_threads(arguments.threads)
    variants: dict[str, Callable[[str, int], Times]] = {
        "raw DDP": raw,
        "Trainer": trainer,
        "Trainer, agreement": agreement,
        "Lite": lite,
        **lightning_variants(),
    }
    order = random.Random(0)  # the same on both ranks
    for size in (TINY, MID):
        rounds: list[dict[str, Times]] = []
        names = list(variants)
        for counted in range(arguments.rounds + 1):
            order.shuffle(names)
            times = {name: variants[name](size, arguments.steps) for name in names}
            if counted:  # the first round warms up
                rounds.append(times)
        ranks.barrier()
        if not ranks.is_global_zero:
            continue
        base = statistics.median(r["raw DDP"][0] for r in rounds) / arguments.steps
        print(
            f"\n{size}: raw DDP {base * 1e6:.0f} us a step; torch {torch.__version__}, "
            f"{platform.machine()}, {time.strftime('%Y-%m-%d')}, {arguments.rounds} rounds of "
            f"{arguments.steps} steps, {arguments.threads} thread(s) a process\n"
        )
        print("| variant | times raw DDP | quartiles | us of CPU above |\n|---|---|---|---|")
        for name in variants:
            if name != "raw DDP":
                pairs = [(r[name], r["raw DDP"]) for r in rounds]
                low, middle, high = statistics.quantiles([a[0] / b[0] for a, b in pairs], n=4)
                cpu = statistics.median((a[1] - b[1]) / arguments.steps for a, b in pairs) * 1e6
                print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
