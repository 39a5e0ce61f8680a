"""Metrics: the values of `self.log` in training, or in one evaluation of a run."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.discovery.registry import nearest_of
from stratagem.errors import UserCodeError
from stratagem.interfaces.ranks import Ranks, ReduceOp
from stratagem.interfaces.strategy import Strategy
from stratagem.module.module import LogOptions
from stratagem.trainer.metrics.accumulator import (
    REDUCTIONS,
    Declaration,
    MetricAccumulator,
    ReducedMetric,
    merged,
    over_ranks,
    reduction,
)
from stratagem.trainer.metrics.batch_size import BatchSize
from stratagem.trainer.metrics.log_buffer import LogBuffer

if TYPE_CHECKING:
    from stratagem.trainer.context import FitState
    from stratagem.trainer.job import Job
    from stratagem.trainer.loops.validation import Validation

_CHECKED = 64
"""For so many values of an epoch, ranks compare the names under which they reduce them."""


class LatestMetrics:
    """The latest values since the start of a Trainer's last fit.

    Attributes:
        batch_size: a function that infers the number of samples in a batch.
        values: the latest values by name, except the values of single evaluation steps.
        evaluation_steps: the latest values of single evaluation steps, by name.
        for_loggers: the names of values that go to the loggers.
        bar: the values for the progress bar, from the current run.
    """

    def __init__(self) -> None:
        self.batch_size: Callable[[Any], int] = BatchSize()
        self.values: dict[str, Any] = {}
        self.evaluation_steps: dict[str, Any] = {}
        self.for_loggers: dict[str, None] = {}
        self.bar: dict[str, Any] = {}

    def emptied(self) -> LatestMetrics:
        """Return another store, without values."""
        other = LatestMetrics()
        other.batch_size = self.batch_size
        return other

    def logged(self) -> dict[str, Tensor]:
        """Return the latest value of each name that goes to the loggers."""
        known = self.values | self.evaluation_steps
        there = (name for name in self.for_loggers if name in known)
        return {name: torch.as_tensor(known[name]) for name in there}


class Monitor:
    """Reads the latest logged values for callbacks and schedulers that monitor them.

    Args:
        latest: the latest values.
        state: the state of the training loop.
        ranks: the ranks; their values may differ.
        validation: the validation of the fit.
        job: the request, for the advice if a value is missing.
    """

    def __init__(
        self, latest: LatestMetrics, state: FitState, ranks: Ranks, validation: Validation, job: Job
    ) -> None:
        self._latest = latest
        self._state = state
        self._ranks = ranks
        self._validation = validation
        self._job = job

    def is_pending(self, name: str) -> bool:
        """Return whether a value that has not been logged yet may be logged later.

        Values may come at the end of this fit's first epoch, or by validation in a later epoch.
        """
        validation = self._validation
        comes_later = bool(validation.loaders) and validation.last_epoch == -1
        may_come = comes_later or not self._state.has_ended_epoch
        return may_come and name not in self._latest.values

    def mean_over_ranks(self, name: str, who: str) -> Tensor:
        """Return the latest logged value of a name, the same on all ranks. All ranks call this.

        Values that differ between ranks, such as the values of a single step, are averaged.

        Args:
            name: the name of the value.
            who: the name of the class that needs the value, for the error.

        Raises:
            UserCodeError: if no value has this name. The error lists the logged names.
        """
        values = self._latest.values
        if name not in values:
            logged = ", ".join(sorted(values)) or "nothing"
            remedy = f"Log it in the Module with self.log({name!r}, ...)"
            if name.startswith("val") and (problem := self._job.unused_validation()):
                remedy = problem
            elif near := nearest_of(name, list(values)):
                remedy = f"Did you mean {near!r}? {remedy}"
            raise UserCodeError(
                f"{who}(monitor={name!r}): no value of that name was logged; there is {logged}. "
                + remedy
            )
        value = torch.as_tensor(values[name])
        of_ranks = self._ranks.all_gather(value)
        # The mean of equal values may be rounded.
        return value if bool((of_ranks == value).all()) else of_ranks.double().mean()


class EpochMetrics(NamedTuple):
    """The reduced metrics of an epoch.

    Attributes:
        values: all metrics by name.
        for_loggers: the metrics that go to the loggers.
        loaders: by name, the indices of the evaluation loaders of a metric. A name that is missing
            here belongs to all loaders.
    """

    values: dict[str, Tensor]
    for_loggers: dict[str, Tensor]
    loaders: dict[str, set[int]]


class Metrics:
    """The values that are logged in training, or in one validation or test.

    The value of a step goes to `latest` at once, and to `rows` at the end of the step. The value of
    an epoch is reduced over batches as they come, and over ranks at the end of the epoch.

    Args:
        strategy: a launched strategy; values are reduced over its ranks.
        rows: the buffer for the loggers.
        latest: the latest values, which are updated here.
        every_n_steps: send the values of every n-th step to `rows`; 0: never.
        of_evaluation: whether the values come from an evaluation.
        module: the user's module; a rank that has not logged a metric object finds it there.
    """

    def __init__(
        self,
        strategy: Strategy,
        rows: LogBuffer,
        latest: LatestMetrics,
        *,
        every_n_steps: int = 1,
        of_evaluation: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self.rows = rows
        self.in_step = False
        """Whether a training step is running, in which `on_step` is the default of `log`."""
        self.batch: Any = None
        """The current batch, whose size is its weight in a mean."""
        self.counts = True
        """Whether logged values count for the epoch; False for a repeated batch."""
        self.drops_values = False
        """Whether `log` does nothing, in the context `TrainStep.without_logging`."""
        self.row: dict[str, Any] = {}
        """The current step's values for the loggers."""
        self._ranks = strategy.ranks
        self._module = module
        self._of_evaluation = of_evaluation
        self._compiles_steps = strategy.accelerator.compiles_steps
        self._latest = latest
        self._steps = latest.evaluation_steps if of_evaluation else latest.values
        self._every = every_n_steps
        self._batch_size = latest.batch_size
        self._compared = 0
        self._loader: int | None = None
        self._epoch = EpochMetrics({}, {}, {})
        """The metrics of this epoch that are already reduced."""
        self._metrics: list[Any] = []
        """The torchmetrics objects to reset at the end of the epoch."""
        self._of_loader: dict[int | None, dict[str, MetricAccumulator]] = {}
        self._entries = self._of_loader.setdefault(None, {})

    def begin_loader(self, index: int | None) -> None:
        """Log the following values for an evaluation loader; None if only one loader runs."""
        self._loader, self._compared = index, 0
        self._entries = self._of_loader.setdefault(index, {})

    def log(self, name: str, value: Any, options: LogOptions, batch_size: int | None) -> None:
        """Log a value; see `Module.log`."""
        if self.drops_values:
            return
        try:
            entry = self._entries.get(name)
        except TypeError:
            raise UserCodeError(
                f"self.log() expected a name and a value, received a {type(name).__name__} as name:"
                " pass a dict of values to self.log_dict()"
            ) from None
        if entry is None or entry.options != options:
            entry = self._declare(name, options)
        kind = value.__class__
        if kind is Tensor:
            value = _read(name, value)
        elif isinstance(value, Tensor):
            # A value computed from shards is gathered: all ranks take part.
            value = _read(name, value.full_tensor() if hasattr(value, "full_tensor") else value)
        elif kind is not float and kind is not int:
            value = _number_of(entry, value)
        if entry.on_step and value is not None:
            now = self._reduced(entry, value) if entry.sync_steps else value
            step_name = entry.step_name
            self._steps[step_name] = now
            if entry.logger:
                self.row[step_name] = now
            if entry.prog_bar:
                self._latest.bar[step_name] = now
        if entry.on_epoch and entry.metric is None and self.counts:
            entry.add(value, batch_size or self._batch_size(self.batch))

    def end_step(self, step: int, epoch: int) -> None:
        """Send the values of this step to the log buffer; called only for steps with values."""
        row, self.row = self.row, {}
        if self._every and not (step + 1) % self._every:
            self.rows.add(row, step, epoch)

    def reduce_epoch(self) -> None:
        """Reduce the epoch's values over loaders and ranks, and make them the latest values.

        All values are reduced over ranks with one exchange. A value that only some ranks have
        logged is reduced over these ranks, and all ranks receive it.
        """
        entries = [entry for by_name in self._of_loader.values() for entry in by_name.values()]
        summaries, declared = self._over_ranks(entries)
        for name, summary in summaries.items():
            self._keep(name, summary.value(), summary)
        own = {(index, e.name): e for index, by in self._of_loader.items() for e in by.values()}
        for one in declared:
            entry = own.get((one.loader, one.name))
            if one.metric is not None and not one.everywhere:
                metric: Any = self._metric_of_all(one)
            else:
                metric = None if entry is None else entry.metric
            shown = ReducedMetric("mean", 0.0, 0.0, one.epoch_name, one.logger, one.prog_bar)
            if metric is not None:
                value = _computed(one.name, metric) if one.on_epoch else None
                if value is not None:
                    self._keep(one.name, value, shown)
                # Also a metric that is logged at steps only: its state belongs to this epoch.
                self._metrics.append(metric)
            elif one.on_epoch and one.name not in summaries:
                # The value is not reduced over ranks, and this rank has not logged it.
                self._keep(one.name, shown.value(), shown)
            if one.loader is not None:
                self._epoch.loaders.setdefault(one.name, set()).add(one.loader)
                self._epoch.loaders.setdefault(one.epoch_name, set()).add(one.loader)
        self._of_loader.clear()
        self.begin_loader(self._loader)
        self._latest.values.update(self._epoch.values)

    def end_epoch(self) -> EpochMetrics:
        """Return the epoch's metrics, including values from hooks at its end; start a new epoch.

        If those hooks log a name again, their value replaces the earlier one.
        """
        self.reduce_epoch()
        # After those hooks, which may call compute().
        for metric in self._metrics:
            metric.reset()
        self._metrics.clear()
        epoch, self._epoch = self._epoch, EpochMetrics({}, {}, {})
        return epoch

    @property
    def entries(self) -> dict[str, MetricAccumulator]:
        """The values that training has logged in this epoch, by name; a part of checkpoints."""
        return self._entries

    @entries.setter
    def entries(self, entries: dict[str, MetricAccumulator]) -> None:
        self._entries = self._of_loader[None] = entries

    def _over_ranks(
        self, entries: list[MetricAccumulator]
    ) -> tuple[dict[str, ReducedMetric], list[Declaration]]:
        """Return the epoch's values by name, reduced over loaders and ranks.

        Returns:
            The values, and the declarations of evaluations or metric objects from all ranks, in the
            same order on every rank.
        """
        reduced = [entry for entry in entries if entry.on_epoch]
        # Several loaders may log under one name (add_dataloader_idx=False).
        summaries = merged({e.name: e.summary()} for e in reduced if e.metric is None)
        declared = [
            self._declared(index, entry)
            for index, by_name in self._of_loader.items()
            for entry in by_name.values()
            if self._of_evaluation or entry.metric is not None
        ]
        if self._ranks.world_size > 1:
            shared = {e.name for e in reduced if e.options.sync_dist is not False}
            own = {name: summaries[name] for name in sorted(shared & summaries.keys())}
            of_ranks, declared = over_ranks(own, self._ranks, declared)
            summaries.update(of_ranks)
        return summaries, declared

    def _declared(self, loader: int | None, entry: MetricAccumulator) -> Declaration:
        metric = None if entry.metric is None else _path_of(entry.metric, self._module)
        shown = (entry.epoch_name, entry.logger, entry.prog_bar)
        return Declaration(loader, entry.name, *shown, entry.on_epoch, metric)

    def _metric_of_all(self, one: Declaration) -> Any:
        """Return a metric object that some ranks have logged; computing it takes all ranks."""
        if not one.metric or self._module is None:
            raise UserCodeError(
                f"self.log({one.name!r}, ...) of a metric object was called on some ranks only, as "
                "where other ranks have no batch, and the Module does not have the object: assign "
                "it to an attribute of the Module, so that all ranks can compute it"
            )
        return self._module.get_submodule(one.metric)

    def _keep(self, name: str, value: Tensor, shown: ReducedMetric) -> None:
        epoch = self._epoch
        epoch.values[shown.name] = epoch.values[name] = value
        if shown.logger:
            epoch.for_loggers[shown.name] = value
        if shown.prog_bar:
            self._latest.bar[shown.name] = value

    def _reduced(self, entry: MetricAccumulator, value: Any) -> Any:
        op: ReduceOp = entry.reduce_fx if isinstance(entry.reduce_fx, str) else "mean"  # type: ignore[assignment]
        ranks = self._ranks
        self._compare_names(entry.name)
        own = torch.as_tensor(value, dtype=torch.float32)
        members = {*ranks.members}
        count = sum(not members.isdisjoint(group) for group in ranks.value_groups)
        if op in ("max", "min") or count == len(members):
            return _read(entry.name, ranks.all_reduce(own, op))
        # Ranks that compute the same values count as one, however many they are.
        reduced = ranks.all_reduce(own / ranks.value_copies, "sum")
        return _read(entry.name, reduced / count if op == "mean" else reduced)

    def _compare_names(self, name: str) -> None:
        """Raise an error on all ranks if they are about to reduce values of different names."""
        if self._ranks.world_size == 1 or self._compared == _CHECKED:
            return
        self._compared += 1
        checksum = zlib.crc32(name.encode())
        # The greatest checksum less the smallest one.
        if sum(self._ranks.all_reduce_ints([checksum, -checksum], "max")):
            own, other, *_ = sorted(set(self._ranks.gather_objects(name)))
            raise UserCodeError(
                f"self.log(..., sync_dist=True) expected one name on all ranks, received {own!r} "
                f"and {other!r}: to log a value of each rank, log every element of "
                "self.all_gather(value) under a name of its own"
            )

    def _declare(self, name: str, options: LogOptions) -> MetricAccumulator:
        """Return the entry of a name that is logged for the first time in this epoch."""
        known = self._entries.get(name)
        if known is not None:
            known.restore_function(options)
            if known.has_options(options):
                return known
        if known is not None and known.is_restored:
            warnings.warn(
                f"self.log({name!r}, ...) is called with other options than in the run that saved "
                "the checkpoint: its value of this epoch begins with this batch",
                stacklevel=4,
            )
        elif known is not None:
            raise UserCodeError(
                f"self.log({name!r}, ...) was called with other options before in this epoch; use "
                "one set of options for one name"
            )
        fx = reduction(options.reduce_fx)
        if not callable(fx) and fx not in REDUCTIONS:
            raise UserCodeError(
                f"self.log({name!r}, reduce_fx={options.reduce_fx!r}): expected one of "
                f"{', '.join(map(repr, REDUCTIONS))}, or a function of a tensor"
            )
        several = self._loader is not None and options.add_dataloader_idx
        on_step = self.in_step if options.on_step is None else options.on_step
        on_epoch = not self.in_step if options.on_epoch is None else options.on_epoch
        if not on_step and not on_epoch:
            raise UserCodeError(
                f"self.log({name!r}, on_step={options.on_step}, on_epoch={options.on_epoch}): "
                "the value goes nowhere. In training_step on_epoch is False unless it is given, "
                "elsewhere on_step: pass True for one of them"
            )
        entry = MetricAccumulator(
            name,
            options,
            on_step=on_step,
            on_epoch=on_epoch,
            compiles_steps=self._compiles_steps,
            suffix=f"/dataloader_idx_{self._loader}" if several else "",
        )
        self._entries[name] = entry
        if entry.logger:
            # Both may be one name.
            shown = ((entry.step_name, on_step), (entry.epoch_name, on_epoch))
            self._latest.for_loggers.update((one, None) for one, is_shown in shown if is_shown)
        return entry


def _read(name: str, value: Tensor) -> Any:
    """Return a number for a tensor on the CPU; a tensor with its own memory for one on a device."""
    if value.is_cpu:
        try:
            return value.item()
        except RuntimeError:
            pass  # it does not have exactly one element
    elif value.numel() == 1:
        # Autograd does not write to its results again. User code may change other tensors: copy.
        taken = value.detach().reshape(())
        return taken if value.grad_fn is not None else taken.clone()
    raise UserCodeError(
        f"self.log({name!r}, ...) expected a single number, received a tensor of shape "
        f"{tuple(value.shape)}: reduce it first, for example by .mean()"
    )


def _computed(name: str, metric: Any) -> Tensor | None:
    """Return the value of a metric object for the epoch, or None if it received no data."""
    with warnings.catch_warnings():
        # This rank may have no batch; compute() reduces over all ranks.
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        value = metric.compute()
    if value is None or (isinstance(value, Tensor) and value.numel() == 1):
        return value
    found = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
    raise UserCodeError(
        f"self.log({name!r}, {type(metric).__name__}(...)): expected a metric whose "
        f"compute() returns a tensor with one element, received {found}: log its parts, as in "
        "self.log_dict(metric.compute()) in on_train_epoch_end or on_validation_epoch_end"
    )


def _path_of(metric: Any, module: nn.Module | None) -> str:
    """Return the path of a metric object in a module, or "" if it is not there."""
    named = () if module is None else module.named_modules()
    return next((path for path, one in named if one is metric), "")


def _number_of(entry: MetricAccumulator, value: Any) -> Any:
    """Return a number for a metric object or a NumPy number.

    None for a metric object that was updated without a call: it has no value for this step.
    """
    if isinstance(value, nn.Module) and hasattr(value, "compute") and hasattr(value, "reset"):
        # A torchmetrics Metric: forward() has kept the value of the step; compute() returns the
        # value of the epoch, over all ranks, at its end.
        entry.metric = value
        last = getattr(value, "_forward_cache", None)
        return _read(entry.name, last) if isinstance(last, Tensor) else None
    try:
        # NumPy's arrays of one element have no float of their own.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        raise UserCodeError(
            f"self.log({entry.name!r}, ...) expected a number, a tensor with one element or a "
            f"torchmetrics Metric, received {type(value).__name__}"
        ) from None
