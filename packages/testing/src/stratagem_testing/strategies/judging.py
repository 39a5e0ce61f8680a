"""What judges of checks share: numbers of all ranks beside the reference's, and what a fault is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.discovery import Capabilities
from stratagem_testing.strategies.check import Result

Flat = Sequence[float]


def by_part(ranks: Sequence[Mapping[str, Any]], key: str) -> list[list[Any]]:
    """Return for each part of the data the first value at `key` that is not empty, by rank."""
    parts: dict[int, list[Any]] = {}
    for told in ranks:
        index = told["shard"][0]
        if not parts.get(index):
            parts[index] = told[key]
    return [parts[index] for index in sorted(parts)]


def mean_losses(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the loss of each micro-batch over all parts of the data."""
    parts = by_part(ranks, "losses")
    counts = {len(part) for part in parts}
    assert len(counts) == 1, (
        f"ranks ran different numbers of training batches: {[len(part) for part in parts]}"
    )
    return [sum(values) / len(values) for values in zip(*parts, strict=True)]


def judge_losses(
    found: Result,
    precision: str = "32-true",
    *,
    first: str = "it is another model, or other samples",
) -> None:
    """Compare losses and the ranks' values with single_device's.

    Args:
        found: the findings.
        precision: decides the tolerance.
        first: the meaning of a difference in the first loss.

    Raises:
        AssertionError: losses differ; the message names the first step with a difference.
    """
    own, expected = mean_losses(found.ranks), mean_losses([found.reference])
    assert len(own) == len(expected), (
        f"{len(own)} training batches were run, single_device ran {len(expected)}: batches were "
        "dropped or repeated"
    )
    assert all(map(math.isfinite, own)), f"losses are not finite: {own}"
    tolerance = found.target.tolerance_of(precision)
    if not found.target.equal:
        _judge_loosely(own, expected, tolerance, moves=_moves_alike(found))
        judge_replicas(found)
        return
    for step, (mine, other) in enumerate(zip(own, expected, strict=True)):
        assert math.isclose(mine, other, rel_tol=tolerance, abs_tol=tolerance), (
            (
                f"the first loss is {mine:.7g}, and {other:.7g} on single_device (tolerance "
                f"{tolerance:g}): {first}"
                if step == 0
                else f"losses are those of single_device up to micro-batch {step - 1} and not from "
                f"{step} on: {mine:.7g}, expected {other:.7g} (tolerance {tolerance:g}). A step "
                "was not that of the mean gradient over all ranks: look at backward and "
                "optimizer_step, and wait for an exchange in the background before the step"
            )
            + _said_of_weights(found)
            + f"\nlosses   {shown(own)}\nexpected {shown(expected)}"
        )
    judge_replicas(found, tolerance)


def _said_of_weights(found: Result) -> str:
    own, expected = found.ranks[0].get("weights", {}), found.reference.get("weights", {})
    said = difference(own, expected, 1e-4)
    return f"\nafter training {said}" if said else ""


def judge_losses_of(found: Result, meaning: str) -> None:
    """Compare losses as `judge_losses`; the message begins with a difference's meaning."""
    try:
        judge_losses(found)
    except AssertionError as error:
        raise AssertionError(f"{meaning}\n{error}") from None


def _moves_alike(found: Result) -> bool:
    """Whether training moves the weights in a direction similar to single_device's."""
    own, reference = found.ranks[0].get("weights", {}), found.reference
    products = [0.0, 0.0, 0.0]
    for name, begun in reference.get("begun", {}).items():
        ends = own.get(name), reference["weights"].get(name)
        if any(end is None or len(end) != len(begun) for end in ends):
            continue
        for before, mine, other in zip(begun, *ends, strict=True):
            moves = mine - before, other - before
            for place, (a, b) in enumerate(((0, 1), (0, 0), (1, 1))):
                products[place] += moves[a] * moves[b]
    return products[0] > 0.1 * math.sqrt(products[1] * products[2])


def _judge_loosely(own: Flat, expected: Flat, tolerance: float, *, moves: bool) -> None:
    """Judge that a strategy with losses of its own trains.

    Args:
        own, expected: the losses, and single_device's.
        tolerance: of the first loss, relative and absolute.
        moves: whether weights move as single_device's do: a strategy that steps back from time to
            time (slow weights) need not have smaller losses within so few steps.
    """
    assert math.isclose(own[0], expected[0], rel_tol=tolerance, abs_tol=tolerance), (
        f"the first loss is {own[0]:.7g}, and single_device's is {expected[0]:.7g}: ranks do not "
        "begin with the same weights, or read other samples"
    )
    half = len(own) // 2
    first, second = sum(own[:half]) / half, sum(own[-half:]) / half
    if sum(expected[-half:]) < sum(expected[:half]):
        assert second < first or moves, (
            f"the mean loss of the second half of the steps is {second:.5g}, and of the first "
            f"{first:.5g}, and weights do not move as those of single_device: it does not train"
        )


def judge_replicas(found: Result, tolerance: float = 1e-6) -> None:
    """Compare unsharded parameters of the ranks if capabilities declare equal parameters.

    Raises:
        AssertionError: names the ranks and the parameter.
    """
    if not found.replicated:
        return
    first = found.ranks[0]["own"]
    for rank, told in enumerate(found.ranks[1:], start=1):
        for name, values in told["own"].items():
            assert close(values, first.get(name, []), tolerance), (
                f"ranks 0 and {rank} have different values of {name!r} after training, and "
                "parameters='same' in the capabilities says that they are alike: gradients were "
                "not averaged over ranks, or ranks began with different weights. Under Lite, "
                "finish_step and train_step are not called: average in backward or optimizer_step"
            )


def judge_refusal(what: str, capability: str, said: Any, *names: str) -> None:
    """Judge the refusal of an action that the capabilities exclude.

    Args:
        what: the requested action.
        capability: the capability that excludes the action.
        said: class and text of the error; None: the action raised no error.
        names: the text of the refusal must contain a name of this list.

    Raises:
        AssertionError: the action was not refused, or the refusal does not give the reason.
    """
    assert said is not None, f"{capability} in the capabilities, and {what} was not refused"
    assert said["kind"] == "ConfigurationError", (
        f"{capability} in the capabilities, and {what} ended in {said['kind']} where a "
        f"ConfigurationError was expected: {said['text']}"
    )
    assert any(name in said["text"] for name in names), (
        f"the refusal of {what} names none of {', '.join(names)}: {said['text']}"
    )


def trains_under_lite(can: Capabilities) -> bool:
    """Whether a loop under Lite trains: by backward, or by `Lite.step` alone."""
    return can.manual_backward or can.lite_step


def judge_refused(found: Result, what: str, capability: str, *names: str) -> None:
    """Judge the refusals of all ranks in `probe.attempt`, as `judge_refusal`."""
    for told in found.ranks:
        judge_refusal(what, capability, told["refused"], *names)


def judge_refusal_of_model(found: Result, names: tuple[str, ...]) -> None:
    """Judge the refusals of a model in `probe.attempt`, which a strategy may always refuse.

    Args:
        found: the findings.
        names: a refusal must contain a name of this list, mostly of a parameter.

    Raises:
        AssertionError: only some ranks refused the model, or the refusal does not give the reason.
    """
    refusals = [told["refused"] for told in found.ranks]
    assert all(refusals), f"only some ranks refused the model: {refusals}"
    for said in refusals:
        assert any(name in said["text"] for name in names), (
            "this model ends in an error that does not name its parameters, such as "
            f"'net.{names[0]}': {said['kind']}: {said['text']}"
        )


ONE_MODULE = ("complex", "large")
"""The models with one module that has parameters: ranks have nothing to divide."""


def is_indivisible(found: Result, model: str) -> bool:
    """Whether each rank refused a model of one module, by the name of a module.

    Only a strategy whose ranks have different parts may do so.
    """
    if found.capabilities.parameters != "divided" or model not in ONE_MODULE:
        return False
    said = [told["refused"] or {"kind": "", "text": ""} for told in found.ranks]
    return all(one["kind"] == "ConfigurationError" and "'net" in one["text"] for one in said)


def judge_accepted(found: Result, what: str) -> None:
    """Judge that no rank refused the action in `probe.attempt`.

    Raises:
        AssertionError: one has; shows its error.
    """
    for rank, told in enumerate(found.ranks):
        said = told["refused"]
        hint = ""
        if said is not None and "precision=" in what and "dtype" in said["text"]:
            hint = (
                " (the model and its batches have different dtypes? A `prepare` of your own has to "
                "call precision.convert_module(module), as the base class's does, before it wraps "
                "the module)"
            )
        assert said is None, (
            f"the capabilities take {what}, and it was refused on rank {rank}{hint}: "
            f"{said['kind']}: {said['text']}"
        )


def close(own: Flat, expected: Flat, tolerance: float) -> bool:
    """Whether two lists have the same numbers, up to a tolerance relative to the largest."""
    scale = max(1.0, max(map(abs, expected), default=1.0))
    return len(own) == len(expected) and all(
        abs(a - b) <= tolerance * scale for a, b in zip(own, expected, strict=True)
    )


def alike(own: Mapping[str, Flat], expected: Mapping[str, Flat], tolerance: float) -> bool:
    """Whether the tensors of `expected` have the same numbers in `own`, as `close`."""
    return all(close(own.get(name, []), values, tolerance) for name, values in expected.items())


def difference(own: Mapping[str, Flat], expected: Mapping[str, Flat], tolerance: float) -> str:
    """Return the names of different tensors, and the worst with its values; "" if all are equal."""
    wrong = [
        name for name, values in expected.items() if not close(own.get(name, []), values, tolerance)
    ]
    if not wrong:
        return ""

    def off(name: str) -> float:
        mine, other = own.get(name, []), expected[name]
        if len(mine) != len(other):
            return math.inf
        return max(abs(a - b) for a, b in zip(mine, other, strict=True))

    missing = [repr(name) for name in wrong if name not in own]
    if missing:
        others = [repr(name) for name in own if name not in expected]
        return f"no {' and no '.join(missing[:6])}; there is {', '.join(others[:6]) or 'no other'}"
    worst = max(wrong, key=lambda name: (math.isnan(off(name)), off(name)))
    mine, other = own[worst], expected[worst]
    scale = ratio(mine, other) if len(mine) == len(other) else None
    times = "" if scale is None or abs(scale - 1) < 1e-3 else f" ({scale:.4g} times it)"
    others = [repr(name) for name in wrong if name != worst]
    more = f"; {', '.join(others[:6])} differ{'s' if len(others) == 1 else ''}, too"
    return f"{worst!r} is {shown(mine)}, expected {shown(other)}{times}{more if others else ''}"


def shown(numbers: Flat) -> str:
    """Return numbers for a message; the first ones of many."""
    more = ", ..." if len(numbers) > 8 else ""
    return "[" + ", ".join(f"{number:.6g}" for number in numbers[:8]) + more + "]"


def norm(vector: Flat) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(sum(value * value for value in vector))


def ratio(own: Flat, expected: Flat) -> float | None:
    """Return c for which own = c * expected.

    None: the directions differ.
    """
    product = sum(a * b for a, b in zip(own, expected, strict=True))
    lengths = norm(own) * norm(expected)
    if not lengths or product < 0.9999 * lengths:
        return None
    return norm(own) / norm(expected)


def mean(vectors: Sequence[Flat]) -> list[float]:
    """Return the element-wise mean."""
    return [sum(values) / len(values) for values in zip(*vectors, strict=True)]


def clipped(vector: Flat, value: float, algorithm: str) -> list[float]:
    """Return a gradient clipped to a norm or to a value."""
    if algorithm == "value":
        return [max(-value, min(value, each)) for each in vector]
    factor = min(1.0, value / (norm(vector) + 1e-6))
    return [factor * each for each in vector]
