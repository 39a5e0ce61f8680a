"""What users do with optimizers: groups, schedules, several of them, closures, scaled losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer

from stratagem.callbacks import Callback
from stratagem.precision import Precision
from stratagem_testing.strategies.check import Result, Run, check, judge_of
from stratagem_testing.strategies.judging import (
    by_part,
    difference,
    judge_accepted,
    judge_losses,
    judge_losses_of,
    judge_refused,
    norm,
)
from stratagem_testing.strategies.models import OPTIMIZERS, Learner, Scheduled, build, flat, numbers
from stratagem_testing.strategies.probe import Probe

SCALE = 1024.0


def _judge_groups(found: Result) -> None:
    _judge_rates(found)
    judge_losses_of(
        found,
        "steps were not taken with the options that optimizer.param_groups has then: there are two "
        "groups, a scheduler changes the learning rates of both after each step, and user code "
        "their momentum and weight_decay",
    )


def _judge_rates(found: Result) -> None:
    """Judge that learning rates change as the scheduler says, whatever a strategy makes of them."""
    for rank, told in enumerate(found.ranks):
        for step, (before, now) in enumerate(pairwise(told["rates"]), start=2):
            first, second = found.reference["rates"][step - 2 : step]
            for group, rate in enumerate(now if len(now) == len(second) else ()):
                expected = before[group] * second[group] / first[group]
                assert math.isclose(rate, expected, rel_tol=1e-6), (
                    f"the learning rate of the parameter group {group} is {rate:.6g} before step "
                    f"{step} on rank {rank}, expected {expected:.6g}: the scheduler multiplies the "
                    "rate that is in optimizer.param_groups. Put back in optimizer_step what it "
                    "changes there (in `finally`)"
                )


class _Varied(Scheduled):
    """Changes momentum and weight decay of each group before each step, too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.trainer.optimizers
        for group in optimizers[0].param_groups:
            group.update(momentum=0.9 - 0.2 * batch_idx, weight_decay=0.1 * batch_idx)


@check("optimizers/groups and schedule", _judge_groups, reference=True)
def _groups(probe: Probe) -> dict[str, Any]:
    """Each step uses the current options of each parameter group.

    A scheduler changes learning rates, and user code changes momentum and weight_decay. A strategy
    does not change the learning rates that they see.
    """
    learner = _Varied(optimizer="groups")
    trainer = probe.fit(learner, max_epochs=2)
    return {**probe.report(learner, trainer), "rates": learner.rates}


def _under_lite(name: str, about: str, meaning: str, *names: str) -> Callable[[Run], Run]:
    """Return a decorator that registers a loop of the user, which ends in an error or trains.

    Args:
        name: the name of the check.
        about: the behaviour of a strategy that passes.
        meaning: the meaning of another result.
        *names: names for the error text of an engine that rejects the loop despite its
            capabilities; the text must contain at least one name.
    """

    def judge(found: Result) -> None:
        can = found.capabilities
        if can.lite_step and not can.manual_backward:
            # Which may refuse a call of the model outside of a step before Lite.backward.
            accepted = [rank for rank, told in enumerate(found.ranks) if not told["refused"]]
            assert not accepted, (
                "manual_backward=False in the capabilities, and a loop under Lite without "
                f"Lite.step was not refused on rank(s) {accepted}"
            )
            return
        if not can.manual_backward:
            judge_refused(
                found, "a loop under Lite", "manual_backward=False", "manual_backward=False"
            )
            return
        if all(told["refused"] for told in found.ranks):
            try:
                judge_refused(found, name, "an engine", *names)
            except AssertionError as error:
                raise AssertionError(f"{meaning}\n{error}") from None
            return
        judge_accepted(found, name)
        judge_losses_of(found, meaning)

    def register(run: Run) -> Run:
        check(f"optimizers/{name}", judge, about=about, reference=True)(
            lambda probe: probe.attempt(lambda: run(probe))
        )
        return run

    return register


def _set_up(lite: Any, *makers: Any, name: str = "dense") -> tuple[nn.Module, Any, list[Any]]:
    """Set up a model and an optimizer for each maker, made afterwards: all take that."""
    net = build(name)
    model = lite.setup(net)
    made = [make(list(model.parameters())) for make in makers]
    optimizers = lite.setup_optimizers(*made)
    return net, model, list(optimizers) if len(made) > 1 else [optimizers]


def _train(
    probe: Probe,
    lite: Any,
    net: nn.Module,
    model: Any,
    optimizers: Sequence[Any],
    clip: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Run a plain loop, in which each optimizer clips and steps after each backward."""
    losses = []
    for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
        loss = mse_loss(model(inputs), target)
        lite.backward(loss)
        if clip:
            # Clip all before the first step, so that a wrong clip shows.
            for optimizer in optimizers:
                lite.clip_gradients(model, optimizer, **clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return probe.report_of_loop(lite, net, model, losses)


@_under_lite(
    "two",
    "Each of two optimizers of one model updates its own parameters.",
    "one of two optimizers of a model was not stepped, was stepped with the other one's options, "
    "or the gradients of its parameters were not averaged over ranks",
    "optimizer",
)
def _two(probe: Probe) -> dict[str, Any]:
    lite = probe.lite()
    return _train(probe, lite, *_set_up(lite, *_TWO))


_TWO = (
    lambda parameters: SGD(parameters[:2], lr=0.1),
    lambda parameters: SGD(parameters[2:], lr=0.03, momentum=0.9),
)
_CLIPS_ITSELF = "clips gradients itself"


def _judge_halves(found: Result) -> None:
    if any(told.get("refused") or not told for told in found.ranks):
        return  # see optimizers/two
    told = found.ranks[0]
    for name, begun in told["begun"].items():
        one, two = (told[which].get(name, ()) for which in ("one", "two"))
        # Of a small one, a random part of a step may have another size.
        if len(begun) < 1000 or not len(begun) == len(one) == len(two):
            continue
        far, expected = (
            norm([a - b for a, b in zip(end, begun, strict=True)]) for end in (two, one)
        )
        assert 0.6 * expected <= far <= 1.6 * expected, (
            f"{_DRIFT_STEPS} steps of two optimizers, each of a part of the parameters, move "
            f"{name!r} {far / expected:.3g} times as far as those of one optimizer with the same "
            "options: count the steps of each optimizer by itself (in prepared.strategy_data), and "
            "change what is in its optimizer.param_groups"
        )


@check("optimizers/one as two", _judge_halves)
def _halves(probe: Probe) -> dict[str, Any]:
    """Two optimizers, each of a part of the parameters, move them as far as one optimizer does.

    This is for strategies with losses of their own.
    """
    can = probe.target.capabilities()
    if probe.target.equal or not can.manual_backward:
        return {}

    def ends(*makers: Any) -> dict[str, list[float]]:
        lite = probe.lite()
        _, model, optimizers = _set_up(lite, *makers, name="wide")
        batches = list(lite.setup_dataloaders(probe.loader(32)))
        for step in range(_DRIFT_STEPS):
            _, inputs, target = batches[step % len(batches)]
            lite.backward(mse_loss(model(inputs), target))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return flat(model.state_dict())

    def train() -> dict[str, Any]:
        two = ends(lambda p: SGD(p[:2], lr=_SMALL), lambda p: SGD(p[2:], lr=_SMALL))
        begun = flat(dict(build("wide").named_parameters()))
        return {"begun": begun, "one": ends(lambda p: SGD(p, lr=_SMALL)), "two": two}

    return probe.attempt(train)


_SMALL = 0.002
"""A learning rate with which the gradient of "wide" hardly changes."""


@_under_lite(
    "two and clip",
    "Lite.clip_gradients clips only the parameters of its optimizer, by their norm.",
    "clipping the gradients of one of two optimizers changed those of the other one, or took its "
    "norm: clip_gradients(prepared, optimizer, clip) is about optimizer.param_groups",
    "optimizer",
    _CLIPS_ITSELF,
)
def _two_clipped(probe: Probe) -> dict[str, Any]:
    lite = probe.lite()
    return _train(probe, lite, *_set_up(lite, *_TWO), clip={"max_norm": 0.05})


_LAST_LAYER = lambda parameters: SGD(parameters[2:], lr=0.1)  # noqa: E731
_DRIFT_STEPS = 24
"""Steps in which a strategy with replicas that drift apart is expected to average them."""


def _drift(probe: Probe, models: int, *makers: Any, later: str = "") -> dict[str, Any]:
    """Train models in turn; note the parameters after each step of each optimizer.

    Args:
        probe: the probe of the rank.
        models: the number of models.
        *makers: create the optimizers.
        later: the change after a few steps: "unfrozen" or "added", of the first layer.
    """
    lite = probe.lite()
    set_up = [_set_up(lite, *makers) for _ in range(models)]
    first = list(set_up[0][0].parameters())[:2]
    for parameter in first if later == "unfrozen" else ():
        parameter.requires_grad_(False)
    seen: list[dict[str, list[float]]] = []
    batches = list(lite.setup_dataloaders(probe.loader(32)))
    for step in range(_DRIFT_STEPS):
        _, inputs, target = batches[step % len(batches)]
        if step == 2 and later == "unfrozen":
            for parameter in first:
                parameter.requires_grad_(True)
        elif step == 2 and later == "added":
            set_up[0][2][0].add_param_group({"params": list(set_up[0][1].parameters())[:2]})
        for _, model, optimizers in set_up:
            lite.backward(mse_loss(model(inputs), target), model=model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
                nets = enumerate(net for net, _, _ in set_up)
                named = ((f"{i} {k}", p) for i, net in nets for k, p in net.named_parameters())
                seen.append({name: numbers(p) for name, p in named})
    return {"seen": seen}


@check(
    "optimizers/averages",
    about="With parameters='drift', training brings ranks together: in some steps a parameter "
    "becomes equal on all ranks, or stays closer than without communication. It does so as often "
    "with two optimizers, and with two models, as with one.",
)
def _averages(probe: Probe) -> dict[str, Any]:
    can = probe.target.capabilities()
    if can.parameters != "drift" or can.sharded_state or not can.manual_backward:
        return {}
    return {
        "alone": _alone(probe),
        "one": probe.attempt(lambda: _drift(probe, 1, OPTIMIZERS["sgd"])),
        "two optimizers": probe.attempt(lambda: _drift(probe, 1, *_TWO)),
        "two models": probe.attempt(lambda: _drift(probe, 2, OPTIMIZERS["sgd"])),
        "a layer that is unfrozen later": probe.attempt(
            lambda: _drift(probe, 1, OPTIMIZERS["sgd"], later="unfrozen")
        ),
        "a group of parameters that is added later": probe.attempt(
            lambda: _drift(probe, 1, _LAST_LAYER, later="added")
        ),
    }


_PATIENCE = 1100
"""Steps within which ranks meet: some strategies average after every 500 or 1000 steps."""


def _alone(probe: Probe) -> dict[str, Any]:
    """Train until ranks have met; return whether they have, and how far they are from each other.

    Without communication, too; ranks compare by files.
    """
    lite = probe.lite()
    net, model, (optimizer,) = _set_up(lite, OPTIMIZERS["sgd"])
    batches = list(lite.setup_dataloaders(probe.loader(32)))
    plain = build("dense")
    of_plain = OPTIMIZERS["sgd"](plain.parameters())
    seen: list[dict[str, list[float]]] = []
    for step in range(1, _PATIENCE + 1):
        _, inputs, target = batches[step % len(batches)]
        lite.backward(mse_loss(model(inputs), target))
        optimizer.step()
        optimizer.zero_grad()
        _plain_step(plain, of_plain, inputs.cpu(), target.cpu())
        seen.append(flat(dict(net.named_parameters())))
        if step in (_DRIFT_STEPS, _PATIENCE):
            own = probe.folder / f"seen.{step}.{probe.rank}.json"
            own.write_text(json.dumps([seen, flat(dict(plain.named_parameters()))]))
            probe.meet(f"alone.{step}")
            paths = (own.with_name(f"seen.{step}.{r}.json") for r in range(probe.world_size))
            ranks, plains = zip(*(json.loads(path.read_text()) for path in paths), strict=True)
            if max(_meetings(ranks).values()):
                break
    far, of_plain_far = (_distance(one) for one in ([rank[-1] for rank in ranks], plains))
    return {"met": bool(max(_meetings(ranks).values())), "far": far, "alone": of_plain_far}


def _plain_step(net: nn.Module, optimizer: Optimizer, inputs: Tensor, target: Tensor) -> None:
    """Take a step by torch alone."""
    torch.autograd.backward(mse_loss(net(inputs), target))
    optimizer.step()
    optimizer.zero_grad()


def _distance(ranks: Sequence[Mapping[str, Sequence[float]]]) -> float:
    """Return how far the last rank's parameters are from the first one's."""
    pairs = (zip(ranks[0][name], ranks[-1][name], strict=True) for name in ranks[0])
    return norm([a - b for pair in pairs for a, b in pair])


@judge_of(_averages)
def _judge_averages(found: Result) -> None:
    first = found.ranks[0]
    if not first or any(told["one"]["refused"] for told in found.ranks):
        return  # see lite/loop
    alone = first["alone"]
    assert len(found.ranks) == 1 or alone["met"] or alone["far"] < 0.8 * alone["alone"], (
        f"in {_PATIENCE} steps, no parameter became equal on all ranks, and ranks are as far from "
        "each other as without communication: parameters='drift' is for replicas that are averaged "
        "from time to time, in optimizer_step. Test a longer period with a shorter one"
    )
    one = _meetings([told["one"]["seen"] for told in found.ranks])
    most = max(one.values())
    for name, times in one.items():
        assert most < 2 or times >= most / 4, (
            f"in {_DRIFT_STEPS} steps, an element of the parameter {name[2:]!r} became equal on "
            f"all ranks {times:.3g} time(s), and of another parameter {most:.3g} time(s): average "
            "every parameter of each group of the optimizer, or nobody averages this one"
        )
    for which in [which for which in first if which not in ("one", "alone")]:
        said = [told[which]["refused"] for told in found.ranks if told[which]["refused"]]
        unexpected = [each for each in said if "\nTraceback" in each["text"]]
        assert not unexpected, (
            f"{_DRIFT_STEPS} steps with {which} ended in {unexpected[0]['kind']}, and with one "
            f"optimizer in no error: {unexpected[0]['text']}"
        )
        if said:
            continue  # see optimizers/two, lite/two models, steps/unfrozen, optimizers/added group
        for name, times in _meetings([told[which]["seen"] for told in found.ranks]).items():
            expected = one[f"0 {name[2:]}"]
            assert times >= expected / 2, (
                f"in {_DRIFT_STEPS} steps, the parameter {name[2:]!r} became equal on all ranks "
                f"{expected:.3g} time(s) with one optimizer, and {times:.3g} time(s) with {which}: "
                "count the steps of each optimizer and of each model by themselves (in "
                "prepared.strategy_data), or average all parameters; and look at requires_grad "
                "and optimizer.param_groups at each average"
            )


def _meetings(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return after how many of its changes an element of each parameter is equal on all ranks.

    The mean over its elements: a strategy may average some of them at a time.
    """
    times: dict[str, float] = {}
    for name in ranks[0][0]:
        each = [[seen[name] for seen in rank] for rank in ranks]
        changed = [True, *(before != now for before, now in pairwise(each[0]))]
        for of, is_changed in zip(zip(*each, strict=True), changed, strict=True):
            equal = [max(values) - min(values) < 1e-9 for values in zip(*of, strict=True)]
            times[name] = times.get(name, 0.0) + is_changed * sum(equal) / len(equal)
    return times


def _register_norm(name: str, norm_type: float, which: str) -> None:
    @_under_lite(
        name,
        f"Lite.clip_gradients(norm_type={norm_type:g}) uses {which} as the norm.",
        f"norm_type={norm_type:g} did not clip by {which} over all parameters and ranks: look at "
        "clip.norm_type in clip_gradients",
        "norm_type",
        _CLIPS_ITSELF,
    )
    def clipped(probe: Probe) -> dict[str, Any]:
        lite = probe.lite()
        clip = {"max_norm": 0.05, "norm_type": norm_type}
        return _train(probe, lite, *_set_up(lite, OPTIMIZERS["sgd"]), clip=clip)


_register_norm("clip by the largest", math.inf, "the largest element")
_register_norm("clip by the sum", 1.0, "the sum of absolute values")


def _judge_clip_not_finite(found: Result) -> None:
    if not found.capabilities.manual_backward or found.capabilities.engine_clips:
        return  # see lite/clip
    for rank, told in enumerate(found.ranks):
        assert told["raised"] is not None, (
            f"Lite.clip_gradients(error_if_nonfinite=True) raised nothing on rank {rank} for "
            "gradients that are NaN: pass clip.error_if_nonfinite on in clip_gradients"
        )
        said = told["passed"]
        assert said is None, (
            f"Lite.clip_gradients(error_if_nonfinite=False) ended on rank {rank} in {said['kind']}"
            f" for gradients that are NaN, expected their norm: {said['text']}"
        )


@check("optimizers/clip what is not finite", _judge_clip_not_finite)
def _clip_not_finite(probe: Probe) -> dict[str, Any]:
    """clip_gradients raises an error for a norm that is not finite, if error_if_nonfinite=True."""
    can = probe.target.capabilities()
    if not can.manual_backward or can.engine_clips:
        return {}
    lite = probe.lite()
    _, model, (optimizer,) = _set_up(lite, OPTIMIZERS["sgd"])
    batch = lite.to_device(next(iter(probe.loader(8))))
    lite.backward(mse_loss(model(batch[1]), batch[2]) * math.nan)

    def clip(raises: bool) -> Any:
        return lite.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=raises)

    return {"raised": probe.said(lambda: clip(True)), "passed": probe.said(lambda: clip(False))}


class _CallsTwice(SGD):
    """Calls its closure twice in a step, as LBFGS does more often."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        return loss


@_under_lite(
    "closure",
    "optimizer.step(closure) calls the closure as often as the optimizer does, and returns its "
    "loss, also of one of two optimizers.",
    "optimizer.step(closure) did not train as the closure asks, or did not return its loss: pass "
    "it on in optimizer_step(prepared, optimizer, closure), and return what that step returns. "
    "The optimizer calls its closure twice, and each call has to compute a gradient. There are two "
    "optimizers",
    "closure",
    _CallsTwice.__name__,
)
def _closure(probe: Probe) -> dict[str, Any]:
    lite = probe.lite()
    makers = (
        lambda parameters: _CallsTwice(parameters[:2], lr=0.05),
        lambda parameters: _CallsTwice(parameters[2:], lr=0.02),
    )
    # An engine may take one only.
    count = 1 if lite.plan.capabilities.engine_steps else 2
    net, model, optimizers = _set_up(lite, *makers[:count])
    losses: list[float] = []
    calls = 0
    for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):

        def closure(inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
            nonlocal calls
            calls += 1
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = mse_loss(model(inputs), target)
            lite.backward(loss)
            return loss.detach()

        for optimizer in optimizers:
            calls = 0
            returned = optimizer.step(closure)
            losses.append(math.nan if returned is None or calls != 2 else float(returned))
    return probe.report_of_loop(lite, net, model, losses)


@_under_lite(
    "arguments of backward",
    "Lite.backward passes its arguments to Tensor.backward, such as retain_graph and gradient.",
    "backward(loss, gradient=..., retain_graph=True) did not train as with its gradient: pass each "
    "argument on to super().backward, by name and by position (*args, **kwargs)",
    "retain_graph",
)
def _backward(probe: Probe) -> dict[str, Any]:
    lite = probe.lite()
    net, model, (optimizer,) = _set_up(lite, OPTIMIZERS["sgd"])
    losses = []
    for number, (_, inputs, target) in enumerate(lite.setup_dataloaders(probe.loader(32))):
        output = model(inputs)
        loss = mse_loss(output, target)
        twice = torch.full_like(loss, 2.0)
        if number % 2:
            lite.backward(loss / 2, twice, True)
        else:
            lite.backward(loss / 2, gradient=twice, retain_graph=True)
        torch.autograd.grad(loss, output)  # of a graph that was freed, this is torch's error
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return probe.report_of_loop(lite, net, model, losses)


@_under_lite(
    "two backward passes",
    "The gradients of several backward passes before a step add up, also without no_backward_sync.",
    "a step after two backward passes, of which each may communicate, was not that of the sum of "
    "their gradients: leave in p.grad what an earlier pass has put there",
    "backward",
)
def _two_passes(probe: Probe) -> dict[str, Any]:
    lite = probe.lite()
    net, model, (optimizer,) = _set_up(lite, OPTIMIZERS["sgd"])
    losses = []
    for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
        losses.append(0.0)
        for half in range(2):
            loss = mse_loss(model(inputs[half::2]), target[half::2]) / 2
            lite.backward(loss)
            losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return probe.report_of_loop(lite, net, model, losses)


@_under_lite(
    "dropped gradients",
    "zero_grad() between backward and step drops the gradients, or raises an error.",
    "gradients that optimizer.zero_grad() was to drop have counted in a later step: clear them in "
    "what PreparedModel.gradient_clearer returns, or raise there",
    "zero_grad",
)
def _dropped(probe: Probe) -> dict[str, Any]:
    lite = probe.lite()
    net, model, (optimizer,) = _set_up(lite, OPTIMIZERS["sgd"])
    losses = []
    for _, inputs, target in lite.setup_dataloaders(probe.loader(32)):
        lite.backward(3 * mse_loss(model(inputs), target))
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), target)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return probe.report_of_loop(lite, net, model, losses)


class _OwnBackward(Learner):
    """Runs backward itself."""

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]


def _judge_own_backward(found: Result) -> None:
    what = "a Module that overrides backward"
    if all((told["refused"] or {}).get("kind") == "ConfigurationError" for told in found.ranks):
        judge_refused(found, what, "an engine", "backward")
        return
    judge_accepted(found, what)
    judge_losses(found)


@check("optimizers/the Module's backward", _judge_own_backward, reference=True)
def _own_backward(probe: Probe) -> dict[str, Any]:
    """A Module that overrides `backward` trains by its own method, or raises an error."""

    def train() -> dict[str, Any]:
        learner = _OwnBackward()
        return probe.report(learner, probe.fit(learner))

    return probe.attempt(train)


class _ScaledLoss(Precision):
    """Scales losses, as float16 needs it; steps unscaled if `unscale` was not called.

    Args:
        skips: the number of the step with overflowing gradients, which is skipped; 0: no step.
    """

    name = "scaled_by_the_kit"
    scales_loss = True

    def __init__(self, *, skips: int = 0) -> None:
        self.unscaled: set[int] = set()
        self.scaled = False
        self.skips = skips
        self.asked = 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        self.scaled = True
        return loss * (math.inf if self.asked + 1 == self.skips else SCALE)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(SCALE)
        self.unscaled.add(id(optimizer))

    def optimizer_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self.unscaled:
            self.unscale_gradients(optimizer)
        self.unscaled.clear()
        self.asked += 1
        self.step_was_skipped = self.asked == self.skips
        if not self.step_was_skipped:
            optimizer.step()


def _judge_scaled(found: Result) -> None:
    if found.capabilities.precisions is not None:
        judge_refused(found, f"the precision {_ScaledLoss.name!r}", "precisions", _ScaledLoss.name)
        return
    for rank, told in enumerate(found.ranks):
        said = told["refused"]
        assert said is None, (
            "Capabilities.precisions is None, which takes every precision, and one that scales "
            f"losses (scales_loss=True) was refused on rank {rank}. If the strategy takes none "
            "that scales losses, list what it takes: precisions=('32-true', '64-true', "
            "'bf16-mixed', 'bf16-true') in its capabilities. Others are refused then before a "
            f"process starts. {said['kind']}: {said['text']}"
        )
    scales = {scale for told in by_part(found.ranks, "scaled") for scale in told}
    assert scales == {True}, (
        "the precision's scale_loss was never called: call super().backward(), or scale_loss"
    )
    judge_losses_of(
        found,
        f"a precision that multiplies losses by {SCALE:g} changes what is trained: step by "
        "self.precision.optimizer_step(optimizer), which unscales gradients; call "
        "self.precision.unscale_gradients(optimizer) before step.before_optimizer_step, whose hook "
        "may change gradients, and before you clip",
    )
    for rank, told in enumerate(found.ranks):
        assert told.get("steps") == found.reference.get("steps"), (
            f"rank {rank} counts {told['steps']} steps, expected {found.reference['steps']}: the "
            "precision has skipped one, as loss scaling does when gradients overflow. If "
            "self.precision.step_was_skipped after optimizer_step, call "
            "step.optimizer_step_was_skipped(optimizer), not step.after_optimizer_step(optimizer)"
        )


def _judge_scaled_twice(found: Result) -> None:
    """Judge the training with one optimizer, and that with two of strategies that take two."""
    if any(told["refused"] for told in found.ranks):
        _judge_scaled(found)
        return
    for which in [which for which in ("one", "two") if which in found.ranks[0]]:
        ranks = [{"refused": None, **told[which]} for told in found.ranks]
        _judge_scaled(replace(found, ranks=ranks, reference=found.reference[which]))


@check("precisions/scaled loss", _judge_scaled_twice, reference=True)
def _scaled(probe: Probe) -> dict[str, Any]:
    """If the precision scales the loss, gradients are unscaled before each optimizer's step."""
    can = probe.target.capabilities()

    def train(*makers: Any) -> dict[str, Any]:
        made = _ScaledLoss()
        if not can.manual_backward:
            learner = Learner("dense", "momentum")
            told = probe.report(learner, probe.fit(learner, plugins=["single_file", made]))
        else:
            lite = probe.lite(plugins=["single_file", made])
            told = _train(probe, lite, *_set_up(lite, *makers))
        return {**told, "scaled": [made.scaled]}

    def train_twice() -> dict[str, Any]:
        told = {"one": train(OPTIMIZERS["momentum"])}
        # An engine may take one optimizer only.
        if can.manual_backward and not can.engine_steps:
            told["two"] = train(*_TWO)
        return told

    return probe.attempt(train_twice)


class _DecaysInHook(Learner):
    """Adds to gradients in the hook before the step."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.1)


def _judge_overflow(found: Result) -> None:
    """Judge a training in which the gradients of one step overflow."""
    for rank, told in enumerate(found.ranks if found.capabilities.precisions is None else ()):
        values = [value for some in told.get("weights", {}).values() for value in some]
        begin = f"gradients overflowed in one step, which the precision skips. Rank {rank} "
        advice = (
            " afterwards: what the strategy keeps of gradients from step to step (a residual, an "
            "average) has to stay as it was before such a step"
        )
        fewer = told.get("steps", math.inf) < found.reference["steps"]
        assert not fewer, f"{begin}takes no step any more{advice}"
        assert all(map(math.isfinite, values)), f"{begin}has weights that are not finite{advice}"
    _judge_scaled(found)


@check("precisions/scaled loss and clip", _judge_overflow, reference=True)
def _scaled_and_clipped(probe: Probe) -> dict[str, Any]:
    """If the precision scales the loss, gradients are unscaled before they are clipped.

    They are unscaled before the hook on_before_optimizer_step, which adds to them. A step whose
    gradients overflow is skipped by the precision, is not counted, and leaves nothing behind.
    """
    capabilities = probe.target.capabilities()
    clips = capabilities.gradient_clipping and not capabilities.engine_clips
    options: dict[str, Any] = {"gradient_clip_val": 0.3} if clips else {}

    def train() -> dict[str, Any]:
        made = _ScaledLoss(skips=2)
        learner = _DecaysInHook("dense", "momentum")
        trainer = probe.fit(learner, plugins=["single_file", made], **options)
        told = probe.report(learner, trainer)
        return {**told, "scaled": [made.scaled], "steps": trainer.global_step}

    return probe.attempt(train)


class _Frozen(Learner):
    """Its first layer is frozen, and the optimizer has it all the same."""

    def __init__(self) -> None:
        super().__init__()
        _first_layer(self, trained=False)

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS["momentum"](list(self.parameters()))


class _Unfreezes(Callback):
    """Lets the second epoch train the first layer, too, and no other one."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        _first_layer(module, trained=trainer.current_epoch == 1)


def _first_layer(module: nn.Module, *, trained: bool) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith("net.0."):  # of which this rank need not have anything
            parameter.requires_grad_(trained)


def _judge_unfrozen(found: Result) -> None:
    refused = [told["refused"] for told in found.ranks]
    if all(refused):
        for said in refused:
            assert "net.0" in said["text"] or "requires_grad" in said["text"], (
                "a layer that is unfrozen while training goes on ends in an error that names "
                f"neither it nor requires_grad: {said['kind']}: {said['text']}"
            )
        return
    judge_accepted(found, "a layer that is unfrozen while training goes on")
    judge_losses_of(
        found,
        "a layer that is frozen in the first epoch, trained in the second and frozen again in the "
        "third is stepped otherwise: look at requires_grad in each step, and not once in prepare "
        "or wrap, leave the gradient of what is frozen None, and clip the gradients that there are",
    )


@check("steps/unfrozen", _judge_unfrozen, reference=True)
def _unfrozen(probe: Probe) -> dict[str, Any]:
    """A layer can be unfrozen and frozen during a fit, or doing so raises an error.

    Clipping leaves out what is frozen, which has no gradient.
    """
    options: dict[str, Any] = {"max_epochs": 3, "callbacks": [_Unfreezes()]}
    if probe.target.capabilities().gradient_clipping:
        options["gradient_clip_val"] = 0.5

    def train() -> dict[str, Any]:
        learner = _Frozen()
        return probe.report(learner, probe.fit(learner, **options))

    return probe.attempt(train)


class _LastLayer(Learner):
    """Its optimizer has the parameters of the last layer only."""

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS["momentum"](_of_first_layer(self, False))


class _AddsGroup(Callback):
    """Gives the optimizer the first layer, too, when the second epoch begins."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            group = {"params": _of_first_layer(module, True), "lr": 0.03}
            trainer.optimizers[0].add_param_group(group)


def _of_first_layer(module: nn.Module, wanted: bool) -> list[nn.Parameter]:
    return [p for n, p in module.named_parameters() if n.startswith("net.0.") is wanted]


def _judge_added(found: Result) -> None:
    if all(told["refused"] for told in found.ranks):
        judge_refused(found, "add_param_group", "an engine", "add_param_group", "group")
        return
    judge_accepted(found, "a group of parameters that an optimizer is given while training goes on")
    meaning = (
        "parameters that optimizer.add_param_group brings in the second epoch are not trained as "
        "the others are: look at optimizer.param_groups in each step, and not once in prepare"
    )
    judge_losses_of(found, meaning)
    if found.target.equal:
        own, expected = found.ranks[0]["weights"], found.reference["weights"]
        said = difference(own, expected, 100 * found.target.tolerance)
        assert not said, f"{meaning}: {said}"


@check("optimizers/added group", _judge_added, reference=True)
def _added(probe: Probe) -> dict[str, Any]:
    """A parameter group that is added during a fit is trained, or raises an error."""

    def train() -> dict[str, Any]:
        learner = _LastLayer()
        return probe.report(learner, probe.fit(learner, max_epochs=2, callbacks=[_AddsGroup()]))

    return probe.attempt(train)
