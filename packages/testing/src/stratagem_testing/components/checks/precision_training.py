"""Precisions: steps, scaled losses, and what a checkpoint restores."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from stratagem.precision import Precision
from stratagem.state import find_offending_value
from stratagem_testing.components import training
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.every import pickled
from stratagem_testing.components.checks.precision import bound
from stratagem_testing.places import find

KIND = "precision"
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05}
"""How far losses may be from those of 32-true; 1e-5 where none stands here."""
LIMIT = 0.25
"""The norm that gradients are clipped to, less than they have."""


def _one_parameter() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Return a parameter and its optimizer, which has a further one that nothing uses."""
    parameter, unused = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    return parameter, torch.optim.SGD([parameter, unused], lr=1.0)


def _backward(precision: Precision, parameter: nn.Parameter, factor: float = 1.0) -> torch.Tensor:
    """Call backward on a loss whose gradient is known; return that."""
    gradient = torch.tensor([3.0, -1.0, 0.5, 2.0]) * factor
    loss = (parameter * gradient).sum() + 1.0
    before = loss.detach().clone()
    precision.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(loss.detach(), before) or not math.isfinite(factor), (
        f"scale_loss changed the loss in place, from {float(before)} to {float(loss)}: the user "
        "logs it. Return a new tensor"
    )
    return gradient


@check(KIND, "steps/gradient")
def _gradient(bench: Bench) -> None:
    """unscale_gradients restores the unscaled gradient, and optimizer_step applies it once.

    This includes sparse gradients, if the precision scales the loss.
    """
    precision = bound(bench)
    parameter, optimizer = _one_parameter()
    expected = _backward(precision, parameter)
    assert parameter.grad is not None
    assert precision.scales_loss or torch.equal(parameter.grad, expected), (
        "scales_loss is False, and scale_loss changes the gradient: front ends leave out unscaling "
        "by what scales_loss says"
    )
    own = type(precision).optimizer_step is not Precision.optimizer_step
    assert precision.scales_loss or not own, (
        "scales_loss is False, and the class has an optimizer_step of its own, which front ends "
        "call only with scales_loss=True: set it, also where the scale is 1"
    )
    precision.unscale_gradients(optimizer)
    assert torch.allclose(parameter.grad, expected), (
        f"after unscale_gradients the gradient is {parameter.grad.tolist()}, expected "
        f"{expected.tolist()}: clipping would see another norm"
    )
    error = bench.error(lambda: precision.unscale_gradients(optimizer))
    assert error is None and torch.allclose(parameter.grad, expected), (  # noqa: PT018
        "a second unscale_gradients before the step, as of a loop that clips by value and then by "
        f"norm, ended in {brief(error)}, with the gradient {parameter.grad.tolist()}, expected "
        f"{expected.tolist()}: the second one has nothing to do"
    )
    precision.optimizer_step(optimizer)
    assert torch.allclose(parameter.detach(), -expected), (
        f"optimizer_step of SGD with lr 1 changed the parameters by {parameter.tolist()}, expected "
        f"{(-expected).tolist()}: no step, two of them, or another gradient"
    )
    assert not precision.step_was_skipped, "step_was_skipped after a step that was taken"
    if precision.scales_loss:
        _sparse(bench)


def _sparse(bench: Bench) -> None:
    """Fail unless gradients of an embedding with sparse=True are unscaled, and looked at."""
    for factor in (1.0, float("inf")):
        precision = bound(bench)
        embedding = nn.Embedding(3, 2, sparse=True, _weight=torch.zeros(3, 2))
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        loss = (embedding(torch.tensor([1, 1, 2])) * factor).sum()

        def step(precision: Precision = precision, loss: Any = loss, it: Any = optimizer) -> None:
            precision.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
            precision.unscale_gradients(it)
            precision.optimizer_step(it)

        error = bench.error(step)
        if type(error).__name__ == "ConfigurationError":
            return
        expected = torch.tensor([0.0, -2.0, -1.0]) * (factor == 1.0)
        assert error is None and torch.allclose(embedding.weight[:, 0], expected), (  # noqa: PT018
            f"a step with the sparse gradient of an embedding, multiplied by {factor}, ended in "
            f"{brief(error)}, with the weights {embedding.weight[:, 0].tolist()}, expected "
            f"{expected.tolist()}: unscale_gradients and optimizer_step look at "
            "gradient.coalesce().values() where gradient.is_sparse, or raise ConfigurationError"
        )


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


@check(KIND, "steps/two optimizers")
def _two_optimizers(bench: Bench) -> None:
    """Two optimizers, whose gradients one backward pass makes, are unscaled and stepped once each.

    If the gradients of one are infinite, the other one is stepped.
    """
    for unscaled in (True, False):
        for factor in (1.0, float("inf")):
            precision = bound(bench)
            if math.isinf(factor) and not precision.scales_loss:
                continue  # nothing looks for it
            (one, first), (other, second) = _one_parameter(), _one_parameter()
            _backward(precision, one, factor)
            expected = _backward(precision, other)
            for optimizer in (first, second) if unscaled else ():
                precision.unscale_gradients(optimizer)
            precision.optimizer_step(first)
            assert precision.step_was_skipped == math.isinf(factor), (
                f"step_was_skipped is {precision.step_was_skipped} after the step of an optimizer "
                f"whose gradients were multiplied by {factor}"
            )
            precision.optimizer_step(second)
            assert torch.allclose(other.detach(), -expected), (
                "of two optimizers, the second one's step changed the parameters by "
                f"{other.tolist()}, expected {(-expected).tolist()}"
                + (", after the first one's was skipped" if math.isinf(factor) else "")
                + ": remember for each optimizer whether its gradients are unscaled and finite, "
                "and change the scale before the next backward pass only"
            )
            assert not precision.step_was_skipped, "step_was_skipped after a step that was taken"


@check(KIND, "steps/skipped")
def _skipped(bench: Bench) -> None:
    """A step with infinite or NaN gradients is skipped (step_was_skipped). The next is taken.

    A scale that adapts becomes smaller until gradients are finite. Without overflows, it does not
    become smaller, and grows so seldom that at most a quarter of the steps is skipped.
    """
    precision = bound(bench)
    if not precision.scales_loss:
        assert not precision.step_was_skipped, "step_was_skipped, and scales_loss is False"
        return
    parameter, optimizer = _one_parameter()
    finite = nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [finite]})
    for factor in (float("inf"), float("nan")):
        _backward(precision, parameter, factor)
        _backward(precision, finite)
        precision.optimizer_step(optimizer)
        for each in (parameter, finite):
            assert torch.equal(each.detach(), torch.zeros(4)), (
                f"a step with gradients of {factor} was taken: the parameters are {each.tolist()}. "
                "Look at the gradients of all parameters before one is changed"
            )
        assert precision.step_was_skipped, (
            f"a step with gradients of {factor} was left out and step_was_skipped is False: it "
            "would be counted, and the learning rate's schedule would go on"
        )
        optimizer.zero_grad()
    expected = _backward(precision, parameter)
    precision.optimizer_step(optimizer)
    assert torch.allclose(parameter.detach(), -expected), "the step after one left out is wrong"
    assert not precision.step_was_skipped, "step_was_skipped stays True after a step that was taken"
    _judge_scale(bound(bench))


_OVERFLOWS = 64
"""Steps within which a scale that is halved by each becomes small enough, whatever it was."""
_GOOD = 2100
"""Steps without an overflow: after 2000, torch.amp.GradScaler and its like double the scale."""


def _judge_scale(precision: Precision) -> None:
    _take(precision, 2)
    initial, state = _scale_of(precision), copy.deepcopy(precision.state_dict())
    skipped = _take(precision, 1, float("inf"))[1]
    smaller = _scale_of(precision)  # a scale may adapt by the next loss
    assert smaller * 1024 >= initial, (
        f"after one step with an overflow the scale is {smaller:g}, and was {initial:g}: small "
        "gradients become zero then. Halve it"
    )
    if skipped and precision.state_dict() != state:
        # Losses with gradients that overflow by the scale alone.
        gradient = min(2.0**127, 2.0**130 / initial)
        skipped = _take(precision, _OVERFLOWS, gradient)[1]
        assert skipped < _OVERFLOWS, (
            f"{_OVERFLOWS} steps one after the other were left out, as the scale "
            f"{_scale_of(precision):g} makes gradients overflow: no step is ever taken again. Let "
            "a step that was skipped make the scale smaller, by the next scale_loss"
        )
    scales, skipped = _take(precision, _GOOD)
    assert skipped <= _GOOD // 4, (
        f"of {_GOOD} steps with gradients of 1, {skipped} were left out, and the scale is "
        f"{scales[-1]:g}: let it grow after many steps without an overflow only, as after 2000"
    )
    lower = [index for index in range(1, _GOOD) if scales[index] < scales[index - 1]]
    assert not lower or skipped, (
        f"after {lower[0]} steps without an overflow the scale became {scales[lower[0]]:g}, and "
        f"was {scales[lower[0] - 1]:g}: it becomes smaller after overflows only"
    )


def _take(precision: Precision, count: int, gradient: float = 1.0) -> tuple[list[float], int]:
    """Take steps of one gradient; return the scale of each, and how many were skipped."""
    parameter, optimizer = _one_parameter()
    scales, skipped = [], 0
    for _ in range(count):
        scaled = precision.scale_loss(torch.ones(()))
        scales.append(float(scaled))
        parameter.grad = scaled * torch.full((4,), gradient)
        precision.optimizer_step(optimizer)
        skipped += precision.step_was_skipped
    return scales, skipped


@check(KIND, "state/round trip")
def _state(bench: Bench) -> None:
    """state_dict returns weights-only-safe data, which load_state_dict restores. {} resets it.

    What it returned does not change with later steps.
    """
    precision = bound(bench)
    parameter, optimizer = _one_parameter()
    initial, scale = copy.deepcopy(precision.state_dict()), _scale_of(precision)

    def train() -> None:
        for factor in (1.0, float("inf"), 1.0):  # so that a scale is not the first one
            _backward(precision, parameter, factor)
            precision.optimizer_step(optimizer)
            optimizer.zero_grad()

    train()
    state = precision.state_dict()
    assert isinstance(state, dict), f"state_dict returned {state!r}; expected a dict"
    offending = find_offending_value(state, "state_dict()")
    assert offending is None, f"{offending}: a checkpoint holds weights-only-safe data only"
    again = bound(bench)
    assert (again.state_dict(), _scale_of(again)) == (initial, scale), (
        f"a new precision begins with the state {again.state_dict()}, as another one has it after "
        f"its steps, expected {initial}: keep it in the object and not in its class"
    )
    again.load_state_dict(dict(state))
    assert again.state_dict() == state, (
        f"after load_state_dict the state is {again.state_dict()}, expected {state}"
    )
    assert _scale_of(again) == _scale_of(precision), (
        f"after load_state_dict a loss is multiplied by {_scale_of(again)}, and by "
        f"{_scale_of(precision)} where the state was saved"
    )
    if precision.scales_loss:
        expected, found = (_take(each, _GOOD)[0] for each in (precision, again))
        assert found == expected, (
            f"after load_state_dict and {_GOOD} steps a loss is multiplied by {found[-1]:g}, and "
            f"by {expected[-1]:g} in the run that saved, or they grow at different steps: "
            "state_dict() has to hold all that decides when the scale changes, such as the number "
            "of steps since the last overflow"
        )
    error = bench.error(lambda: again.load_state_dict({}))
    assert error is None, (
        f"load_state_dict({{}}), as of a checkpoint of another precision, ended in {brief(error)}"
    )
    assert (again.state_dict(), _scale_of(again)) == (initial, scale), (
        f"after load_state_dict({{}}) the state is {again.state_dict()}, expected that of a new "
        f"precision, {initial}"
    )
    before = copy.deepcopy(state)
    train()
    assert state == before, (
        f"what state_dict() had returned was {before}, and is {state} after further steps: return "
        "a copy, or a checkpoint that is written in the background has another step's state"
    )


def _scale_of(precision: Precision) -> float:
    """Return what a loss is multiplied by."""
    return float(precision.scale_loss(torch.ones(())))


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
        # A precision that freezes weights (4 bits) trains otherwise: compare the first loss only.
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


@check(KIND, "training/other weights")
def _other_weights(bench: Bench) -> None:
    """Training continues with weights that are loaded into the model between two steps."""
    lite = _lite(bench, bench.make())
    lite.launch()

    def set_up(seed: int) -> tuple[Any, Any]:
        with lite.init_module():
            net = training.build(seed=seed)
        return training.set_up(lite, net)

    (source, other), (model, optimizer) = set_up(0), set_up(5)
    other.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"] = 0.0
    training.train(lite, model, optimizer, steps=2)
    model.load_state_dict(source.state_dict())
    own = training.train(lite, model, optimizer, steps=3)
    expected = training.train(lite, source, other, steps=3)
    assert own == expected, (
        f"after load_state_dict of other weights the losses are {own}, expected {expected} as of "
        "the model that has had them from the beginning: what is kept beside the parameters, such "
        "as copies in float32, has to be made of them again"
    )


check(KIND, "life/pickled")(pickled)
