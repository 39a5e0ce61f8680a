"""Losses beside single_device's: models, optimizers, precisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    close,
    judge_accepted,
    judge_losses,
    judge_refused,
    shown,
)
from stratagem_testing.strategies.models import MODELS, Learner
from stratagem_testing.strategies.probe import Probe

PRECISIONS = ("64-true", "bf16-mixed", "bf16-true")
REFUSABLE = {"unused": "idle.weight", "scalar": "scale"}
"""Models that a strategy may refuse, and the parameter that the refusal has to name."""
LOSSES = tuple(name for name in MODELS if name not in ("dropout", "buffered"))


def _train(probe: Probe, model: str, optimizer: str = "momentum", **options: Any) -> dict[str, Any]:
    learner = Learner(model, optimizer)
    trainer = probe.fit(learner, max_epochs=2, **options)
    return probe.report(learner, trainer)


def _register_model(model: str) -> None:
    # Statistics of batch norm over all ranks are what one process has.
    options: dict[str, Any] = {"sync_batchnorm": True} if model == "batch_norm" else {}

    def judge(found: Result) -> None:
        if model in REFUSABLE and any(told["refused"] for told in found.ranks):
            _judge_refusal_of_model(found, REFUSABLE[model])
        else:
            judge_accepted(found, f"the model {model!r}")
            judge_losses(found)
            _judge_weights(found, model)

    @check(f"losses/{model}", judge, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        """The loss of each step is that of single_device on the same samples."""
        return probe.attempt(lambda: _train(probe, model, **options))


def _judge_weights(found: Result, model: str) -> None:
    """Compare the parameters after training, of which a loss need not show each."""
    unused = model == "unused"
    if not found.target.equal or (unused and found.target.zeros_for_unused):
        return
    meaning = (
        ". A parameter that has no gradient in a step keeps grad=None: with zeros in its place, an "
        "optimizer decays and moves it. If that is how your engine works, say zeros_for_unused = "
        "True"
    )
    own, expected = found.ranks[0]["weights"], found.reference["weights"]
    for name in found.reference["own"]:
        if name in own and not close(own[name], expected[name], 100 * found.target.tolerance):
            raise AssertionError(
                f"losses are those of single_device, and {name!r} is another one after training: "
                f"{shown(own[name])}, expected {shown(expected[name])}{meaning if unused else ''}"
            )


def _judge_refusal_of_model(found: Result, parameter: str) -> None:
    """Judge the refusal of a model, which has to name one of its parameters."""
    refusals = [told["refused"] for told in found.ranks]
    assert all(refusals), f"only some ranks refused the model: {refusals}"
    for said in refusals:
        assert parameter in said["text"], (
            "this model ends in an error that does not name its parameters, such as "
            f"'net.{parameter}': {said['kind']}: {said['text']}"
        )


def _register_optimizer(optimizer: str) -> None:
    @check(f"optimizers/{optimizer}", judge_losses, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        """The optimizer steps the model's parameters once in each step, with its own state."""
        return _train(probe, "dense", optimizer)


def _register_precision(precision: str) -> None:
    def judge(found: Result) -> None:
        accepted = found.capabilities.precisions
        if accepted is not None and precision not in accepted:
            judge_refused(found, f"precision={precision!r}", "precisions", precision)
            return
        judge_accepted(found, f"precision={precision!r}")
        for told in found.ranks:
            assert told["dtype"] == found.reference["dtype"], (
                f"the model computes in {told['dtype']} under precision={precision!r}, and in "
                f"{found.reference['dtype']} on single_device: the precision was not applied"
            )
        judge_losses(found, precision)

    @check(f"precisions/{precision}", judge, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        """A precision that the capabilities take is applied, and any other one is refused."""

        def train() -> dict[str, Any]:
            learner = _Seeing()
            trainer = probe.fit(learner, max_epochs=2, precision=precision)
            return {**probe.report(learner, trainer), "dtype": learner.dtype_of_outputs, "own": {}}

        return probe.attempt(train)


class _Seeing(Learner):
    """Notes the dtype that the first layer computes in."""

    def __init__(self) -> None:
        super().__init__("dense", "sgd")
        self.dtype_of_outputs = ""
        first: Any = self.net
        first[0].register_forward_hook(self._note)

    def _note(self, layer: Any, inputs: Any, output: Any) -> None:
        self.dtype_of_outputs = str(output.dtype)


for _model in LOSSES:
    _register_model(_model)
for _optimizer in ("sgd", "adam", "adamw"):
    _register_optimizer(_optimizer)
for _precision in PRECISIONS:
    _register_precision(_precision)


@check("losses/own models", reference=True)
def _own(probe: Probe) -> dict[str, Any]:
    """The author's models train as on single_device."""
    return {model: _train(probe, model) for model in probe.target.models if ":" in model}


@judge_of(_own)
def _judge_own(found: Result) -> None:
    for model in found.reference:
        ranks = [told[model] for told in found.ranks]
        try:
            judge_losses(replace(found, ranks=ranks, reference=found.reference[model]))
        except AssertionError as error:
            raise AssertionError(f"{model}: {error}") from None


@check("losses/initial weights", reference=True)
def _initial(probe: Probe) -> dict[str, Any]:
    """Every rank trains from rank 0's weights and buffers, whatever it was seeded with."""
    learner = Learner("buffered", "sgd", seed=probe.rank)
    trainer = probe.fit(learner)
    return probe.report(learner, trainer)


@judge_of(_initial)
def _judge_initial(found: Result) -> None:
    try:
        judge_losses(found)
    except AssertionError as error:
        raise AssertionError(
            "ranks that were seeded differently do not train from rank 0's weights and buffers: "
            f"give every rank those before training\n{error}"
        ) from None
