"""One step, looked at as a gradient: averaging, accumulation, clipping."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem import Module, Trainer
from stratagem.callbacks import Callback
from stratagem.strategies import TrainStep
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    Flat,
    alike,
    by_part,
    clipped,
    close,
    difference,
    is_indivisible,
    judge_accepted,
    judge_losses,
    judge_losses_of,
    judge_refusal_of_model,
    judge_refused,
    mean,
    norm,
    ratio,
    shown,
)
from stratagem_testing.strategies.models import (
    Learner,
    flat,
    initial,
    plain_gradient,
    trained_names,
)
from stratagem_testing.strategies.probe import Probe

LIMIT = {"norm": 0.2, "value": 0.05}
"""Less than the gradient of every model here, so that clipping has an effect."""


class _Observed(Learner):
    """Keeps the losses that it returned, and doubles gradients in a hook before clipping.

    Clipping by norm removes the factor.

    Args:
        model: its name.
        doubles: whether the hook doubles gradients.

    Attributes:
        returned: the losses.
        hooked: the gradients that the hook received on this rank.
        seeds: the seed of torch before the forward pass of each micro-batch.
    """

    def __init__(self, model: str, *, doubles: bool) -> None:
        super().__init__(model, "unit")
        self.doubles = doubles
        self.returned: list[Tensor] = []
        self.seeds: list[int] = []
        self.hooked: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.returned.append(loss.detach())  # the same memory
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.hooked = flat({k: v for k, v in gradients.items() if not hasattr(v, "to_local")})
        for gradient in gradients.values() if self.doubles else ():
            gradient.mul_(2)


class _Seeded(_Observed):
    """Seeds torch before each forward pass, by the part of the data and the micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seeds.append(100 * self.trainer.ranks.data_split[0] + batch_idx)
        torch.manual_seed(self.seeds[-1])
        return super().training_step(batch, batch_idx)


def _one_step(
    probe: Probe,
    count: int = 1,
    model: str = "dense",
    samples: int = 8,
    *,
    doubles: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Take one step of SGD with lr 1: what changes is the gradient that was applied."""
    kind = _Seeded if model == "masked" else _Observed
    learner = kind(model, doubles=doubles)
    trainer = probe.fit(learner, samples * count, accumulate_grad_batches=count, **options)
    # Of the whole model: a rank need not have all of its parts.
    before, after = initial(model), probe.weights(trainer)
    own = probe.own_weights(trainer.run.require_prepared().original)

    def moved(after: Mapping[str, Flat]) -> dict[str, Flat]:
        return {
            name: [old - new for old, new in zip(before[name], after[name], strict=True)]
            for name in trained_names(model)
            if len(after.get(name, ())) == len(before[name])
        }

    return {
        "shard": list(trainer.ranks.data_split),
        "gradient": moved(after),
        "of this rank's parameters": moved(own),
        # The gradient by torch alone for this rank's samples.
        "alone": plain_gradient(learner.seen, model, learner.seeds),
        "hooked": learner.hooked,
        "steps": trainer.global_step,
        "losses": learner.losses,
        "returned": [float(loss) for loss in learner.returned],
    }


def _judge_step(found: Result, count: int = 1, algorithm: str = "") -> None:
    """Compare the gradient that was applied, and say what another one is."""
    for rank, told in enumerate(found.ranks):
        assert close(told["returned"], told["losses"], found.target.tolerance), (
            f"training_step returned the losses {shown(told['losses'])} on rank {rank}, and after "
            f"the step these tensors are {shown(told['returned'])}: the loss was changed in place, "
            "and user code may have kept it. Write loss = loss / count, not loss /= count"
        )
    if not found.target.equal:
        return  # each rank's own; see `losses/`
    for rank, told in enumerate(found.ranks):
        assert told["steps"] == 1, (
            f"rank {rank} counts {told['steps']} steps after {count} micro-batch(es) of one step"
        )
    own, expected = found.ranks[0]["gradient"], found.reference["gradient"]
    missing = sorted(expected.keys() - own.keys())
    assert not missing, (
        f"model_state(prepared) returned no whole {', '.join(missing)} on rank 0: it has to return "
        "the whole model there, also what other ranks hold"
    )
    tolerance = 10 * found.target.tolerance
    if not alike(own, expected, tolerance):
        of_rank = found.ranks[0]["of this rank's parameters"]
        assert not (of_rank and alike(of_rank, expected, tolerance)), (
            "the step was right on rank 0, and model_state(prepared) returns other weights than "
            f"the model has after it\n{difference(own, expected, tolerance)}"
        )
        said = _fault(found, count, algorithm, tolerance)
        raise AssertionError(
            f"the first step applied {said}\n{difference(own, expected, tolerance)}"
        )
    if found.replicated:
        for rank, told in enumerate(found.ranks):
            said = difference(told["hooked"], found.reference["hooked"], tolerance)
            # The hook sees no gradients of an engine that keeps them elsewhere.
            assert not (told["hooked"] and said), (
                "the gradient of the step is right, and the hook on_before_optimizer_step sees "
                f"another one on rank {rank}, where users log and change the gradients of all "
                "ranks: average before step.before_optimizer_step, as in backward. There "
                f"{said}"
            )
        for rank, told in enumerate(found.ranks[1:], start=1):
            assert alike(told["gradient"], own, tolerance), (
                f"rank {rank} applied another gradient than rank 0: gradients are not averaged "
                f"over all ranks\n{difference(told['gradient'], own, tolerance)}"
            )


def _fault(found: Result, count: int, algorithm: str, tolerance: float) -> str:
    """Return what a wrong gradient is, in words, and of which parameters."""
    named, told = found.reference["gradient"], found.ranks[0]["gradient"]
    wrong = [name for name in named if not close(told[name], named[name], tolerance)]
    alone = [[_flat(micro, named) for micro in part] for part in by_part(found.ranks, "alone")]
    is_wrong = [name in wrong for name in named for _ in named[name]]

    def only(vector: Flat) -> list[float]:
        return [value for value, chosen in zip(vector, is_wrong, strict=True) if chosen]

    candidates = _candidates(alone, LIMIT.get(algorithm, 0.0), algorithm)
    said = _what(
        _flat(told, wrong),
        _flat(named, wrong),
        {said: only(vector) for said, vector in candidates.items()},
        [[only(micro) for micro in part] for part in alone],
        algorithm,
    )
    if len(wrong) == len(named):
        return said
    early = ". An exchange in the background may not have ended when the step reads the gradient: "
    early = "" if "clip" in said else f"{early}wait for its handle"
    names = ", ".join(map(repr, wrong))
    return f"{said} (so it is for {names}; other parameters are right{early})"


def _flat(gradient: Mapping[str, Flat], names: Iterable[str]) -> list[float]:
    return [value for name in names for value in gradient[name]]


def _candidates(
    alone: Sequence[Sequence[Flat]], limit: float, algorithm: str
) -> dict[str, list[float]]:
    """Return what gradients may be by mistake, by what is said of each."""
    parts = len(alone)
    whole = mean([mean(part) for part in alone])
    found = {
        "the gradient of this rank's samples alone: gradients are not averaged over ranks (look "
        "at backward, and at what wrap returns)": mean(alone[0]),
        "gradients that were averaged over ranks in the last micro-batch only: those of the "
        "micro-batches before are this rank's": mean(
            [*alone[0][:-1], mean([part[-1] for part in alone])]
        ),
    }
    if not algorithm:
        return found
    doubled = 2.0 if algorithm == "norm" else 1.0  # by a hook
    late = [doubled * value for value in clipped(whole, limit, algorithm)]
    clip = {
        "the mean gradient, not clipped: look at clip_gradients": [doubled * v for v in whole],
        "a gradient that the hook on_before_optimizer_step has changed after it was clipped: call "
        "step.before_optimizer_step(optimizer) before clip_gradients, as finish_step does": late,
        "the mean of gradients that each rank clipped by itself: clip after they are averaged "
        "over ranks": mean([clipped(mean(part), limit, algorithm) for part in alone]),
        "the sum of gradients that each micro-batch clipped by itself: clip once, when all are "
        "there": mean(
            [clipped(mean(micro), limit, algorithm) for micro in zip(*alone, strict=True)]
        ),
    }
    other = "norm" if algorithm == "value" else "value"
    clip[
        f"a gradient that was clipped by {other} and not by {algorithm}: look at clip.algorithm in "
        "clip_gradients"
    ] = clipped(whole, limit, other)
    for name, factor in (("multiplied", parts), ("divided", 1 / parts)):
        clip[f"a gradient that was clipped while {name} by {parts} (the ranks)"] = [
            value / factor for value in clipped([factor * v for v in whole], limit, algorithm)
        ]
    return clip | found


def _what(
    own: Flat,
    expected: Flat,
    candidates: Mapping[str, Flat],
    alone: Sequence[Sequence[Flat]],
    algorithm: str,
) -> str:
    """Return what a wrong gradient is; all of these are of the parameters that are wrong."""
    parts, count = len(alone), len(alone[0])
    if not norm(own):
        return "nothing: no step was taken, or the model that was stepped is another one"
    for said, candidate in candidates.items():
        if not close(candidate, expected, 1e-4) and close(own, candidate, 1e-4):
            return said
    for which, position in (("last", -1), ("first", 0)):
        if count > 1 and ratio(own, mean([part[position] for part in alone])) is not None:
            return (
                f"the gradient of the {which} micro-batch alone: the others are lost (look at "
                "accumulate and accumulate_all)"
            )
    if algorithm == "norm":
        return (
            f"a gradient with the norm {norm(own):.5g}, expected {norm(expected):.5g} (the limit "
            f"is {LIMIT[algorithm]}): it was not clipped by the norm over all parameters and ranks "
            "(look at clip_gradients)"
        )
    scale = ratio(own, expected)
    if scale is not None and abs(scale - 1) > 1e-3:
        return f"{scale:.4g} times the gradient: {_meaning(scale, parts, count)}"
    off = norm([a - b for a, b in zip(own, expected, strict=True)]) / norm(expected)
    if off < 0.02:
        return (
            f"the mean gradient up to {off:.1%}: it was rounded to a lower precision on its way "
            "between ranks"
        )
    return (
        "a gradient of another direction: not the mean over all ranks and micro-batches, or it was "
        "changed after (look at backward, accumulate_all and finish_step), or it is read before an "
        "exchange in the background has ended (wait for its handle before that)"
    )


def _meaning(factor: float, parts: int, count: int) -> str:
    """Return what a factor says about a gradient."""
    known = (
        (float(parts), "gradients are summed over ranks instead of averaged"),
        (1 / parts, "gradients are divided by the number of ranks twice"),
        (float(count), "the loss is not divided by the number of micro-batches"),
        (1 / count, "the loss is divided by the number of micro-batches twice"),
        (2.0, "the step was taken twice"),
    )
    said = [said for value, said in known if value != 1.0 and abs(factor / value - 1) < 1e-2]
    return ", or ".join(said) or "the loss is scaled on its way"


def _judge_exact(found: Result) -> None:
    """Judge the gradients of float64 of a model that has two dtypes, or its refusal."""
    if any(told["refused"] for told in found.ranks):
        judge_refusal_of_model(found, ("layer", "float64"))
        return
    _judge_step(found)
    if not found.target.equal:
        return
    own, expected = found.ranks[0]["gradient"], found.reference["gradient"]
    doubles = {name: values for name, values in expected.items() if "layer" in name}
    # How samples are divided changes nothing but the last digits of float64.
    wrong = [name for name in doubles if not close(own[name], doubles[name], 1e-10)]
    assert not wrong, (
        f"the gradients of {', '.join(map(repr, wrong))}, which are of float64, were rounded to "
        "float32: the model's first parameter is of float32. Use one flat tensor for each dtype, "
        "not one for all parameters"
    )


def _register(
    name: str, about: str, count: int = 1, algorithm: str = "", ranks: int = 0, **of_step: Any
) -> None:
    options: dict[str, Any] = (
        {"gradient_clip_val": LIMIT[algorithm], "gradient_clip_algorithm": algorithm}
        if algorithm
        else {}
    )
    of_step["doubles"] = algorithm == "norm"

    def judge(found: Result) -> None:
        can = found.capabilities
        if algorithm and not can.gradient_clipping:
            judge_refused(
                found,
                "Trainer(gradient_clip_val=...)",
                "gradient_clipping=False",
                "cannot clip gradients",
            )
        elif algorithm == "value" and can.engine_clips and found.ranks[0]["refused"]:
            # An engine may know norms only, if it says so.
            judge_refused(
                found,
                "gradient_clip_algorithm='value'",
                "engine_clips=True",
                "gradient_clip_algorithm",
            )
        elif not is_indivisible(found, of_step.get("model", "dense")):
            judge_accepted(found, f"a step of {count} micro-batch(es) with {options}")
            _judge_step(found, count, algorithm)

    @check(f"steps/{name}", judge, about=about, reference=True, ranks=ranks)
    def run(probe: Probe) -> dict[str, Any]:
        return probe.attempt(lambda: _one_step(probe, count, **of_step, **options))


_register(
    "gradient",
    "A step uses the mean gradient of all samples on all ranks. The hook on_before_optimizer_step "
    "sees it.",
    1,
)
_register(
    "large model",
    "A step of a model that exceeds one bucket of gradients (25 MB) uses the mean gradient.",
    model="large",
)
check(
    "steps/two dtypes",
    _judge_exact,
    about="If a model has float32 and float64 parameters, no gradient is rounded to another dtype.",
    reference=True,
)(lambda probe: probe.attempt(lambda: _one_step(probe, model="two_dtypes")))


def _judge_seeded(found: Result) -> None:
    if found.capabilities.parameters == "divided":
        return  # a rank draws for its part of the model
    alone = [_mean_of(part) for part in by_part(found.ranks, "alone")]
    expected = _mean_of(alone)
    try:
        _judge_step(replace(found, reference={"gradient": expected, "hooked": expected}), 2)
    except AssertionError as error:
        raise AssertionError(
            "a model that draws random numbers in forward, as dropout does, is not trained by the "
            "gradient of what it computed. If layers run again in backward, they have to draw the "
            "same numbers: torch.utils.checkpoint does with preserve_rng_state=True, its default. "
            "Nor may backward run before all of forward has, nor model_state(prepared) return "
            f"other weights than those that are trained\n{error}"
        ) from None


def _mean_of(gradients: Sequence[Mapping[str, Flat]]) -> dict[str, Flat]:
    """Return the mean of gradients by parameter."""
    return {name: mean([one[name] for one in gradients]) for name in gradients[0]}


@check("steps/random numbers", _judge_seeded)
def _seeded(probe: Probe) -> dict[str, Any]:
    """If a model draws random numbers (dropout), a step uses the gradient of what it computed."""
    return _one_step(probe, 2, "masked")


_register(
    "three ranks",
    "A step on three ranks uses the mean gradient. On two ranks, two errors may cancel out.",
    samples=6,
    ranks=3,
)
_register(
    "accumulation",
    "Each micro-batch of a step counts equally. Losses that user code keeps do not change.",
    3,
)
_register(
    "clip norm",
    "Gradients are clipped by their norm over all parameters and ranks, after the hook "
    "on_before_optimizer_step, which may change them.",
    1,
    "norm",
)
_register("clip value", "Each element of the mean gradient is clipped to the limit.", 1, "value")
_register(
    "accumulation and clip",
    "Gradients are clipped once, after the last micro-batch. The norm counts a tied weight once.",
    3,
    "norm",
    model="tied",
)


@check("steps/several", judge_losses, reference=True)
def _several(probe: Probe) -> dict[str, Any]:
    """Each step starts without gradients.

    A last step with fewer micro-batches divides losses by its own number of micro-batches.
    """
    learner = Learner("dense", "momentum")
    trainer = probe.fit(learner, 40, max_epochs=2, accumulate_grad_batches=2)
    return probe.report(learner, trainer)


class _ZeroGradient(Learner):
    """The gradient of the second step is zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 0.0 if batch_idx == 1 else loss


def _judge_zero(found: Result) -> None:
    judge_losses_of(
        found,
        "the step after one whose gradient is zero is another one: with zeros, momentum and weight "
        "decay go on and the optimizer counts; call optimizer_step whatever the gradients are",
    )


@check("steps/zero gradient", _judge_zero, reference=True)
def _zero(probe: Probe) -> dict[str, Any]:
    """A step with zero gradients is taken, so that momentum and weight decay apply."""
    learner = _ZeroGradient("dense", "momentum")
    return probe.report(learner, probe.fit(learner))


class _NotFinite(Learner):
    """The loss of the last part of the data is NaN in the last step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        part, parts = self.trainer.ranks.data_split
        is_last = batch_idx == self.trainer.num_training_batches - 1
        return loss * math.nan if is_last and part == parts - 1 else loss


_SAY = (
    "say so: self.precision.step_was_skipped = True in optimizer_step, and False in each step that "
    "is taken; a train_step of one's own calls step.optimizer_step_was_skipped(optimizer)"
)


def _judge_not_finite(found: Result) -> None:
    if any(told["refused"] for told in found.ranks):
        return  # an engine may end the run
    skipped = [told["steps"] < told["batches"] for told in found.ranks]
    finite = [told["own"] for told in found.ranks]
    assert len(set(skipped)) == len(set(finite)) == 1, (
        "the loss of one rank was NaN in the last step. Whether the ranks left the step out: "
        f"{skipped}; whether their weights are finite after it: {finite}. Let the ranks agree "
        "(self.ranks.all_reduce_ints([bad], 'max')) before one of them leaves a step out, and "
        f"{_SAY}"
    )
    assert skipped[0] or not found.ranks[0]["finite"], (
        "the loss of a rank was NaN in the last step, the step was counted, and every weight is a "
        "number after it. If optimizer_step leaves such a step out, "
        f"{_SAY}. If NaN was made a number on its way (as nan_to_num does), leave it NaN: nobody "
        "would learn that training diverges"
    )


@check("steps/not finite", _judge_not_finite)
def _not_finite(probe: Probe) -> dict[str, Any]:
    """A NaN in a gradient reaches the weights of all ranks, also with clipping.

    If a strategy leaves such a step out, it does so on all ranks.
    """
    can = probe.target.capabilities()
    clip: dict[str, Any] = {"gradient_clip_val": 1.0} if can.gradient_clipping else {}

    def train() -> dict[str, Any]:
        trainer = probe.fit(_NotFinite(), **clip)
        whole = probe.weights(trainer)
        own = probe.own_weights(trainer.run.require_prepared().original)
        return {
            "steps": trainer.global_step,
            "batches": trainer.num_training_batches,
            "finite": all(math.isfinite(value) for some in whole.values() for value in some),
            "own": all(math.isfinite(value) for some in own.values() for value in some),
        }

    return probe.attempt(train)


class _MicroBatches(Collection[Any]):
    """The micro-batches of a step, which count how many of them were read."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)
        self.read = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, batch: object) -> bool:
        raise TypeError("the micro-batches of a step are not searched")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.read += 1
            yield batch


class _NoLoss(TrainStep):
    """A step with micro-batches without a loss, which records whether the step was taken.

    Attributes:
        taken: whether the step was counted.
        ahead: the largest number of micro-batches that were read before they began.
    """

    def __init__(self, micro_batches: _MicroBatches) -> None:
        self.taken = False
        self.ahead = self._begun = 0
        self._micro_batches = micro_batches

    def begin(self, micro_batch: Any) -> Any:
        self._begun += 1
        self.ahead = max(self.ahead, self._micro_batches.read - self._begun)
        return micro_batch

    def loss(self, part: Any, *, converted: bool = False) -> None:
        return None

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self.taken = True


class _TakesOneMore(Callback):
    """Takes a step without a loss at the end of the epoch."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.found: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Compare the weights before and after the step."""
        batches = _MicroBatches(self._probe.loader(32))
        step, before = _NoLoss(batches), self._probe.weights(trainer)
        trainer.strategy.train_step(trainer.run.require_prepared(), step, batches)
        after = self._probe.weights(trainer)
        self.found = {"taken": step.taken, "before": before, "after": after, "ahead": step.ahead}


@check("steps/no loss")
def _skipped(probe: Probe) -> dict[str, Any]:
    """If no micro-batch of a step has a loss, the step is not taken.

    A step reads its micro-batches one at a time, so that only one of them is in memory. With
    opens_micro_batches=True, an error may say that training_step returned None.
    """
    takes = _TakesOneMore(probe)
    opens = probe.trainer().strategy.opens_micro_batches

    def train() -> dict[str, Any]:
        probe.fit(Learner("dense", "momentum"), 16, callbacks=[takes])
        return takes.found

    return {**probe.attempt(train), "opens": opens}


@judge_of(_skipped)
def _judge_skipped(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        said = told["refused"]
        if said and told["opens"] and "returned None" in said["text"]:
            continue
        assert said is None, (
            f"a step without a loss ended on rank {rank} in {said['kind']}: {said['text']}"
        )
        said = difference(told["after"], told["before"], 1e-9)
        assert not told["taken"] and not said, (  # noqa: PT018
            f"rank {rank} took a step of which no micro-batch had a loss, so that momentum and "
            "weight decay move the model and schedulers go on: call finish_step in train_step only "
            f"if accumulate_all returns True. {said}"
        )
        # An engine may read the next one while it works.
        assert told["ahead"] <= 1, (
            f"train_step had read {told['ahead']} more micro-batches on rank {rank} when it began "
            "one: they are read from the loader meanwhile, and would all be in memory at once. "
            "Iterate over micro_batches once, without list(micro_batches), and keep none"
        )
