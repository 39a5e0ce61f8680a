"""Losses beside single_device's: models, optimizers, precisions."""

from __future__ import annotations

from typing import Any

from stratagem.testing.strategies.check import Found, check
from stratagem.testing.strategies.judging import judge_losses
from stratagem.testing.strategies.models import MODELS, Learner
from stratagem.testing.strategies.probe import Probe

PRECISIONS = ("64-true", "bf16-mixed", "bf16-true")
REFUSABLE = {"unused": "idle.weight", "scalar": "scale"}
"""Models that a strategy may refuse, and the parameter that the refusal has to name."""
LOSSES = tuple(name for name in MODELS if name != "dropout")


def _train(probe: Probe, model: str, optimizer: str = "momentum", **options: Any) -> dict[str, Any]:
    learner = Learner(model, optimizer)
    trainer = probe.fit(learner, max_epochs=2, **options)
    return probe.told(learner, trainer)


def _register_model(model: str) -> None:
    # Statistics of batch norm over all ranks are what one process has.
    options: dict[str, Any] = {"sync_batchnorm": True} if model == "batch_norm" else {}

    @check(
        f"losses/{model}",
        "the loss of each step is that of single_device on the same samples",
        (lambda found: _judge_or_refusal(found, REFUSABLE[model]))
        if model in REFUSABLE
        else judge_losses,
        reference=True,
    )
    def run(probe: Probe) -> dict[str, Any]:
        if model not in REFUSABLE:
            return _train(probe, model, **options)
        told: dict[str, Any] = {}
        refused = probe.said(lambda: told.update(_train(probe, model, **options)))
        return {**told, "refused": refused}


def _judge_or_refusal(found: Found, parameter: str) -> None:
    """Judge a model that trains as under single_device, or is refused by a parameter's name."""
    refusals = [told["refused"] for told in found.ranks]
    if not any(refusals):
        judge_losses(found)
        return
    assert all(refusals), f"only some ranks refused the model: {refusals}"
    for said in refusals:
        assert parameter in said["text"], (
            "this model ends in an error that does not name its parameters, such as "
            f"'net.{parameter}': {said['kind']}: {said['text']}"
        )


def _register_optimizer(optimizer: str) -> None:
    @check(
        f"optimizers/{optimizer}",
        "the optimizer steps the model's parameters once in each step, with its own state",
        judge_losses,
        reference=True,
    )
    def run(probe: Probe) -> dict[str, Any]:
        return _train(probe, "dense", optimizer)


def _register_precision(precision: str) -> None:
    def judge(found: Found) -> None:
        accepted = found.capabilities.precisions
        refusals = [told["refused"] for told in found.ranks]
        if accepted is not None and precision not in accepted:
            for said in refusals:
                assert said is not None, (
                    f"precision={precision!r} is not in the capabilities' precisions, and training "
                    "with it was not refused"
                )
                assert precision in said["text"], f"the refusal names no precision: {said}"
            return
        assert not any(refusals), (
            f"precision={precision!r} is taken by the capabilities, and refused: {refusals[0]}"
        )
        for told in found.ranks:
            assert told["dtype"] == found.reference["dtype"], (
                f"the model computes in {told['dtype']} under precision={precision!r}, and in "
                f"{found.reference['dtype']} on single_device: the precision was not applied"
            )
        judge_losses(found, precision)

    @check(
        f"precisions/{precision}",
        "a precision that the capabilities take is applied, and any other one is refused",
        judge,
        reference=True,
    )
    def run(probe: Probe) -> dict[str, Any]:
        told: dict[str, Any] = {}

        def train() -> None:
            learner = _Seeing()
            trainer = probe.fit(learner, max_epochs=2, precision=precision)
            told.update(probe.told(learner, trainer), dtype=learner.dtype_of_outputs, own={})

        return {"refused": probe.said(train), **told}


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


@check(
    "losses/own models",
    "the author's models train as on single_device",
    lambda found: _judge_own(found),
    reference=True,
)
def _own(probe: Probe) -> dict[str, Any]:
    return {model: _train(probe, model) for model in probe.target.models if ":" in model}


def _judge_own(found: Found) -> None:
    for model in found.reference:
        ranks = [told[model] for told in found.ranks]
        one = Found(
            target=found.target,
            capabilities=found.capabilities,
            ranks=ranks,
            reference=found.reference[model],
        )
        try:
            judge_losses(one)
        except AssertionError as error:
            raise AssertionError(f"{model}: {error}") from None


@check(
    "losses/initial weights",
    "every rank trains from rank 0's weights, whatever it was seeded with",
    lambda found: _judge_initial(found),
    reference=True,
)
def _initial(probe: Probe) -> dict[str, Any]:
    learner = Learner("dense", "sgd", seed=probe.rank)
    trainer = probe.fit(learner)
    return probe.told(learner, trainer)


def _judge_initial(found: Found) -> None:
    try:
        judge_losses(found)
    except AssertionError as error:
        raise AssertionError(
            "ranks that were seeded differently do not train from rank 0's weights: "
            f"give every rank those before training\n{error}"
        ) from None
