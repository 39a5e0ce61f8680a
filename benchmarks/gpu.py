"""What the Trainer adds to a step on a GPU, how idle the GPU is, and what waits for it.

    python benchmarks/gpu.py                          # one GPU, some minutes
    python benchmarks/gpu.py --device cpu --small     # tries the script, in seconds

Raw PyTorch and the Trainer take turns in one process, and Lightning's Trainer where it is
installed; ratios are medians over the rounds.

- step: a GPT of 125 million parameters in bfloat16 (autocast), fused AdamW. Goal: at most 1.01.
- small step: a network of two layers, in which the host is slower than the GPU.
- loader: batches of 200 MB in pinned memory. The part of a step in which the GPU computes nothing,
  beside raw PyTorch that copies each batch on the computing stream. Goal: under 5%.
- waits: how often a step of the Trainer, with values logged and gradients clipped, waits for the
  GPU, by torch's own `set_sync_debug_mode`. Goal: 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stratagem import Callback, Module, Trainer
from stratagem.loggers import CSVLogger

WARM_UP = 5


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50_304
    length: int = 1024
    batch: int = 8
    steps: int = 50
    rounds: int = 5
    megabytes: int = 200
    hidden: int = 8192


SMALL = Size(1, 32, 2, 64, 16, 2, 4, 1, 1, 64)


class GPT(nn.Module):
    """A decoder of the shape of GPT-2, with tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.length, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(size.length)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("numbers", torch.arange(size.length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places(self.numbers)
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        logits = hidden @ self.words.weight.T
        return cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


class Dense(nn.Module):
    """Multiplies long enough for a copy of a batch to hide behind it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = nn.Linear(1024, size.hidden)
        self.last = nn.Linear(size.hidden, 1024)

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.relu(self.first(batch))).float().square().mean()
        return loss


class Clock:
    """Marks on the computing stream; nothing waits for them before `idle` and `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def _between(self, first: int, second: int) -> float:
        before, after = self.marks[first], self.marks[second]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(before.elapsed_time(after)) / 1000
        return float(after - before)

    def seconds(self) -> float:
        """Return the time of a step, from the end of the warm-up on; two marks a step."""
        steps = len(self.marks) // 2 - WARM_UP
        return self._between(2 * WARM_UP - 1, -1) / steps

    def idle(self) -> float:
        """Return the part of that time between the end of a step and the start of the next."""
        steps = range(WARM_UP, len(self.marks) // 2)
        gaps = sum(self._between(2 * step - 1, 2 * step) for step in steps)
        return gaps / (self.seconds() * len(steps))


class Net(Module):
    """What the Trainer trains: marks the beginning of each step."""

    def __init__(self, net: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.net = net
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.mark()
        loss: Tensor = self.net(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Batches:
    """Batches that Lightning does not take for several loaders."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class EndOfStep(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.clock.mark()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def with_trainer(
    net: nn.Module, batches: list[Tensor], device: torch.device, **options: Any
) -> Clock:
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=device.type,
            devices=1,
            max_epochs=1,
            precision="bf16-mixed",
            logger=CSVLogger(folder),
            log_every_n_steps=10,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_checkpointing=False,
            callbacks=[EndOfStep(), *options.pop("callbacks", [])],
            **options,
        )
        trainer.fit(Net(net, clock), batches)
    return clock


def raw(net: nn.Module, batches: list[Tensor], device: torch.device) -> Clock:
    clock = Clock(device)
    net.to(device)
    optimizer = optimizer_of(net)
    for batch in batches:
        here = batch.to(device, non_blocking=True)
        clock.mark()
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(here)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
    return clock


def with_lightning(net: nn.Module, batches: list[Tensor], device: torch.device) -> Clock:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger as PeerCSV

    clock = Clock(device)

    class Peer(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.mark()
            loss = self.net(batch)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            clock.mark()

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator=device.type,
            devices=1,
            max_epochs=1,
            precision="bf16-mixed",
            logger=PeerCSV(folder),
            log_every_n_steps=10,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        ).fit(Peer(), Batches(batches))
    return clock


Train = Callable[[nn.Module, list[Tensor], torch.device], Clock]


def rounds(
    size: Size,
    make: Callable[[], nn.Module],
    batches: list[Tensor],
    device: torch.device,
    runs: Sequence[Train] = (raw, with_trainer),
) -> Iterator[tuple[Clock, ...]]:
    for number in range(size.rounds):
        # In turn, so that a GPU that slows down as it warms up does so for all.
        order = runs if number % 2 else runs[::-1]
        clocks = {run: run(make(), batches, device) for run in order}
        yield tuple(clocks[run] for run in runs)


def compare(
    title: str,
    size: Size,
    make: Callable[[], nn.Module],
    batches: list[Tensor],
    device: torch.device,
) -> None:
    runs: dict[str, Train] = {"raw": raw, "Trainer": with_trainer}
    if importlib.util.find_spec("lightning"):
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        runs["Lightning"] = with_lightning
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for clocks in rounds(size, make, batches, device, [*runs.values()]):
        for name, clock in zip(runs, clocks, strict=True):
            seconds[name].append(clock.seconds())
    figures = []
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, seconds["raw"], strict=True))
        figures.append(f"{name} {statistics.median(own) * 1e3:.3f} ms (ratio {ratio:.3f})")
    print(f"{title}: {', '.join(figures)}", flush=True)


def measure_step(size: Size, device: torch.device) -> None:
    shape = (size.batch, size.length)
    tokens = [pinned(torch.randint(size.words, shape), device) for _ in range(4)]
    batches = [tokens[i % 4] for i in range(size.steps + WARM_UP)]
    compare("step", size, lambda: GPT(size), batches, device)


def measure_small_step(size: Size, device: torch.device) -> None:
    held = [pinned(torch.randn(64, 1024), device) for _ in range(4)]
    batches = [held[i % 4] for i in range(8 * size.steps + WARM_UP)]
    small = replace(size, hidden=size.hidden // 64)
    compare("small step", size, lambda: Dense(small), batches, device)


def measure_loader(size: Size, device: torch.device) -> None:
    rows = size.megabytes * 2**20 // 4096
    held = [pinned(torch.randn(rows, 1024), device) for _ in range(4)]
    batches = [held[i % 4] for i in range(size.steps + WARM_UP)]
    pairs = list(rounds(size, lambda: Dense(size), batches, device))
    idle, without = (statistics.median(pair[i].idle() for pair in pairs) for i in (1, 0))
    step = statistics.median(pair[1].seconds() for pair in pairs)
    print(
        f"loader: batches of {size.megabytes} MB, a step of {step * 1e3:.2f} ms: idle {idle:.1%} "
        f"of it; raw without copying ahead {without:.1%}"
    )


def measure_waits(size: Size, device: torch.device) -> None:
    if device.type != "cuda":
        print(f"waits: not counted on {device.type}; tests/devices counts them in CI")
        return

    class Count(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            if arguments[-1] == WARM_UP:
                torch.cuda.set_sync_debug_mode("warn")

        def on_train_batch_end(self, *arguments: Any) -> None:
            if arguments[-1] == size.steps:
                torch.cuda.set_sync_debug_mode("default")

    batches = [pinned(torch.randn(64, 1024), device) for _ in range(size.steps + WARM_UP)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with_trainer(Dense(size), batches, device, callbacks=[Count()], gradient_clip_val=1.0)
    found = [str(one.message) for one in said if "called a synchronizing" in str(one.message)]
    print(f"waits: {len(found)} in {size.steps - WARM_UP + 1} steps {sorted(set(found))}")


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="seconds, and figures without meaning")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch can use; try with --device cpu --small")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    size = SMALL if given.small else Size()
    name = torch.cuda.get_device_name(device) if given.device == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {name}")
    for measure in (measure_step, measure_small_step, measure_loader, measure_waits):
        measure(size, device)


if __name__ == "__main__":
    main()
