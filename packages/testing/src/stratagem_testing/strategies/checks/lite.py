"""A loop of the user's own, under Lite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    close,
    difference,
    judge_accepted,
    judge_losses,
    judge_losses_of,
    judge_refused,
    shown,
)
from stratagem_testing.strategies.models import LARGE, OPTIMIZERS, build
from stratagem_testing.strategies.probe import Probe

REFUSAL = "manual_backward=False in its capabilities"


def _parameters(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _set_up(lite: Any, net: nn.Module, *, afterwards: bool = False) -> tuple[Any, Any]:
    """Set up a model and its optimizer, made before or after."""
    make = OPTIMIZERS["momentum"]
    if lite.plan.capabilities.accepts_existing_optimizers and not afterwards:
        model, optimizer = lite.setup(net, make(_parameters(net)))
        return model, optimizer
    model = lite.setup(net)
    return model, lite.setup_optimizers(make(_parameters(model)))


def _loop(
    probe: Probe,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    afterwards: bool = False,
    nested: bool = False,
    looks: bool = False,
) -> dict[str, Any]:
    lite = probe.lite()
    net = build("dense")
    model, optimizer = _set_up(lite, net, afterwards=afterwards)
    batches = lite.setup_dataloaders(probe.loader(32))
    losses, norms = [], []
    for _ in range(2):
        for number, (_, inputs, target) in enumerate(batches):
            last = (number + 1) % accumulate == 0
            with nullcontext() if last else lite.no_backward_sync(model):
                if nested:
                    with lite.no_backward_sync(model):
                        """The outer one goes on."""
                loss = mse_loss(model(inputs), target)
                lite.backward(loss / accumulate)
            losses.append(float(loss.detach()))
            if not last:
                continue
            if clip is not None and not lite.plan.capabilities.engine_clips:
                norm = lite.clip_gradients(model, optimizer, max_norm=clip)
                norms.append(None if norm is None else float(norm))
            if looks:
                model(inputs)  # and no backward, as to log an output
            optimizer.step()
            optimizer.zero_grad()
    return {
        "shard": list(lite.ranks.data_split),
        "losses": losses,
        "norms": norms,
        "own": probe.own_weights(net),
    }


def _steps(probe: Probe, lite: Any, net: nn.Module, model: Any, optimizer: Any) -> dict[str, Any]:
    """Take a step with each batch of an epoch."""
    losses = []
    for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
        loss = mse_loss(model(inputs), target)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    shard = list(lite.ranks.data_split)
    return {"shard": shard, "losses": losses, "own": probe.own_weights(net)}


def _register(name: str, about: str, **options: Any) -> None:
    def judge(found: Result) -> None:
        if not found.capabilities.manual_backward:
            judge_refused(found, "a loop under Lite", "manual_backward=False", REFUSAL)
            return
        judge_accepted(found, "a loop under Lite")
        judge_losses(found)
        own, expected = found.ranks[0]["own"], found.reference["own"]
        said = difference(own, expected, 100 * found.target.tolerance) if own else ""
        assert not (said and found.target.equal), (
            "losses are those of single_device, and the module that was passed to Lite.setup is "
            f"not what was trained: look at prepare, which must not copy it: {said}"
        )

    @check(f"lite/{name}", judge, about=about, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        return probe.attempt(lambda: _loop(probe, **options))


_register("loop", "A hand-written loop under Lite has the losses of single_device.")


def _judge_looked(found: Result) -> None:
    if not found.capabilities.manual_backward:
        return  # see lite/loop
    meaning = (
        "a forward pass before optimizer.step(), without a backward pass after it, changes what is "
        "trained. If it leaves gathered weights, free them in optimizer_step "
        "(PreparedModel.reshard): the next forward pass would use those from before the step"
    )
    for rank, told in enumerate(found.ranks):
        said = told["refused"]
        assert said is None, f"{meaning}\nrank {rank} raised {said['kind']}: {said['text']}"
    judge_losses_of(found, meaning)


@check("lite/forward before the step", _judge_looked, reference=True)
def _looked(probe: Probe) -> dict[str, Any]:
    """A forward pass between backward and optimizer.step() does not change training."""
    if not probe.target.capabilities().manual_backward:
        return {}
    return probe.attempt(lambda: _loop(probe, looks=True))


_register(
    "optimizer afterwards", "An optimizer can be made after Lite.setup(model).", afterwards=True
)
_register(
    "accumulation",
    "With no_backward_sync for all micro-batches but the last, a step uses all their gradients.",
    accumulate=2,
)


def _judge_nested(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        if not told["refused"]:  # see lite/accumulation
            assert close(told["losses"], told["once"], found.target.tolerance), (
                f"accumulation has other losses on rank {rank} if no_backward_sync is entered "
                f"again within no_backward_sync: {shown(told['losses'])}, expected "
                f"{shown(told['once'])}. Let no_sync(prepared) put back what there was before, "
                "and not what is usual"
            )


@check("lite/accumulation, nested", _judge_nested)
def _nested(probe: Probe) -> dict[str, Any]:
    """no_backward_sync inside another no_backward_sync has no effect, and does not end it."""

    def train() -> dict[str, Any]:
        once = _loop(probe, accumulate=2)["losses"]
        return {"losses": _loop(probe, accumulate=2, nested=True)["losses"], "once": once}

    return probe.attempt(train)


class _Nested(nn.Module):
    """Returns more than a tensor, and counts the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("dense")
        self.calls: dict[str, int] = {}

    def note(self, hook: str) -> Any:
        """Return a hook that counts its calls, and changes nothing."""
        self.calls[hook] = 0

        def count(*arguments: Any) -> None:
            self.calls[hook] += 1

        return count

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        return {
            "output": self.net(x) * scale,
            "number": torch.arange(3) + LARGE,
            "double": x.double().sum(),
            "is positive": x > 0,
            "pair": (x, "text"),
            "nothing": None,
        }


def _kinds(data: Any) -> Any:
    """Return what nested data is made of, with the dtypes of tensors."""
    if isinstance(data, Mapping):
        return {key: _kinds(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [type(data).__name__, *map(_kinds, data)]
    return str(data.dtype) if isinstance(data, Tensor) else type(data).__name__


@check("lite/outputs and hooks", reference=True)
def _outputs(probe: Probe) -> dict[str, Any]:
    """A model takes keyword arguments, returns its outputs unchanged, and calls its hooks."""
    lite = probe.lite()
    if not lite.plan.capabilities.manual_backward:
        return {}
    net = _Nested()
    net.register_forward_pre_hook(net.note("the model's forward pre-hook"))
    net.register_forward_hook(net.note("the model's forward hook"))
    net.net.register_forward_hook(net.note("a layer's forward hook"))
    net.net.register_full_backward_hook(net.note("a layer's backward hook"))
    model, optimizer = _set_up(lite, net, afterwards=True)
    _, inputs, target = lite.to_device(next(iter(probe.loader(8))))
    output = model(inputs, scale=2.0)
    lite.backward(mse_loss(output["output"], target))
    optimizer.step()
    return {"kinds": _kinds(output), "hooks": net.calls}


@judge_of(_outputs)
def _judge_outputs(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        if not told:
            continue
        for key, expected in found.reference["kinds"].items():
            assert told["kinds"].get(key) == expected, (
                f"a model under Lite returned {told['kinds'].get(key)} at {key!r} on rank {rank}, "
                f"expected {expected}, which its forward returns: look at what wrap returns"
            )
        for hook, count in found.reference["hooks"].items():
            assert told["hooks"][hook] == count, (
                f"{hook} was called {told['hooks'][hook]} time(s) in a step on rank {rank}, "
                f"expected {count}: call modules, and not their forward functions"
            )


@check("lite/hooks of parameters", reference=True)
def _parameter_hooks(probe: Probe) -> dict[str, Any]:
    """A hook on a parameter (register_hook) is called with the gradient, or raises an error."""
    if not probe.target.capabilities().manual_backward:
        return {}

    def train() -> dict[str, Any]:
        lite = probe.lite()
        net = build("dense")
        seen: list[list[int]] = []
        parameter: Any = next(net.parameters())
        parameter.register_hook(lambda gradient: seen.append(list(gradient.shape)))
        model, optimizer = _set_up(lite, net, afterwards=True)
        told = _steps(probe, lite, net, model, optimizer)
        return {**told, "seen": seen}

    return probe.attempt(train)


@judge_of(_parameter_hooks)
def _judge_parameter_hooks(found: Result) -> None:
    if not found.capabilities.manual_backward:
        return
    what = "a hook on the parameter '0.weight'"
    if all(told["refused"] for told in found.ranks):
        judge_refused(found, what, "an engine", "hook")
        return
    judge_accepted(found, what)
    # Where a rank has this parameter at all.
    counts = {len(told["seen"]) for told in found.ranks}
    assert max(counts) == len(found.reference["seen"]), (
        f"{what} was called {max(counts)} time(s) in {len(found.reference['seen'])} backward "
        "passes: it was set before the model was set up. Where wrap makes a new parameter, "
        "refuse hooks by a ConfigurationError"
    )
    judge_losses(found)


class _FailedBatchError(Exception):
    """What a loop of the user's catches, to go on with the next batch."""


def _judge_interrupted(found: Result) -> None:
    if not found.capabilities.manual_backward:
        judge_refused(found, "a loop under Lite", "manual_backward=False", REFUSAL)
        return
    judge_accepted(found, "a loop under Lite")
    judge_losses_of(
        found,
        "training is another one after an error in no_backward_sync that the loop has caught: put "
        "back in `finally` what no_sync(prepared) changes",
    )


@check("lite/error in accumulation", _judge_interrupted, reference=True)
def _interrupted(probe: Probe) -> dict[str, Any]:
    """After an error inside no_backward_sync that the loop catches, training works as before."""

    def train() -> dict[str, Any]:
        lite = probe.lite()
        net = build("dense")
        model, optimizer = _set_up(lite, net)
        with suppress(_FailedBatchError), lite.no_backward_sync(model):
            raise _FailedBatchError
        return _steps(probe, lite, net, model, optimizer)

    return probe.attempt(train)


@check("lite/clip", reference=True)
def _clip(probe: Probe) -> dict[str, Any]:
    """Lite.clip_gradients clips by the norm over all ranks, and returns this norm.

    With engine_clips=True, it raises an error.
    """
    capabilities = probe.target.capabilities()
    if not capabilities.manual_backward:
        return {}
    if not capabilities.engine_clips:
        return _loop(probe, accumulate=2, clip=0.2)
    lite = probe.lite()
    model, optimizer = _set_up(lite, build("dense"))
    refused = probe.said(lambda: lite.clip_gradients(model, optimizer, max_norm=0.2))
    return {"refused": refused}


@judge_of(_clip)
def _judge_clip(found: Result) -> None:
    if not found.capabilities.manual_backward:
        return
    if not found.capabilities.engine_clips:
        judge_losses(found)
        for rank, told in enumerate(found.ranks if found.target.equal else []):
            for own, expected in zip(told["norms"], found.reference["norms"], strict=True):
                assert own is not None and math.isclose(own, expected, rel_tol=1e-3), (  # noqa: PT018
                    f"Lite.clip_gradients(max_norm=...) returned {own} on rank {rank}, expected "
                    f"{expected:.6g}, the norm of the gradients before they were clipped: "
                    "clip_gradients has to return it"
                )
        return
    judge_refused(found, "Lite.clip_gradients", "engine_clips=True", "clips gradients itself")


def _judge_two(found: Result) -> None:
    if not found.capabilities.manual_backward:
        judge_refused(found, "a loop under Lite", "manual_backward=False", REFUSAL)
        return
    if all(told["refused"] for told in found.ranks):
        judge_refused(found, "a second model under Lite", "an engine", "models", "setup")
        return
    judge_accepted(found, "two models under Lite")
    judge_losses_of(
        found,
        "of two models that were set up in turn, one is not trained as if it were the only one: "
        "keep what belongs to a model in its PreparedModel, or by it, and not in the strategy",
    )


@check("lite/two models", _judge_two, reference=True)
def _two_models(probe: Probe) -> dict[str, Any]:
    """Two models of one Lite train independently, also while one of them accumulates gradients."""

    def train() -> dict[str, Any]:
        lite = probe.lite()
        nets = [build("dense", seed) for seed in range(2)]
        set_up = [_set_up(lite, net, afterwards=True) for net in nets]
        losses = []
        for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
            for (model, optimizer), (other, _) in zip(set_up, reversed(set_up), strict=True):
                loss = mse_loss(model(inputs), target)
                with lite.no_backward_sync(other):
                    lite.backward(loss, model=model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        own = {f"{i}.{k}": v for i, n in enumerate(nets) for k, v in probe.own_weights(n).items()}
        return {"shard": list(lite.ranks.data_split), "losses": losses, "own": own}

    return probe.attempt(train)


@check("lite/state")
def _state(probe: Probe) -> dict[str, Any]:
    """After Lite.load, training continues with the saved model and optimizer."""
    if not probe.target.capabilities().manual_backward:
        return {}
    path = probe.folder / "lite.ckpt"

    def steps(lite: Any, model: Any, optimizer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = mse_loss(model(batch[0]), batch[1])
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    lite = probe.lite()
    batch = lite.to_device(next(iter(probe.loader(8)))[1:])
    model, optimizer = _set_up(lite, build("dense"))
    steps(lite, model, optimizer, 3)
    lite.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    expected = steps(lite, model, optimizer, 3)
    again = probe.lite()
    model, optimizer = _set_up(again, build("dense", seed=5))
    state = {"optimizer": optimizer, "model": model, "step": 0}
    again.load(path, state)
    return {
        "shard": list(lite.ranks.data_split),
        "losses": steps(again, model, optimizer, 3),
        "expected": expected,
        "step": state["step"],
    }


@judge_of(_state)
def _judge_state(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        if not told:
            continue
        assert told["step"] == 3, f"Lite.load left step={told['step']} on rank {rank}, expected 3"
        if not found.target.equal:
            told["losses"], told["expected"] = told["losses"][:1], told["expected"][:1]
        for step, (mine, other) in enumerate(zip(told["losses"], told["expected"], strict=True)):
            assert abs(mine - other) <= 10 * found.target.tolerance, (
                f"after Lite.load, rank {rank} has the losses {told['losses']}, expected "
                f"{told['expected']}: "
                + ("weights" if step == 0 else "the optimizer's state")
                + " were not restored"
            )
