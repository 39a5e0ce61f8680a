"""MetricAccumulator: reduces the values of one logged name over an epoch and over ranks."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.data.pytree import widest_float
from stratagem.errors import format_value
from stratagem.interfaces.ranks import Ranks
from stratagem.module.module import LogOptions

REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "mean": torch.sum,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}
_MERGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "mean": (torch.mean,),
    "sum": (torch.sum, sum),
    "max": (torch.max, torch.amax, max),
    "min": (torch.min, torch.amin, min),
}
_START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}
_FOLD = 64
"""So many tensors are kept before they are reduced together, so that no step waits for a device."""


def reduction(requested: Any) -> Any:
    """Return the canonical name of a reduction; functions without a name are returned unchanged."""
    if not isinstance(requested, str):
        return next((name for name, known in _FUNCTIONS.items() if requested in known), requested)
    name = requested.casefold()
    return "mean" if name == "avg" else name


class ReducedMetric(NamedTuple):
    """The reduced value of an epoch on one rank, or of one loader; weights-only-safe data.

    Attributes:
        reduce_fx: "mean", "sum", "max" or "min".
        number: the value; of a mean, the weighted sum.
        weight: of a mean, the sum of the weights.
        name: under which the epoch's value is shown.
        logger: whether it goes to the loggers.
        prog_bar: whether it goes to the progress bar.
    """

    reduce_fx: str
    number: float
    weight: float
    name: str
    logger: bool
    prog_bar: bool

    def value(self) -> Tensor:
        """Return the epoch's value; NaN for a mean of nothing."""
        if self.reduce_fx == "mean":
            return torch.tensor(self.number / self.weight if self.weight else math.nan)
        return torch.tensor(self.number)

    def merged_with(self, other: ReducedMetric) -> ReducedMetric:
        """Return the summary of both ranks or loaders together, shown as the other one."""
        number = _merge(other.reduce_fx, self.number, other.number)
        return other._replace(number=number, weight=self.weight + other.weight)


class MetricAccumulator:
    """The options of one logged name in one epoch, and the reduction of its values so far.

    Args:
        name: the logged name.
        options: the options that `Module.log` received.
        on_step, on_epoch: the options, with the defaults of the calling hook.
        compiles_steps: whether the computation is compiled as a part of a step, and must therefore
            be the same in each step.
        suffix: appended to all its names: the index of the evaluation loader, if a run has several.
    """

    def __init__(
        self,
        name: str,
        options: LogOptions,
        *,
        on_step: bool,
        on_epoch: bool,
        compiles_steps: bool = False,
        suffix: str = "",
    ) -> None:
        self.name = f"{name}{suffix}"
        self.options = options
        self.on_step, self.on_epoch = on_step, on_epoch
        self.compiles_steps = compiles_steps
        self.logger, self.prog_bar = options.logger, options.prog_bar
        self.reduce_fx = reduction(options.reduce_fx)
        self.sync_steps = options.sync_dist is True
        both = on_step and on_epoch
        self.step_name = f"{name}_step{suffix}" if both else self.name
        self.epoch_name = f"{name}_epoch{suffix}" if both else self.name
        self.metric: Any = None
        """A torchmetrics Metric, which reduces its values itself."""
        self.is_restored = False
        """Whether a checkpoint has declared it, and not a call in this run."""
        self.number = _START.get(self.reduce_fx, 0.0) if isinstance(self.reduce_fx, str) else 0.0
        self.weight = 0.0
        self.total: Tensor | None = None
        """What tensors on a device were reduced to so far; the widest float, shape (1,)."""
        self.values: list[Any] = []
        self.weights: list[float] = []

    def add(self, value: Any, weight: float) -> None:
        """Add a value of this epoch.

        A number is reduced at once; a tensor on a device is kept, so that nothing waits for it.
        """
        fx = self.reduce_fx
        if value.__class__ is Tensor and isinstance(fx, str) and self.compiles_steps:
            self._add_to_total(fx, value, weight)
        elif value.__class__ is Tensor or not isinstance(fx, str):
            self.values.append(value)
            self.weights.append(weight)
            if len(self.values) >= _FOLD:
                self._fold()
        elif fx == "mean":
            self.number += value * weight
            self.weight += weight
        else:
            self.number = _merge(fx, self.number, value)

    def _add_to_total(self, fx: str, value: Tensor, weight: float) -> None:
        """Reduce a tensor with those before it, by operations that are the same at each step."""
        if self.total is None:
            # Copy it to the device, so that the first step's program has the inputs of the others.
            widest = widest_float(value.device)
            self.total = torch.full((1,), _START[fx], dtype=widest).to(value.device)
        one = value.reshape(1).to(self.total.dtype)
        if fx == "mean":
            one = one * weight
            self.weight += weight
        self.total = _MERGES[fx](self.total, one)

    def _fold(self) -> None:
        """Reduce the tensors that are kept, and the total so far, to a total."""
        fx = self.reduce_fx
        if not isinstance(fx, str) or not self.values:
            return
        widest = widest_float(self.values[0].device)
        values = torch.stack([value.reshape(()).to(widest) for value in self.values])
        if fx == "mean":
            values = values * torch.tensor(self.weights, dtype=values.dtype, device=values.device)
            self.weight += sum(self.weights)
        reduced = REDUCTIONS[fx](values).reshape(1)
        self.total = reduced if self.total is None else _MERGES[fx](self.total, reduced)
        self.values, self.weights = [], []

    # -- in a checkpoint

    def state(self) -> dict[str, Any]:
        """Return the options and the reduced value of this epoch so far, as safe data.

        A function is not safe data: in its place there are its values, and its result for the case
        that the name is not logged again in this epoch. Waits for values on a device.
        """
        number, weight = self.number, self.weight
        if self.reduce_fx and isinstance(self.reduce_fx, str):
            number = self.summary().number
            weight = self.weight  # the summary has added to it
        elif self.values and self.reduce_fx:
            number, weight = self._result_so_far(), 1.0
        return {
            "options": [o if o is None else _plain(o) for o in self.options],
            "on": [self.on_step, self.on_epoch],
            "number": float(number),
            "weight": float(weight),
            "values": [float(value) for value in self.values],
        }

    def _result_so_far(self) -> float:
        """Return what a function makes of the values; NaN if it needs more than there are yet."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.summary().number
            except Exception:
                return math.nan

    @classmethod
    def restored(
        cls, name: str, states: Sequence[Mapping[str, Any]], *, compiles_steps: bool
    ) -> MetricAccumulator:
        """Return an accumulator that continues from the states of one or several ranks.

        Args:
            name: as it was logged.
            states: at least one.
            compiles_steps: as for the class.
        """
        options, (on_step, on_epoch) = LogOptions(*states[0]["options"]), states[0]["on"]
        entry = cls(
            name, options, on_step=on_step, on_epoch=on_epoch, compiles_steps=compiles_steps
        )
        entry.is_restored = True
        fx = entry.reduce_fx
        if fx and fx not in REDUCTIONS:
            raise ValueError(f"{name!r} is reduced by {format_value(fx)}, which is not known")
        for state in states:
            entry.number = _merge(fx or "mean", entry.number, state["number"])
            entry.weight += state["weight"]
            entry.values += state["values"]
        entry.weights = [1.0] * len(entry.values)
        return entry

    def restore_function(self, options: LogOptions) -> None:
        """Take the function from the options after a resume: a checkpoint holds no function."""
        if not self.options.reduce_fx and callable(options.reduce_fx):
            self.options = self.options._replace(reduce_fx=options.reduce_fx)
            self.reduce_fx = options.reduce_fx

    def has_options(self, options: LogOptions) -> bool:
        """Return whether the options match.

        A function that is written in the call is another object each time.
        """
        return all(
            a == b or getattr(a, "__code__", a) == getattr(b, "__code__", b)
            for a, b in zip(self.options, options, strict=True)
        )

    def summary(self) -> ReducedMetric:
        """Return this epoch's value on this rank."""
        shown = (self.epoch_name, self.logger, self.prog_bar)
        if not self.reduce_fx:
            return ReducedMetric("mean", self.number, self.weight, *shown)
        if isinstance(self.reduce_fx, str):
            self._fold()
            number = self.number
            if self.total is not None:
                number = _merge(self.reduce_fx, number, float(self.total))
            return ReducedMetric(self.reduce_fx, number, self.weight, *shown)
        values = torch.stack([torch.as_tensor(v, dtype=torch.float32).cpu() for v in self.values])
        # The results of a function of the user's are averaged over ranks.
        return ReducedMetric("mean", float(self.reduce_fx(values)), 1.0, *shown)


def merged(parts: Iterable[Mapping[str, ReducedMetric]]) -> dict[str, ReducedMetric]:
    """Return the summaries of several ranks or loaders, reduced to one for each name."""
    together: dict[str, ReducedMetric] = {}
    for part in parts:
        for name, summary in part.items():
            before = together.get(name)
            together[name] = summary if before is None else before.merged_with(summary)
    return together


class Declaration(NamedTuple):
    """A logged name on one rank, for the ranks that have not logged it; weights-only-safe data.

    Attributes:
        loader: the index of the evaluation loader; None with one loader.
        name: with the loader's suffix.
        epoch_name, logger, prog_bar, on_epoch: as of `MetricAccumulator`.
        metric: the path of a torchmetrics object in the Module; None: numbers were logged. "" if
            the Module does not have the object.
        everywhere: whether every rank has logged it.
    """

    loader: int | None
    name: str
    epoch_name: str
    logger: bool
    prog_bar: bool
    on_epoch: bool
    metric: str | None
    everywhere: bool = True


def over_ranks(
    own: Mapping[str, ReducedMetric], ranks: Ranks, declared: Sequence[Declaration] = ()
) -> tuple[dict[str, ReducedMetric], list[Declaration]]:
    """Return the summaries of all ranks, reduced to one summary per name, and the declarations.

    Ranks of a value group log the same values, or only some of them (the last pipeline stage) log a
    value. For each name, the first rank of such a group that has logged it counts.

    Args:
        own: the summaries of this rank, sorted by name.
        ranks: the ranks that have logged.
        declared: the declarations of this rank.

    Returns:
        The summaries, and the distinct declarations of all ranks, in the same order on every rank.
    """
    described = repr(
        (
            [(name, *summary._replace(number=0.0, weight=0.0)) for name, summary in own.items()],
            [tuple(one) for one in declared],
        )
    )
    digest = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "big")
    most, least = ranks.all_reduce_ints([digest, -digest], "max")
    if most != -least:
        plain = {name: tuple(summary) for name, summary in own.items()}
        told = ranks.gather_objects([plain, [list(one) for one in declared]])
        groups = [[told[rank][0] for rank in group] for group in ranks.value_groups]
        return merged(_first_of_each(group) for group in groups), _of_all(
            [[Declaration(*one) for one in each] for _, each in told]
        )
    if not own:
        return {}, list(declared)
    # All have logged the same names: numbers will do, as bytes, since some devices have no float64.
    numbers = torch.tensor([[s.number, s.weight] for s in own.values()], dtype=torch.float64)
    gathered = ranks.all_gather(numbers.view(torch.uint8)).cpu().view(torch.float64)
    of_groups = gathered[[group[0] for group in ranks.value_groups]]
    weights = of_groups[..., 1].sum(0).tolist()
    return {
        name: summary._replace(
            number=REDUCTIONS[summary.reduce_fx](of_groups[:, i, 0], 0).item(), weight=weights[i]
        )
        for i, (name, summary) in enumerate(own.items())
    }, list(declared)


def _of_all(of_ranks: Sequence[Sequence[Declaration]]) -> list[Declaration]:
    """Return the declarations of all ranks, each once."""
    by_name: dict[tuple[int | None, str], list[Declaration]] = {}
    for declared in of_ranks:
        for one in declared:
            by_name.setdefault((one.loader, one.name), []).append(one)
    return [each[0]._replace(everywhere=len(each) == len(of_ranks)) for each in by_name.values()]


def _first_of_each(group: Iterable[Mapping[str, Any]]) -> dict[str, ReducedMetric]:
    """Return the summaries of ranks that compute the same values, each of them once.

    Args:
        group: of each rank, its summaries as plain tuples.
    """
    first: dict[str, ReducedMetric] = {}
    for summaries in group:
        for name, summary in summaries.items():
            first.setdefault(name, ReducedMetric(*summary))
    return first


def _plain(option: Any) -> str | bool:
    """Return an option of `log` as safe data; "" for a function."""
    if isinstance(option, str):
        return str(option)
    return "" if callable(option) else bool(option)


def _merge(fx: str, one: float, other: float) -> float:
    """Return the reduction of two numbers; NaN stays NaN."""
    if fx in ("mean", "sum"):
        return one + other
    if other != other:
        return other
    better = other > one if fx == "max" else other < one
    return other if better else one
