"""Saving and loading a checkpoint, beside a plain write of the same bytes and `torch.load`.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --layers 12 --width 1024 --rounds 5    # 100.7M parameters

The state is that of linear layers with Adam: parameters and two moments. In each round the ways to
save and to load take turns, each the first in some rounds, so that what else the machine and its
disk do meets all of them alike; printed are medians over the rounds, and the medians' ratio to the
first way. Every save ends on the disk (fsync of the file and of its directory). A plain write is
that of the checkpoint's own bytes, from memory, in pieces of 1 MB. To load is to have all values
copied into a model and its moments: of a file in the page cache, which is the worst case for a
check of it, and of one that has to come from the disk. An asynchronous save is timed until training
would go on, beside `torch.save` without waiting for the disk. Without a checksum is a save whose
hash does nothing. Extra memory is what the peak of a process rises in a save (`ru_maxrss`).
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from stratagem.checkpoint import AsyncCheckpointIO, SingleFileCheckpointIO, checksum

T = TypeVar("T")
State = dict[str, dict[str, Tensor]]


def make_state(layers: int, width: int) -> State:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes[f"{layer}.up.weight"] = (4 * width, width)
        shapes[f"{layer}.up.bias"] = (4 * width,)
        shapes[f"{layer}.down.weight"] = (width, 4 * width)
        shapes[f"{layer}.down.bias"] = (width,)
    parts = ("state_dict", "exp_avg", "exp_avg_sq")
    return {part: {name: torch.randn(shape) for name, shape in shapes.items()} for part in parts}


def sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def plain_write(state: State, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for part in state.values():
            for tensor in part.values():
                # Not a copy: the tensor's own bytes.
                data: memoryview = tensor.numpy().data.cast("B")
                for start in range(0, len(data), 1 << 20):
                    file.write(data[start : start + (1 << 20)])
        os.fsync(file.fileno())
    sync_directory(path.parent)


def torch_save(state: State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def stratagem_save(state: State, path: Path) -> None:
    SingleFileCheckpointIO().save_checkpoint(state, path)


class NoHash:
    """Takes the place of xxhash, to see what that costs."""

    def update(self, data: memoryview) -> None: ...

    def digest(self) -> bytes:
        return b""

    def hexdigest(self) -> str:
        return "0" * 32


class NoChecksum:
    xxh3_128 = NoHash


def save_without_checksum(state: State, path: Path) -> None:
    with mock.patch.object(checksum, "xxhash", NoChecksum):
        stratagem_save(state, path)


def plain_torch_save(state: State, path: Path) -> None:
    torch.save(state, path)


def load_into(target: State, load: Callable[[Path], Any], path: Path) -> None:
    loaded = load(path)
    with torch.no_grad():
        for part, tensors in target.items():
            for name, tensor in tensors.items():
                tensor.copy_(loaded[part][name])


def leave_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def torch_load(path: Path) -> Any:
    return torch.load(path, weights_only=True, mmap=True)


def stratagem_load(path: Path) -> Any:
    return SingleFileCheckpointIO().load_checkpoint(path)


def unverified_load(path: Path) -> Any:
    return SingleFileCheckpointIO(verify=False).load_checkpoint(path)


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def rotated(ways: dict[str, T], by: int) -> list[tuple[str, T]]:
    """Return the ways so that each is the first in turn."""
    items = list(ways.items())
    by %= len(items)
    return items[by:] + items[:by]


def print_table(title: str, taken: dict[str, list[float]]) -> None:
    print(f"\n| {title} | s | of the first | of the first, per round |\n|---|---|---|---|")
    first = next(iter(taken.values()))
    base = statistics.median(first)
    for name, times in taken.items():
        own = statistics.median(times)
        ratios = " ".join(f"{time / other:.2f}" for time, other in zip(times, first, strict=True))
        print(f"| {name} | {own:.3f} | {own / base:.2f} | {ratios} |")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_extra_memory(layers: int, width: int, folder: Path) -> None:
    state = make_state(layers, width)
    stratagem_save({"small": {"a": torch.ones(1000)}}, folder / "small.ckpt")
    before = peak_mb()
    stratagem_save(state, folder / "model.ckpt")
    print(f"{peak_mb() - before:.1f}")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--pause", type=float, default=0.5, help="seconds before each save")
    arguments.add_argument("--dir", type=Path, help="where to save; a temporary folder otherwise")
    arguments.add_argument("--extra-memory", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.extra_memory is not None:
        print_extra_memory(given.layers, given.width, given.extra_memory)
        return

    saves = {"write, fsync": plain_write, "torch.save, fsync": torch_save}
    saves |= {"stratagem": stratagem_save, "stratagem, no checksum": save_without_checksum}
    in_background = AsyncCheckpointIO()
    blocking = {"torch.save": plain_torch_save}

    def save_in_background(state: State, path: Path) -> None:
        in_background.save_checkpoint(dict(state), path)

    blocking["stratagem, async"] = save_in_background
    loads = {"torch.load(mmap=True)": torch_load, "stratagem": stratagem_load}
    loads["stratagem, verify=False"] = unverified_load
    state = make_state(given.layers, given.width)
    target = {part: {n: torch.empty_like(t) for n, t in ts.items()} for part, ts in state.items()}
    saved: dict[str, list[float]] = {name: [] for name in saves}
    blocked: dict[str, list[float]] = {name: [] for name in blocking}
    loaded: dict[str, list[float]] = {name: [] for name in loads}
    cold: dict[str, list[float]] = {name: [] for name in loads}
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        folder = Path(name)
        path, to_load = folder / "model.ckpt", folder / "load.ckpt"
        stratagem_save(state, to_load)
        for round_ in range(given.rounds + 1):
            for way, save in rotated(saves, round_):
                path.unlink(missing_ok=True)
                os.sync()  # what the last way or another process left to write is not this one's
                # Nor what the file system does with the space that became free; and a disk in the
                # cloud that has been busy is slowed down for a while.
                time.sleep(given.pause)
                saved[way].append(seconds(partial(save, state, path)))
            for way, save in rotated(blocking, round_):
                path.unlink(missing_ok=True)
                os.sync()
                time.sleep(given.pause)
                blocked[way].append(seconds(partial(save, state, path)))
                in_background.wait()
            for way, load in rotated(loads, round_):
                # Written just now, or else how it came from the disk decides: what was read by way
                # of page faults is slower to map.
                stratagem_save(state, to_load)
                loaded[way].append(seconds(partial(load_into, target, load, to_load)))
                leave_page_cache(to_load)
                cold[way].append(seconds(partial(load_into, target, load, to_load)))
            if round_ == 0:  # to warm up
                for table in (saved, blocked, loaded, cold):
                    for taken in table.values():
                        taken.clear()
        size = to_load.stat().st_size
        command = [sys.executable, __file__, "--extra-memory", str(folder)]
        command += ["--layers", str(given.layers), "--width", str(given.width)]
        extra = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}, torch {torch.__version__}, {given.rounds} rounds, "
        f"{size / 1e6:.0f} MB"
    )
    print_table("save until durable", saved)
    print_table("training is blocked", blocked)
    print_table("load, from the page cache", loaded)
    print_table("load, from the disk", cold)
    print(f"\nextra memory of a save: {extra} MB")


if __name__ == "__main__":
    main()
