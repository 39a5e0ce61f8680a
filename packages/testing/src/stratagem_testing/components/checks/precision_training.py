"""Precisions: steps, scaled losses, and what a checkpoint restores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from stratagem.precision import Precision
from stratagem.state import find_offending_value
from stratagem_testing.components import training
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.precision import bound
from stratagem_testing.places import find

KIND = "precision"
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05}
"""How far losses may be from those of 32-true; 1e-5 where none stands here."""
LIMIT = 0.25
"""The norm that gradients are clipped to, less than they have."""


def _one_parameter() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(4))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def _backward(precision: Precision, parameter: nn.Parameter, factor: float = 1.0) -> torch.Tensor:
    """Call backward on a loss whose gradient is known; return that."""
    gradient = torch.tensor([3.0, -1.0, 0.5, 2.0]) * factor
    loss = (parameter * gradient).sum()
    precision.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
    return gradient


@check(KIND, "steps/gradient")
def _gradient(bench: Bench) -> None:
    """unscale_gradients restores the unscaled gradient, and optimizer_step applies it once."""
    precision = bound(bench)
    parameter, optimizer = _one_parameter()
    expected = _backward(precision, parameter)
    assert parameter.grad is not None
    scaled = not torch.equal(parameter.grad, expected)
    assert scaled == precision.scales_loss, (
        f"scales_loss is {precision.scales_loss}, and scale_loss "
        + ("changes" if scaled else "does not change")
        + " the gradient: front ends leave out unscaling by what scales_loss says"
    )
    precision.unscale_gradients(optimizer)
    assert torch.allclose(parameter.grad, expected), (
        f"after unscale_gradients the gradient is {parameter.grad.tolist()}, expected "
        f"{expected.tolist()}: clipping would see another norm"
    )
    precision.optimizer_step(optimizer)
    assert torch.allclose(parameter.detach(), -expected), (
        f"optimizer_step of SGD with lr 1 changed the parameters by {parameter.tolist()}, expected "
        f"{(-expected).tolist()}: no step, two of them, or another gradient"
    )
    assert not precision.step_was_skipped, "step_was_skipped after a step that was taken"


@check(KIND, "steps/clipping")
def _clipping(bench: Bench) -> None:
    """Clipping between unscale_gradients and optimizer_step limits the applied gradient."""
    precision = bound(bench)
    parameter, optimizer = _one_parameter()
    _backward(precision, parameter)
    precision.unscale_gradients(optimizer)
    torch.nn.utils.clip_grad_norm_([parameter], LIMIT)
    precision.optimizer_step(optimizer)
    norm = float(parameter.detach().norm())
    assert math.isclose(norm, LIMIT, rel_tol=1e-3), (
        f"the step has the norm {norm:.4g}, and gradients were clipped to {LIMIT} after "
        "unscale_gradients: optimizer_step scales them once more, or unscales twice"
    )


@check(KIND, "steps/without unscaling")
def _without_unscaling(bench: Bench) -> None:
    """Without a call of unscale_gradients, optimizer_step unscales the gradients."""
    precision = bound(bench)
    parameter, optimizer = _one_parameter()
    expected = _backward(precision, parameter)
    precision.optimizer_step(optimizer)
    assert torch.allclose(parameter.detach(), -expected), (
        f"without a call of unscale_gradients, optimizer_step applied {(-parameter).tolist()}, "
        f"expected {expected.tolist()}: it has to unscale what was not"
    )


@check(KIND, "steps/skipped")
def _skipped(bench: Bench) -> None:
    """A step with infinite gradients is skipped (step_was_skipped). The next step is taken."""
    precision = bound(bench)
    if not precision.scales_loss:
        assert not precision.step_was_skipped, "step_was_skipped, and scales_loss is False"
        return
    parameter, optimizer = _one_parameter()
    _backward(precision, parameter, float("inf"))
    precision.optimizer_step(optimizer)
    assert torch.equal(parameter.detach(), torch.zeros(4)), (
        f"a step with infinite gradients was taken: the parameters are {parameter.tolist()}"
    )
    assert precision.step_was_skipped, (
        "a step was left out and step_was_skipped is False: it would be counted, and the learning "
        "rate's schedule would go on"
    )
    optimizer.zero_grad()
    expected = _backward(precision, parameter)
    precision.optimizer_step(optimizer)
    assert torch.allclose(parameter.detach(), -expected), "the step after one left out is wrong"
    assert not precision.step_was_skipped, "step_was_skipped stays True after a step that was taken"


@check(KIND, "state/round trip")
def _state(bench: Bench) -> None:
    """state_dict returns weights-only-safe data, which load_state_dict restores. {} resets it."""
    precision = bound(bench)
    parameter, optimizer = _one_parameter()
    for factor in (1.0, float("inf"), 1.0):  # so that a scale is not the first one
        _backward(precision, parameter, factor)
        precision.optimizer_step(optimizer)
        optimizer.zero_grad()
    state = precision.state_dict()
    assert isinstance(state, dict), f"state_dict returned {state!r}; expected a dict"
    offending = find_offending_value(state, "state_dict()")
    assert offending is None, f"{offending}: a checkpoint holds weights-only-safe data only"
    again = bound(bench)
    again.load_state_dict(dict(state))
    assert again.state_dict() == state, (
        f"after load_state_dict the state is {again.state_dict()}, expected {state}"
    )
    error = bench.error(lambda: bound(bench).load_state_dict({}))
    assert error is None, (
        f"load_state_dict({{}}), as of a checkpoint of another precision, ended in {brief(error)}"
    )


def _lite(bench: Bench, precision: Any) -> Any:
    return bench.lite(accelerator=bench.option("accelerator"), plugins=[precision])


@check(KIND, "training/losses")
def _losses(bench: Bench) -> None:
    """Losses equal those of 32-true within `tolerance`, for the kit's model and for `models`."""
    dtype = bound(bench).dtype
    stated = bench.option("tolerance")
    tolerance = TOLERANCE.get(dtype, 1e-5) if stated is None else stated
    for make in (training.dense, *map(find, bench.option("models"))):
        own_lite = _lite(bench, bench.make())
        own = training.losses_of(own_lite, make)
        expected = training.losses_of(bench.lite(accelerator=bench.option("accelerator")), make)
        assert all(map(math.isfinite, own)), f"losses are not finite: {own}"
        # What it freezes (weights in 4 bits) trains otherwise: then the first loss is compared.
        count = len(own) if _trains_all(bench, make) else 1
        for step in range(count):
            assert math.isclose(own[step], expected[step], rel_tol=tolerance, abs_tol=tolerance), (
                f"the loss of step {step} is {own[step]:.6g}, and {expected[step]:.6g} with "
                f"32-true (tolerance {tolerance:g}): "
                + (
                    "the first one differs: weights or inputs are rounded more than `dtype` says"
                    if step == 0
                    else "a step was not that of the gradient: losses "
                    f"{[f'{loss:.5g}' for loss in own]}, expected "
                    f"{[f'{loss:.5g}' for loss in expected]}"
                )
            )


def _trains_all(bench: Bench, make: Any) -> bool:
    with bound(bench).init_context():
        plain = training.build(make)
        count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    converted = bound(bench).convert_module(plain)
    return count == sum(p.numel() for p in converted.parameters() if p.requires_grad)


@check(KIND, "training/resume bit for bit")
def _resume(bench: Bench) -> None:
    """A resumed run equals the uninterrupted run in every bit."""
    lite = _lite(bench, bench.make())
    lite.launch()
    with lite.init_module():
        net = training.build()
    model, optimizer = training.set_up(lite, net)
    training.train(lite, model, optimizer, steps=3)
    lite.save("saved.ckpt", {"model": model, "optimizer": optimizer})
    expected = training.train(lite, model, optimizer, steps=3, begin=3)
    again = _lite(bench, bench.make())
    again.launch()
    with again.init_module():
        net = training.build(seed=5)
    model, optimizer = training.set_up(again, net)
    again.load("saved.ckpt", {"model": model, "optimizer": optimizer})
    own = training.train(again, model, optimizer, steps=3, begin=3)
    assert own == expected, (
        f"after a resume the losses are {own}, expected exactly {expected}: "
        + (
            "what the first step computes with was not restored whole"
            if own[0] != expected[0]
            else "the optimizer's state or the loss scale was not restored whole"
        )
    )
