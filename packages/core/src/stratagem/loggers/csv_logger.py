"""CSVLogger: values in a file that every tool reads."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from torch import Tensor

from stratagem.errors import ConfigurationError
from stratagem.loggers.logger import Logger, as_mapping, as_plain
from stratagem.loggers.version_folder import VersionFolder, local_folder

_PIECE = 2**20
"""Bytes of a file that are read at once."""
_OTHER_BYTES = "surrogateescape"
"""What is no UTF-8 stays what it is."""


class CSVLogger(Logger):
    """Writes values to `save_dir/name/version_N/metrics.csv`, one row for each step.

    The file contains the rows when `log_metrics` returns, so that a kill loses no row; a Trainer
    passes the rows of two seconds at once. Rows survive a power cut once `finalize` returns. New
    columns are added by copying the file once for all rows of a call, piece by piece, beside it: a
    reader sees either the old or the new file. Hyperparameters go to `hparams.json` beside it.

    A row that a full disk or a crash has truncated is removed before the next row is written. A
    resumed fit moves the rows of its checkpoint's step and later steps to `metrics.cut.csv`, and
    writes them again. A row of the step before is not written twice. Rows on another axis, such as
    the batches of a validation, have their optimizer step in the column `trainer/optimizer_step`.
    The fit gets a new folder if another process writes to the folder of its run, or if its run has
    finished without an error after more steps.

    Args:
        save_dir: folder of all experiments.
        name: folder of this experiment; None or "": `save_dir` itself.
        version: version of the run (int or str); appends if its folder exists. None: the version of
            the run that a fit resumes, or the next free number.
        prefix: prepended to each name, with a "-".
        flush_logs_every_n_steps: the number of rows of `log_metrics` to buffer before writing.

    Raises:
        ConfigurationError: `flush_logs_every_n_steps` is 0, or `save_dir` is a URL.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem.loggers import CSVLogger
        >>> logger = CSVLogger(tempfile.mkdtemp())
        >>> logger.log_metrics({"loss": 0.5}, step=0)
        >>> (Path(logger.log_dir) / "metrics.csv").read_text().split()
        ['step,loss', '0,0.5']
    """

    optimizer_step_name = "trainer/optimizer_step"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "stratagem_logs",
        version: int | str | None = None,
        *,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ConfigurationError(
                f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps}): expected a whole "
                "number of at least 1"
            )
        self.save_dir = local_folder(type(self).__name__, save_dir or ".")
        self.name = name or ""
        self._folder = VersionFolder(type(self).__name__, self.save_dir / self.name, version)
        self._prefix = f"{prefix}-" if prefix else ""
        self._optimizer_step = f"{self._prefix}{CSVLogger.optimizer_step_name}"
        self._flush_every = flush_logs_every_n_steps
        self._held: list[tuple[int | None, Mapping[str, float]]] = []
        self._columns: list[str] = []
        self._written = False
        self._resumed_at: int | None = None
        self._last_rows: dict[str, list[bytes]] = {}
        """Rows of the last step before the one that is resumed, which may be written again, by the
        contents of their first column."""

    @property
    def experiment(self) -> Any:
        """The logger itself: it writes through nothing else."""
        return self

    def __getattr__(self, name: str) -> Any:
        # Attributes of other experiments or loggers.
        raise AttributeError(
            f"{type(self).__name__!r} has no {name!r}: it takes values and hyperparameters. "
            "Trainer(logger='tensorboard') has an experiment that takes pictures and texts too "
            "(pip install 'stratagem-core[tensorboard]')",
            name=name,
            obj=self,
        )

    @property
    def root_dir(self) -> str:
        """The folder of this experiment."""
        return str(self._folder.root)

    @property
    def version(self) -> int | str:  # type: ignore[override]  # chosen on first use
        """The run's number or name; choosing a free one makes its folder.

        Raises:
            ConfigurationError: it cannot be made.
        """
        return self._folder.version

    @property
    def log_dir(self) -> str:
        """The folder of this run; choosing a free one makes it.

        Raises:
            ConfigurationError: it cannot be made.
        """
        return str(self._folder.path)

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Go on in the folder of a run that is resumed, unless a version was given."""
        self._last_rows = {}
        if self._folder.begin_run(run_id, resumed_at):
            self._resumed_at, self._written = resumed_at, False

    @property
    def _file(self) -> Path:
        return self._folder.path / "metrics.csv"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row."""
        self._held.append((step, self._named(metrics)))
        if len(self._held) >= self._flush_every:
            self.save()

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Append rows, with one write for all of them."""
        every, self._flush_every = self._flush_every, len(self._held) + len(rows) + 1
        try:
            super().log_rows(rows)
        finally:
            self._flush_every = every

    def _named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{self._prefix}{name}": value.item() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
        }

    def log_hyperparams(self, params: Any) -> None:
        """Write `hparams.json`.

        Args:
            params: a mapping, an argparse.Namespace or a dataclass.
        """
        text = json.dumps(as_plain(as_mapping(params)), indent=2)
        (self._folder.make() / "hparams.json").write_text(text + "\n")

    def save(self) -> None:
        """Write the rows that are held back."""
        rows, self._held = self._held, []
        if rows:
            self._append(rows)

    def finalize(self, status: str) -> None:
        """Wait until the disk has every row."""
        self.save()
        self._folder.end(status, self.steps_taken)
        if self._written:
            with self._file.open("rb") as file:
                os.fsync(file.fileno())

    def _append(self, rows: Sequence[tuple[int | None, Mapping[str, float]]]) -> None:
        try:
            self._write(rows)
        except OSError:
            self._written = False  # the last row may be cut short
            raise

    def _write(self, rows: Sequence[tuple[int | None, Mapping[str, float]]]) -> None:
        if not self._written:
            self._continue_file()
        full: list[dict[str, Any]] = [{"step": step, **values} for step, values in rows]
        if self._last_rows:
            full = [row for row in full if not self._is_there(row)]
        known = set(self._columns)
        new = list(dict.fromkeys(c for row in full for c in row if c not in known))
        if not self._written:
            self._folder.make()
        elif new:
            self._add_columns(new)
        self._columns += new
        # Opened for each call: nothing is held back that the end of the process could lose.
        with _open(self._file, "a" if self._written else "w") as opened:
            writer = csv.writer(opened)
            if not self._written:
                writer.writerow(self._columns)
            writer.writerows([row.get(column, "") for column in self._columns] for row in full)
        self._written = True

    def _is_there(self, row: Mapping[str, Any]) -> bool:
        """Whether the interrupted run has written a row, perhaps with further values."""
        left = self._last_rows.get(str(row["step"]), [])
        for index, record in enumerate(left):  # in the order of the rewrite
            other = dict(zip(self._columns, _fields(record), strict=False))
            if all(other.get(name) == str(value) for name, value in row.items()):
                del left[index]
                return True
        return False

    def _continue_file(self) -> None:
        """Take over the columns of a file that is there: a named version may have been used."""
        self._columns = []
        if self._file.exists():
            self._cut_rows()
            with _open(self._file) as file:
                self._columns = next(csv.reader(file), [])
        self._written = bool(self._columns)

    def _cut_rows(self) -> None:
        """Remove a last row that is cut short; move the rows that a resumed run writes again."""
        with self._file.open("rb") as file:
            file.seek(-min(1, self._file.stat().st_size), os.SEEK_END)
            if self._resumed_at is None and file.read() in (b"", b"\n"):
                return
        first, self._resumed_at = self._resumed_at, None
        temporary = self._file.with_suffix(".tmp")
        cut: list[bytes] = []
        with self._file.open("rb") as old, temporary.open("wb") as file:
            records = _records(old)
            header = next(records, b"")
            names = _fields(header)
            name = self._optimizer_step
            column = names.index(name) if name in names else None
            file.write(header)
            for record in records:
                if first is None:
                    file.write(record)
                    continue
                step = _step_of(record, column)
                if step >= first:
                    cut.append(record)
                    continue
                file.write(record)
                if step == first - 1:
                    axis = _decoded(record.partition(b",")[0])
                    self._last_rows.setdefault(axis, []).append(record)
            file.flush()
            os.fsync(file.fileno())
        if cut:
            with self._file.with_suffix(".cut.csv").open("ab") as file:
                file.writelines([header, *cut])
        temporary.replace(self._file)

    def _add_columns(self, new: list[str]) -> None:
        """Write the file anew, with as many more fields in each row; a kill leaves the old one."""
        temporary = self._file.with_suffix(".tmp")
        with self._file.open("rb") as old, temporary.open("wb") as file:
            header = io.StringIO(newline="")
            csv.writer(header).writerow(next(csv.reader(map(_decoded, old))) + new)
            file.write(header.getvalue().encode(errors=_OTHER_BYTES))
            file.writelines(_with_more_fields(old, len(new)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file)


def _with_more_fields(rows: BinaryIO, more: int) -> Iterator[bytes]:
    """Yield the rows of a CSV file with empty fields at their ends.

    They are not parsed, which takes nine times as long (1.1 s for a million rows).
    """
    end = b"," * more + b"\r\n"
    is_quoted = False
    while piece := rows.read(_PIECE):
        if piece.endswith(b"\r"):
            piece += rows.read(1)
        parts = piece.split(b'"')
        for number, part in enumerate(parts):
            is_quoted ^= number > 0
            if not is_quoted:  # within quotes, a line's end is a part of the value
                parts[number] = part.replace(b"\r\n", b"\n").replace(b"\n", end)
        yield b'"'.join(parts)


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rows of a CSV file that are complete, the header first."""
    record = b""
    for line in file:
        record += line
        if line.endswith(b"\n") and record.count(b'"') % 2 == 0:
            yield record
            record = b""


def _fields(record: bytes) -> list[str]:
    """Return the fields of a row; []: the csv module cannot read it."""
    try:
        return next(csv.reader([_decoded(record)]), [])
    except csv.Error:
        return []


def _step_of(record: bytes, column: int | None) -> float:
    """Return the optimizer step of a row, which is in a column or else its first field.

    -1: it has none.
    """
    fields = [] if column is None else _fields(record)[column : column + 1]
    try:
        return float("".join(fields) or record.partition(b",")[0])
    except ValueError:
        return -1


def _open(file: Path, mode: Literal["r", "w", "a"] = "r") -> IO[str]:
    """Open a CSV file: UTF-8, whatever the locale."""
    return file.open(mode, encoding="utf-8", errors=_OTHER_BYTES, newline="")


def _decoded(line: bytes) -> str:
    return line.decode(errors=_OTHER_BYTES)
