"""Reads the logs of runs: CSVLogger's files, those of other tools like them, TensorBoard's."""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError, format_text

_LONGEST_NAME = 200
_MOST_SERIES = 2000
"""Columns of a file that are read. A file with more is not a log of metrics."""
_OPTIMIZER_STEP = "trainer/optimizer_step"
"""The column of the optimizer step, perhaps with a prefix, in rows that have another step."""


@dataclass
class Series:
    """The values of one metric in the order in which they were logged.

    Attributes:
        steps: the step of each value.
        values: the values; they may be infinite or NaN.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        name: the name of its file or folder.
        size: bytes.
        saved: seconds since the epoch.
    """

    name: str
    size: int
    saved: float


@dataclass
class Run:
    """The logs of a run.

    Attributes:
        name: a short name, unique among the runs of a report.
        folder: where the logs lie.
        series: the values by metric.
        hyperparameters: as text.
        status: how the run ended, as its logger wrote it; empty if unknown.
        resumed: the steps at which the run resumed from a checkpoint and wrote rows again.
        checkpoints: the checkpoints beside the logs.
        notes: unreadable parts of the logs, one sentence each.
    """

    name: str
    folder: Path
    series: dict[str, Series] = field(default_factory=dict)
    hyperparameters: dict[str, str] = field(default_factory=dict)
    status: str = ""
    resumed: list[float] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def last_step(self) -> float | None:
        """Return the highest step of any value, or None without values."""
        return max((max(each.steps) for each in self.series.values()), default=None)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the folders with logs at or below the given paths, in natural order.

    Args:
        paths: folders of runs, folders of experiments, or files `metrics.csv`.

    Raises:
        ConfigurationError: a path does not exist, or has no logs.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ConfigurationError(
                f"{str(path)!r}: there is no such file or folder: give the folder of a run, which "
                "a fit prints as 'logs go to ...'"
            )
        folder = path.parent if path.is_file() else path
        inside = [folder] if _has_logs(folder) else _below(folder)
        if not inside:
            raise ConfigurationError(
                f"{str(path)!r}: expected a folder with logs (metrics.csv, or TensorBoard's "
                "events.out.tfevents...), or with folders of runs: found neither"
            )
        found.update(dict.fromkeys(each.resolve() for each in inside))
    return list(found)


def read_run(folder: Path, name: str) -> Run:
    """Read the logs in a folder.

    Args:
        folder: the folder.
        name: the name of the run in the report.
    """
    run = Run(name, folder)
    file = folder / "metrics.csv"
    if file.exists():
        _read_csv(file, run)
        _read_resumes(folder / "metrics.cut.csv", run)
    events = sorted(folder.glob("events.out.tfevents*"))
    if events:
        _read_events(folder, run)
    run.hyperparameters = _read_hyperparameters(folder, run)
    run.status = (
        _text(folder / ".writer").partition(" ")[0] if (folder / ".writer").exists() else ""
    )
    run.checkpoints = _checkpoints(folder)
    if not run.series:
        run.notes.append("no value was logged")
    return run


def _has_logs(folder: Path) -> bool:
    return (folder / "metrics.csv").is_file() or any(folder.glob("events.out.tfevents*"))


def _below(folder: Path) -> list[Path]:
    """Return the folders of runs at most two levels below a folder."""
    found = {path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/metrics.csv")}
    events = (folder.glob(f"{depth}/events.out.tfevents*") for depth in ("*", "*/*"))
    found |= {path.parent for each in events for path in each}
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sorting key that puts version_10 behind version_9."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file, without NUL bytes and without a last line cut short."""
    with file.open(encoding="utf-8", errors="replace", newline="") as opened:
        for line in opened:
            if line.endswith("\n"):
                yield line.replace("\0", "") if "\0" in line else line


def _read_csv(file: Path, run: Run) -> None:
    with file.open("rb") as opened:
        opened.seek(0, 2)
        opened.seek(max(0, opened.tell() - 1))
        if opened.read() not in (b"", b"\n"):
            run.notes.append("the last row was cut short and is left out")
    rows = csv.reader(_lines(file))
    bad = 0
    try:
        header = [format_text(cell, _LONGEST_NAME) for cell in next(rows, [])]
        if len(header) > _MOST_SERIES:
            run.notes.append(f"only the first {_MOST_SERIES} of {len(header)} columns are read")
        step_at = header.index("step") if "step" in header else None
        if header and step_at is None:
            run.notes.append("there is no column 'step', so rows are counted")
        columns = [(Series(), name) for name in header[:_MOST_SERIES]]
        size = len(header)
        for number, row in enumerate(rows):
            if len(row) != size:
                bad += 1
                continue
            try:
                step = float(number if step_at is None else row[step_at])
            except ValueError:
                bad += 1
                continue
            for (series, _), cell in zip(columns, row, strict=False):
                if cell:
                    try:
                        value = float(cell)
                    except ValueError:  # a text
                        continue
                    series.steps.append(step)
                    series.values.append(value)
    except csv.Error as error:
        run.notes.append(f"metrics.csv cannot be read to its end: {error}")
        if "columns" not in locals():
            return
    if bad:
        run.notes.append(f"{bad} row(s) that are not complete are left out")
    run.series |= {
        name: each
        for each, name in columns
        if name != "step" and not _is_optimizer_step(name) and each.values
    }


def _is_optimizer_step(column: str) -> bool:
    return column == _OPTIMIZER_STEP or column.endswith(f"-{_OPTIMIZER_STEP}")


def _read_resumes(file: Path, run: Run) -> None:
    """Note where the run was resumed: each time, its logger moved the rows from there on away."""
    if not file.exists():
        return
    header: list[str] = []
    try:
        for fields in csv.reader(_lines(file)):
            if fields[:1] == ["step"]:
                header = fields
            elif header:
                row = dict(zip(header, fields, strict=False))
                steps = [row[name] for name in row if _is_optimizer_step(name)]
                run.resumed.append(float(next(filter(None, steps), row["step"])))
                header = []
    except (csv.Error, KeyError, ValueError):
        run.notes.append("metrics.cut.csv cannot be read")


def _read_events(folder: Path, run: Run) -> None:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        run.notes.append("TensorBoard's files are not read: pip install tensorboard")
        return
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    # A damaged file, or a file of another version, must not hide the others.
    try:
        accumulator.Reload()
        tags = accumulator.Tags()["scalars"]
    except Exception as error:
        run.notes.append(f"TensorBoard's files cannot be read: {format_text(str(error))}")
        return
    for tag in tags[:_MOST_SERIES]:
        name = format_text(tag, _LONGEST_NAME)
        if name == "hp_metric" or name in run.series:
            continue
        series = Series()
        for event in accumulator.Scalars(tag):
            series.steps.append(event.step)
            series.values.append(event.value)
        run.series[name] = series


def _read_hyperparameters(folder: Path, run: Run) -> dict[str, str]:
    """Return the hyperparameters by dotted name; TensorBoardLogger's YAML file is JSON."""
    for name in ("hparams.json", "hparams.yaml"):
        if not (folder / name).is_file():
            continue
        try:
            data = json.loads(_text(folder / name))
        except (ValueError, RecursionError):
            run.notes.append(f"{name} is not JSON and is left out")
            continue
        if isinstance(data, dict):
            return dict(_flat(data))
    return {}


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        if isinstance(value, dict) and value and prefix.count(".") < 5:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield format_text(prefix + name, _LONGEST_NAME), format_text(text, 500)


def _checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in the folder `checkpoints`, the oldest first."""
    found = []
    for path in (folder / "checkpoints").glob("*.ckpt"):
        try:
            files = (
                [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            )
            sizes = [each.stat() for each in files]
        except OSError:  # removed in this moment by a run that goes on
            continue
        latest = max((each.st_mtime for each in sizes), default=0.0)
        size = sum(each.st_size for each in sizes)
        found.append(Checkpoint(format_text(path.name), size, latest))
    return sorted(found, key=lambda each: each.saved)


def _text(file: Path) -> str:
    """Return the beginning of a text file; "" if it cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(2**20)
    except OSError:
        return ""
