"""Draws configurations of training runs at random, each from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

RANKS = {
    "single_device": 1,
    "ddp": 2,
    "fsdp": 2,
    "deepspeed_stage_1": 2,
    "ddp_sharded": 2,
    "fsdp_shard_grad_op": 2,
    "deepspeed_stage_2": 2,
    "deepspeed_stage_3": 2,
}
"""Ranks by strategy. Cases go through the strategies by number; the rest is drawn."""

DATA = (
    *("shuffled", "workers", "generator", "weighted", "replacement", "batch sampler", "in order"),
    *("own sampler", "own generator", "stateful", "two loaders"),
)
VALUES = ("mean", "loss_epoch", "sum", "metric", "val")
CALLBACKS = (
    *("accumulation", "ema", "swa", "finetuning", "pruning", "early", "learning rates", "timer"),
    *("device", "throughput", "exception", "lambda"),
)


@dataclass(frozen=True)
class Case:
    """One configuration.

    - `accelerator`: on which it trains; "cuda" has one rank.
    - `front`: "trainer" or "lite".
    - `data`: how the training data is read.
    - `batches`, `epochs`: of training, per rank.
    - `short`: the last batch has fewer samples.
    - `accumulate`: batches of an optimizer step.
    - `monitor`: the value that a plateau, EarlyStopping and ModelCheckpoint look at.
    - `validation`: arguments of the Trainer.
    - `limits`: arguments of the Trainer that end training, or keep it from ending.
    - `stops_at`: the step after which `should_stop` is set; 0: never.
    - `callbacks`: names of built-in ones.
    """

    number: int
    accelerator: str
    front: str
    strategy: str
    precision: str
    data: str
    batches: int
    epochs: int
    short: bool
    accumulate: int
    optimizer: str
    scheduler: str
    frequency: int
    monitor: str
    clip: str
    form: str
    validation: dict[str, Any]
    callbacks: tuple[str, ...]
    best: dict[str, Any]
    batch_norm: bool
    limits: dict[str, Any]
    stops_at: int

    @property
    def ranks(self) -> int:
        return RANKS[self.strategy] if self.accelerator == "cpu" else 1


def draw(seed: int, number: int, accelerator: str = "cpu") -> Case:
    """Return a configuration that is meant to work.

    Args:
        seed: of all cases.
        number: from 0; it says which strategy and which front end.
        accelerator: "cpu" or "cuda".
    """
    dice = random.Random(f"{seed} {number}")
    strategy = [*RANKS][number % len(RANKS)]
    deepspeed = strategy.startswith("deepspeed")
    alone = strategy == "single_device"
    lite = dice.random() < 0.2
    batches, epochs = dice.randint(4, 7), dice.choice([2, 2, 3])
    precisions = ["32-true", "32-true", "bf16-mixed", "bf16-true"]
    optimizers = ["sgd", "adam", "groups"]
    if accelerator == "cuda":
        precisions.append("16-mixed")
    if alone or strategy == "ddp":
        optimizers += ["manual"] * (not lite)
        precisions.append("64-true")
    if alone and not lite:
        optimizers.append("lbfgs")
    optimizer = dice.choice(optimizers)
    plain = optimizer in ("manual", "lbfgs")
    accumulate = 1 if plain else dice.choice([1, 1, 2, 3, 4])
    schedulers = ["none", "step", "by steps", "one cycle", "cosine", "sequential"]
    if not lite and optimizer != "manual":
        schedulers += ["plateau", "plateau", "plateau by steps", "plateau by steps"]
    monitors = list(VALUES)
    if optimizer == "lbfgs":
        schedulers.remove("one cycle")  # torch's needs a momentum
    scheduler, short = dice.choice(schedulers), dice.random() < 0.5
    return Case(
        number=number,
        accelerator=accelerator,
        front="lite" if lite else "trainer",
        strategy=strategy,
        precision=dice.choice(["32-true"] if optimizer == "lbfgs" else precisions),
        data=dice.choice(DATA),
        batches=batches,
        epochs=epochs,
        short=short,
        accumulate=accumulate,
        optimizer=optimizer,
        scheduler=scheduler,
        frequency=dice.choice([1, 1, 2]),
        monitor=dice.choice(monitors),
        clip=""
        if plain or (deepspeed and lite)
        else dice.choice(["", "norm"] if deepspeed else ["", "norm", "value"]),
        form=dice.choice(["single_file", "directory"]),
        validation=_validation(dice, batches),
        callbacks=_callbacks(dice, strategy, plain=plain, accumulate=accumulate),
        best={
            "save_top_k": dice.choice([1, 2, -1]),
            "save_last": dice.random() < 0.5,
            **dice.choice([{}, {"every_n_train_steps": 2}, {"save_on_train_epoch_end": False}, {}]),
        },
        batch_norm=alone and not short and dice.random() < 0.3,
        **_limits(dice, batches),
    )


def _limits(dice: random.Random, batches: int) -> dict[str, Any]:
    """Return how training ends; a stop comes before the minimum of training."""
    steps = dice.randint(4, 2 * batches)
    limits: dict[str, Any] = dice.choice(
        [{}, {}, {"max_steps": steps}, {"min_steps": steps}, {"min_epochs": 2}]
    )
    latest = {"min_steps": steps - 1, "min_epochs": 1}
    stops_at = [0, *(dice.randint(1, latest[name]) for name in limits if name in latest)]
    return {"limits": limits, "stops_at": dice.choice(stops_at)}


def _validation(dice: random.Random, batches: int) -> dict[str, Any]:
    interval: dict[str, Any] = dice.choice(
        [{}, {}, {"val_check_interval": dice.randint(2, batches)}, {"val_check_interval": 0.5}]
    )
    over_epochs: dict[str, Any] = {
        "check_val_every_n_epoch": None,
        "val_check_interval": dice.randint(2, 9),
    }
    every: dict[str, Any] = {"check_val_every_n_epoch": 2}
    drawn: dict[str, Any] = dice.choice([interval, interval, interval, over_epochs, every])
    return {"num_sanity_val_steps": dice.choice([0, 2]), **drawn}


def _callbacks(
    dice: random.Random, strategy: str, *, plain: bool, accumulate: int
) -> tuple[str, ...]:
    possible = list(CALLBACKS)
    if plain or accumulate > 1 or strategy.startswith("deepspeed"):
        possible.remove("accumulation")
    if strategy == "deepspeed_stage_3":
        possible.remove("ema")
    if plain:
        possible = [name for name in possible if name not in ("swa", "finetuning")]
    if strategy not in ("single_device", "ddp"):
        possible = [name for name in possible if name not in ("swa", "pruning", "finetuning")]
    chosen = {name for name in possible if dice.random() < 0.3}
    # Two that own the weights or the learning rate are not used together.
    owners = [name for name in ("ema", "swa", "finetuning", "pruning") if name in chosen]
    chosen -= set(owners[1:])
    return tuple(name for name in possible if name in chosen)
