"""A loop of the user's own, under Lite."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from typing import Any

from torch import nn
from torch.nn.functional import mse_loss

from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    judge_accepted,
    judge_losses,
    judge_losses_of,
    judge_refused,
)
from stratagem_testing.strategies.models import OPTIMIZERS, build
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
    probe: Probe, *, accumulate: int = 1, clip: float | None = None, afterwards: bool = False
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
                loss = mse_loss(model(inputs), target)
                lite.backward(loss / accumulate)
            losses.append(float(loss.detach()))
            if not last:
                continue
            if clip is not None and not lite.plan.capabilities.engine_clips:
                norm = lite.clip_gradients(model, optimizer, max_norm=clip)
                norms.append(None if norm is None else float(norm))
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

    @check(f"lite/{name}", judge, about=about, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        return probe.attempt(lambda: _loop(probe, **options))


_register("loop", "A loop of the user's own trains as the Trainer does.")
_register(
    "optimizer afterwards", "An optimizer may be made once the model is set up.", afterwards=True
)
_register(
    "accumulation",
    "no_backward_sync around all but the last micro-batch gives the gradient of all of them.",
    accumulate=2,
)


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
    """An error in no_backward_sync that a loop catches leaves gradients communicated after it."""

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
    """Lite.clip_gradients clips by the norm over all ranks; an engine that clips refuses it."""
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
    """Two models that are set up in one Lite are both trained, as in a GAN."""

    def train() -> dict[str, Any]:
        lite = probe.lite()
        nets = [build("dense", seed) for seed in range(2)]
        set_up = [_set_up(lite, net, afterwards=True) for net in nets]
        losses = []
        for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
            for model, optimizer in set_up:
                loss = mse_loss(model(inputs), target)
                lite.backward(loss, model=model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        own = {f"{i}.{k}": v for i, n in enumerate(nets) for k, v in probe.own_weights(n).items()}
        return {"shard": list(lite.ranks.data_split), "losses": losses, "own": own}

    return probe.attempt(train)


@check("lite/state")
def _state(probe: Probe) -> dict[str, Any]:
    """Lite.save and Lite.load go on with model and optimizer as they were."""
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
