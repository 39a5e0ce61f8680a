"""Compares what `plan_memory` predicts with `torch.cuda.max_memory_allocated` of real steps.

    python benchmarks/gpu_memory.py             # a GPU of 40 GB or more; some minutes
    python benchmarks/gpu_memory.py --small     # a GPU of any size, in half a minute

- A decoder of a billion parameters trains under each strategy with AdamW, on one GPU. The figure is
  that of the second and third step, of the Trainer. Goal: within 10%.
- The largest decoder that trains in float32, by its number of layers: planned first, then tried.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from planned_memory import MARK, Decoder, measured
from torch import Tensor

CELLS = (
    ("single_device", "32-true"),
    ("single_device", "bf16-mixed"),
    ("fsdp", "bf16-mixed"),
    ("deepspeed_stage_3", "bf16-mixed"),
    ("deepspeed_stage_3_offload", "bf16-mixed"),
    ("deepspeed_stage_2_offload", "bf16-true"),
)
AT_ONCE = 3
"""As many runs share the GPU; each counts its own memory."""


def batch(length: int) -> Tensor:
    return torch.zeros(4, length, dtype=torch.long)


def measure(width: int, layers: int, words: int, length: int, strategy: str, precision: str) -> int:
    """Return the bytes that torch has at most handed out in the second and third step."""
    from stratagem import Callback, Module, Trainer

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("cuda"):
                self.net = Decoder(width, layers, words)

        def training_step(self, words: Tensor, batch_idx: int) -> Tensor:
            logits: Tensor = self.net(words)
            return logits.float().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class ResetPeak(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            if arguments[-1] == 1:
                torch.cuda.reset_peak_memory_stats()

    Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        callbacks=[ResetPeak()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(Net(), [batch(length) for _ in range(3)])
    return torch.cuda.max_memory_allocated()


def predicted(model: Sequence[int], cell: tuple[str, str]) -> Any:
    """Return the row of a plan."""
    from stratagem import plan_memory

    width, layers, words, length = model
    strategy, precision = cell
    plan = plan_memory(
        lambda: Decoder(width, layers, words),
        batch(length),
        precision=precision,
        strategies=[strategy],
    )
    (row,) = plan.strategies
    return row


def compare(cells: Sequence[tuple[str, str]], *model: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        real = pool.map(lambda cell: measured(*map(str, model), *cell, script=__file__), cells)
        print("| strategy | precision | predicted GiB | measured | ratio |\n|---|---|---|---|---|")
        for cell, bytes_or_error in zip(cells, real, strict=True):
            row = predicted(model, cell)
            if isinstance(bytes_or_error, str) or row.memory is None:
                print(f"| {' | '.join(cell)} | {row.why_not or bytes_or_error} | | |")
                continue
            sizes = (row.on_device / 2**30, bytes_or_error / 2**30)
            figures = f"{sizes[0]:.2f} | {sizes[1]:.2f} | {sizes[0] / sizes[1]:.3f}"
            print(f"| {' | '.join(cell)} | {figures} |", flush=True)


def find_largest(*model: int) -> None:
    """Plan with more layers until one does not fit; train with the most that do, and with more."""
    from stratagem.strategies import StepMemory

    width, words, length = model
    total = torch.cuda.get_device_properties(0).total_memory

    def sized(layers: int) -> Any:
        return predicted((width, layers, words, length), ("single_device", "32-true"))

    few, more = (sized(layers).on_device for layers in (4, 6))
    each = (more - few) / 2
    planned = 4 + int((StepMemory.USABLE * total - few) / each)
    full = 4 + int((total - few) / each)
    fits = [sized(layers).fits for layers in (planned, planned + 1)]
    print(f"planned: {planned} layers fit ({fits}), {full} fill the whole of {total / 2**30:.1f}")
    for layers in range(planned, full + 2):
        sizes = map(str, (width, layers, words, length))
        real = measured(*sizes, "single_device", "32-true", script=__file__)
        print(f"{layers} layers: {real if isinstance(real, str) else real / 2**30}", flush=True)
        if isinstance(real, str):
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="25 million parameters")
    parser.add_argument("--only", choices=("compare", "largest"), help="one of the two")
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if given.measure:
        *sizes, strategy, precision = given.measure
        width, layers, words, length = map(int, sizes)
        print(MARK + json.dumps(measure(width, layers, words, length, strategy, precision)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch can use")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}\n")
    if given.small:
        compare(CELLS, 256, 12, 32000, 128)
        return
    if given.only != "largest":
        compare(CELLS, 2048, 18, 32000, 512)
    if given.only != "compare":
        find_largest(4096, 32000, 512)


if __name__ == "__main__":
    main()
