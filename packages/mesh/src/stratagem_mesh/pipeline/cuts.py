"""The stages of a model: cut points, units, and the stages that hold a parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from stratagem.errors import ConfigurationError
from stratagem_mesh.pipeline.dry_run import DependentError, DryRun, unchanged
from stratagem_mesh.pipeline.redirection import redirected
from stratagem_mesh.pipeline.skeletons import Skeletons, only_shapes
from stratagem_mesh.pipeline.values import Stages
from stratagem_mesh.tensor.search import alike, inputs_of

_SHARE_OF_SIZES = 0.01
"""The weight of the sizes of parameters in a measured cost."""


def find_stages(
    model: nn.Module, count: int, cuts: Sequence[str] | None = None, example: Any = None
) -> Stages:
    """Divide a model into stages.

    Args:
        model: the user's model, whole.
        count: the number of stages.
        cuts: the names of the first modules of all stages but the first. None: cuts that balance
            the costs of the stages: floating-point operations in a run on the example without
            values, or the sizes of parameters.
        example: an input of the model; None: its own, if it brings one.

    Raises:
        ConfigurationError: see `check_stages`; or the model refuses the example.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        >>> find_stages(model, 2).cuts
        ('2',)
    """
    units = check_stages(model, count, cuts)
    return divided_by(model, count, measure(model, units, example), cuts)


def divided_by(
    model: nn.Module, count: int, measured: Measured, cuts: Sequence[str] | None = None
) -> Stages:
    """Divide a model into stages by the costs of its units.

    Args:
        model: the user's model, whole.
        count: the number of stages.
        measured: the units, at least as many as stages, in the order in which they run.
        cuts: as for `find_stages`.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        >>> divided_by(model, 2, Measured(list("0123"), {"0": 3, "1": 1, "2": 1, "3": 1})).cuts
        ('1',)
    """
    order = measured.order
    places = (
        _balanced(measured, count, blocks_of(model, order))
        if cuts is None
        else _places(model, order, cuts)
    )
    of_units: dict[str, int] = {}
    sums = [0.0] * count
    for index, name in enumerate(order):
        of_units[name] = stage = sum(index >= place for place in places)
        sums[stage] += measured.costs[name]
    total = sum(sums) or 1.0
    chosen = tuple(order[place] for place in places)
    if cuts is None and count > 1:  # larger units, where no cut lies within
        larger = _units_of(model, chosen)
        found = {one: name for name in larger for one in order if _lies_in(one, name)}
        of_units = {found[one]: of_units[one] for one in reversed(order)}
        of_units = dict(reversed(of_units.items()))
    parameters, tied = _holders(model, of_units, measured.read)
    return Stages(count, chosen, of_units, parameters, tied, tuple(s / total for s in sums))


def check_stages(
    model: nn.Module, count: int, cuts: Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Return the modules that can be divided between stages, by name.

    Args:
        model, count, cuts: see `find_stages`.

    Raises:
        ConfigurationError: the model has fewer units than stages, a cut is no module of the model
            or the first one, or a parameter has no shape.

    Example:
        >>> list(check_stages(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 2))
        ['0', '2']
    """
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigurationError(
            f"the parameter {lazy!r} has no shape yet, and stages are found by shapes: call the "
            "model once before, so that its lazy modules have parameters"
        )
    if cuts is not None:
        _check_cuts(model, count, cuts)
    series = _series(model)
    units = _units_of(model, cuts) if cuts is not None else _divisible(model, count, series)
    if len(units) < count:
        raise ConfigurationError(
            f"{count} stages, but {type(model).__name__} has {len(units)} module(s) with "
            f"parameters to divide between them ({', '.join(map(repr, list(units)[:5]))}): "
            "expected at least as many as pipeline x virtual_stages. Pass smaller sizes"
        )
    return units


def _lies_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


# -- units


def _check_cuts(model: nn.Module, count: int, cuts: Sequence[str]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    if len(cuts) != count - 1 or len(set(cuts)) != len(cuts):
        raise ConfigurationError(
            f"pipeline_cuts={list(cuts)!r}: expected {count - 1} different name(s), those of the "
            f"first modules of all of {count} stages but the first"
        )
    for name in cuts:
        if name not in modules or not name:
            raise ConfigurationError(
                f"pipeline_cuts has {name!r}, which {type(model).__name__} does not have: expected "
                f"names of modules, such as {', '.join(map(repr, list(modules)[1:6]))}"
            )
        if not _has_state(modules[name]):
            raise ConfigurationError(
                f"pipeline_cuts has {name!r}, a {type(modules[name]).__name__} without parameters: "
                "expected the first module with parameters of a stage"
            )
        ends = [end for end, sign in enumerate(name) if sign == "."]
        outer = next((name[:end] for end in ends if _is_repeated(modules[name[:end]])), None)
        if outer is not None:
            raise ConfigurationError(
                f"pipeline_cuts has {name!r} inside of {outer!r}, whose activations are computed "
                "again in backward, as a whole: expected a cut between such modules, or "
                "activation_checkpointing of smaller ones"
            )
        inner = next((one for one in cuts if one.startswith(f"{name}.")), None)
        if inner is not None:
            raise ConfigurationError(
                f"pipeline_cuts has {name!r} and {inner!r} inside of it: a stage begins with a "
                "whole module; expected modules that lie in no other one of them"
            )


def _units_of(model: nn.Module, cuts: Sequence[str]) -> dict[str, nn.Module]:
    """Return the units: the largest modules that are not cut, in the order of registration."""
    split = {name[:end] for name in cuts for end, sign in enumerate(name) if sign == "."}
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(part: nn.Module, name: str) -> None:
        for key, child in part.named_children():
            inner = f"{name}.{key}" if name else key
            if id(child) in seen:
                continue
            seen.add(id(child))
            if inner in split or type(child).forward is nn.Module.forward:
                visit(child, inner)
            elif _has_state(child):
                found[inner] = child

    visit(model, "")
    return found


def _divisible(model: nn.Module, count: int, series: Sequence[str]) -> dict[str, nn.Module]:
    """Return the elements of the series and the modules around; or parts of those, if too few."""
    split = [f"{name}.0" for name in series]
    while len(units := _units_of(model, split)) < count:
        inner = [
            f"{name}.{key}"
            for name, unit in units.items()
            if name.rpartition(".")[0] not in series and not _is_repeated(unit)
            for key, part in unit.named_children()
            if _has_state(part)
        ]
        if not inner:
            break
        split += inner
    return units


def _is_repeated(module: nn.Module) -> bool:
    """Whether a module is called again in backward, which needs all of it on one stage."""
    return hasattr(module.__dict__.get("forward"), "forward_to_repeat")


def _has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or statistics that its forward pass changes."""
    if next(module.parameters(), None) is not None:
        return True
    norms = nn.modules.batchnorm._NormBase
    return any(isinstance(part, norms) and part.track_running_stats for part in module.modules())


def _series(model: nn.Module) -> list[str]:
    """Return the lists and sequences of blocks that lie in no other one, by name."""
    found: list[str] = []
    for name, part in model.named_modules():
        is_series = isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1
        if not is_series or any(name.startswith(f"{outer}.") or not outer for outer in found):
            continue
        if sum(next(child.parameters(), None) is not None for child in part) > 1:
            found.append(name)
    return found


def blocks_of(model: nn.Module, order: Sequence[str]) -> set[str]:
    """Return the elements of the outermost lists and sequences of blocks.

    Stages begin at these units, if there are enough.

    Args:
        model: the user's model.
        order: the names of the units.
    """
    series = _series(model)
    before = {f"{name}." if name else "" for name in series}
    return {unit for unit in order if unit[: unit.rfind(".") + 1] in before}


# -- the order and the costs of units


@dataclass
class Measured:
    """The units of a model, by a run without values.

    Attributes:
        order: the units in the order in which they run.
        costs: the cost of each.
        sizes: the bytes of the arguments of its first call.
        read: the parameters that user code reads outside of their modules.
    """

    order: list[str]
    costs: Mapping[str, float]
    sizes: Mapping[str, int] = field(default_factory=dict)
    read: Collection[str] = ()


def costs_of(flops: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the costs of units: their operations, and to a small part their parameters.

    Args:
        flops: the operations of each unit.
        weights: the size of the parameters of each.

    Example:
        >>> costs_of({"a": 3, "b": 1}, {"a": 1, "b": 1})
        {'a': 0.755, 'b': 0.255}
        >>> costs_of({"a": 0, "b": 0}, {"a": 1, "b": 2})
        {'a': 1, 'b': 2}
    """
    total, weight = sum(flops.values()), sum(weights.values()) or 1.0
    if not total:
        return dict(weights)
    return {n: flops[n] / total + _SHARE_OF_SIZES * weights[n] / weight for n in weights}


def measure(model: nn.Module, units: Mapping[str, nn.Module], example: Any = None) -> Measured:
    """Return the order of the units and their costs.

    Without an input, units are in the order of registration, and the costs are sizes of parameters.

    Args:
        model: the user's model, whole.
        units: as `check_stages` returns them.
        example: as for `find_stages`.

    Raises:
        ConfigurationError: the model refuses the example.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> measure(model, check_stages(model, 2)).costs
        {'0': 40.0, '1': 18.0}
    """
    weights = {n: float(sum(p.numel() for p in unit.parameters())) for n, unit in units.items()}
    try:
        calls = list(inputs_of(model, example))
    except Exception:  # no example
        return Measured(list(units), weights)
    try:
        run = _run(model, units, calls)
    except DependentError:  # the dry run of a step says where, if stages have not run
        return Measured(list(units), weights)
    except Exception as error:
        if example is None:  # its own example, which may be of another use of the model
            return Measured(list(units), weights)
        raise ConfigurationError(
            f"{type(model).__name__} was run on example_input without values, to find the order "
            f"and the costs of its modules, and raised {type(error).__name__}: {error}\nPass "
            "another example_input"
        ) from error
    called = list(dict.fromkeys(call.unit for call in run.calls))
    flops = dict.fromkeys(units, 0.0)
    sizes: dict[str, int] = {}
    for call in run.calls:
        flops[call.unit] += call.flops
        of_call = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _ in call.given.values()
        ]
        sizes.setdefault(call.unit, sum(of_call))
    # A unit that does not run stays at its place.
    runs = iter(called)
    order = [next(runs) if name in sizes else name for name in units]
    return Measured(order, costs_of(flops, weights), sizes, run.read_parameters())


def _run(model: nn.Module, units: Mapping[str, nn.Module], calls: Sequence[Any]) -> DryRun:
    """Run a model without values, and count the operations of its units."""
    skeletons = Skeletons(model, units)
    with unchanged(model), only_shapes(model, skeletons) as names, torch.no_grad():
        run = DryRun(dict.fromkeys(units, 0), skeletons, names)
        run.counter = FlopCounterMode(display=False)
        with redirected(units, run.call):
            for _, part, args, kwargs in calls:
                given, named = alike(model, args, kwargs)
                given, named = tree_map_only(Tensor, _of_a_device, (given, named))
                with run:
                    part(*given, **named)
        run.restore()
    if not tree_leaves(run.calls):
        raise ConfigurationError("no module with parameters ran")
    return run


def _of_a_device(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor


# -- cut points


def _places(model: nn.Module, order: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """Return the indices of the first units of all stages but the first."""
    found = {}
    for name in cuts:
        inside = [index for index, unit in enumerate(order) if _lies_in(unit, name)]
        if not inside:
            raise ConfigurationError(
                f"pipeline_cuts has {name!r}, which {type(model).__name__} also has under another "
                "name, by which it belongs to an earlier stage: expected a module that has one name"
            )
        found[min(inside)] = name
    if len(found) < len(cuts) or 0 in found:
        raise ConfigurationError(
            f"pipeline_cuts={list(cuts)!r} leaves a stage without a module with parameters: they "
            f"run in the order {', '.join(order[:8])}{', ...' if len(order) > 8 else ''}; expected "
            "cuts at different ones, and none at the first"
        )
    return sorted(found)


def _balanced(measured: Measured, count: int, elements: Collection[str]) -> list[int]:
    """Return the cuts that minimize the largest cost of a stage, then the bytes that cross."""
    order = measured.order
    places = [index for index, name in enumerate(order) if index and name in elements]
    if len(places) < count - 1:
        places = list(range(1, len(order)))
    sums = [0.0]
    for name in order:
        sums.append(sums[-1] + measured.costs[name])
    total = sums[-1] or 1.0
    Best = tuple[float, int, tuple[int, ...]]
    best: dict[int, Best] = {0: (0.0, 0, ())}
    for stage in range(1, count):
        reached: dict[int, Best] = {}
        for left, place in enumerate(reversed(places)):
            if left < count - 1 - stage:  # the later stages need places, too
                continue
            size = measured.sizes.get(order[place], 0)
            found = [
                (
                    max(largest, round((sums[place] - sums[before]) / total, 6)),
                    size + crossing,
                    (*chosen, place),
                )
                for before, (largest, crossing, chosen) in best.items()
                if before < place
            ]
            if found:
                reached[place] = min(found)
        best = reached
    ends = [
        (max(largest, round((sums[-1] - sums[place]) / total, 6)), crossing, chosen)
        for place, (largest, crossing, chosen) in best.items()
    ]
    return list(min(ends)[2])


# -- parameters


def divided_copies(model: nn.Module, stages: Stages) -> list[tuple[str, str]]:
    """Return modules and their frozen copies that have other stages, such as a teacher.

    User code that goes through the parameters of both in pairs would meet others on each stage.

    Args:
        model: the user's model, whole.
        stages: the division.

    Example:
        >>> net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
        >>> copy = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)]).requires_grad_(False)
        >>> model = nn.ModuleDict({"net": net, "teacher": copy})
        >>> divided_copies(model, find_stages(model, 2, ["teacher"]))
        [('net', 'teacher')]
    """
    by_shape: dict[Any, list[tuple[str, bool, list[Any]]]] = {}
    for name, part in model.named_children():
        named = dict(part.named_parameters())
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in named.items())
        learns = any(parameter.requires_grad for parameter in named.values())
        held = [stages.parameters.get(f"{name}.{key}") for key in named]
        if shapes:
            by_shape.setdefault(shapes, []).append((name, learns, held))
    return [
        (trained, frozen)
        for alike in by_shape.values()
        for trained, learns, held in alike
        for frozen, other_learns, other_held in alike
        if learns and not other_learns and held != other_held
    ]


def _holders(
    model: nn.Module, of_units: Mapping[str, int], read: Collection[str]
) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]]:
    """Return the stages that hold each parameter, and the parameters that several hold.

    Those outside of units, and those that user code reads outside of their modules, are held by
    all stages.
    """
    everyone = set(of_units.values())
    stages: dict[int, set[int]] = {}
    for unit, stage in of_units.items():
        for parameter in model.get_submodule(unit).parameters():
            stages.setdefault(id(parameter), set()).add(stage)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if name in read:
            stages[id(parameter)] = everyone
    holders = {
        name: tuple(sorted(stages.get(key, everyone)))
        for key, of_tensor in names.items()
        for name in of_tensor
    }
    tied = tuple(
        (tuple(of_tensor), holders[of_tensor[0]])
        for of_tensor in names.values()
        if len(holders[of_tensor[0]]) > 1
    )
    return holders, tied
