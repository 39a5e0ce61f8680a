"""Trains configurations drawn at random with Lightning and with `stratagem_lightning`.

Each configuration is a model with an optimizer, a scheduler, callbacks and options of the Trainer.
What is compared: the learning rate of each optimizer step, every value that a logger was given,
what the callbacks kept, and the final weights::

    python benchmarks/lightning_draws.py OUT --peer ENV_WITH_LIGHTNING/bin/python --cases 40

`--case 7` prints one configuration and what differs. The differences that from-lightning.md lists
are not drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any


def draw(seed: int) -> dict[str, Any]:
    """Return a configuration, as JSON has it."""
    of = random.Random(seed)
    pick = of.choice
    samples, batch_size = of.randint(12, 40), of.randint(2, 6)
    batches = math.ceil(samples / batch_size)
    case: dict[str, Any] = {
        "seed": seed,
        "samples": samples,
        "batch_size": batch_size,
        "shuffle": pick([True, False]),
        "layers": pick(["plain", "dropout", "norm"]),
        "optimizer": pick(["sgd", "momentum", "adam", "adamw"]),
        "log": pick(["step", "epoch", "both"]),
        "validates": of.random() < 0.8,
        "trainer": {
            "max_epochs": of.randint(2, 5),
            "accumulate_grad_batches": pick([1, 1, 1, 2, 3]),
            "log_every_n_steps": pick([1, 2, 3, 5]),
            "num_sanity_val_steps": pick([0, 2]),
            "check_val_every_n_epoch": pick([1, 1, 1, 2]),
        },
    }
    options = case["trainer"]
    if of.random() < 0.3:
        options["gradient_clip_val"] = pick([0.1, 1.0])
        options["gradient_clip_algorithm"] = pick(["norm", "value"])
    if of.random() < 0.3:
        options["limit_train_batches"] = pick([0.5, max(2, batches - 1)])
    if of.random() < 0.3:
        options["limit_val_batches"] = pick([0.5, 2])
    unaccumulated = options["accumulate_grad_batches"] == 1
    if of.random() < 0.25 and unaccumulated and case["validates"]:
        options["val_check_interval"] = pick([0.5, 0.34, 2])
    if of.random() < 0.2:
        options["precision"] = "bf16-mixed"
    if of.random() < 0.2:
        options["max_steps"] = of.randint(3, 2 * batches)
    monitors = ["train_loss"] if case["log"] != "step" else ["train_loss_only"]
    # A training value is of another epoch after a validation that comes before its epoch's end.
    within = "val_check_interval" in options or options["check_val_every_n_epoch"] > 1
    if case["validates"]:
        monitors = ["val_loss"] if within else [*monitors, "val_loss"]
    case["scheduler"] = pick([None, "step", "cosine", "onecycle", "plateau", "plateau", "two"])
    if case["scheduler"] in ("step", "cosine"):
        case["interval"], case["frequency"] = pick(["step", "epoch"]), pick([1, 1, 2, 3])
    if case["scheduler"] == "plateau":
        case["monitor"] = pick(monitors)
        # A value of an epoch is there once the first epoch has ended.
        step = case["monitor"] == "train_loss" and case["log"] == "both"
        case["interval"] = pick(["epoch", "step"]) if step else "epoch"
        case["frequency"] = 1
    case["callbacks"] = callbacks = {}
    if of.random() < 0.4 and "max_steps" not in options:
        callbacks["EarlyStopping"] = {
            "monitor": pick(monitors),
            "patience": of.randint(0, 2),
            "min_delta": pick([0.0, 0.05, 0.3]),
            "mode": pick(["min", "min", "max"]),
        }
        if of.random() < 0.3 and callbacks["EarlyStopping"]["mode"] == "min":
            callbacks["EarlyStopping"]["stopping_threshold"] = 0.5
        if of.random() < 0.3 and not within:
            callbacks["EarlyStopping"]["check_on_train_epoch_end"] = True
    # A fit that ends within an epoch is there saved with a value of the epoch before.
    if of.random() < 0.5 and "max_steps" not in options:
        callbacks["ModelCheckpoint"] = {
            "monitor": pick(monitors),
            "mode": pick(["min", "min", "max"]),
            "save_top_k": pick([1, 2, -1]),
            "save_weights_only": pick([True, False]),
        }
        if of.random() < 0.3:
            callbacks["ModelCheckpoint"]["every_n_epochs"] = 2
    if of.random() < 0.4 and not case["scheduler"] and "max_steps" not in options:
        callbacks["StochasticWeightAveraging"] = {
            "swa_lrs": 0.02,
            "swa_epoch_start": pick([0.5, 1, 2]),
            "annealing_epochs": pick([1, 3]),
            "annealing_strategy": pick(["cos", "linear"]),
        }
    averages = "StochasticWeightAveraging" in callbacks
    if of.random() < 0.25 and unaccumulated and not averages:
        callbacks["GradientAccumulationScheduler"] = {
            "scheduling": {str(of.randint(1, 2)): 2, "3": pick([1, 3])}
        }
        options.pop("val_check_interval", None)
    if of.random() < 0.2:
        callbacks["Timer"] = {"duration": "00:01:00:00", "interval": pick(["step", "epoch"])}
    if of.random() < 0.4:
        callbacks["LearningRateMonitor"] = {"logging_interval": pick([None, "step", "epoch"])}
    # Trials of the tuner draw random numbers there, and move its schedulers.
    draws = case["shuffle"] or case["layers"] != "plain" or case["scheduler"]
    if of.random() < 0.3 and not draws:
        callbacks["LearningRateFinder"] = {
            "min_lr": 1e-4,
            "max_lr": 0.5,
            "num_training_steps": 5,
            "early_stop_threshold": None,
        }
        options.pop("max_steps", None)
    if of.random() < 0.3 and not draws:
        callbacks["BatchSizeFinder"] = {"steps_per_trial": 2, "max_trials": 2, "init_val": 2}
    return case


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train with what `lightning` is in this process; return what is compared."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch import callbacks as known
    from lightning.pytorch.loggers.logger import Logger
    from torch.utils.data import DataLoader, TensorDataset

    rows: dict[str, dict[str, float]] = {}
    rates: list[float] = []

    class Rows(Logger):  # type: ignore[misc]  # one of two classes
        name, version, experiment = "rows", 0, None

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            values = {k: float(v) for k, v in metrics.items() if k != "epoch"}
            rows.setdefault(str(step), {}).update(values)

    class Net(pl.LightningModule):  # type: ignore[misc]  # one of two classes
        def __init__(self) -> None:
            super().__init__()
            middle: dict[str, Any] = {
                "plain": torch.nn.Tanh(),
                "dropout": torch.nn.Dropout(0.3),
                "norm": torch.nn.BatchNorm1d(8),
            }
            layers = torch.nn.Linear(4, 8), middle[case["layers"]], torch.nn.Linear(8, 1)
            self.net = torch.nn.Sequential(*layers)
            self.lr, self.batch_size = 0.05, case["batch_size"]

        def loss_of(self, batch: Any) -> Any:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss_of(batch)
            kinds = {"step": (True, False), "epoch": (False, True), "both": (True, True)}
            on_step, on_epoch = kinds[case["log"]]
            self.log("train_loss", loss, on_step=on_step, on_epoch=on_epoch)
            if case["log"] == "step":
                self.log("train_loss_only", loss, on_step=False, on_epoch=True)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optim, parameters = torch.optim, self.parameters()
            make: dict[str, Any] = {
                "sgd": lambda: optim.SGD(parameters, self.lr),
                "momentum": lambda: optim.SGD(parameters, self.lr, momentum=0.9),
                "adam": lambda: optim.Adam(parameters, self.lr),
                "adamw": lambda: optim.AdamW(parameters, self.lr, weight_decay=0.1),
            }
            optimizer = make[case["optimizer"]]()
            schedulers = torch.optim.lr_scheduler
            make = {
                "step": lambda: schedulers.StepLR(optimizer, 2, 0.7),
                "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 7),
                "onecycle": lambda: schedulers.OneCycleLR(
                    optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches) + 1
                ),
                "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
            }
            kind = case["scheduler"]
            if kind is None:
                return optimizer
            if kind == "two":
                every = {"scheduler": schedulers.StepLR(optimizer, 3, 0.9), "interval": "step"}
                return [optimizer], [schedulers.StepLR(optimizer, 1, 0.8), every]
            config = {"scheduler": make[kind](), "interval": case.get("interval", "step")}
            config["frequency"] = case.get("frequency", 1)
            if "monitor" in case:
                config["monitor"] = case["monitor"]
            return {"optimizer": optimizer, "lr_scheduler": config}

        def data(self, shuffle: bool) -> Any:
            of = torch.Generator().manual_seed(case["seed"])
            inputs = torch.randn(case["samples"], 4, generator=of)
            targets = inputs.sum(1, keepdim=True) + torch.randn(case["samples"], 1, generator=of)
            drops = case["layers"] == "norm"  # which cannot train on one sample
            return DataLoader(
                TensorDataset(inputs, targets),
                batch_size=self.batch_size,
                shuffle=shuffle,
                drop_last=drops,
            )

        def train_dataloader(self) -> Any:
            return self.data(case["shuffle"])

    class Validates(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss_of(batch))

        def val_dataloader(self) -> Any:
            return self.data(False)

    pl.seed_everything(case["seed"])
    model = (Validates if case["validates"] else Net)()
    callbacks = []
    for name, options in case["callbacks"].items():
        given = dict(options)
        if name == "GradientAccumulationScheduler":
            given = {"scheduling": {int(k): v for k, v in options["scheduling"].items()}}
        if name == "ModelCheckpoint":
            given["dirpath"] = folder
        callbacks.append(getattr(known, name)(**given))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=Rows(),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing="ModelCheckpoint" in case["callbacks"],
        default_root_dir=folder,
        callbacks=callbacks,
        **case["trainer"],
    )
    trainer.fit(model)
    kept: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, known.EarlyStopping):
            kept["stopped_epoch"] = callback.stopped_epoch
            kept["wait_count"] = callback.wait_count
            kept["best_score"] = float(callback.best_score)
        elif isinstance(callback, known.ModelCheckpoint):
            kept["best"] = Path(callback.best_model_path).name
            score = callback.best_model_score
            kept["score"] = None if score is None else float(score)
            kept["files"] = sorted(path.name for path in Path(folder).glob("*.ckpt"))
        elif isinstance(callback, known.LearningRateMonitor):
            kept["lrs"] = callback.lrs
        elif isinstance(callback, known.LearningRateFinder):
            found = callback.optimal_lr
            kept["found"] = None if found is None else [found.suggestion(), *found.results["lr"]]
    if "StochasticWeightAveraging" in case["callbacks"]:
        # There the averaged weights are trained for one more step: compare all but the last epoch.
        accumulated = case["trainer"]["accumulate_grad_batches"]
        in_epoch = math.ceil(trainer.num_training_batches / accumulated)
        steps = (case["trainer"]["max_epochs"] - 1) * in_epoch
        early = {step: row for step, row in rows.items() if int(step) < steps - 1}
        return {"rates": rates[:steps], "rows": early}
    return {
        "rates": rates,
        "rows": rows,
        "kept": kept,
        "global_step": trainer.global_step,
        "batch_size": model.batch_size,
        "callback_metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "weights": [w.double().flatten().tolist() for w in model.state_dict().values()],
    }


def serve(side: str, seeds: list[int]) -> None:
    """Train the cases of these seeds, and write a line of JSON for each."""
    if side == "ours":
        import stratagem_lightning  # noqa: F401 - from here on `lightning` is ours
    import logging

    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "stratagem"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = train(draw(seed), folder)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write("RESULT " + json.dumps({"seed": seed, **result}) + "\n")
        sys.stdout.flush()


def run(python: str, side: str, seeds: list[int]) -> dict[int, dict[str, Any]]:
    """Return the results of a side by seed."""
    command = [python, __file__, "--serve", side, "--seeds", *map(str, seeds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [x.partition("RESULT ")[2] for x in done.stdout.splitlines() if "RESULT " in x]
    results = [json.loads(line) for line in lines]
    return {result.pop("seed"): result for result in results}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two results differ by more than rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                found.append(f"{where}.{key}: only {'ours' if key not in one else 'Lightning'}")
            else:
                found += differences(one[key], other[key], f"{where}.{key}")
        return found
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return [f"{where}: {one} and {other}"[:300]]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    if isinstance(one, float) and isinstance(other, float):
        close = math.isclose(one, other, rel_tol=2e-5, abs_tol=1e-7)
        return [] if close or (one != one and other != other) else [f"{where}: {one} and {other}"]
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="the Python of an environment with Lightning")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--serve", choices=["peer", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.seeds)
        return
    seeds = list(range(options.first, options.first + options.cases))
    if options.case is not None:
        seeds = [options.case]
        print(json.dumps(draw(options.case), indent=1))
    theirs = run(options.peer, "peer", seeds)
    ours = run(sys.executable, "ours", seeds)
    equal = refused = 0
    for seed in seeds:
        if "error" in theirs[seed]:
            refused += 1
            print(f"{seed}: Lightning refuses it: {theirs[seed]['error'][:200]}")
            continue
        found = differences(theirs[seed], ours[seed])
        equal += not found
        if found:
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            print(f"{seed}: " + "\n    ".join(found[:5]) + more)
    print(f"{equal} of {len(seeds) - refused} equal, {refused} refused by Lightning")


if __name__ == "__main__":
    main()
