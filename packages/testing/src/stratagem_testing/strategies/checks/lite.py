"""A loop of the user's own, under Lite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    trains_under_lite,
)
from stratagem_testing.strategies.models import LARGE, OPTIMIZERS, build, flat
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


def by_steps(
    lite: Any, model: Any, batches: Sequence[Any], accumulate: int = 1, limits: Sequence[float] = ()
) -> list[float]:
    """Take steps by `Lite.step`; return the losses that this rank computes.

    Args:
        lite, model: the Lite, and the model that it has set up.
        batches: all batches.
        accumulate: the number of micro-batches of a step.
        limits: the largest norms of the gradients, of one step after another.
    """
    losses: list[float] = []

    def loss(batch: Any) -> Tensor:
        found = mse_loss(model(batch[1]), batch[2])
        losses.append(float(found.detach()))
        return found

    for step, first in enumerate(range(0, len(batches), accumulate)):
        limit = limits[step % len(limits)] if limits else None
        lite.step(model, batches[first : first + accumulate], loss, max_norm=limit)
    return losses


def _loop(
    probe: Probe,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    afterwards: bool = False,
    nested: bool = False,
    looks: bool = False,
    halves: bool = False,
) -> dict[str, Any]:
    lite = probe.lite()
    with lite.init_module() if halves else nullcontext():
        net = build("dense")
    model, optimizer = _set_up(lite, net, afterwards=afterwards)
    batches = lite.setup_dataloaders(probe.loader(32))
    losses: list[float] = []
    norms: list[float | None] = []
    clipped: list[float] = []
    if not lite.plan.capabilities.manual_backward:
        limits = () if clip is None else (clip, 1000.0)
        losses = by_steps(lite, model, [*batches, *batches], accumulate, limits)
        return {**probe.report_of_loop(lite, net, model, losses), "norms": norms, "clipped": []}
    for _ in range(2):
        for number, (_, inputs, target) in enumerate(batches):
            last = (number + 1) % accumulate == 0
            with nullcontext() if last else lite.no_backward_sync(model):
                if nested:
                    with lite.no_backward_sync(model):
                        """The outer one goes on."""
                # Two forward passes, and the backward pass of both.
                outputs = torch.cat([model(half) for half in inputs.chunk(2 if halves else 1)])
                loss = mse_loss(outputs, target)
                lite.backward(loss / accumulate)
            losses.append(float(loss.detach()))
            if not last:
                continue
            if clip is not None and not lite.plan.capabilities.engine_clips:
                limit = clip if len(norms) % 2 == 0 else 1000.0  # which no norm exceeds
                norm = lite.clip_gradients(model, optimizer, max_norm=limit)
                norms.append(None if norm is None else float(norm))
                clipped += [_norm(net) / limit]
            if looks:
                model(inputs)  # and no backward, as to log an output
            optimizer.step()
            optimizer.zero_grad()
    return {**probe.report_of_loop(lite, net, model, losses), "norms": norms, "clipped": clipped}


def _norm(net: nn.Module) -> float:
    """Return the norm of the gradients that this rank has."""
    gradients = [p.grad.detach() for p in net.parameters() if p.grad is not None]
    return math.hypot(*(float(each.double().norm()) for each in gradients))


def _steps(
    probe: Probe, lite: Any, net: nn.Module, model: Any, optimizer: Any, seed: int = 0
) -> dict[str, Any]:
    """Take a step with each batch of an epoch."""
    losses = []
    batches = lite.setup_dataloaders(probe.loader(32))
    if not lite.plan.capabilities.manual_backward:
        losses = by_steps(lite, model, list(batches))
        return probe.report_of_loop(lite, net, model, losses, seed)
    for _, inputs, target in batches:
        loss = mse_loss(model(inputs), target)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return probe.report_of_loop(lite, net, model, losses, seed)


def _register(name: str, about: str, **options: Any) -> None:
    def judge(found: Result) -> None:
        if not trains_under_lite(found.capabilities):
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


_register(
    "loop",
    "A hand-written loop under Lite has the losses of single_device. With lite_step=True, and "
    "manual_backward=False, it takes its steps by Lite.step, here and in the other checks.",
)


def _judge_own_backward(found: Result) -> None:
    if not found.capabilities.manual_backward:
        judge_refused(found, "Lite.backward", "manual_backward=False", REFUSAL)


@check("lite/backward", _judge_own_backward)
def _own_backward(probe: Probe) -> dict[str, Any]:
    """With manual_backward=False, Lite.backward raises an error."""
    lite = probe.lite()
    if lite.plan.capabilities.manual_backward:
        return {}

    def backward() -> dict[str, Any]:
        lite.backward(torch.ones((), requires_grad=True), lite.setup(build("dense")))
        return {}

    return probe.attempt(backward)


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
    for rank, told in enumerate(found.ranks):
        assert close(told["losses"], told["without"], found.target.tolerance), (
            f"{meaning}\nthe losses are {shown(told['losses'])} on rank {rank}, expected "
            f"{shown(told['without'])}, those of the same loop without this forward pass"
        )


@check("lite/forward before the step", _judge_looked)
def _looked(probe: Probe) -> dict[str, Any]:
    """A forward pass between backward and optimizer.step() does not change training."""
    if not probe.target.capabilities().manual_backward:
        return {}

    def train() -> dict[str, Any]:
        without = _loop(probe)["losses"]
        return {"losses": _loop(probe, looks=True)["losses"], "without": without}

    return probe.attempt(train)


_register(
    "optimizer afterwards",
    "An optimizer can be made after Lite.setup(model), of a model that was made in "
    "Lite.init_module(). A loss can use two forward passes.",
    afterwards=True,
    halves=True,
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
    if not probe.target.capabilities().manual_backward:
        return {"refused": REFUSAL}

    def train() -> dict[str, Any]:
        once = _loop(probe, accumulate=2)["losses"]
        return {"losses": _loop(probe, accumulate=2, nested=True)["losses"], "once": once}

    return probe.attempt(train)


class _Pair(NamedTuple):
    """An output whose parts have names."""

    first: Tensor
    second: str


@dataclass
class _Output:
    """An output as libraries of models have them."""

    value: Tensor


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
            "named": _Pair(x, "text"),
            "of a class": _Output(x),
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
    if not trains_under_lite(found.capabilities):
        judge_refused(found, "a loop under Lite", "manual_backward=False", REFUSAL)
        return
    if found.capabilities.engine_steps and all(told["refused"] for told in found.ranks):
        judge_refused(found, "zero_grad() after backward", "engine_steps=True", "zero_grad")
        return
    judge_accepted(found, "a loop under Lite")
    judge_losses_of(
        found,
        "training is another one after an error in no_backward_sync that the loop has caught: put "
        "back in `finally` what no_sync(prepared) changes, and keep gradients in p.grad meanwhile, "
        "where zero_grad() drops them",
    )


@check("lite/error in accumulation", _judge_interrupted, reference=True)
def _interrupted(probe: Probe) -> dict[str, Any]:
    """After an error inside no_backward_sync that the loop catches, training works as before.

    zero_grad() drops the gradients of a backward pass in no_backward_sync, if state is not sharded.
    """

    def train() -> dict[str, Any]:
        lite = probe.lite()
        net = build("dense")
        model, optimizer = _set_up(lite, net)
        batch = lite.to_device(next(iter(probe.loader(8))))
        if not lite.plan.capabilities.manual_backward:

            def fail(batch: Any) -> Tensor:
                model(batch[1])
                raise _FailedBatchError

            with suppress(_FailedBatchError):
                lite.step(model, [batch], fail)
            return _steps(probe, lite, net, model, optimizer)
        _, inputs, target = batch
        with suppress(_FailedBatchError), lite.no_backward_sync(model):
            # FSDP of torch keeps gradients that wait in a place that zero_grad does not know.
            if not lite.plan.capabilities.sharded_state:
                lite.backward(3 * mse_loss(model(inputs), target))
            raise _FailedBatchError
        optimizer.zero_grad()
        return _steps(probe, lite, net, model, optimizer)

    return probe.attempt(train)


@check("lite/clip", reference=True)
def _clip(probe: Probe) -> dict[str, Any]:
    """Lite.clip_gradients clips by the norm over all ranks, and returns this norm.

    A norm below the limit leaves the gradients unchanged. With clip_val, each element is clipped.
    With engine_clips=True, it raises an error.
    """
    capabilities = probe.target.capabilities()
    if not trains_under_lite(capabilities):
        return {}
    if not capabilities.engine_clips:
        told = _loop(probe, accumulate=2, clip=0.2)
        # Where a rank has whole parameters, with their gradients.
        is_divided = capabilities.sharded_state or capabilities.parameters == "divided"
        if is_divided or not capabilities.manual_backward:
            return {**told, "clipped": []}
        return {**told, "by value": _largest_of_clipped(probe)}
    lite = probe.lite()
    model, optimizer = _set_up(lite, build("dense"))
    refused = probe.said(lambda: lite.clip_gradients(model, optimizer, max_norm=0.2))
    return {"refused": refused}


_LARGEST = 0.01


def _largest_of_clipped(probe: Probe) -> float:
    """Return the largest element of gradients that were clipped to `_LARGEST`."""
    lite = probe.lite()
    net = build("dense")
    model, optimizer = _set_up(lite, net)
    _, inputs, target = lite.to_device(next(iter(probe.loader(8))))
    lite.backward(mse_loss(model(inputs), target))
    lite.clip_gradients(model, optimizer, clip_val=_LARGEST)
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return max((float(each.abs().max()) for each in gradients), default=_LARGEST)


@judge_of(_clip)
def _judge_clip(found: Result) -> None:
    if not trains_under_lite(found.capabilities):
        return
    if not found.capabilities.engine_clips:
        judge_losses_of(
            found,
            "gradients were not clipped by their norm, or changed where their norm is below the "
            "limit: look at clip_gradients, which has to leave those as they are",
        )
        returns_norm = found.target.equal and found.capabilities.manual_backward
        for rank, told in enumerate(found.ranks if returns_norm else []):
            for own, expected in zip(told["norms"], found.reference["norms"], strict=True):
                assert own is not None and math.isclose(own, expected, rel_tol=1e-3), (  # noqa: PT018
                    f"Lite.clip_gradients(max_norm=...) returned {own} on rank {rank}, expected "
                    f"{expected:.6g}, the norm of the gradients before they were clipped: "
                    "clip_gradients has to return it"
                )
        for rank, told in enumerate(found.ranks):
            assert all(times < 1.001 for times in told["clipped"]), (
                "after Lite.clip_gradients(max_norm=...), the norm of the gradients on rank "
                f"{rank} is {shown(told['clipped'])} times the limit in each step: look at "
                "clip_gradients"
            )
            largest = told.get("by value", _LARGEST)
            assert math.isclose(largest, _LARGEST, rel_tol=1e-3), (
                f"after Lite.clip_gradients(clip_val={_LARGEST}), the largest element of the "
                f"gradients is {largest:.5g} on rank {rank}, and it was larger than {_LARGEST}: "
                "look at clip.algorithm in clip_gradients"
            )
        return
    judge_refused(found, "Lite.clip_gradients", "engine_clips=True", "clips gradients itself")


def _judge_two(found: Result) -> None:
    if not trains_under_lite(found.capabilities):
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
    for rank, told in enumerate(found.ranks):
        assert close(told["losses"], told["alone"], found.target.tolerance), (
            "two models that are trained in turn have other losses than each of them alone on rank "
            f"{rank}: {shown(told['losses'])}, expected {shown(told['alone'])}. Parameters of two "
            "models may have the same names: keep what belongs to a model in "
            "prepared.strategy_data, and not in the strategy"
        )
        said = difference(told["saved"], told["own"], 1e-6)
        assert not said, (
            "of two models that were saved in one checkpoint, one has the weights of the other, or "
            f"none: look at model_state, and return those of prepared: {said}"
        )


@check("lite/two models", _judge_two, reference=True)
def _two_models(probe: Probe) -> dict[str, Any]:
    """Two models of one Lite train independently, also while one of them accumulates gradients.

    A checkpoint has the weights of both.
    """

    def train() -> dict[str, Any]:
        lite = probe.lite()
        nets = [build("dense", seed) for seed in range(2)]
        set_up = [_set_up(lite, net, afterwards=True) for net in nets]
        losses: list[float] = []
        for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
            for (model, optimizer), (other, _) in zip(set_up, reversed(set_up), strict=True):
                if not lite.plan.capabilities.manual_backward:
                    losses += by_steps(lite, model, [(None, inputs, target)])
                    continue
                loss = mse_loss(model(inputs), target)
                with lite.no_backward_sync(other):
                    lite.backward(loss, model=model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        reports = [
            probe.report_of_loop(lite, net, model, losses, seed)
            for seed, (net, (model, _)) in enumerate(zip(nets, set_up, strict=True))
        ]
        of_both = {
            key: {
                f"{i}.{name}": v for i, each in enumerate(reports) for name, v in each[key].items()
            }
            for key in ("begun", "weights", "own")
        }
        path = probe.folder / "two.ckpt"
        lite.save(path, {str(i): model for i, (model, _) in enumerate(set_up)})
        saved = {
            f"{i}.{name}": values
            for i, state in lite.load(path).items()
            if i.isdigit()
            for name, values in flat(state).items()
        }
        alone = [_one_model(probe, seed)["losses"] for seed in range(2)]
        return {
            **reports[0],
            **of_both,
            "saved": saved,
            "alone": [loss for pair in zip(*alone, strict=True) for loss in pair],
        }

    return probe.attempt(train)


def _one_model(probe: Probe, seed: int) -> dict[str, Any]:
    """Train one of the models as if there were no other one."""
    lite = probe.lite()
    net = build("dense", seed)
    return _steps(probe, lite, net, *_set_up(lite, net, afterwards=True), seed)


@check("lite/state")
def _state(probe: Probe) -> dict[str, Any]:
    """After Lite.load, training continues with the saved model and its two optimizers.

    The model that loads was trained before. A checkpoint can have the model alone.
    """
    if not trains_under_lite(probe.target.capabilities()):
        return {}
    path = probe.folder / "lite.ckpt"
    said: list[Any] = []  # of the model alone

    def set_up(lite: Any, net: nn.Module) -> tuple[Any, list[Any]]:
        can = lite.plan.capabilities
        if can.engine_steps or not can.manual_backward:  # which may take one only
            model, optimizer = _set_up(lite, net)
            return model, [optimizer]
        model = lite.setup(net)
        if not said:
            path = probe.folder / "alone.ckpt"
            said.append(probe.said(lambda: _save_and_load(lite, model, path)))
        parameters = list(model.parameters())
        two = OPTIMIZERS["adam"](parameters[2:]), OPTIMIZERS["momentum"](parameters[:2])
        return model, list(lite.setup_optimizers(*two))

    def steps(lite: Any, model: Any, optimizers: list[Any], count: int) -> list[float]:
        if not lite.plan.capabilities.manual_backward:
            return by_steps(lite, model, [(None, *batch)] * count)
        losses = []
        for _ in range(count):
            loss = mse_loss(model(batch[0]), batch[1])
            lite.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def state(model: Any, optimizers: list[Any], step: int) -> dict[str, Any]:
        # In another order, which must not matter.
        named = {f"optimizer {i}": each for i, each in reversed([*enumerate(optimizers)])}
        return {**named, "model": model, "step": step}

    lite = probe.lite()
    batch = lite.to_device(next(iter(probe.loader(8)))[1:])
    model, optimizers = set_up(lite, build("dense"))
    steps(lite, model, optimizers, 3)
    lite.save(path, state(model, optimizers, 3))
    expected = steps(lite, model, optimizers, 3)
    again = probe.lite()
    model, optimizers = set_up(again, build("dense", seed=5))
    steps(again, model, optimizers, 2)
    loaded = state(model, optimizers, 0)
    again.load(path, loaded)
    return {
        "said": any(said) and said[0],
        "losses": steps(again, model, optimizers, 3),
        "expected": expected,
        "step": loaded["step"],
    }


def _save_and_load(lite: Any, model: Any, path: Path) -> None:
    lite.save(path, {"model": model})
    lite.load(path, {"model": model})


@judge_of(_state)
def _judge_state(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        if not told:
            continue
        assert told["step"] == 3, f"Lite.load left step={told['step']} on rank {rank}, expected 3"
        said = told["said"]
        assert not said, (
            "Lite.save and Lite.load of a model without an optimizer end on rank "
            f"{rank} in {said['kind']}: {said['text']}. state and load_state have no optimizers "
            "then"
        )
        for step, (mine, other) in enumerate(zip(told["losses"], told["expected"], strict=True)):
            assert abs(mine - other) <= 10 * found.target.tolerance, (
                f"after Lite.load, rank {rank} has the losses {told['losses']}, expected "
                f"{told['expected']}: "
                + (
                    "weights were not restored"
                    if step == 0
                    else "the state of one of the two optimizers was not restored, or the "
                    "strategy's own state, which has to replace what the model had before (look "
                    "at load_optimizer_state and load_state)"
                )
            )
