"""EpochState: the values of the present epoch on one rank, as a checkpoint holds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.checkpoint.forms import Count, Nothing, Scalar, require_form
from stratagem.data.pytree import map_tensors
from stratagem.state.safe_data import find_offending_value
from stratagem.trainer.metrics.accumulator import MetricAccumulator

if TYPE_CHECKING:
    from stratagem.interfaces.ranks import Ranks
    from stratagem.trainer.context import RunContext
    from stratagem.trainer.metrics.metrics import Metrics
    from stratagem.trainer.step.schedulers import Schedulers

_FLAG = (bool, Nothing)
FORM = {
    "split": [Count, Count],
    "logged": {
        str: {
            "options": [*[_FLAG] * 4, (str, *_FLAG), _FLAG, _FLAG],
            "on": [bool, bool],
            "number": float,
            "weight": float,
            "values": [float],
            "metric?": str,
        }
    },
    "metrics": {str: {"updates": Count, "state": {str: object}}},
    "latest": {
        "values": {str: Scalar},
        "evaluation_steps": {str: Scalar},
        "for_loggers": {str: object},
        "bar": {str: Scalar},
    },
    "row?": {str: Scalar},
    "schedulers": {"seen": int, "of_validation": [str]},
    "validated": Count,
}
"""The form of `EpochState.state`."""

_LATEST = ("values", "evaluation_steps", "for_loggers", "bar")
# Of torchmetrics' Running and MinMaxMetric, which do not declare them as states.
_UNDECLARED = ("_num_vals_seen", "min_val", "max_val")


class EpochState:
    """The metrics of the current epoch on one rank, for callbacks, loggers and schedulers.

    - `split`: this rank's part of the data.
    - `logged`: the options and the reduction so far of each name that training has logged.
    - `metrics`: the states of torchmetrics objects in the Module, by their place in it.
    - `latest`: the latest values, including the values of the last validation.
    - `row`: on rank 0, values of the last step that the loggers do not have yet.
    - `schedulers`: the last step after which schedulers that need a value were stepped.
    - `validated`: the number of batches of validation; the step of the values that validations log.

    Values are read when a checkpoint is saved, and not before.

    Args:
        context: the objects of the fit, with the latest values.
        metrics: the values that training has logged.
        schedulers: the learning rate schedulers.
    """

    def __init__(self, context: RunContext, metrics: Metrics, schedulers: Schedulers) -> None:
        self._ranks, self._module = context.strategy.ranks, context.module
        self._compiles_steps = context.strategy.accelerator.compiles_steps
        self._metrics, self._schedulers = metrics, schedulers
        self._latest, self._state = context.latest, context.state
        self._evaluation = context.progress
        self._resumed: Mapping[str, Any] | None = None
        self._warns, self._warned = True, set[str]()

    def state(self, *, warns: bool = True) -> dict[str, Any]:
        """Return the values as weights-only-safe data; waits for values on a device.

        Args:
            warns: whether to warn of values that are left out.
        """
        self._warns = warns
        latest = {name: dict(getattr(self._latest, name)) for name in _LATEST}
        row = self._metrics.row if self._ranks.is_global_zero else {}
        return {
            "split": list(self._ranks.eval_split),
            "logged": self._logged(),
            "metrics": dict(self._metric_states()),
            "latest": map_tensors(lambda tensor: tensor.detach().cpu().clone(), latest),
            "row": map_tensors(lambda tensor: tensor.detach().cpu().clone(), dict(row)),
            "schedulers": self._schedulers.position(),
            "validated": self._evaluation.batches,
        }

    def _logged(self) -> dict[str, Any]:
        places = {id(part): place for place, part in self._module.named_modules()}
        states = {}
        for name, entry in self._metrics.entries.items():
            states[name] = entry.state()
            if entry.metric is None:
                continue
            place = states[name]["metric"] = places.get(id(entry.metric), "")
            if not place:
                kind = type(entry.metric).__name__
                self._warn_of(
                    f"self.log({name!r}, ...) was called with a {kind} that is not an attribute"
                )
        return states

    def _warn_of(self, fault: str) -> None:
        """Warn once that the state of a metric is not saved."""
        if self._warns and fault not in self._warned:
            self._warned.add(fault)
            warnings.warn(
                f"{fault}, so its state is not in the checkpoint: a resumed run computes it from "
                f"the rest of the epoch. Assign metrics in {type(self._module).__name__}.__init__, "
                "and keep numbers, strings, tensors, and lists and tuples of them in their states",
                stacklevel=2,
            )

    def _metric_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for place, metric in _metrics_in(self._module):
            undeclared = (name for name in _UNDECLARED if name in vars(metric))
            state = {name: getattr(metric, name) for name in (*metric._defaults, *undeclared)}
            state = map_tensors(lambda tensor: tensor.detach().cpu().clone(), state)
            if offending_value := find_offending_value(state, f"{type(metric).__name__} {place}"):
                self._warn_of(offending_value)
            else:
                yield place, {"updates": getattr(metric, "_update_count", 0), "state": state}

    # -- resuming

    def resume(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the latest values; `restore_epoch` restores the partial reductions.

        Args:
            states: of the ranks that saved, in their order.
        """
        ranks = self._ranks
        own = dict(states[ranks.global_rank if ranks.global_rank < len(states) else 0])
        for name in _LATEST:
            # In place: others hold these dicts.
            latest = getattr(self._latest, name)
            latest.clear()
            latest.update(own["latest"][name])
        self._schedulers.go_on_from(own["schedulers"])
        self._evaluation.batches = own["validated"]
        if row := own.get("row"):
            self._metrics.row = dict(row)
            self._metrics.end_step(self._state.global_step - 1, self._state.epoch)
        if len(states) != ranks.world_size or own["split"] != list(ranks.eval_split):
            own["logged"], own["metrics"] = _of_other_ranks(states, ranks)
        else:
            own["logged"] = {name: [state] for name, state in own["logged"].items()}
            own["metrics"] = {place: [state] for place, state in own["metrics"].items()}
        metrics = dict(_metrics_in(self._module))
        for place in metrics.keys() & own["metrics"].keys():
            states_of_it = [state["state"] for state in own["metrics"][place]]
            for state in states_of_it:
                _check_metric(metrics[place], state, states_of_it[0], place)
        own["logged"] = {name: self._restored(name, of) for name, of in own["logged"].items()}
        self._resumed = own

    def _restored(
        self, name: str, states: Sequence[Mapping[str, Any]]
    ) -> tuple[MetricAccumulator, str | None]:
        """Return what was logged under a name, and the place of its metric in the Module."""
        entry = MetricAccumulator.restored(name, states, compiles_steps=self._compiles_steps)
        return entry, states[0].get("metric")

    def restore_epoch(self) -> None:
        """Restore the partial reductions of the resumed epoch, replacing the current ones."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        _extend_trackers(self._module, resumed["metrics"])
        metrics = dict(_metrics_in(self._module))
        for place, states in resumed["metrics"].items():
            if place in metrics:
                _restore_metric(metrics[place], states)
        parts = dict(self._module.named_modules())
        entries = {}
        for name, (entry, place) in resumed["logged"].items():
            if place:
                entry.metric = parts.get(place)
            if place is None or entry.metric is not None:
                entries[name] = entry
        self._metrics.entries = entries


def _metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics objects in a module, each with its place."""
    for place, part in module.named_modules():
        if place and hasattr(part, "compute") and isinstance(getattr(part, "_defaults", 0), dict):
            yield place, part


def _extend_trackers(module: nn.Module, places: Iterable[str]) -> None:
    """Give each torchmetrics.MetricTracker as many metrics as the checkpoint has of it."""
    for tracker, part in list(module.named_modules()):
        if hasattr(part, "increment") and hasattr(part, "_base_metric"):
            inside = [place for place in places if place.startswith(f"{tracker}.")]
            saved = {place[len(tracker) + 1 :].partition(".")[0] for place in inside}
            while len(part) < len(saved):
                part.increment()


def _of_other_ranks(
    states: Sequence[Mapping[str, Any]], ranks: Ranks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's part of `logged` and `metrics` of the ranks that saved, by name.

    Each part of the data goes to one part: sums and weights of all ranks add up to what they were.
    Of ranks that shared a part, the first that has a name counts, as in `over_ranks`.
    """
    index, count = ranks.eval_split
    of_parts: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for state in states:
        part = state["split"][0]
        if part % count == index:
            logged, metrics = of_parts.setdefault(part, ({}, {}))
            for found, own in ((logged, state["logged"]), (metrics, state["metrics"])):
                for name, value in own.items():
                    found.setdefault(name, value)
    together: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for part in sorted(of_parts):
        for found, own in zip(together, of_parts[part], strict=True):
            for name, value in own.items():
                found.setdefault(name, []).append(value)
    # Every rank computes a metric object, in one order: that is a collective.
    every = (item for state in states for item in state["logged"].items())
    objects = {name: value for name, value in every if "metric" in value}
    for name in sorted(objects):
        together[0][name] = together[0].pop(name, [objects[name]])
    return together


def _check_metric(
    metric: Any, state: Mapping[str, Any], first: Mapping[str, Any], place: str
) -> None:
    """Raise if the state of a torchmetrics object has other attributes, or of another kind.

    Args:
        metric: will be restored.
        state: of one rank.
        first: of the first rank; tensors of both have one shape.
        place: of the metric in the Module.
    """
    names = (*metric._defaults, *_UNDECLARED)
    form = {name: type(own) for name, own in vars(metric).items() if name in names}
    require_form(state, form, place)
    for name, value in state.items():
        own = getattr(metric, name) if name in form else None
        is_other = isinstance(own, Tensor) and (
            own.is_floating_point() != value.is_floating_point() or value.shape != first[name].shape
        )
        if name not in form or is_other:
            raise ValueError(f"the {type(metric).__name__} at {place!r} has no such {name!r}")


def _restore_metric(metric: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Restore a torchmetrics object from the states of one or several ranks."""
    for name in states[0]["state"]:
        values = [state["state"][name] for state in states]
        if len(values) > 1 and isinstance(values[0], Tensor):
            # As torchmetrics reduces over ranks.
            reduce = metric._reductions.get(name)
            values = [values[0] if reduce is None else reduce(torch.stack(values))]
        is_list = isinstance(values[0], (list, tuple))
        value = [v for part in values for v in part] if is_list else values[0]
        setattr(metric, name, map_tensors(lambda tensor: tensor.to(metric.device), value))
    if hasattr(metric, "_update_count"):
        metric._update_count = sum(state["updates"] for state in states)
    metric._computed = None
