"""A loop of the user's own, under Lite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.functional import mse_loss

from stratagem.testing.strategies.check import Found, check
from stratagem.testing.strategies.judging import judge_losses
from stratagem.testing.strategies.models import OPTIMIZERS, build
from stratagem.testing.strategies.probe import Probe

REFUSAL = "manual_backward=False in its capabilities"


def _parameters(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _set_up(lite: Any, net: nn.Module, *, afterwards: bool = False) -> tuple[Any, Any]:
    """Set up a model and its optimizer, made before or after."""
    make = OPTIMIZERS["momentum"]
    if lite.plan.capabilities.rebinds_optimizers and not afterwards:
        model, optimizer = lite.setup(net, make(_parameters(net)))
        return model, optimizer
    model = lite.setup_module(net)
    return model, lite.setup_optimizers(make(_parameters(model)))


def _loop(
    probe: Probe, *, accumulate: int = 1, clip: float | None = None, afterwards: bool = False
) -> dict[str, Any]:
    lite = probe.lite()
    net = build("dense")
    model, optimizer = _set_up(lite, net, afterwards=afterwards)
    batches = lite.setup_dataloaders(probe.loader(32))
    losses = []
    for _ in range(2):
        for number, (_, inputs, target) in enumerate(batches):
            last = (number + 1) % accumulate == 0
            with nullcontext() if last else lite.no_backward_sync(model):
                loss = mse_loss(model(inputs), target)
                lite.backward(loss / accumulate)
            losses.append(float(loss.detach()))
            if not last:
                continue
            if clip is not None and not lite.plan.capabilities.owns_clipping:
                lite.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
    return {"shard": list(lite.ranks.data_shard), "losses": losses, "own": {}}


def _register(name: str, about: str, **options: Any) -> None:
    def judge(found: Found) -> None:
        refusals = [told["refused"] for told in found.ranks]
        if not found.capabilities.manual_backward:
            for said in refusals:
                assert said is not None, (
                    "manual_backward=False in the capabilities, and a loop under Lite was not "
                    "refused"
                )
                assert REFUSAL in said["text"], f"the refusal does not name it: {said['text']}"
            return
        assert not any(refusals), (
            f"a loop under Lite was refused, although manual_backward=True: {refusals[0]}"
        )
        judge_losses(found)

    @check(f"lite/{name}", about, judge, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        told: dict[str, Any] = {}
        clip = options.get("clip")
        given = dict(options)
        if clip is not None and not probe.target.capabilities().gradient_clipping:
            given.pop("clip")
        refused = _said_by_front_end(probe, lambda: told.update(_loop(probe, **given)))
        return {**told, "refused": refused}


def _said_by_front_end(probe: Probe, action: Callable[[], Any]) -> dict[str, str] | None:
    """Return a refusal; what else goes wrong is an error of the check."""
    said = probe.said(action)
    if said is not None and said["kind"] != "ConfigurationError":
        raise AssertionError(f"{said['kind']}: {said['text']}")
    return said


_register("loop", "a loop of the user's own trains as the Trainer does")
_register(
    "optimizer afterwards", "an optimizer may be made once the model is set up", afterwards=True
)
_register(
    "accumulation",
    "no_backward_sync around all but the last micro-batch gives the gradient of all of them",
    accumulate=2,
)


@check(
    "lite/clip",
    "Lite.clip_gradients clips by the norm over all ranks; an engine that clips refuses it",
    lambda found: _judge_clip(found),
    reference=True,
)
def _clip(probe: Probe) -> dict[str, Any]:
    capabilities = probe.target.capabilities()
    if not capabilities.manual_backward:
        return {}
    if not capabilities.owns_clipping:
        return _loop(probe, accumulate=2, clip=0.2)
    lite = probe.lite()
    model, optimizer = _set_up(lite, build("dense"))
    refused = probe.said(lambda: lite.clip_gradients(model, optimizer, max_norm=0.2))
    return {"refused": refused}


def _judge_clip(found: Found) -> None:
    if not found.capabilities.manual_backward:
        return
    if not found.capabilities.owns_clipping:
        judge_losses(found)
        return
    for told in found.ranks:
        said = told["refused"]
        assert said is not None, (
            "owns_clipping=True in the capabilities, and Lite.clip_gradients was not refused"
        )
        assert "clips gradients itself" in said["text"], f"the refusal does not say why: {said}"


@check(
    "lite/state",
    "Lite.save and Lite.load go on with model and optimizer as they were",
    lambda found: _judge_state(found),
)
def _state(probe: Probe) -> dict[str, Any]:
    if not probe.target.capabilities().manual_backward:
        return {}
    path = probe.folder / "lite.ckpt"
    batch = next(iter(probe.loader(8)))[1:]

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
    model, optimizer = _set_up(lite, build("dense"))
    steps(lite, model, optimizer, 3)
    lite.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    expected = steps(lite, model, optimizer, 3)
    again = probe.lite()
    model, optimizer = _set_up(again, build("dense", seed=5))
    state = {"optimizer": optimizer, "model": model, "step": 0}
    again.load(path, state)
    return {
        "shard": list(lite.ranks.data_shard),
        "losses": steps(again, model, optimizer, 3),
        "expected": expected,
        "step": state["step"],
    }


def _judge_state(found: Found) -> None:
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
