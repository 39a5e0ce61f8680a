"""A folder of safetensors into the shards of two ranks, and out of them: time and memory.

    python benchmarks/pretrained_load.py
    python benchmarks/pretrained_load.py --layers 4 --width 512 --rounds 1

The model has blocks of linear layers between an embedding and a head, 1.2 GB in float32, in files
of 300 MB. It is built in shards under fsdp, and loaded and saved by `Lite.load_weights` and
`save_pretrained`. Reading the bytes is a read of all files in one process, into one buffer; the
files are in the page cache for all ways. Processor time is that of the slower rank, for machines
that others use too. A plain write is that of the same bytes, with fsync.
Memory is what the peak of a rank rises above its start, where the shards are in memory already, and
is printed beside the largest tensor. Printed are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from stratagem import Lite
from stratagem.checkpoint import save_pretrained

MB = 1e6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(32_000, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32_000, bias=False)


def resident(key: str) -> float:
    """Return a size of this process in MB: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024 / MB


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(function: Callable[[], object]) -> dict[str, float]:
    """Return the time of a call, its processor time, and the memory that its peak adds."""
    forget_peak()
    before, begin, begin_cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    function()
    return {
        "": time.perf_counter() - begin,
        " cpu": time.process_time() - begin_cpu,
        " memory": resident("VmHWM") - before,
    }


def read_bytes(folder: Path) -> None:
    buffer = bytearray(16 << 20)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def write_bytes(folder: Path, target: Path) -> None:
    data = bytes(16 << 20)
    for path in folder.glob("*.safetensors"):
        with target.open("wb", buffering=0) as file:
            for begin in range(0, path.stat().st_size, len(data)):
                file.write(data[: path.stat().st_size - begin])
            os.fsync(file.fileno())


def on_rank(options: argparse.Namespace) -> None:
    """Load and save on this rank, in turns with plain reads; rank 0 writes what all found."""
    lite = Lite(accelerator="cpu", devices=2, strategy="fsdp")
    lite.launch()
    with lite.init_module():
        net = Net(options.layers, options.width)
    model = lite.setup(net)
    folder, out = options.folder / "in", options.folder / "out"
    times: dict[str, list[float]] = {}
    for turn in range(options.rounds):
        if lite.is_global_zero:
            plain = options.folder / "plain"
            for name, call in (
                ("read", partial(read_bytes, folder)),
                ("write", partial(write_bytes, folder, plain)),
            ):
                for key, value in measured(call).items():
                    times.setdefault(name + key, []).append(value)
        lite.barrier()
        for name, call in (
            ("load", partial(lite.load_weights, model, folder)),
            ("save", partial(save_pretrained, model, out, max_shard_size="300MB")),
        ):
            found = measured(call)
            lite.barrier()
            for key, value in found.items():
                times.setdefault(name + key, []).append(max(lite.ranks.gather_objects(value)))
        if lite.is_global_zero and turn + 1 < options.rounds:
            shutil.rmtree(out)
    parameters = list(model.parameters())
    facts = {name: statistics.median(values) for name, values in times.items()}
    facts["whole"] = sum(p.nbytes for p in parameters) / MB
    facts["largest"] = max(p.nbytes for p in parameters) / MB
    if lite.is_global_zero:
        (options.folder / "found.json").write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        on_rank(options)
        return
    with tempfile.TemporaryDirectory() as name:
        options.folder = Path(name)
        model = Lite(accelerator="cpu", devices=1).setup(Net(options.layers, options.width))
        save_pretrained(model, options.folder / "in", max_shard_size="300MB")
        del model
        arguments = [f"--{key}={value}" for key, value in vars(options).items()]
        subprocess.run([sys.executable, __file__, *arguments], check=True)
        found = json.loads((options.folder / "found.json").read_text())
    print(f"{found['whole']:.0f} MB, largest tensor {found['largest']:.0f} MB, 2 ranks of fsdp")
    print(f"{'':16}{'seconds':>9}{'ratio':>7}{'cpu':>9}{'ratio':>7}{'memory above the start':>26}")
    for what, plain in (("load", "read"), ("save", "write")):
        time_ratio, cpu_ratio = (found[what + k] / found[plain + k] for k in ("", " cpu"))
        print(f"{plain + ' the bytes':16}{found[plain]:9.2f}{'':7}{found[plain + ' cpu']:9.2f}")
        print(
            f"{what:16}{found[what]:9.2f}{time_ratio:7.2f}{found[what + ' cpu']:9.2f}"
            f"{cpu_ratio:7.2f}{found[what + ' memory']:23.0f} MB"
        )


if __name__ == "__main__":
    main()
