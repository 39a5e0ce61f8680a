"""Uneven evaluations with users' collectives: prints the result of each case beside the right one.

    python uneven_users.py STRATEGY RANKS [--samples 0 1 9] [--hooks test predict] [--json FILE]

The cases are hooks (validate, test, fit, predict) and numbers of samples; each runs a Module that
gathers, logs with `sync_dist=True` at each step, logs a metric object, and computes another one at
the end of the epoch.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.errors import StratagemError
from stratagem.strategies import ModelParallelStrategy

HOOKS = ("validate", "test", "fit", "predict")
BATCH = 2


class User(Module):
    """Does in a step what users do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.logged = torchmetrics.MeanMetric()
        self.computed = torchmetrics.SumMetric()
        self.seen: list[float] = []
        self.own: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def step(self, batch: Tensor, batch_idx: int) -> None:
        output = self.net(batch)
        self.log("output", output.mean())
        self.log("mean", batch.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("double", batch.double().sum(), sync_dist=True, on_step=True, reduce_fx="sum")
        self.log("count", float(len(batch)), reduce_fx="sum")
        self.logged.update(batch)
        self.log("metric", self.logged)
        self.computed.update(batch)
        self.collect(batch)

    test_step = validation_step = step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.collect(batch)
        output: Tensor = self.net(batch)
        return output

    def collect(self, batch: Tensor) -> None:
        """Gather in several forms; the first rank that takes part sees the samples of all."""
        self.own += batch.flatten().tolist()
        gathered = self.all_gather(
            {"rows": batch.double(), "odd": batch % 2 == 1, "n": batch[0, 0]}
        )
        rows, odd = gathered["rows"].flatten(), gathered["odd"].flatten()
        assert odd.dtype == torch.bool and torch.equal(odd, rows % 2 == 1)
        assert gathered["n"].ndim == 1
        assert torch.equal(self.trainer.ranks.all_reduce(batch, "sum"), gathered["rows"].sum(0))
        told = self.trainer.ranks.gather_objects(batch.flatten().tolist())
        assert sorted(chain(*told)) == sorted(rows.tolist())
        assert self.trainer.ranks.all_reduce_ints([len(batch)], "sum") == [len(rows)]
        assert self.trainer.ranks.broadcast("text") == "text"
        self.trainer.ranks.barrier()
        if torch.distributed.is_initialized():
            raw = batch.clone()
            torch.distributed.all_reduce(raw)
            assert torch.equal(raw, gathered["rows"].sum(0).float())
        self.seen += rows.tolist()

    def epoch_end(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.log("sum", self.computed.compute(), sync_dist=False)
        self.computed.reset()

    on_validation_epoch_end = on_test_epoch_end = epoch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer_of(name: str, ranks: int) -> Trainer:
    strategy: Any = name
    if name == "model_parallel":
        strategy = ModelParallelStrategy(tensor_parallel_size=1)  # no layer is divided
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    return Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loader(samples: int) -> Any:
    values = torch.arange(1.0, samples + 1.0).reshape(-1, 1)
    return DataLoader(values, BATCH)  # type: ignore[arg-type]


def run(trainer: Trainer, hook: str, samples: int) -> dict[str, Any]:
    """Run a case; return this rank's values."""
    user = User()
    values: dict[str, Any] = {}
    if hook == "fit":
        trainer.fit(user, DataLoader(torch.ones(8, 1), BATCH), loader(samples))  # type: ignore[arg-type]
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    elif hook == "predict":
        predicted = trainer.predict(user, loader(samples))
        values = {"rows": sum(len(batch) for batch in predicted)}
    else:
        (values,) = getattr(trainer, hook)(user, loader(samples), verbose=False)
    return {"values": values, "seen": sorted(user.seen), "own": user.own}


def expected(hook: str, samples: int) -> dict[str, float]:
    """Return the values of one process."""
    values = torch.arange(1.0, samples + 1.0)
    with torch.no_grad():
        output = User().net(values.reshape(-1, 1)).mean()
    mean, total = float(values.mean()), float(values.sum())
    right = {"output": float(output), "mean": mean, "mean_epoch": mean, "double": total}
    return right | {"count": samples, "metric": mean, "sum": total}


def judge(hook: str, samples: int, ranks: list[dict[str, Any]]) -> str:
    """Return "" if the values of all ranks are right, or else what is wrong."""
    everything = [float(number) for number in range(1, samples + 1)]
    if sorted(chain(*(one["own"] for one in ranks))) != everything:
        return f"samples were read otherwise: {[one['own'] for one in ranks]}"
    if hook == "predict":
        rows = [one["values"]["rows"] for one in ranks]
        if rows != [len(one["own"]) for one in ranks]:
            return f"predictions of {rows}"
    else:
        for rank, one in enumerate(ranks):
            for name, value in expected(hook, samples).items():
                found = one["values"].get(name)
                if found is None or abs(found - value) > 1e-5 * max(1.0, abs(value)):
                    return f"{name} is {found} on rank {rank}, expected {value}"
            if one["values"].keys() != ranks[0]["values"].keys():
                return f"rank {rank} has other names than rank 0"
    if ranks[0]["seen"] != everything:
        return f"rank 0 gathered {ranks[0]['seen']}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--samples", type=int, nargs="*", default=range(1, 10))
    parser.add_argument("--hooks", nargs="*", default=HOOKS)
    parser.add_argument("--json")
    options = parser.parse_args()
    trainer = trainer_of(options.strategy, options.ranks)
    results = []
    for hook in options.hooks:
        for samples in options.samples:
            begun = time.monotonic()
            try:
                own: dict[str, Any] = run(trainer, hook, samples)
            except StratagemError as error:
                own = {"refused": str(error)}
            seconds = time.monotonic() - begun
            ranks = trainer.ranks.gather_objects(own)
            refused = [one["refused"] for one in ranks if "refused" in one]
            if refused:
                verdict = f"refused by {len(refused)} ranks: {refused[0].splitlines()[0]}"
            else:
                verdict = judge(hook, samples, ranks) or "right"
            results.append([options.strategy, options.ranks, hook, samples, verdict, seconds])
            if trainer.is_global_zero:
                print(*results[-1][:-1], f"{seconds:.2f} s", flush=True)
    if options.json and trainer.is_global_zero:
        Path(options.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
