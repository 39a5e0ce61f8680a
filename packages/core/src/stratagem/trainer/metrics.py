"""What `self.log` does: a step's values for the loggers, an epoch's means, the progress bar."""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import UserCodeError
from stratagem.interfaces.ranks import Ranks, ReduceOp
from stratagem.loggers.logger import Logger

Options = tuple[Any, ...]
_FOLD = 64
"""Values are kept as tensors and folded together by so many, so that no step waits for a device."""
_ROWS = 256
_HOLD_SECONDS = 2.0
"""Rows are handed to the loggers when there are so many, or after this time."""
_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.sum,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}
_START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


class _Entry:
    """One name that is logged, with its options resolved and its values of this epoch."""

    __slots__ = (
        "epoch_name",
        "fx",
        "given",
        "logger",
        "metric",
        "name",
        "number",
        "on_epoch",
        "on_step",
        "prog_bar",
        "shown",
        "step_name",
        "sync",
        "values",
        "weight",
        "weights",
    )

    def __init__(self, name: str, given: Options, *, on_step: bool, on_epoch: bool) -> None:
        self.name = name
        self.given = given
        self.prog_bar, self.logger, _, _, self.fx, self.sync, _ = given
        self.on_step, self.on_epoch = on_step, on_epoch
        both = on_step and on_epoch
        self.step_name = f"{name}_step" if both else name
        self.epoch_name = f"{name}_epoch" if both else name
        self.shown: Shown = (self.epoch_name, self.logger, self.prog_bar)
        self.metric: Any = None
        self.number = _START.get(self.fx, 0.0) if isinstance(self.fx, str) else 0.0
        self.weight = 0.0
        self.values: list[Any] = []
        self.weights: list[float] = []

    def add(self, value: Any, weight: float) -> None:
        """Take a value of this epoch.

        A number is reduced at once; a tensor on a device is kept, so that nothing waits for it.
        """
        fx = self.fx
        if value.__class__ is Tensor or not isinstance(fx, str):
            self.values.append(value)
            self.weights.append(weight)
            if len(self.values) >= _FOLD:
                self.fold()
        elif fx == "mean":
            self.number += value * weight
            self.weight += weight
        else:
            self.number = _merge(fx, self.number, value)

    def fold(self) -> None:
        """Reduce the tensors that are kept to one of them."""
        if not isinstance(self.fx, str) or not self.values:
            return
        values = torch.stack([value.reshape(()).double() for value in self.values])
        if self.fx == "mean":
            values = values * torch.tensor(self.weights, dtype=values.dtype, device=values.device)
            self.weight += sum(self.weights)
        # What is reduced already counts once from here on.
        self.values, self.weights = [_REDUCTIONS[self.fx](values)], [0.0]

    def summary(self) -> Summary:
        """Return this epoch's value on this rank, as plain data."""
        if isinstance(self.fx, str):
            self.fold()
            number = self.number
            for value in self.values:
                number = _merge(self.fx, number, float(value))
            return self.fx, number, self.weight, self.shown
        values = torch.stack([torch.as_tensor(v, dtype=torch.float32).cpu() for v in self.values])
        # A function of our user's: over ranks its results are averaged.
        return "mean", float(self.fx(values)), 1.0, self.shown


Shown = tuple[str, bool, bool]
"""Name of the epoch's value; whether it goes to the loggers, and to the progress bar."""
Summary = tuple[str, float, float, Shown]
"""Reduction, value, weight, and how it is shown."""


def _merge(fx: str, one: float, other: float) -> float:
    """Return the reduction of two numbers; NaN stays NaN."""
    if fx in ("mean", "sum"):
        return one + other
    if other != other:
        return other
    better = other > one if fx == "max" else other < one
    return other if better else one


class Metrics:
    """The values logged in one stage of a run ("train", "validate", ...).

    Args:
        ranks: those that values are reduced over.
        loggers: receive rows; empty on ranks other than 0.
        every_n_steps: hand every n-th step's values to the loggers.
    """

    def __init__(
        self,
        ranks: Ranks,
        loggers: Sequence[Logger],
        *,
        every_n_steps: int = 1,
    ) -> None:
        self.ranks = ranks
        self.loggers = loggers
        self.every_n_steps = every_n_steps
        self.in_step = False
        """Within a training step: values of a step are the default; elsewhere, of an epoch."""
        self.batch: Any = None
        """The present batch; its size weights a mean."""
        self.counts = True
        """Whether what is logged counts for the epoch; a batch that is repeated does not."""
        self.dataloader_idx: int | None = None
        """Which of several evaluation loaders, or None if there is one."""
        self.row: dict[str, Any] = {}
        """This step's values for the loggers."""
        self.step_values: dict[str, Any] = {}
        """The latest values of steps that nobody has taken yet."""
        self.bar: dict[str, Any] = {}
        """The latest values for the progress bar."""
        self._entries: dict[tuple[str, int | None], _Entry] = {}
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._due = monotonic() + _HOLD_SECONDS

    def log(self, name: str, value: Any, options: Options, batch_size: int | None) -> None:
        """Take a value; see `Module.log`."""
        entry = self._entries.get((name, self.dataloader_idx))
        if entry is None or entry.given != options:
            entry = self._declare(name, options)
        if value.__class__ is Tensor or isinstance(value, Tensor):
            value = self._read(name, value)
        elif value.__class__ is not float and value.__class__ is not int:
            value = self._number_of(entry, value)
        if entry.on_step and value is not None:
            now = self._reduced(entry, value) if entry.sync is True else value
            self.step_values[entry.step_name] = now
            if entry.logger:
                self.row[entry.step_name] = now
            if entry.prog_bar:
                self.bar[entry.step_name] = now
        if entry.on_epoch and entry.metric is None and self.counts:
            entry.add(value, batch_size or _batch_size(self.batch))

    def _read(self, name: str, value: Tensor) -> Any:
        """Return a number for a tensor on the CPU; a tensor of its own for one on a device."""
        if value.is_cpu:
            try:
                return value.item()
            except RuntimeError:
                pass  # it has several elements, or none
        elif value.numel() == 1:
            # A result of autograd is not written to again; anything else may be, before it is
            # read here.
            taken = value.detach().reshape(())
            return taken if value.grad_fn is not None else taken.clone()
        raise UserCodeError(
            f"self.log({name!r}, ...) expected a single number, received a tensor of shape "
            f"{tuple(value.shape)}: reduce it first, for example by .mean()"
        )

    def _reduced(self, entry: _Entry, value: Any) -> Any:
        op: ReduceOp = entry.fx if isinstance(entry.fx, str) else "mean"  # type: ignore[assignment]
        own = torch.as_tensor(value, dtype=torch.float32)
        index, count = self.ranks.data_shard
        if op in ("max", "min") or count == self.ranks.world_size:
            return self._read(entry.name, self.ranks.all_reduce(own, op))
        # Ranks that share a part of the data count as one, however many they are.
        reduced = self.ranks.all_reduce(own / len(self.ranks.data_groups[index]), "sum")
        return self._read(entry.name, reduced / count if op == "mean" else reduced)

    def _declare(self, name: str, options: Options) -> _Entry:
        key = (name, self.dataloader_idx)
        if key in self._entries:
            if _alike(self._entries[key].given, options):
                return self._entries[key]
            raise UserCodeError(
                f"self.log({name!r}, ...) was called with other options before in this epoch; use "
                "one set of options for one name"
            )
        _, _, on_step, on_epoch, fx, _, add_index = options
        on_step = self.in_step if on_step is None else on_step
        on_epoch = not self.in_step if on_epoch is None else on_epoch
        if not callable(fx) and fx not in _REDUCTIONS:
            raise UserCodeError(
                f"self.log({name!r}, reduce_fx={fx!r}): expected one of "
                f"{', '.join(map(repr, _REDUCTIONS))}, or a function of a tensor"
            )
        if self.dataloader_idx is not None and add_index:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        entry = self._entries[key] = _Entry(name, options, on_step=on_step, on_epoch=on_epoch)
        return entry

    def _number_of(self, entry: _Entry, value: Any) -> Any:
        """Return a number for what is neither tensor nor float: a metric object, a NumPy number.

        None: a metric object that was updated, not called, has no value of this step.
        """
        if isinstance(value, nn.Module) and hasattr(value, "compute") and hasattr(value, "reset"):
            # A torchmetrics Metric: the value of the step is what its forward left, the value of
            # the epoch is what it computes, over ranks, at the end.
            entry.metric = value
            last = getattr(value, "_forward_cache", None)
            return self._read(entry.name, last) if isinstance(last, Tensor) else None
        try:
            # NumPy's arrays of one element have no float of their own.
            return float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError):
            raise UserCodeError(
                f"self.log({entry.name!r}, ...) expected a number, a tensor with one element or a "
                f"torchmetrics Metric, received {type(value).__name__}"
            ) from None

    # -- rows for the loggers

    def end_step(self, step: int) -> None:
        """Keep this step's values for the loggers; called only where there are any."""
        row, self.row = self.row, {}
        if not self.loggers or not self.every_n_steps or (step + 1) % self.every_n_steps:
            return
        self._rows.append((step, row))
        if len(self._rows) >= _ROWS or monotonic() >= self._due:
            self.flush()

    def write(self, values: Mapping[str, Any], step: int) -> None:
        """Hand values to the loggers after the rows that are kept."""
        if self.loggers and values:
            self._rows.append((step, dict(values)))
            self.flush()

    def flush(self) -> None:
        """Hand the kept rows to the loggers."""
        self._due = monotonic() + _HOLD_SECONDS
        rows, self._rows = self._rows, []
        if not rows:
            return
        _read_tensors([row for _, row in rows])
        for logger in self.loggers:
            for step, row in rows:
                logger.log_metrics(row, step)
            logger.save()

    def take_step_values(self) -> dict[str, Any]:
        """Return the values of steps that came since the last time."""
        taken, self.step_values = self.step_values, {}
        return taken

    # -- an epoch's values

    def end_epoch(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the epoch's values and those of them for the loggers; begin a new epoch.

        Values are reduced over ranks here, all of them with one exchange. A value that only some
        ranks have logged is reduced over those, and known to all.
        """
        entries = [entry for entry in self._entries.values() if entry.on_epoch]
        # Several loaders may log under one name (add_dataloader_idx=False).
        summaries = _merged({e.name: e.summary()} for e in entries if e.metric is None)
        if self.ranks.world_size > 1:
            shared = {e.name for e in entries if e.sync is not False}
            own = {name: summary for name, summary in summaries.items() if name in shared}
            # Ranks that share a part of the data log the same, or each what it has: the first one
            # that has logged a value speaks for all of them.
            groups = self.ranks.by_data_group(self.ranks.gather_plain(own))
            summaries.update(_merged(dict(ChainMap(*group)) for group in groups))
        values: dict[str, Tensor] = {}
        for_loggers: dict[str, Tensor] = {}

        def take(name: str, value: Tensor, shown: Shown) -> None:
            epoch_name, to_loggers, in_bar = shown
            values[epoch_name] = values[name] = value
            if to_loggers:
                for_loggers[epoch_name] = value
            if in_bar:
                self.bar[epoch_name] = value

        for name, (fx, number, weight, shown) in summaries.items():
            mean = number / weight if weight else math.nan
            take(name, torch.tensor(mean if fx == "mean" else number), shown)
        for entry in entries:
            if entry.metric is not None:
                take(entry.name, entry.metric.compute(), entry.shown)
        for entry in self._entries.values():
            # Also one that is logged at steps only: what it holds is of this epoch.
            if entry.metric is not None:
                entry.metric.reset()
        self._entries.clear()
        return values, for_loggers


def _merged(parts: Iterable[dict[str, Summary]]) -> dict[str, Summary]:
    """Return the summaries of ranks or loaders, reduced to one for each name."""
    merged: dict[str, Summary] = {}
    for part in parts:
        for name, (fx, number, weight, shown) in part.items():
            if name in merged:
                _, before, weight_before, _ = merged[name]
                number, weight = _merge(fx, before, number), weight_before + weight
            merged[name] = (fx, number, weight, shown)
    return merged


def _read_tensors(rows: list[dict[str, Any]]) -> None:
    """Put numbers in the place of tensors, reading the device once for all of them."""
    places = [(row, name) for row in rows for name in row if row[name].__class__ is Tensor]
    if places:
        numbers = torch.stack([row[name].reshape(()).double() for row, name in places]).tolist()
        for (row, name), number in zip(places, numbers, strict=True):
            row[name] = number


def _batch_size(batch: Any) -> int:
    """Return the first dim of the first tensor in a batch; 1 if there is none."""
    tensor = _first_tensor(batch)
    return tensor.shape[0] if tensor is not None and tensor.dim() else 1


def _first_tensor(data: Any) -> Tensor | None:
    if isinstance(data, Tensor):
        return data
    if isinstance(data, Mapping):
        data = data.values()
    elif dataclasses.is_dataclass(data):
        data = [getattr(data, field.name) for field in dataclasses.fields(data)]
    elif not isinstance(data, (list, tuple)):
        return None
    return next((found for part in data if (found := _first_tensor(part)) is not None), None)


def _alike(one: Options, other: Options) -> bool:
    """Whether options mean the same; a function written in the call is another object each time."""
    return all(
        a == b or getattr(a, "__code__", a) == getattr(b, "__code__", b)
        for a, b in zip(one, other, strict=True)
    )
