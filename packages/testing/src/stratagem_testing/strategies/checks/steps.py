"""One step, looked at as a gradient: averaging, accumulation, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem_testing.strategies.check import Result, check
from stratagem_testing.strategies.judging import (
    Flat,
    by_part,
    clipped,
    close,
    judge_accepted,
    judge_losses,
    judge_refused,
    mean,
    norm,
    ratio,
    shown,
)
from stratagem_testing.strategies.models import Learner, plain_gradient
from stratagem_testing.strategies.probe import Probe, initial, trained_names

LIMIT = {"norm": 0.25, "value": 0.05}
"""Less than the gradient of every model here, so that clipping has an effect."""


def _one_step(probe: Probe, count: int = 1, **options: Any) -> dict[str, Any]:
    """Take one step of SGD with lr 1: what changes is the gradient that was applied."""
    learner = Learner("dense", "unit")
    trainer = probe.fit(learner, 8 * count, accumulate_grad_batches=count, **options)
    before, after = initial("dense"), probe.weights(trainer)
    names = [f"net.{name}" for name in trained_names(learner.net)]
    gradient = [
        old - new
        for name in names
        if name in after
        for old, new in zip(before[name], after[name], strict=True)
    ]
    return {
        "shard": list(trainer.ranks.data_split),
        "gradient": gradient,
        # What torch alone finds for this rank's samples.
        "alone": plain_gradient(learner.seen),
        "steps": trainer.global_step,
        "own": probe.own_weights(trainer.run.require_prepared().original),
    }


def _judge_step(found: Result, count: int = 1, algorithm: str = "") -> None:
    """Compare the gradient that was applied, and say what another one is."""
    if not found.target.equal:
        return  # each rank's own; see `losses/`
    for rank, told in enumerate(found.ranks):
        assert told["steps"] == 1, (
            f"rank {rank} counts {told['steps']} steps after {count} micro-batch(es) of one step"
        )
    own, expected = found.ranks[0]["gradient"], found.reference["gradient"]
    if not close(own, expected, 10 * found.target.tolerance):
        alone = by_part(found.ranks, "alone")
        said = _fault(found, own, expected, alone, count, algorithm)
        raise AssertionError(
            f"the first step applied {said}\napplied  {shown(own)}\nexpected {shown(expected)}"
        )
    if found.replicated:
        for rank, told in enumerate(found.ranks[1:], start=1):
            assert close(told["gradient"], own, 10 * found.target.tolerance), (
                f"rank {rank} applied another gradient than rank 0: gradients are not averaged "
                "over all ranks"
            )


def _fault(
    found: Result,
    own: Flat,
    expected: Flat,
    alone: Sequence[Sequence[Flat]],
    count: int,
    algorithm: str,
) -> str:
    """Return what a wrong gradient is, in words."""
    parts = len(alone)
    if len(own) != len(expected):
        return (
            f"a gradient of {len(own)} elements, expected {len(expected)}: the state is not whole"
        )
    if not norm(own):
        return "nothing: no step was taken, or the model that was stepped is another one"
    limit = LIMIT.get(algorithm, 0.0)
    whole = mean([mean(part) for part in alone])
    candidates: dict[str, Flat] = {}
    if algorithm:
        candidates["the mean gradient, not clipped"] = whole
        candidates["the mean of gradients that each rank clipped by itself: clip after they are "
                   "averaged over ranks"] = mean(
            [clipped(mean(part), limit, algorithm) for part in alone]
        )  # fmt: skip
        candidates["the sum of gradients that each micro-batch clipped by itself: clip once, "
                   "when all are there"] = mean(
            [clipped(mean(micro), limit, algorithm) for micro in zip(*alone, strict=True)]
        )  # fmt: skip
        other = "norm" if algorithm == "value" else "value"
        candidates[f"a gradient that was clipped by {other} and not by {algorithm}"] = clipped(
            whole, limit, other
        )
        for name, factor in (("multiplied", parts), ("divided", 1 / parts)):
            candidates[f"a gradient that was clipped while {name} by {parts} (the ranks)"] = [
                value / factor for value in clipped([factor * v for v in whole], limit, algorithm)
            ]
    candidates["the gradient of this rank's samples alone: gradients are not averaged over "
               "ranks"] = mean(alone[0])  # fmt: skip
    for said, candidate in candidates.items():
        if not close(candidate, expected, 1e-4) and close(own, candidate, 1e-4):
            return said
    for which, position in (("last", -1), ("first", 0)):
        if count > 1 and ratio(own, mean([part[position] for part in alone])) is not None:
            return f"the gradient of the {which} micro-batch alone: the others are lost"
    if algorithm == "norm":
        return (
            f"a gradient with the norm {norm(own):.5g}, expected {norm(expected):.5g} (the limit "
            f"is {limit}): it was not clipped by the norm over all parameters and ranks"
        )
    scale = ratio(own, expected)
    if scale is None:
        return (
            "a gradient of another direction: not the mean over all ranks and micro-batches, or "
            "it was changed after"
        )
    return f"{scale:.4g} times the gradient: {_meaning(scale, parts, count)}"


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


def _register(name: str, about: str, count: int, algorithm: str = "") -> None:
    options: dict[str, Any] = (
        {"gradient_clip_val": LIMIT[algorithm], "gradient_clip_algorithm": algorithm}
        if algorithm
        else {}
    )

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
        else:
            judge_accepted(found, f"a step of {count} micro-batch(es) with {options}")
            _judge_step(found, count, algorithm)

    @check(f"steps/{name}", judge, about=about, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        return probe.attempt(lambda: _one_step(probe, count, **options))


_register("gradient", "A step applies the mean gradient over all samples of all ranks.", 1)
_register("accumulation", "Micro-batches of a step count equally, whichever rank they are on.", 3)
_register(
    "clip norm", "Gradients are clipped by their norm over all parameters and ranks.", 1, "norm"
)
_register("clip value", "Each element of the mean gradient is clipped.", 1, "value")
_register("accumulation and clip", "Clipping comes once, after the last micro-batch.", 3, "norm")


@check("steps/several", judge_losses, reference=True)
def _several(probe: Probe) -> dict[str, Any]:
    """Each step begins without gradients, and a short last step is divided by its own number."""
    learner = Learner("dense", "momentum")
    trainer = probe.fit(learner, 40, max_epochs=2, accumulate_grad_batches=2)
    return probe.report(learner, trainer)
