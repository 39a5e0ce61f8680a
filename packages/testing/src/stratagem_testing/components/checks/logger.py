"""Loggers: what a run has when it ends, however it ends, and what it has not."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stratagem.callbacks import Callback
from stratagem.loggers import Logger
from stratagem.trainer import Trainer
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.every import pickled
from stratagem_testing.places import find
from stratagem_testing.strategies.models import Learner, loader
from stratagem_testing.surroundings import Surroundings, open_files

KIND = "logger"
Rows = Sequence[tuple[int | None, Mapping[str, float]]]
ROWS: list[tuple[int, dict[str, float]]] = [
    (0, {"loss": 1.5, "rate": 0.1}),
    (1, {"loss": 1.25}),
    (2, {"loss": 1.0, "val_loss": -2.0}),
]


def _read(bench: Bench, logger: Logger) -> list[tuple[int | None, dict[str, float]]]:
    """Return what the logger's run has, by the author's function."""
    rows: Rows = find(bench.option("read"))(logger)
    return [(step, {name: float(value) for name, value in row.items()}) for step, row in rows]


def _judge_rows(bench: Bench, logger: Logger, expected: Rows, when: str) -> None:
    found = _read(bench, logger)
    assert found == list(expected), (
        f"{when} the run has {found}, expected {list(expected)}: each step with its own values, in "
        "the order in which they were logged"
    )


@check(KIND, "life/nothing logged")
def _nothing(bench: Bench) -> None:
    """A logger that is created and finalized without values leaves no file and no thread."""
    before = Surroundings.now()
    logger = bench.make()
    assert isinstance(logger, Logger), (
        f"{bench.component.name} made {logger!r}: subclass stratagem.loggers.Logger"
    )
    assert not bench.files(), (
        f"making a logger wrote {', '.join(bench.files())}: every rank makes one; begin with the "
        "first value, on rank 0"
    )
    logger.save()
    logger.finalize("success")
    assert not bench.files(), f"without a value logged there is {', '.join(bench.files())}"
    changed = before.changes()
    assert not changed, f"after finalize() there is {'; '.join(changed)}"


@check(KIND, "life/folders")
def _folders(bench: Bench) -> None:
    """save_dir is a local path or None. log_dir is a text that does not change."""
    logger = bench.make()
    assert logger.save_dir is None or isinstance(logger.save_dir, (str, Path)), (
        f"save_dir is {logger.save_dir!r}; expected a path, which a Trainer tries before it starts "
        "processes, or None"
    )
    first, again = logger.log_dir, logger.log_dir
    assert isinstance(first, str), f"log_dir is {first!r}; expected a str ('': there is none)"
    assert first == again, f"log_dir is {first!r}, and then {again!r}: checkpoints go beside it"


@check(KIND, "rows/values")
def _values(bench: Bench) -> None:
    """All rows are stored with their steps and values, also if new names appear later.

    The rows that log_rows receives do not change. After finalize, no thread and no file of the
    logger is open, unless library_stays = True.
    """
    before = Surroundings.now()
    logger = bench.make()
    rows = copy.deepcopy(ROWS)
    logger.log_rows(rows)
    logger.finalize("success")
    assert rows == ROWS, (
        f"log_rows changed the rows that it was given to {rows}: other loggers get them, too"
    )
    changed, own = before.changes(), str(bench.folder)
    changed += [f"the open file {file}" for file in sorted({*open_files()}) if file.startswith(own)]
    assert bench.option("library_stays") or not changed, (
        f"after finalize() there is {'; '.join(changed)}: end it there. If a library of others "
        "keeps it until the process ends, set library_stays = True in the test's class"
    )
    _judge_rows(bench, logger, ROWS, "after log_rows and finalize")


_NAMES = (
    "val/loss",
    "train loss",
    'a, "b"; c',
    "gr\u00f6\u00dfe (%)",
    "lr-Adam/pg1",
    "a.b[0]",
    "x" * 90,
)


@check(KIND, "rows/names and digits")
def _names(bench: Bench) -> None:
    """Names may have slashes, spaces, commas, quotes and other letters. Seven digits are stored."""
    logger = bench.make()
    values = (1 / 3, 1.25e-7, -12345678.0, 2e30, 0.1, 3.0, 1234.5678)
    row = dict(zip(_NAMES, values, strict=True))
    error = bench.error(lambda: (logger.log_rows([(0, row)]), logger.finalize("success")))
    assert error is None, f"a row with the names {', '.join(row)} ended in {brief(error)}"
    stored = {name: value for _, row in _read(bench, logger) for name, value in row.items()}
    found = list(stored.values())
    for name, value in row.items():
        assert any(math.isclose(value, each, rel_tol=1e-6) for each in found), (
            f"the value {value!r} of {name!r} is not stored; there are {sorted(found)}: write all "
            "digits (repr), and names as the format wants them"
        )
    for name, value in row.items():
        assert math.isclose(stored.get(name, value), value, rel_tol=1e-6), (
            f"{name!r} has the value {stored[name]!r}, expected {value!r}: a name before it is "
            "taken for several"
        )
    assert len(found) == len(row), f"{len(row)} values of a row became {len(found)}"


@check(KIND, "rows/one at a time")
def _metrics(bench: Bench) -> None:
    """log_metrics stores one row, as log_rows stores many."""
    logger = bench.make()
    for step, values in ROWS:
        logger.log_metrics(values, step)
    logger.save()
    logger.finalize("success")
    _judge_rows(bench, logger, ROWS, "after log_metrics and save")


@check(KIND, "rows/of one step")
def _of_one_step(bench: Bench) -> None:
    """Several rows of one step, for example from training and validation, are all stored.

    So are rows of earlier steps than the last: the batches of an evaluation count from 0.
    """
    logger = bench.make()
    rows = [{"loss": 1.5}, {"val_loss": 2.5}, {"rate": 0.5}]
    for values in rows:
        logger.log_metrics(values, 3)
    logger.finalize("success")
    found = {
        name: value
        for step, row in _read(bench, logger)
        if step == 3
        for name, value in row.items()
    }
    expected = {name: value for row in rows for name, value in row.items()}
    assert found == expected, (
        f"three rows of step 3 came back as {found}, expected {expected}: a second row of a step "
        "has other values, and is no repetition"
    )
    logger.log_rows([(0, {"batch_loss": 4.0}), (1, {"batch_loss": 5.0})])
    logger.finalize("success")
    steps = {step: row["batch_loss"] for step, row in _read(bench, logger) if "batch_loss" in row}
    assert steps == {0: 4.0, 1: 5.0}, (
        f"after a row of step 3, rows of the steps 0 and 1 came back as {steps}, expected "
        "{0: 4.0, 1: 5.0}: batches of an evaluation are counted from 0"
    )


@check(KIND, "rows/not finite")
def _not_finite(bench: Bench) -> None:
    """NaN and infinite values are stored."""
    logger = bench.make()
    values = {"nan": math.nan, "inf": math.inf, "large": 1e300}
    error = bench.error(lambda: (logger.log_rows([(0, values)]), logger.finalize("success")))
    assert error is None, f"a row with NaN and infinity ended in {brief(error)}"
    rows = _read(bench, logger)
    assert len(rows) == 1, f"a row with NaN and infinity became {len(rows)} rows"
    found = rows[0][1]
    assert math.isnan(found.get("nan", 0.0)), f"NaN came back as {found.get('nan')}"
    assert found.get("inf") == math.inf, f"infinity came back as {found.get('inf')}"


@check(KIND, "rows/flushed")
def _flushed(bench: Bench) -> None:
    """The rows that log_rows received are on disk, also if the process is killed directly after."""

    def log(report: Any) -> None:
        bench.make().log_rows(ROWS)
        report(logged=True)
        os.kill(os.getpid(), 9)

    child = bench.in_child(log)
    told = child.next_report()
    child.end()
    assert told == {"logged": True}, "log_rows raised an error"
    _judge_rows(bench, bench.make(), ROWS, "after a kill behind log_rows,")


@check(KIND, "life/continued")
def _continued(bench: Bench) -> None:
    """A second logger of the same run appends to the existing rows."""
    first = bench.make()
    first.log_rows(ROWS[:2])
    first.finalize("failed")
    second = bench.make()
    more = (3, {"loss": 0.5, "new": 7.0})
    second.log_rows([ROWS[2], more])
    second.finalize("success")
    _judge_rows(bench, second, [*ROWS, more], "after a run that was resumed")


@check(KIND, "life/finalized twice")
def _twice(bench: Bench) -> None:
    """A run can be finalized twice, with any status, and values can be logged in between."""
    logger = bench.make()
    logger.log_rows(ROWS[:1])
    error = bench.error(lambda: (logger.finalize("failed"), logger.finalize("success")))
    assert error is None, f"a second finalize ended in {brief(error)}: a Trainer fits, then tests"
    error = bench.error(lambda: (logger.log_rows(ROWS[1:2]), logger.finalize("success")))
    assert error is None, (
        f"a row after finalize ended in {brief(error)}: a Trainer fits, then tests"
    )
    _judge_rows(bench, logger, ROWS[:2], "after two runs of one Trainer")


@check(KIND, "hyperparameters/taken")
def _hyperparameters(bench: Bench) -> None:
    """log_hyperparams accepts nested values of any type, and does not change them."""
    logger = bench.make()
    values: dict[str, Any] = {
        "rate": 0.1,
        "layers": [1, (2, 3)],
        "nested": {"path": Path("x"), 7: None, "kind": torch.float32, "empty": {}},
        "function": math.sqrt,
        "tensor": torch.ones(2),
        "object": object(),
        "set": {1, 2},
        "not finite": math.nan,
        "text": "two\nlines, \u00fc",
    }
    before = repr(values)
    error = bench.error(lambda: logger.log_hyperparams(values))
    assert error is None, (
        f"log_hyperparams of nested values ended in {brief(error)}: write the text of what cannot "
        "be stored"
    )
    assert repr(values) == before, "log_hyperparams changed the user's hyperparameters"
    for again in (values, {}):
        error = bench.error(lambda again=again: logger.log_hyperparams(again))  # type: ignore[misc]
        assert error is None, f"a second log_hyperparams, of a second fit, ended in {brief(error)}"
    logger.finalize("success")


class _Noting:
    """Notes the calls of a logger's methods, with the process, in a file."""

    NAMES = ("log_hyperparams", "log_rows", "log_metrics", "finalize")

    def __init__(self, logger: Logger, file: Path) -> None:
        self.file = file
        for name in self.NAMES:
            setattr(logger, name, self._noted(name, getattr(logger, name)))

    def _noted(self, name: str, method: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            with self.file.open("a") as file:
                file.write(f"{os.getpid()} {name} {arguments[0] if name == 'finalize' else ''}\n")
            return method(*arguments, **options)

        noted.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return noted


class _Logging(Learner):
    """Logs its loss at each step, and fails at a step."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.fails_at:
            raise ValueError("planted by the conformance kit")
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss.detach(), on_step=True, on_epoch=False)
        return loss


def _fit(
    bench: Bench, logger: Logger, fails_at: int = -1, path: Any = None, **options: Any
) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=bench.folder.parent / "root",
        **{"strategy": "single_device", "devices": 1, "max_epochs": 1, **options},
    )
    trainer.fit(_Logging(fails_at), loader(32, 1), ckpt_path=path)
    return trainer


def _steps(rows: Rows) -> list[int | None]:
    return [step for step, row in rows if "step_loss" in row]


@check(KIND, "trainer/a run")
def _run(bench: Bench) -> None:
    """A run of the Trainer stores every step once and in order, with finite values."""
    logger, file = bench.make(), bench.folder.parent / "calls"
    _Noting(logger, file)
    _fit(bench, logger)
    rows = _read(bench, logger)
    assert _steps(rows) == [0, 1, 2, 3], (
        f"a run of 4 steps has rows of the steps {_steps(rows)}, expected [0, 1, 2, 3]"
    )
    values = [value for _, row in rows for value in row.values()]
    assert all(map(math.isfinite, values)), f"values are not finite: {rows}"
    calls = [line.split()[1:] for line in file.read_text().splitlines()]
    assert calls[-1] == ["finalize", "success"], f"the last call of a run is {calls[-1]}"
    assert sum(call[0] == "finalize" for call in calls) == 1, f"finalize was called twice: {calls}"


@check(KIND, "trainer/a run that fails")
def _failed(bench: Bench) -> None:
    """After an error in a run, earlier values are stored, and finalize gets the status "failed"."""
    logger, file = bench.make(), bench.folder.parent / "calls"
    _Noting(logger, file)
    error = bench.error(lambda: _fit(bench, logger, fails_at=3))
    assert error is not None, "the error of a training step was swallowed"
    assert "planted" in str(error), f"a training that fails ended in {brief(error)}"
    assert _steps(_read(bench, logger)) == [0, 1, 2], (
        f"after an error in step 3 the run has the steps {_steps(_read(bench, logger))}, expected "
        "[0, 1, 2]"
    )
    calls = [line.split()[1:] for line in file.read_text().splitlines()]
    assert ["finalize", "failed"] in calls, f"finalize('failed') was not called: {calls}"


@check(KIND, "trainer/a resumed run")
def _resumed(bench: Bench) -> None:
    """After a resume, the rows of both runs are stored, and those of before once.

    The first run fails two steps after its checkpoint. The rows of these steps may be there twice.
    """
    path = bench.folder.parent / "saved.ckpt"
    options: Any = {"max_epochs": 2, "callbacks": [_SavesEpoch(path)]}
    error = bench.error(lambda: _fit(bench, bench.make(), fails_at=6, **options))
    assert "planted" in str(error), f"a training that fails ended in {brief(error)}"
    second = bench.make()
    _fit(bench, second, path=path, max_epochs=2)
    steps = _steps(_read(bench, second))
    again = steps.count(4)
    expected = [step for step in range(8) for _ in range(again if step in (4, 5) else 1)]
    assert again in (1, 2) and sorted(map(str, steps)) == [*map(str, expected)], (  # noqa: PT018
        "a run that was saved after the steps 0 to 3, failed in step 6 and was resumed until step "
        f"7 has rows of the steps {steps}, expected each step, and once but 4 and 5, which were "
        "taken twice: append to what the run has. If begin_run(run_id, resumed_at=4) removes rows, "
        "then those of step 4 and later, and no others"
    )


class _SavesEpoch(Callback):
    """Saves a checkpoint when an epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)


@check(KIND, "trainer/rank 0 only", slow=True)
def _rank_zero(bench: Bench) -> None:
    """With two ranks, only rank 0 writes, and each value is stored once."""
    logger, file = bench.make(), bench.folder.parent / "calls"
    _Noting(logger, file)
    _fit(bench, logger, strategy="ddp_fork", devices=2)
    processes = {line.split()[0] for line in file.read_text().splitlines()}
    assert len(processes) == 1, (
        f"{len(processes)} processes have called the logger, expected rank 0"
    )
    steps = _steps(_read(bench, logger))
    assert len(set(steps)) == len(steps), f"steps were written more than once: {steps}"


check(KIND, "life/pickled")(pickled)
