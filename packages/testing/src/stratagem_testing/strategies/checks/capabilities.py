"""Capabilities: what a strategy says that it cannot do is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from stratagem.callbacks import Callback
from stratagem.discovery import StrategySpec, get_registry
from stratagem.errors import format_text
from stratagem.module import Module
from stratagem.strategies import StepMemory, Strategy
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.checks.lite import by_steps
from stratagem_testing.strategies.judging import (
    close,
    judge_accepted,
    judge_losses,
    judge_losses_of,
    judge_refusal,
    judge_refused,
    shown,
    trains_under_lite,
)
from stratagem_testing.strategies.models import GROUPED, OPTIMIZERS, Learner, Numbered, build
from stratagem_testing.strategies.probe import Probe


@check("capabilities/refusals")
def _refusals(probe: Probe) -> dict[str, Any]:
    """If the capabilities exclude a request, an error says so before a process starts.

    The check requests devices, nodes, launchers, clipping and divergence checks.
    """

    def made(**options: Any) -> Any:
        return probe.said(lambda: probe.trainer(**options))

    registry = get_registry()
    launchers = [
        candidate.spec.name
        for candidate in registry.candidates("launcher")
        if candidate.spec.name not in ("external",)
    ]
    return {
        "several devices": made(devices=2 * max(2, probe.target.devices)),
        "several nodes": made(num_nodes=2),
        "clipping": made(gradient_clip_val=0.5),
        "divergence": made(detect_divergence=1),
        "axes": bool(probe.trainer().strategy.ranks.axes),
        "launchers": {name: made(plugins=["single_file", name]) for name in launchers},
    }


@judge_of(_refusals)
def _judge_refusals(found: Result) -> None:
    can, told = found.capabilities, found.ranks[0]
    if not can.many_devices:
        judge_refusal(
            "devices=4", "many_devices=False", told["several devices"], "device", "strategy"
        )
    if not can.multi_node:
        judge_refusal("num_nodes=2", "multi_node=False", told["several nodes"], "node")
    if not can.gradient_clipping:
        judge_refusal("gradient_clip_val=0.5", "gradient_clipping=False", told["clipping"], "clip")
    else:
        assert told["clipping"] is None, (
            "gradient_clipping=True in the capabilities, and gradient_clip_val was refused: "
            f"{told['clipping']['text']}"
        )
    if can.parameters != "same" and not (can.parameters == "divided" and told["axes"]):
        judge_refusal(
            "detect_divergence",
            f"parameters={can.parameters!r}",
            told["divergence"],
            f"parameters={can.parameters!r} in its capabilities",
        )
    if can.launchers is not None:
        for name, said in told["launchers"].items():
            if name not in can.launchers and found.target.devices > 1:
                judge_refusal(f"the launcher {name!r}", "launchers", said, name, "launcher")


@check("capabilities/of the spec and the class")
def _spec(probe: Probe) -> dict[str, Any]:
    """The spec and the class have the same capabilities, and the spec's target is the class."""
    if probe.target.is_place:
        return {}  # not published
    own = type(probe.trainer().strategy)
    spec = get_registry().find("strategy", probe.target.strategy).spec
    assert isinstance(spec, StrategySpec)
    return {
        "spec": str(spec.capabilities),
        "class": str(own.capabilities),
        "target": f"{spec.target}",
        "is target": own is spec.load(),
    }


@judge_of(_spec)
def _judge_spec(found: Result) -> None:
    told = found.ranks[0]
    if not told:
        return
    assert told["is target"], (
        f"the spec's target {told['target']} is not the class of the strategy that is made: name "
        "the class, and preset its arguments by init_args"
    )
    assert told["spec"] == told["class"], (
        f"the spec's capabilities are {told['spec']}, and those of the class {told['class']}: let "
        "both hold one object"
    )


@check("capabilities/parameters of ranks")
def _alike(probe: Probe) -> dict[str, Any]:
    """With parameters="same", detect_divergence finds no difference between ranks."""
    if probe.target.capabilities().parameters != "same":
        return probe.attempt(dict)  # see capabilities/refusals
    learner = Learner("dense", "momentum")
    return probe.attempt(
        lambda: {"steps": probe.fit(learner, max_steps=3, detect_divergence=1).global_step}
    )


@judge_of(_alike)
def _judge_alike(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        said = told["refused"]
        assert said is None, (
            "parameters='same' in the capabilities, and three steps under "
            f"Trainer(detect_divergence=1) ended on rank {rank} in {said['kind']}: {said['text']}\n"
            "If ranks are to differ between two averages, say parameters='drift'"
        )


class _Manual(Learner):
    """Calls backward in training_step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = mse_loss(self.net(batch[1]), batch[2])
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@check("capabilities/backward in forward", reference=True)
def _manual(probe: Probe) -> dict[str, Any]:
    """Manual optimization has the losses of single_device, also those of a validation.

    With backward_in_forward=False or manual_backward=False, it raises an error.
    """

    def train() -> dict[str, Any]:
        automatic, learner = Learner("dense", "momentum"), _Manual("dense", "momentum")
        probe.fit(automatic, max_epochs=2, validated=8)
        told = probe.report(learner, probe.fit(learner, max_epochs=2, validated=8))
        one, other = (
            {"training": each.losses, "validation": [loss for _, loss in each.evaluated]}
            for each in (automatic, learner)
        )
        return {**told, "automatic": one, "manual": other}

    return probe.attempt(train)


@judge_of(_manual)
def _judge_manual(found: Result) -> None:
    can = found.capabilities
    what = "a Module with automatic_optimization = False"
    if not (can.manual_backward and can.backward_in_forward):
        capability = "backward_in_forward" if can.manual_backward else "manual_backward"
        judge_refused(found, what, f"{capability}=False", "automatic_optimization")
        return
    judge_accepted(found, f"{what} (backward_in_forward=True in the capabilities)")
    try:
        judge_losses(found)
    except AssertionError as error:
        raise AssertionError(
            "backward_in_forward=True in the capabilities, and manual optimization does not "
            f"train as automatic does\n{error}"
        ) from None
    for told in found.ranks:
        expected, manual = told["automatic"], told["manual"]
        if close(manual["training"], expected["training"], found.target.tolerance):
            assert close(manual["validation"], expected["validation"], found.target.tolerance), (
                "manual optimization trains as automatic does, and its validation has the losses "
                f"{shown(manual['validation'])}, expected {shown(expected['validation'])}: what "
                "evaluation uses, such as an average of weights, is not updated. Do it in "
                "optimizer_step, which every loop calls, and not in finish_step or train_step"
            )


@check("capabilities/rebinds optimizers", reference=True)
def _rebinds(probe: Probe) -> dict[str, Any]:
    """Lite.setup(model, optimizer) trains with an optimizer that was made before.

    The optimizer keeps its parameter groups and the state of earlier steps, or an error says that
    it has such a state. With accepts_existing_optimizers=False, it raises an error.
    """
    if not trains_under_lite(probe.target.capabilities()):
        return {}
    lite = probe.lite()
    net = build("dense")

    def train() -> dict[str, Any]:
        made = GROUPED["groups"](net.named_parameters())
        # A step before, of samples that all ranks have.
        every = Numbered(8)
        torch.autograd.backward(mse_loss(net(every.inputs), every.targets))
        made.step()
        made.zero_grad()
        model, optimizer = lite.setup(net, made)
        losses = []
        first, *others = lite.setup_dataloaders(probe.loader(32))
        batches = (first, first, *others)
        if not lite.plan.capabilities.manual_backward:
            losses, batches = by_steps(lite, model, batches), ()
        for _, inputs, target in batches:
            loss = mse_loss(model(inputs), target)
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        own = probe.own_weights(net)
        changed = not losses or losses[0] != losses[1]
        shard = list(lite.ranks.data_split)
        return {"changed": changed, "losses": losses, "own": own, "shard": shard}

    return probe.attempt(train)


@judge_of(_rebinds)
def _judge_rebinds(found: Result) -> None:
    can = found.capabilities
    if not trains_under_lite(can):
        return
    if not can.accepts_existing_optimizers:
        judge_refused(
            found, "Lite.setup(model, optimizer)", "accepts_existing_optimizers=False", "optimizer"
        )
        return
    if all(told["refused"] for told in found.ranks):
        judge_refused(found, "an optimizer that has taken a step", "an engine", "state of earlier")
        return
    judge_accepted(found, "Lite.setup(model, optimizer) (accepts_existing_optimizers=True)")
    for rank, told in enumerate(found.ranks):
        assert told["changed"], (
            f"rank {rank}: an optimizer that was made before Lite.setup(model, optimizer) does not "
            "train the model: rebind it to the parameters that the model has then"
        )
    judge_losses_of(
        found,
        "an optimizer that was made before Lite.setup(model, optimizer), and has taken a step, is "
        "not what it was: keep its parameter groups, with their options, and its state",
    )


class _Gradients(Callback):
    """Measures gradients before the first step."""

    def __init__(self) -> None:
        self.measured: dict[str, Any] = _measured([])

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.measured = _measured(p.grad for p in module.parameters() if p.grad is not None)


def _measured(tensors: Iterable[Any]) -> dict[str, Any]:
    """Return how many elements this process has of some tensors, and where they are."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {
        "elements": sum(tensor.numel() for tensor in local),
        "devices": sorted({tensor.device.type for tensor in local if tensor.numel()}),
    }


@check("capabilities/what ranks hold", reference=True)
def _held(probe: Probe) -> dict[str, Any]:
    """Each rank holds only a part of the state that the spec lists in `shards`.

    With sharded_state=True, each rank holds a part of the parameters or of the optimizer's state,
    unless the spec is a preset (`init_args`) without `shards`. State in `offloads` is in host
    memory. On the CPU accelerator all state is, so only a run on another accelerator finds a
    strategy that offloads nothing. `estimate_memory` returns at least the memory that a rank uses.
    It is called after `bind` alone.
    """
    gradients = _Gradients()
    trainer = probe.fit(Learner("wide", "adam"), 16, callbacks=[gradients])
    prepared = trainer.run.require_prepared()
    prepared.reshard()
    states = [state for one in prepared.optimizers for state in one.state.values()]
    tensors = [
        value
        for state in states
        if isinstance(state, Mapping)
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    spec = None
    if not probe.target.is_place:
        spec = get_registry().find("strategy", probe.target.strategy).spec
    return {
        "shards": list(getattr(spec, "shards", ())),
        "preset": bool(getattr(spec, "init_args", None)),
        "offloads": list(getattr(spec, "offloads", ())),
        "parameters": _measured(prepared.original.parameters()),
        "gradients": gradients.measured,
        "optimizer": _measured(tensors),
        # As a plan does it, in a process without a launch.
        "estimate": _estimated(probe.trainer().strategy, getattr(spec, "shards", ())),
    }


_ALONE = StepMemory(parameters=10_000, gradients=10_000, optimizer=20_000, buffers=0, working=0)


def _estimated(strategy: Strategy, shards: Sequence[str]) -> Any:
    """Return the parts of `_ALONE` that the strategy's estimate leaves on a rank, or its repr."""
    phases = dict.fromkeys(("forward", "backward", "step"), _ALONE)
    try:
        estimated = strategy.estimate_memory(phases, shards)
    except Exception as error:
        return format_text(f"{type(error).__name__}: {error}", 200)
    memory = estimated.get("step") if isinstance(estimated, Mapping) else None
    if not isinstance(memory, StepMemory):
        return format_text(repr(estimated), 200)
    parts = ("parameters", "gradients", "optimizer")
    return {part: getattr(memory, part) / getattr(_ALONE, part) for part in parts}


@judge_of(_held)
def _judge_held(found: Result) -> None:
    world = len(found.ranks)
    for rank, told in enumerate(found.ranks):
        for part in told["shards"] if world > 1 else ():
            own, whole = told[part]["elements"], found.reference[part]["elements"]
            assert own < whole, (
                f"the spec says shards={tuple(told['shards'])!r}, and rank {rank} has {own} "
                f"elements of the {part}, of a model on single_device {whole}: nothing was "
                "divided. Whether a model fits is planned by it: divide it in wrap, or leave it out"
            )
        for part in told["offloads"]:
            places = told[part]["devices"]
            assert set(places) <= {"cpu"}, (
                f"the spec says offloads={tuple(told['offloads'])!r}, and the {part} are on "
                f"{', '.join(places)} on rank {rank}"
            )
        estimate = told["estimate"]
        assert isinstance(estimate, dict), (
            "estimate_memory was called after bind alone, with the phase 'step', and returned "
            f"{estimate}; expected a dict with a StepMemory for each phase that it was called with"
        )
        for part, share in estimate.items():
            # Ranks may hold different parts of a model.
            held = mean(one[part]["elements"] for one in found.ranks)
            whole = found.reference[part]["elements"]
            assert share >= 0.9 * held / whole, (
                f"estimate_memory leaves {share:.0%} of the {part} on each rank, and a rank has "
                f"{held:.0f} of {whole} elements: a plan would promise too much"
            )
        shards_nothing = told["preset"] and not told["shards"]
        if found.capabilities.sharded_state and world > 1 and not shards_nothing:
            assert any(
                told[part]["elements"] < found.reference[part]["elements"]
                for part in ("parameters", "optimizer")
            ), (
                "sharded_state=True in the capabilities, and rank "
                f"{rank} has all parameters and all of the optimizer's state: nothing is sharded"
            )


class _Pure(Module):
    """Notes nothing in a step, which can be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("dense")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["sgd"](self.parameters())


class _Losses(Callback):
    """Notes the loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


@check("capabilities/compiles", reference=True)
def _compiles(probe: Probe) -> dict[str, Any]:
    """A compiled model has the losses of single_device, if `compiles` lists "model"."""

    def train() -> dict[str, Any]:
        noted, module = _Losses(), _Pure()
        # Run the graphs without a code generator, which is slow.
        trainer = probe.trainer(compile={"backend": "eager"}, callbacks=[noted], max_epochs=1)
        trainer.fit(module, probe.loader(32))
        return {"shard": list(trainer.ranks.data_split), "losses": noted.losses, "own": {}}

    return probe.attempt(train)


@judge_of(_compiles)
def _judge_compiles(found: Result) -> None:
    if "model" not in found.capabilities.compiles:
        judge_refused(found, "compile=True", "no 'model' in compiles", "compile")
        return
    judge_accepted(found, "compile=True ('model' in compiles)")
    judge_losses(found)
