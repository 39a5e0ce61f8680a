"""What reading a batch costs through Lite's loader over the same torch DataLoader.

    python benchmarks/loader_time.py [--rounds 25] [--batches 8000]

The dataset returns a number and nothing is trained, so that only the loader is measured: one
process, no workers. Both are read in every round; figures are the least CPU time of all rounds, in
microseconds a batch, since other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
from time import process_time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from stratagem import Lite


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 1


def microseconds(loader: Any) -> float:
    began = process_time()
    for _ in loader:
        pass
    return (process_time() - began) / len(loader) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--batches", type=int, default=8000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    kinds: dict[str, dict[str, Any]] = {
        "single samples, in order": {"batch_size": None},
        "batches of 4, shuffled": {"batch_size": 4, "shuffle": True},
    }
    print("| loader | DataLoader, us | through Lite, us |\n|---|---|---|")
    for kind, options in kinds.items():
        data = Numbers(arguments.batches * (options["batch_size"] or 1))
        raw, wrapped = [], []
        for _ in range(arguments.rounds):
            raw.append(microseconds(DataLoader(data, **options)))
            wrapped.append(microseconds(lite.setup_dataloaders(DataLoader(data, **options))))
        print(f"| {kind} | {min(raw):.2f} | {min(wrapped):.2f} |")


if __name__ == "__main__":
    main()
