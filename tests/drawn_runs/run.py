"""Run by test_drawn_runs.py: python run.py FOLDER ACCELERATOR SEED NUMBER...

Each case trains once, and once more from each of its checkpoints, as if the process had been killed
at one of the next hooks. All cases are of one strategy. Each rank writes what differs to
NUMBER-RANK.json.
"""

from __future__ import annotations

import contextlib
import csv
import json
import random
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import Case, draw
from parts import BATCH, Net, Samples, callbacks_of, optimizers_of, training_data
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import (
    DirectoryCheckpointIO,
    LazyTensor,
    SingleFileCheckpointIO,
    read_whole,
)
from stratagem.loggers import CSVLogger
from stratagem.state.rank_states import RankStates

IGNORED = re.compile(
    # What follows the clock.
    r"/time$|_per_sec$|\.Timer\b|\.ThroughputMonitor\.time$"
    # How far a dataset was read that was begun anew since; the next epoch is read from its start.
    r"|\.own\.position$"
    # What follows the machine.
    r"|DeviceStatsMonitor\.on_\w+/\w+$"
)
AXES = {"step", "epoch", "trainer/optimizer_step"}


def seed_rank(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Snapshots(Callback):
    """Copies the folder of a run at one of the hooks between two saves.

    A run that is killed after a further save leaves a checkpoint that it does not know of when it
    resumes from the one before, and saves it again under another name.
    """

    def __init__(self, folder: Path, kept: Path, seed: int) -> None:
        self.folder, self.kept, self.dice = folder, kept, random.Random(seed)

    def copy(self, trainer: Trainer, module: Module, *_: Any, **__: Any) -> None:
        if not trainer.is_global_zero:
            return
        for path in (self.folder / "all").glob("*.ckpt"):
            if not (self.kept / path.stem).exists():
                # Claims are those of a process that has ended.
                claims = shutil.ignore_patterns("*.claim", "*.heir", ".writer")
                shutil.copytree(self.folder, self.kept / path.stem, symlinks=True, ignore=claims)

    def copy_maybe(self, trainer: Trainer, module: Module, *_: Any, **__: Any) -> None:
        if self.dice.random() < 0.5:
            self.copy(trainer, module)

    on_train_batch_start = on_validation_start = on_validation_batch_start = copy_maybe
    on_train_batch_end = on_validation_end = on_train_epoch_end = on_train_end = copy


class Fit:
    """A fit in a folder; `path` names the checkpoint that it resumes.

    - `losses`, `epochs`: of this rank.
    - `saved`: the names of checkpoints.
    """

    def __init__(self, case: Case, folder: Path, seed: int, extra: Any = (), path: Any = None):
        torch.manual_seed(seed)
        net = Net(case)
        clipping: Any = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": case.clip}
        trainer = Trainer(
            accelerator=case.accelerator,
            devices=case.ranks,
            strategy=strategy_of(case),
            precision=case.precision,
            plugins=case.form,
            max_epochs=case.epochs,
            accumulate_grad_batches=case.accumulate,
            logger=CSVLogger(folder / "logs"),
            callbacks=[
                *callbacks_of(case, folder),
                ModelCheckpoint(
                    folder / "all", every_n_train_steps=1, save_top_k=-1, filename="{step}"
                ),
                *extra,
            ],
            enable_progress_bar=False,
            **case.validation,
            **case.limits,
            **(clipping if case.clip else {}),
        )
        seed_rank(seed + 100 * trainer.global_rank)
        validation = DataLoader(Samples(4 * case.ranks), batch_size=BATCH, shuffle=True)
        trainer.fit(net, training_data(case), validation, ckpt_path=path)
        self.losses, self.epochs = net.losses, net.epochs
        trainer.save_checkpoint(folder / "end.ckpt")


def strategy_of(case: Case) -> Any:
    unused = "finetuning" in case.callbacks or case.optimizer == "manual"
    if case.strategy == "ddp" and unused:
        return "ddp_find_unused_parameters_true"
    return case.strategy


def loop(case: Case, folder: Path, seed: int, path: Any = None) -> Any:
    """A loop of one's own, which saves after each optimizer step."""
    torch.manual_seed(seed)
    net = Net(case)
    lite = Lite(
        accelerator=case.accelerator,
        devices=case.ranks,
        strategy=case.strategy,
        precision=case.precision,
        plugins=case.form,
    )
    lite.launch()
    optimizers, schedulers = optimizers_of(case, net)
    model, optimizer = lite.setup(net, *optimizers)
    scheduler = schedulers[0]["scheduler"] if schedulers else None
    loaders = [lite.setup_dataloaders(training_data(case))]
    if case.data == "two loaders":
        loaders.append(lite.setup_dataloaders(training_data(case)))
    seed_rank(seed + 100 * lite.global_rank)
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "batch": 0}
    state |= {f"data{number}": loader for number, loader in enumerate(loaders)}
    if scheduler is not None:
        state["scheduler"] = scheduler
    if path is not None:
        lite.load(path, state)
    losses: list[str] = []
    done = state["batch"]
    for epoch in range(state["epoch"], case.epochs):
        for batches in zip(*loaders, strict=True):
            done += 1
            last = done == case.batches
            steps = done % case.accumulate == 0 or last
            with lite.no_backward_sync(model, enabled=not steps):
                samples = torch.cat(batches).to(net.head.weight.dtype)
                loss = (model(samples) - 1).float().square().mean() / case.accumulate
                lite.backward(loss)
            losses.append(float(loss.detach()).hex())
            if not steps:
                continue
            if case.clip == "norm":
                lite.clip_gradients(model, optimizer, max_norm=0.5)
            elif case.clip:
                lite.clip_gradients(model, optimizer, clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            lite.save(folder / f"{epoch}-{done}.ckpt", {**state, "epoch": epoch, "batch": done})
        done = 0
        end = {**state, "epoch": epoch + 1, "batch": 0}
        lite.save(folder / f"{epoch}-{case.batches + 1}.ckpt", end)
    return losses


def same(one: Any, other: Any, place: str) -> Iterator[str]:
    """Yield the places where two checkpoints differ."""
    if IGNORED.search(place):
        return
    progress = one.get("progress", {}) if isinstance(one, dict) else {}
    if progress.get("epoch_is_done") or progress.get("batches") == 0:
        # The next epoch begins without it.
        one, other = ({**state, "ranks": without_loader(state)} for state in (one, other))
    if isinstance(one, dict) and isinstance(other, dict) and "changes" in one:
        one, other = (list(RankStates(states)) for states in (one, other))
    if isinstance(one, LazyTensor):
        one, other = read_whole(one), read_whole(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        if not (equal and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))):
            yield f"{place}: {str(one.tolist())[:80]} and {str(other.tolist())[:80]}"
    elif isinstance(one, dict) and isinstance(other, dict):
        if unlike := {key for key in one.keys() ^ other.keys() if not IGNORED.search(str(key))}:
            yield f"{place}: keys {sorted(map(str, unlike))}"
        for key in one.keys() & other.keys():
            yield from same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{place}: {len(one)} and {len(other)} values"
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from same(mine, theirs, f"{place}[{index}]")
    elif one != other and not (one != one and other != other):
        yield f"{place}: {one!r} and {other!r}"


def without_loader(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**state, "loader": None} for state in RankStates(checkpoint["ranks"])]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        found = [
            {name: value for name, value in row.items() if not IGNORED.search(name)}
            for row in csv.DictReader(file)
        ]
    # A validation that a killed run had begun is timed and measured a second time.
    return [
        row
        for at, row in enumerate(found)
        if row not in found[:at]
        or (not row.get("validate/batches") and any(row[name] for name in row.keys() - AXES))
    ]


def differences(case: Case, expected: Path, found: Path) -> Iterator[str]:
    """Yield how two folders of runs differ: names, rows of logs and what checkpoints hold."""
    names, others = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if is_result(path)}
        for folder in (expected, found)
    )
    if names ^ others:
        yield f"files: not resumed {sorted(names - others)}, only resumed {sorted(others - names)}"
    io: Any = DirectoryCheckpointIO() if case.form == "directory" else SingleFileCheckpointIO()
    for name in sorted(names & others):
        if name.endswith("metrics.csv"):
            if rows(expected / name) != rows(found / name):
                pairs = zip(rows(expected / name), rows(found / name), strict=False)
                yield f"{name}: {next(((a, b) for a, b in pairs if a != b), 'number of rows')}"
        elif name.endswith(".ckpt"):
            one, other = (io.load_checkpoint(folder / name) for folder in (expected, found))
            yield from same(one, other, name)


def is_result(path: Path) -> bool:
    inside = any(parent.suffix == ".ckpt" for parent in path.parents)
    return not inside and path.suffix in (".ckpt", ".csv") and "cut" not in path.name


def swap(lite: Lite, source: Path, target: Path) -> None:
    """Replace a folder by a copy, on rank 0."""
    lite.barrier()
    if lite.is_global_zero:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=True)
    lite.barrier()


def check_fits(case: Case, folder: Path, lite: Lite) -> Iterator[Any]:
    """Yield the number of a checkpoint and what differs, for each."""
    work, whole, kept = folder / "run", folder / "whole", folder / "kept"
    first = Fit(case, work, 1, [Snapshots(work, kept, case.number)])
    swap(lite, work, whole)
    for number, path in enumerate(sorted(kept.iterdir(), key=step_of)):
        swap(lite, path, work)
        rest = Fit(case, work, 50 + number, path=work / "all" / f"{path.name}.ckpt")
        lite.barrier()
        said = []
        if rest.losses != first.losses[len(first.losses) - len(rest.losses) :]:
            said.append("losses")
        if rest.epochs != [one for one in first.epochs if one[0] >= step_of(path)]:
            said.append(f"epochs {first.epochs} and {rest.epochs}")
        if lite.is_global_zero:
            said += differences(case, whole, work)
        yield path.name, said


def step_of(path: Path) -> int:
    return int(path.stem.partition("step=")[2])


def check_loops(case: Case, folder: Path, lite: Lite) -> Iterator[Any]:
    whole, work, empty = folder / "whole", folder / "run", folder / "empty"
    if lite.is_global_zero:
        empty.mkdir(parents=True)
    first = loop(case, whole, 1)
    for number, path in enumerate(sorted(whole.iterdir())):
        swap(lite, empty, work)
        rest = loop(case, work, 50 + number, path)
        lite.barrier()
        said = ["losses"] if rest != first[len(first) - len(rest) :] else []
        if lite.is_global_zero:
            io: Any = (
                DirectoryCheckpointIO() if case.form == "directory" else SingleFileCheckpointIO()
            )
            for saved in work.iterdir():
                other = io.load_checkpoint(saved)
                said += same(io.load_checkpoint(whole / saved.name), other, saved.name)
        lite.barrier()
        yield path.name, said


def main(folder: Path, accelerator: str, seed: int, numbers: list[int]) -> None:
    warnings.simplefilter("ignore")
    first = draw(seed, numbers[0], accelerator)
    strategy = "ddp" if first.ranks > 1 else "auto"
    lite = Lite(accelerator=accelerator, devices=first.ranks, strategy=strategy)
    lite.launch()
    for number in numbers:
        case = draw(seed, number, accelerator)
        check = check_loops if case.front == "lite" else check_fits
        place = folder / f"case{number}"
        result: dict[str, Any] = {}
        try:
            result["resumes"] = {}
            for name, said in check(case, place, lite):
                result["resumes"][name] = said
        except BaseException:
            result["error"] = traceback.format_exc()
            raise
        finally:
            with contextlib.suppress(OSError):
                text = json.dumps(result)
                (folder / f"{number}-{lite.global_rank}.json").write_text(text)
        lite.barrier()
        if lite.is_global_zero:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    folder, accelerator, seed, *drawn = sys.argv[1:]
    main(Path(folder), accelerator, int(seed), [*map(int, drawn)])
