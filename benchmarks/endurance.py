"""100 launches, 20 at once, 20 kills: does each end cleanly, and is every killed rank named?

    python benchmarks/endurance.py --launches 100 --at-once 20 --kills 20
    python benchmarks/endurance.py --launches 50 --ways deepspeed_stage_2 deepspeed_stage_3

Each launch trains a small model under ddp in two processes, by the launchers in turn. Each kill is
a `kill -9` of a rank at a random moment of a training that would go on for minutes; the time counts
until no process of the launch is left.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(float(sys.argv[3]))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Started(Callback):
    def on_train_start(self, trainer, module):
        Path(sys.argv[4], f"rank{trainer.global_rank}").write_text(str(os.getpid()))


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_steps=int(sys.argv[2]),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=Started(),
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4))
"""

WAYS = ("ddp", "ddp_spawn", "ddp_fork", "torchrun", "stratagem run")


def command(way: str, script: Path, *arguments: str) -> list[str]:
    """Return the command line of one way to launch."""
    python = sys.executable
    if way == "torchrun":
        before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return [python, *before, str(script), "ddp", *arguments]
    if way == "stratagem run":
        program = str(Path(python).with_name("stratagem"))
        return [program, "run", "--devices", "2", str(script), "ddp", *arguments]
    return [python, str(script), way, *arguments]


def members(session: int) -> list[int]:
    """Return the processes with this one among their forebears' sessions; zombies do not count."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"ENDURANCE={session}".encode() in environment.split(b"\0") and state != "Z":
            found.append(int(folder.name))
    return found


def start(line: list[str], number: int) -> subprocess.Popen[str]:
    """Start a launch whose processes can be told by a variable."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ENDURANCE": str(number)}
    return subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def launches(count: int, script: Path, folder: Path, ways: list[str]) -> None:
    """Launch so many times and print how each way ended."""
    codes: dict[str, Counter[int]] = {way: Counter() for way in ways}
    orphans = 0
    for number in range(count):
        way = ways[number % len(ways)]
        program = start(command(way, script, "20", "0", str(folder)), number)
        output, _ = program.communicate(timeout=120)
        codes[way][program.returncode] += 1
        left = members(number)
        orphans += len(left)
        if program.returncode or left:
            print(f"{way}: exit code {program.returncode}, {len(left)} left\n{output}")
    print("| launched by | launches | exit code 0 |\n|---|---|---|")
    for way, counted in codes.items():
        print(f"| {way} | {counted.total()} | {counted[0]} |")
    print(f"\nprocesses left over: {orphans}\n")


def at_once(count: int, script: Path, folder: Path) -> None:
    """Launch so many at the same time and print how many ended well."""
    line = command("ddp", script, "20", "0", str(folder))
    programs = [start(line, 500 + number) for number in range(count)]
    outputs = [program.communicate(timeout=600)[0] for program in programs]
    for program, output in zip(programs, outputs, strict=True):
        if program.returncode:
            print(output)
    good = sum(program.returncode == 0 for program in programs)
    print(f"launches at once: {count}, exit code 0: {good}\n")


def kills(count: int, script: Path, folder: Path) -> None:
    """Kill a rank so many times and print whether it was named, and how long the rest lived."""
    print("| launched by | killed rank | after (s) | named | all gone after (s) |")
    print("|---|---|---|---|---|")
    worst, unnamed = 0.0, 0
    ways = ("ddp", "ddp_spawn", "ddp_fork", "stratagem run")
    for number in range(1000, 1000 + count):
        way = ways[number % len(ways)]
        files = [folder / f"rank{rank}" for rank in range(2)]
        for file in files:
            file.unlink(missing_ok=True)
        program = start(command(way, script, "100000", "0.001", str(folder)), number)
        while not all(file.exists() and file.read_text() for file in files):
            if program.poll() is not None:
                raise RuntimeError(f"{way} ended before it trained:\n{program.communicate()[0]}")
            time.sleep(0.02)
        # Rank 0 of ddp is the program that tells: when it dies, nobody is left to tell.
        rank = 1 if way == "ddp" else random.randrange(2)
        delay = random.uniform(0, 2)
        time.sleep(delay)
        os.kill(int(files[rank].read_text()), signal.SIGKILL)
        began = time.monotonic()
        output, _ = program.communicate(timeout=60)
        while members(number) and time.monotonic() - began < 60:
            time.sleep(0.02)
        took = time.monotonic() - began
        named = f"rank {rank} of 2 was ended by SIGKILL" in output and program.returncode != 0
        worst, unnamed = max(worst, took), unnamed + (not named)
        print(f"| {way} | {rank} | {delay:.2f} | {'yes' if named else 'NO'} | {took:.2f} |")
        if not named:
            print(output)
    print(f"\nslowest end: {worst:.2f} s; not named: {unnamed}\n")


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=20)
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), help="launchers, or strategies of two devices"
    )
    options = parser.parse_args()
    print(
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        launches(options.launches, script, folder, options.ways)
        at_once(options.at_once, script, folder)
        kills(options.kills, script, folder)


if __name__ == "__main__":
    main()
