"""A strategy's life: several runs in one process, and the end of one."""

from __future__ import annotations

import copy
import gc
import hashlib
import inspect
import json
import pickle
import random
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from stratagem.callbacks import Callback
from stratagem.strategies import DDPStrategy, Strategy, uncalled_methods
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    Flat,
    close,
    difference,
    judge_losses_of,
    judge_replicas,
    shown,
)
from stratagem_testing.strategies.models import Learner, Numbered
from stratagem_testing.strategies.probe import Probe
from stratagem_testing.strategies.target import REFERENCE
from stratagem_testing.surroundings import Surroundings

ORDER = ("setup_environment", "setup", "prepare", "train_step", "end_training")
"""Calls of which each comes after the one before it; `bind` came before, with the Trainer."""


@check("life/order")
def _order(probe: Probe) -> dict[str, Any]:
    """One strategy trains, validates, tests and predicts.

    Its methods are called in the order that the docstring of `Strategy` gives, and `ranks` has the
    right numbers.
    """
    calls: list[str] = []
    trainer = probe.trainer(max_epochs=1)
    strategy = trainer.strategy
    for name in ORDER:
        setattr(strategy, name, _noted(getattr(strategy, name), name, calls))
    learner = Learner()
    trainer.fit(learner, probe.loader(16), probe.loader(8))
    trainer.validate(learner, probe.loader(8), verbose=False)
    trainer.test(learner, probe.loader(8), verbose=False)
    predicted = trainer.predict(learner, probe.loader(8))
    for name in ORDER:
        delattr(strategy, name)
    return {
        "calls": calls,
        "predicted": len(predicted),
        "is_strategy": isinstance(strategy, Strategy),
        "ranks": [trainer.ranks.global_rank, trainer.ranks.world_size],
        "rank": [probe.rank, probe.world_size],
    }


def _noted(method: Any, name: str, calls: list[str]) -> Any:
    def noted(*arguments: Any, **options: Any) -> Any:
        if not calls or calls[-1] != name:
            calls.append(name)
        return method(*arguments, **options)

    noted.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return noted


@judge_of(_order)
def _judge_order(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert told["is_strategy"], "it is no stratagem.strategies.Strategy"
        assert told["ranks"] == told["rank"], (
            f"strategy.ranks says rank {told['ranks'][0]} of {told['ranks'][1]} on rank "
            f"{told['rank'][0]} of {told['rank'][1]}"
        )
        calls = told["calls"]
        first = [name for name in ORDER if name in calls]
        positions = [calls.index(name) for name in first]
        assert positions == sorted(positions), (
            f"rank {rank}: the strategy was called in the order {calls}, expected {first}"
        )
        missing = [name for name in ORDER if name not in calls]
        assert not missing, f"rank {rank}: {', '.join(missing)} was never called: {calls}"
        assert told["predicted"] == 1, f"rank {rank} predicted {told['predicted']} batches of 1"


@check("life/arguments")
def _arguments(probe: Probe) -> dict[str, Any]:
    """`__init__` accepts the arguments of the base class, and passes them to it.

    A subclass of DDPStrategy trains a model with an unused layer by find_unused_parameters=True.
    """
    kind = _kind_of(probe)

    def make(**given: Any) -> Any:
        signature = inspect.signature(kind)
        signature.bind_partial(**given)
        try:
            signature.bind(**given)
        except TypeError:
            return None  # it has unknown arguments of its own
        return kind(**given)

    def launches() -> None:
        made = make(launcher="script")
        assert made is None or made.requested.get("launcher") == "script", (
            "its `requested` lacks launcher"
        )

    def trains() -> None:
        made = make(find_unused_parameters=True)
        if made is not None:
            probe.fit(Learner("unused"), strategy=made)

    said = {"launcher='script'": probe.said(launches)}
    if issubclass(kind, DDPStrategy):
        said["find_unused_parameters=True"] = probe.said(trains)
    return {"name": kind.__name__, "said": said}


@judge_of(_arguments)
def _judge_arguments(found: Result) -> None:
    told = found.ranks[0]
    for given, said in told["said"].items():
        trains = " trains a model with an unused layer, and" if "unused" in given else ""
        # DDP looks for unused parameters by a mask in pinned memory.
        assert said is None or not _lacks_pinned_memory(said["text"]), (
            f"{told['name']}({given}){trains} ends in {said['text']}: the accelerator "
            f"{found.target.accelerator!r} has no allocator of pinned memory, which DDP needs for "
            "find_unused_parameters: let the device's PrivateUse1HooksInterface return one"
        )
        assert said is None, (
            f"{told['name']}({given}){trains} ends in {said['text']}: what a class does not take "
            "itself belongs to its base, as precision_plugin, checkpoint_io and timeout do: def "
            "__init__(self, ..., **components) and super().__init__(**components). What a method "
            "does instead of the base's has to keep to these"
        )


PLANNED = ("split_offload", "kept_on_device")
"""Methods that `stratagem plan` calls if a strategy has them."""


@check("life/methods")
def _methods(probe: Probe) -> dict[str, Any]:
    """Each public method is a method of the interface, or the plugin's own code calls it.

    List methods that only users call in `own_methods`.
    """
    return {"uncalled": [[kind.__name__, name] for kind, name in uncalled_methods(_kind_of(probe))]}


def _kind_of(probe: Probe) -> type:
    return type(probe.trainer().strategy)


@judge_of(_methods)
def _judge_methods(found: Result) -> None:
    own = (*found.target.own_methods, *PLANNED)
    uncalled = [".".join(each) for each in found.ranks[0]["uncalled"] if each[1] not in own]
    assert not uncalled, (
        f"nothing calls {', '.join(uncalled)}: no method of the interface has such a name. Write "
        "it as the interface has it, begin its name with _, or list it in own_methods if users "
        "call it"
    )


def _lacks_pinned_memory(text: str) -> bool:
    """Whether an error is torch's of a device without an allocator of pinned memory."""
    return "pinned" in text.casefold() or "getPinnedMemoryAllocator" in text


SEVERAL = 56
"""Samples of seven steps: a strategy's period is rarely a divisor of seven."""


@check("life/twice", reference=True)
def _twice(probe: Probe) -> dict[str, Any]:
    """A fit does not depend on earlier fits in the same process.

    New strategies train one model three times. Then the first strategy object trains a new model,
    and has the losses of its first fit. Binding it again does not change its options. Fits do not
    leave more and more hooks on the user's module.
    """
    told: dict[str, Any] = {"fits": []}
    learner = Learner("dense", "momentum")
    trainers = []
    for number in range(3):
        learner.losses = []
        trainers.append(trainer := probe.fit(learner, SEVERAL, validated=8))
        told["fits"].append(learner.losses)
        told.setdefault("validated", [loss for _, loss in learner.evaluated])
        told.setdefault("hooks", []).append(_hooks_of(learner))
        if number == 0:
            told["options"] = _options(trainer.strategy)
            # Validation prepares the model again, and so does the next fit.
            trainer.validate(learner, probe.loader(8), verbose=False)
    told["shard"] = list(trainer.ranks.data_split)
    again = probe.trainer(trainers[0].strategy, max_epochs=1)
    told["options again"] = _options(again.strategy)
    learner = Learner("dense", "momentum")
    said = probe.said(lambda: again.fit(learner, probe.loader(SEVERAL), probe.loader(8)))
    validated = [loss for _, loss in learner.evaluated]
    return {**told, "again": learner.losses, "validated again": validated, "said": said}


def _hooks_of(net: nn.Module) -> int:
    """Return how many hooks there are on modules and parameters."""
    on_modules = (
        len(value)
        for module in net.modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    )
    on_parameters = (
        len(getattr(parameter, name, None) or ())
        for parameter in net.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    return sum(on_modules) + sum(on_parameters)


def _options(strategy: Strategy) -> dict[str, str]:
    """Return the arguments of a strategy's `__init__` that it keeps as plain data, in words."""
    made = [vars(kind)["__init__"] for kind in type(strategy).__mro__ if "__init__" in vars(kind)]
    names = {name for function in made[:-1] for name in inspect.signature(function).parameters}
    kept = {
        name: getattr(strategy, name, getattr(strategy, f"_{name}", None)) for name in sorted(names)
    }
    plain = (int, float, str, bool, tuple, list, dict)
    return {name: repr(value) for name, value in kept.items() if isinstance(value, plain)}


@judge_of(_twice)
def _judge_twice(found: Result) -> None:
    for number in range(3) if found.target.equal else ():
        parts = {told["shard"][0]: told["fits"][number] for told in reversed(found.ranks)}
        own = [sum(values) / len(values) for values in zip(*parts.values(), strict=True)]
        expected = found.reference["fits"][number]
        assert close(own, expected, 10 * found.target.tolerance), (
            f"fit number {number + 1} of one model in one process has the losses {shown(own)}, "
            f"expected {shown(expected)}: what the strategy kept of the fit before gets in its way "
            "(see release)"
        )
    for rank, told in enumerate(found.ranks):
        first, second, third = told["hooks"]
        assert not first < second < third, (
            f"the user's module has {first}, {second} and {third} hooks on rank {rank} after three "
            "fits: remove in release(prepared) the hooks of modules and parameters that prepare "
            "and wrap have set"
        )
        for name, value in told["options"].items():
            now = told["options again"].get(name)
            assert now == value, (
                f"the option {name!r} of the strategy is {now} on rank {rank} once another Trainer "
                f"has bound the same object, and was {value} before: bind(components) may be "
                "called several times, so leave options as __init__ has set them, and keep what "
                "follows from components in another attribute"
            )
        said = told["said"]
        assert said is None, (
            f"a second fit by the same strategy object, of another model, ended on rank {rank} in "
            f"{said['kind']}: {said['text']}"
        )
        assert close(told["again"], told["fits"][0], found.target.tolerance), (
            f"a second fit by the same strategy object has the losses {shown(told['again'])} on "
            f"rank {rank}, and the first one {shown(told['fits'][0])}, from the same weights and "
            "samples: what self keeps of a fit (a count of steps) changes the next one. Keep it "
            "in prepared.strategy_data"
        )
        validated, expected = told["validated again"], told["validated"]
        assert close(validated, expected, found.target.tolerance), (
            "a second fit by the same strategy object has the losses of the first one, and its "
            f"validation has not on rank {rank}: {shown(validated)}, expected {shown(expected)}. "
            "What evaluation uses (an average of weights) is that of an earlier model: keep it in "
            "prepared.strategy_data"
        )


class _SkipsSome(Learner):
    """Of three micro-batches of a step, the second one alone has a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 3 == 1 else None


def _judge_one_rank(found: Result) -> None:
    judge_losses_of(
        found,
        "with devices=1, as users look for a mistake, training is not that of single_device: one "
        "rank has no other one to divide by, or to wait for. In each step some micro-batches have "
        "no loss: accumulate_all returns whether any has one, and divides by the number of all",
    )


@check("life/one rank", _judge_one_rank, reference=True, ranks=1)
def _one_rank(probe: Probe) -> dict[str, Any]:
    """With devices=1, a strategy trains, validates and saves, or its Trainer raises an error.

    Then training_step may return None, and a step uses the micro-batches that have a loss.
    """
    learner = _SkipsSome("dense", "momentum")
    trainer = probe.fit(learner, SEVERAL, accumulate_grad_batches=3, validated=8)
    trainer.save_checkpoint(probe.folder / "saved.ckpt")
    return probe.report(learner, trainer)


class _SameBatches(Learner):
    """Every rank has the same batches, whatever its loader reads.

    Args:
        micro_batches: the number per step. The first has the complete gradient, the others have a
            gradient of zero.
    """

    def __init__(self, micro_batches: int = 1) -> None:
        super().__init__("wide")
        self.micro_batches = micro_batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step, micro_batch = divmod(len(self.losses), self.micro_batches)
        rows = slice(8 * step, 8 * step + 8)
        every = Numbered(64)
        loss = super().training_step(
            (batch[0], every.inputs[rows].to(batch[1]), every.targets[rows].to(batch[2])), batch_idx
        )
        return loss * (0.0 if micro_batch else self.micro_batches)

    def configure_optimizers(self) -> Any:
        return SGD([p for p in self.parameters() if p.requires_grad], lr=0.005)


@check("life/same batches")
def _same_batches(probe: Probe) -> dict[str, Any]:
    """Replicas are alike after all ranks have had the same batches.

    A step of two micro-batches, of which the second one has no gradient, moves weights as far as
    one of a single micro-batch that has the mean of their gradients.
    """
    if probe.target.equal:
        return {}
    learner = _SameBatches()
    told = probe.report(learner, probe.fit(learner, 64))
    if probe.rank == 0:
        (probe.folder / _SAME).write_text(json.dumps(told["weights"]))
    trainer = probe.fit(_SameBatches(2), 64, max_epochs=2, accumulate_grad_batches=2)
    return {**told, "in two": probe.weights(trainer)}


_SAME = "same.json"
"""The weights after a training in which all ranks have had the same batches."""


@judge_of(_same_batches)
def _judge_same_batches(found: Result) -> None:
    if found.target.equal:
        return
    judge_replicas(found, found.target.tolerance)
    told = found.ranks[0]
    for name, begun in told["begun"].items():
        whole, in_two = (told[which].get(name, ()) for which in ("weights", "in two"))
        # Of a small one, a random part of a step may have another size.
        if len(begun) < 1000 or not len(begun) == len(whole) == len(in_two):
            continue
        moves, of_two = _moves(begun, whole), _moves(begun, in_two)
        # A random part of a step may be another one.
        common = [a + b for a, b in zip(moves, of_two, strict=True)]
        far = _along(common, of_two) / (_along(common, moves) or 1.0)
        assert 0.7 < far < 1.4, (
            f"steps of two micro-batches move {name!r} {far:.3g} times as far as steps of one that "
            "has the mean of their gradients: look at accumulate_all, accumulate and no_sync. Each "
            "loss is divided by the number of micro-batches, and gradients add up in p.grad"
        )


@check("life/same batches, one rank", reference=True, ranks=1, follows="life/same batches")
def _same_batches_alone(probe: Probe) -> dict[str, Any]:
    """One rank moves the weights as far as several ranks do that have the same batches as it has.

    This is for strategies with losses of their own. A random part of a step is no difference.
    """
    if probe.target.equal and probe.target.strategy != REFERENCE:
        return {}
    learner = _SameBatches()
    told = probe.report(learner, probe.fit(learner, 64))
    several = probe.reference / _SAME
    return {**told, "several": json.loads(several.read_text()) if several.exists() else {}}


@judge_of(_same_batches_alone)
def _judge_same_batches_alone(found: Result) -> None:
    if found.target.equal:
        return
    (told,) = found.ranks
    reference = found.reference
    for name, begun in reference["begun"].items():
        one, several = (moved.get(name, ()) for moved in (told["weights"], told["several"]))
        # Of a small one, a random part of a step may have another size.
        if len(begun) < 1000 or not len(begun) == len(one) == len(several):
            continue
        right = _moves(begun, reference["weights"][name])
        own, of_several = (_along(right, _moves(begun, end)) for end in (one, several))
        assert own <= 0 or 0.8 < of_several / own < 1.25, (
            f"two ranks that have the same batches move {name!r} {of_several / own:.3g} times as "
            "far as one rank that has them, so that training depends on the number of ranks: a "
            "norm, a mean or a largest value has to be that of the whole gradient, and not of the "
            "part that a rank has of it (DTensor.to_local), and a sum over ranks has to be divided "
            "by their number"
        )


def _moves(begun: Flat, end: Flat) -> list[float]:
    return [after - before for before, after in zip(begun, end, strict=True)]


def _along(right: Flat, moves: Flat) -> float:
    """Return how far weights move in the direction of the gradient."""
    return sum(a * b for a, b in zip(right, moves, strict=True))


@check("life/nothing left between runs")
def _left(probe: Probe) -> dict[str, Any]:
    """A run leaves no process group, thread, environment variable, setting or patch behind."""
    learner = Learner()
    probe.fit(learner)
    # The first run of a process may make permanent state: modules, the group of all ranks.
    before = Surroundings.now()
    left = []
    for _ in range(2):
        trainer = probe.trainer(max_epochs=1)
        trainer.fit(learner, probe.loader(16), probe.loader(8))
        del trainer
        gc.collect()
        left.append(before.changes())
    return {"left": left}


@judge_of(_left)
def _judge_left(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        first, second = (
            [one for one in left if not one.startswith(found.target.allowed_leftovers)]
            for left in told["left"]
        )
        assert not second, (
            f"rank {rank}: a run left behind {'; '.join(second)}"
            + ("" if first == second else " (and each run more of it)")
            + ": undo it in release(prepared) or teardown()"
        )


@check("life/bound again")
def _bound_again(probe: Probe) -> dict[str, Any]:
    """A model can be released twice, and a new strategy of the class works afterwards.

    A released model has the same state, which can be saved.
    """
    trainer = probe.fit(Learner())
    prepared = trainer.run.require_prepared()
    before = probe.weights(trainer)
    trainer.strategy.release(prepared)
    trainer.strategy.release(prepared)
    told: dict[str, Any] = {"before": before, "after": {}}
    # While others wait for no error of this rank alone.
    told["said"] = probe.said(lambda: told.update(after=probe.weights(trainer)))
    learner = Learner()
    again = probe.fit(learner, 16)
    run = {"losses": len(learner.losses), "steps": again.global_step}
    return {**told, "shard": list(again.ranks.data_split), "run": run, "losses": learner.losses}


@judge_of(_bound_again)
def _judge_bound_again(found: Result) -> None:
    # The first stages of a pipeline compute no losses, and the last one does.
    has_losses = {told["shard"][0] for told in found.ranks if told["losses"]}
    divided = found.capabilities.parameters == "divided"
    for rank, told in enumerate(found.ranks):
        is_stage = divided and not told["losses"] and told["shard"][0] in has_losses
        assert told["run"] == {"losses": 0 if is_stage else 2, "steps": 2}, (
            f"rank {rank} came to {told['run']} after the release of another model, expected 2 "
            "steps"
        )
        said = told["said"] or {"kind": "no error", "text": ""}
        is_other = bool(told["said"] or difference(told["after"], told["before"], 1e-6))
        assert not is_other, (
            f"model_state of a model that was released is not what it was before on rank {rank} "
            f"({said['kind']}: {said['text']}): release(prepared) frees what training needs, and "
            "the model may still be evaluated or saved"
        )


@check("life/pickled")
def _pickled(probe: Probe) -> dict[str, Any]:
    """A strategy can be pickled after bind, because "spawn" and cluster launchers pickle it."""
    launchers = probe.target.capabilities().launchers
    if launchers is not None and "spawn" not in launchers:
        return {"said": None}
    strategy = probe.trainer().strategy
    return {"said": probe.said(lambda: pickle.loads(pickle.dumps(strategy)))}


@judge_of(_pickled)
def _judge_pickled(found: Result) -> None:
    for told in found.ranks[:1]:
        assert told["said"] is None, (
            "the launcher 'spawn' and those of clusters pickle a strategy after bind, and it ends "
            f"in {told['said']['kind']}: {told['said']['text']}. Make what cannot be pickled in "
            "setup_environment, or name the launchers that do without it in "
            "Capabilities(launchers=...)"
        )


@check("life/freed")
def _freed(probe: Probe) -> dict[str, Any]:
    """A model is freed after release, also while the strategy runs another model.

    A model whose state is not sharded can be copied by copy.deepcopy after a fit. A strategy object
    that trains one model after another keeps no tensor of each.
    """
    learner = Learner()
    trainer = probe.fit(learner, 16)
    copied = None
    if not probe.target.capabilities().sharded_state:
        copied = probe.said(partial(copy.deepcopy, learner.net))
    kept = weakref.ref(learner.net)
    del learner
    trainer.validate(Learner(), probe.loader(8), verbose=False)
    gc.collect()
    same = kept() is None
    del trainer
    # Another Trainer takes over, and the one before is gone.
    probe.trainer().validate(Learner(), probe.loader(8), verbose=False)
    gc.collect()
    freed = {"by the strategy": same, "at all": kept() is None, "copied": copied}
    strategy = probe.trainer().strategy
    counts = []
    for _ in range(4):
        probe.fit(Learner("dense", "momentum"), 16, strategy=strategy)
        gc.collect()
        counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    # Former strategies are torn down when the second fit begins, and their tensors count before.
    return {**freed, "tensors": counts[1:]}


@judge_of(_freed)
def _judge_freed(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert told["by the strategy"] and told["at all"], (  # noqa: PT018
            f"rank {rank} still has a model that was released"
            + ("" if told["at all"] else ", also when its strategy is gone")
            + ": forget in release(prepared) whatever refers to it, and keep nothing of it in a "
            "class or a module"
        )
        counts = told["tensors"]
        assert not all(before < after for before, after in pairwise(counts)), (
            f"rank {rank} has {counts} tensors after two, three and four fits by one strategy "
            "object, each of a model of its own: keep what belongs to a model in "
            "prepared.strategy_data, and not by id or name in the strategy"
        )
        said = told["copied"]
        assert said is None, (
            f"copy.deepcopy(model) after a fit ends on rank {rank} in {said['kind']}: "
            f"{said['text']}. Users copy models, as for an average of weights: keep what cannot be "
            "copied in prepared.strategy_data, and not on the module or its parameters"
        )


class _Tensors(Callback):
    """Counts the tensors and functions that are there after each of some steps."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.kinds: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, *of_batch: Any) -> None:
        if trainer.global_step % _BETWEEN == 0:
            gc.collect()
            # By class: the attribute `__class__` may be computed.
            kinds = (torch.Tensor, FunctionType)
            held = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
            nodes = _nodes(one for one in held if not isinstance(one, FunctionType))
            self.counts.append(len(held) + len(nodes))
            self.kinds.append(Counter([*map(_kind, held), *map(_kind_of_node, nodes)]))


def _nodes(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """Return the nodes of all graphs that tensors keep."""
    found: set[Any] = set()
    following = [tensor.grad_fn for tensor in tensors]
    while following:
        node = following.pop()
        if node is not None and node not in found:
            found.add(node)
            following += [before for before, _ in node.next_functions]
    return found


def _kind_of_node(node: Any) -> str:
    return f"Node {type(node).__name__} of a graph"


def _kind(one: Any) -> str:
    """Return what a tensor or a function is, in words."""
    if isinstance(one, FunctionType):
        return f"function {one.__module__}.{one.__qualname__}"
    graph = f" with the graph of {type(one.grad_fn).__name__}" if one.grad_fn is not None else ""
    return f"{type(one).__name__} of {one.dtype}{list(one.shape)}{graph}"


_COUNTS, _BETWEEN = 5, 4
"""How often to count, and after how many steps; the first ones may set up what stays."""


@check("life/memory")
def _memory(probe: Probe) -> dict[str, Any]:
    """The number of tensors, nodes of graphs and functions (hooks) does not grow with each step."""
    tensors = _Tensors()
    steps = _COUNTS * _BETWEEN
    probe.fit(Learner("dense", "momentum"), 64, max_steps=steps, callbacks=[tensors])
    before, after = tensors.kinds[-2:]
    grown = sorted(((after[k] - before.get(k, 0)) / _BETWEEN, k) for k in after)
    return {"counts": tensors.counts, "grown": [pair for pair in grown[-3:] if pair[0] >= 0.5]}


@judge_of(_memory)
def _judge_memory(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        counts = told["counts"]
        grown = [after - before for before, after in pairwise(counts)]
        left = "; ".join(f"{number:.3g} times {kind}" for number, kind in reversed(told["grown"]))
        # A leak at each step adds at least one object between all counts; messages that other
        # processes have not taken yet vary.
        assert min(grown, default=0) < _BETWEEN, (
            f"rank {rank} has {counts} tensors, nodes and functions after {_BETWEEN}, "
            f"{2 * _BETWEEN} and more steps: each step leaves "
            f"{grown[-1] / _BETWEEN:.3g} behind, until memory is full{left and f' ({left})'}. "
            "Forget losses with their graphs, buffers and handles of collectives in time, "
            "and remove hooks that were set for one step"
        )


ALWAYS = ("setup_environment", "setup", "prepare", "train_step", "end_training", "release")
"""Calls after which each rank's random numbers are to be its own, and those of its seed."""
UNCHANGED = ("model_state", "optimizer_state", "state")
"""Calls that may come once more or once less, so that they must draw none."""


@check("life/random numbers")
def _random(probe: Probe) -> dict[str, Any]:
    """No method seeds the random numbers of torch, Python or NumPy.

    Evaluations and saves do not draw from them.
    """
    fits = []
    for number in range(2):
        _seed(1 + 100 * number + probe.rank)
        trainer = probe.trainer(max_epochs=1, val_check_interval=1)
        strategy = trainer.strategy
        seen: list[tuple[str, list[str], list[str]]] = []
        for name in (*ALWAYS, *UNCHANGED):
            setattr(strategy, name, _watched(getattr(strategy, name), name, seen))
        evaluation = strategy.evaluation

        @contextmanager
        def evaluate(prepared: Any, evaluation: Any = evaluation, seen: Any = seen) -> Any:
            before = _numbers()
            with evaluation(prepared):
                seen.append(("evaluation", before, _numbers()))
                yield
                inside = _numbers()
            seen.append(("the end of evaluation", inside, _numbers()))

        strategy.evaluation = evaluate  # type: ignore[method-assign]
        trainer.fit(Learner(), probe.loader(16), probe.loader(8))
        trainer.save_checkpoint(probe.folder / "random.ckpt")
        fits.append(seen)
    return {"shard": list(trainer.ranks.data_split), "fits": fits}


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _numbers() -> list[str]:
    """Return what stands for the state of each generator of this process."""
    states = [bytes(torch.get_rng_state().tolist()), repr(random.getstate()).encode()]
    if "numpy" in sys.modules:
        states.append(repr(sys.modules["numpy"].random.get_state()[1].tolist()).encode())
    return [hashlib.sha256(state).hexdigest()[:16] for state in states]


def _watched(method: Any, name: str, seen: list[Any]) -> Any:
    def watched(*arguments: Any, **options: Any) -> Any:
        before = _numbers()
        returned = method(*arguments, **options)
        seen.append((name, before, _numbers()))
        return returned

    watched.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return watched


@judge_of(_random)
def _judge_random(found: Result) -> None:
    # Ranks of one part of the data may well draw the same.
    parts = {told["shard"][0]: told["fits"] for told in reversed(found.ranks)}
    known: dict[tuple[int, str], tuple[str, int, int]] = {}
    for part, fits in parts.items():
        for fit, seen in enumerate(fits):
            for name, before, after in seen:
                for which, (old, new) in enumerate(zip(before, after, strict=False)):
                    whose = ("torch", "random", "numpy.random")[which]
                    is_changed = old != new
                    if name == "release" and not is_changed:
                        continue  # it may come within the next fit
                    assert not is_changed or name in ALWAYS, (
                        f"{name} changes the random numbers of {whose}: a run that evaluates or "
                        "saves once more draws others. Draw from a generator of your own "
                        "(torch.Generator)"
                    )
                    other = known.setdefault((which, new), (name, part, fit))
                    assert not is_changed or other[1:] == (part, fit), (
                        f"{name} seeds {whose}: after it, "
                        + (
                            "ranks draw the same numbers, such as one dropout for all"
                            if other[1] != part
                            else "numbers do not follow from the user's seed"
                        )
                        + ". Draw from a generator of your own (torch.Generator)"
                    )
