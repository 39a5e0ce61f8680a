"""What it costs to begin an epoch of very many samples, and to go on in its middle.

    python benchmarks/scale_orders.py [--samples 1000000 10000000 100000000 1000000000]

The dataset returns its index and nothing is trained, so that only the order is measured: up to the
first batch of 32, on one rank. Times are the least of three, memory is what a process takes at most
beyond what it had before.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.data.resume import make_resumable
from stratagem.data.resume.resumable import Resumable
from stratagem.data.sharding import shard_loader

BATCH_SIZE = 32


class Samples:
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def reader(samples: int, shards: int, *, shuffle: bool) -> Resumable:
    data: Any = Samples(samples)
    loader: Any = DataLoader(data, batch_size=BATCH_SIZE, shuffle=shuffle)
    return make_resumable(
        shard_loader(loader, 0, shards, even=True), "the loader", shard=(0, shards)
    )


def prepare(samples: int, shards: int, *, shuffle: bool, resume: bool) -> Callable[[], None]:
    """Return what is measured: up to the first batch of an epoch, or to one in its middle."""
    begun = reader(samples, shards, shuffle=shuffle)
    done, state = 0, {}
    if resume:
        next(begun.begin(0, 0)[0])
        state = begun.state()
        done = samples // (2 * BATCH_SIZE * shards)
        begun = reader(samples, shards, shuffle=shuffle)

    def read() -> None:
        if resume:
            begun.resume([state] * shards, done)
        next(begun.begin(0, done)[0])

    return read


def milliseconds(samples: int, shards: int, *, shuffle: bool, resume: bool) -> float:
    times = []
    for _ in range(3):
        read = prepare(samples, shards, shuffle=shuffle, resume=resume)
        began = perf_counter()
        read()
        times.append(perf_counter() - began)
    return min(times) * 1e3


def megabytes(samples: int, shards: int, *, shuffle: bool, resume: bool) -> float:
    read = prepare(samples, shards, shuffle=shuffle, resume=resume)
    receives, sends = os.pipe()
    process = os.fork()  # so that nothing is left in memory from the measurement before
    if process == 0:
        prepare(10, shards, shuffle=shuffle, resume=resume)()  # what a first one imports is there
        Path("/proc/self/clear_refs").write_text("5")  # forgets the most that it had
        before = _status("VmRSS")
        read()
        os.write(sends, str((_status("VmHWM") - before) / 1e3).encode())
        os._exit(0)
    os.close(sends)
    with os.fdopen(receives) as pipe:
        taken = float(pipe.read())
    os.waitpid(process, 0)
    return taken


def _status(name: str) -> float:
    """Return a line of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name))


MEASURES: dict[str, Callable[[int], float]] = {
    f"{order}, {shards} rank(s), {what} ({unit})": functools.partial(
        measure, shards=shards, shuffle=order == "random", resume=what.startswith("resume")
    )
    for order in ("sequential", "random")
    for shards in (1, 2)
    for what in ("start of an epoch", "resume in its middle")
    for unit, measure in (("ms", milliseconds), ("MB", megabytes))
}
"""Title, with its unit -> what measures it for a number of samples."""

SIZES = (10**6, 10**7, 10**8, 10**9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=SIZES)
    sizes = parser.parse_args().samples
    torch.set_num_threads(1)
    print("| order | " + " | ".join(f"{size:.0e}" for size in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for title, measure in MEASURES.items():
        print(f"| {title} | " + " | ".join(f"{measure(size):.1f}" for size in sizes) + " |")


if __name__ == "__main__":
    main()
