"""Losses beside single_device's: models, optimizers, precisions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from stratagem.discovery import get_registry
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    close,
    difference,
    is_indivisible,
    judge_accepted,
    judge_losses,
    judge_refusal_of_model,
    judge_refused,
    judge_replicas,
)
from stratagem_testing.strategies.models import Learner, Unusual, flat
from stratagem_testing.strategies.probe import Probe

PRECISIONS = ("64-true", "bf16-mixed", "bf16-true")
REFUSABLE = {
    "unused": ("idle.weight", "'net.idle'"),
    "scalar": ("scale",),
    "routed": ("experts", "different parameters"),
    "complex": ("phase", "complex64"),
}
"""Models that a strategy may refuse, and what the refusal has to name: the parameter, mostly."""
_HAS = {
    "dense": "two linear layers, for 64 steps,",
    "embedding": "an embedding",
    "batch_norm": "batch norm and sync_batchnorm=True",
    "tied": "tied weights",
    "frozen": "frozen parameters",
    "unused": "an unused layer",
    "repeated": "a layer that is called three times, once with activation checkpointing,",
    "scalar": "a zero-dimensional parameter and a convolution",
    "complex": "complex parameters",
    "routed": "layers that only one rank each uses",
}
"""The models of the checks of losses, and what each has."""


def _train(probe: Probe, model: str, optimizer: str = "momentum", **options: Any) -> dict[str, Any]:
    learner = Learner(model, optimizer)
    trainer = probe.fit(learner, **{"max_epochs": 2, **options})
    return probe.report(learner, trainer)


def _register_model(model: str) -> None:
    # Statistics of batch norm over all ranks equal the ones in one process.
    options: dict[str, Any] = {"sync_batchnorm": True} if model == "batch_norm" else {}
    if model == "dense":
        # Counters of a strategy may change later steps.
        options["max_epochs"] = 8

    def judge(found: Result) -> None:
        if is_indivisible(found, model):
            return
        if model in REFUSABLE and any(told["refused"] for told in found.ranks):
            judge_refusal_of_model(found, REFUSABLE[model])
            return
        judge_accepted(found, f"the model {model!r}")
        if model == "batch_norm":
            judge_losses(
                found,
                first="sync_batchnorm=True, and batch norm does not take its statistics from the "
                "samples of all ranks: look at synchronize_batch_norm",
            )
        if model == "tied":
            _judge_tie(found)
        judge_losses(found)
        _judge_weights(found, model)

    about = f"A model with {_HAS[model]} has the losses and weights of single_device."

    @check(f"losses/{model}", judge, about=about, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        return probe.attempt(lambda: _train(probe, model, **options))


def _judge_tie(found: Result) -> None:
    """Judge that a weight with two names is one after training."""
    weights = found.ranks[0]["weights"]
    first, second = (weights.get(f"net.{name}.weight") for name in ("first", "second"))
    if first is None or second is None:
        return  # see _judge_weights
    own = found.ranks[0]["own"]
    assert close(first, second, found.target.tolerance) or not own or "net.second.weight" in own, (
        "'net.first.weight' and 'net.second.weight' are one parameter, also after training, and "
        "model_state(prepared) returns two different values for it"
    )
    assert close(first, second, found.target.tolerance), (
        "'net.first.weight' and 'net.second.weight' are one parameter of the user's model, and two "
        "after training: prepare or wrap has replaced them one by one. Change a parameter in "
        "place, or put the new one at each of its names "
        "(named_parameters(remove_duplicate=False))"
    )


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
    trained = {name: expected[name] for name in found.reference["own"]}
    said = difference(own, trained, 100 * found.target.tolerance)
    assert not trained.keys() - own.keys(), (
        f"model_state(prepared) returned {said} on rank 0. Return the whole model there, by the "
        "names of the user's module, as prepared.original.state_dict() has them"
    )
    evaluates = " what evaluation(prepared) leaves," if model == "unusual" else ""
    assert not said, (
        "losses are those of single_device, and the model is another one after training (look at "
        f"optimizer_step,{evaluates} and at what model_state returns): {said}"
        f"{meaning if unused else ''}"
    )


def _register_optimizer(optimizer: str) -> None:
    @check(f"optimizers/{optimizer}", judge_losses, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        """The optimizer updates each parameter once per step, and keeps its own state."""
        return _train(probe, "dense", optimizer)


def _register_precision(precision: str) -> None:
    def judge(found: Result) -> None:
        accepted = found.capabilities.precisions
        if accepted is not None and precision not in accepted:
            judge_refused(found, f"precision={precision!r}", "precisions", precision)
            return
        if found.ranks[0]["refused"] and not found.ranks[0]["autocasts"]:
            return  # by the accelerator, whatever the strategy is
        judge_accepted(found, f"precision={precision!r}")
        (expected,) = found.reference["dtypes"]
        for rank, told in enumerate(found.ranks):
            # A rank without a layer has nothing to compute.
            assert expected in told["dtypes"] or not told["dtypes"], (
                f"the layers of rank {rank} compute in {', '.join(told['dtypes'])} under precision="
                f"{precision!r}, and in {expected} on single_device: the precision was not applied "
                "(prepare calls precision.convert_module, and input_converter the precision's)"
            )
            wanted = found.reference["evaluated in"]
            assert set(told["evaluated in"]) <= set(wanted), (
                f"the layers of rank {rank} compute in {', '.join(told['evaluated in'])} in a "
                f"validation under precision={precision!r}, and in {', '.join(wanted)} on "
                "single_device: evaluation_module computes past the precision"
            )
            assert told["integers"], (
                f"the integers of a batch are other ones on rank {rank} under precision="
                f"{precision!r}: input_converter has to convert floating-point tensors only"
            )
        judge_losses(found, precision)

    @check(f"precisions/{precision}", judge, reference=True)
    def run(probe: Probe) -> dict[str, Any]:
        """A precision in the capabilities is applied. Any other precision raises an error.

        It is applied in a validation, too, and does not convert integers of a batch.
        """

        def train() -> dict[str, Any]:
            learner = Learner("dense", "sgd")
            dtypes: set[str] = set()
            evaluated: set[str] = set()

            def note(layer: nn.Module, inputs: Any, output: Any) -> None:
                if any(True for _ in layer.parameters(recurse=False)):
                    noted = dtypes if torch.is_grad_enabled() else evaluated
                    noted.update([str(output.dtype)] if isinstance(output, Tensor) else [])

            # Of all modules: a strategy may divide the model into layers of its own.
            hook = register_module_forward_hook(note)
            try:
                trainer = probe.fit(learner, max_epochs=2, validated=8, precision=precision)
            finally:
                hook.remove()
            integers = [number for batch in learner.seen for number in batch]
            return {
                **probe.report(learner, trainer),
                "dtypes": sorted(dtypes),
                "evaluated in": sorted(evaluated),
                "integers": all(isinstance(number, int) for number in integers),
                "own": {},
            }

        spec = get_registry().find("accelerator", probe.target.accelerator).spec
        autocasts = "mixed" not in precision or spec.build().autocast(torch.bfloat16) is not None
        return {**probe.attempt(train), "autocasts": autocasts}


for _model in _HAS:
    _register_model(_model)
for _optimizer in ("sgd", "adam", "adamw"):
    _register_optimizer(_optimizer)
for _precision in PRECISIONS:
    _register_precision(_precision)


@check("losses/own models", reference=True)
def _own(probe: Probe) -> dict[str, Any]:
    """The models in the attribute `models` have the losses of single_device."""
    return {model: _train(probe, model) for model in probe.target.models if ":" in model}


@judge_of(_own)
def _judge_own(found: Result) -> None:
    for model in found.reference:
        ranks = [told[model] for told in found.ranks]
        try:
            judge_losses(replace(found, ranks=ranks, reference=found.reference[model]))
        except AssertionError as error:
            raise AssertionError(f"{model}: {error}") from None


class _Noting(Learner):
    """Notes what is lost of what a user has set on a parameter and on a module, in words."""

    def __init__(self, seed: int) -> None:
        super().__init__("unusual", "sgd", seed)
        self.lost: dict[str, None] = {}

    def configure_optimizers(self) -> Any:
        self.look("in configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(self.net, Unusual) and self.net.norm.training:
            self.lost[
                "the layer 'net.norm' is trained in training mode, and the user has put it in "
                "evaluation mode: call train() for no module that was not in evaluation mode by "
                "your doing (look at train_step, backward and prepare)"
            ] = None
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look("after a step")

    def look(self, when: str) -> None:
        # A rank of a divided model need not have it.
        bias = dict(self.named_parameters()).get("net.last.bias")
        if bias is not None and not hasattr(bias, "is_last"):
            self.lost[
                f"the parameter 'net.last.bias' has lost its attribute is_last {when}, by which "
                "users choose its learning rate or weight decay: where prepare or wrap makes a new "
                "parameter, copy what vars(parameter) has"
            ] = None


@check("losses/initial weights", reference=True)
def _initial(probe: Probe) -> dict[str, Any]:
    """Every rank starts with the weights and buffers of rank 0, whatever its seed is.

    This includes frozen parameters, parameters that are not contiguous, and integer buffers.
    Attributes of parameters and the mode of each layer do not change.
    """
    learner = _Noting(seed=probe.rank)
    trainer = probe.trainer(max_epochs=1)
    trainer.fit(learner, probe.loader(32), probe.loader(8))
    return {
        **probe.report(learner, trainer),
        "lost": list(learner.lost),
        "buffers": flat(dict(learner.net.named_buffers())),
    }


@judge_of(_initial)
def _judge_initial(found: Result) -> None:
    meaning = (
        "ranks that were seeded differently do not train from rank 0's weights and buffers: give "
        "every rank those before training. Where the values are there in another order, a reshape "
        "has lost the layout of a parameter that is not contiguous (channels_last, transposed): "
        "copy by parameter.copy_(value) with value of the same shape"
    )
    for rank, told in enumerate(found.ranks):
        assert not told["lost"], f"on rank {rank} {'; '.join(told['lost'])}"
        for name, values in found.reference["buffers"].items():
            own = told["buffers"].get(name, values)
            assert all(map(_equal, own, values)), (
                f"{meaning}\nafter training, the buffer 'net.{name}' is {own} on rank {rank}, "
                f"expected {values}"
            )
    try:
        judge_replicas(found, found.target.tolerance)
        judge_losses(found)
    except AssertionError as error:
        raise AssertionError(f"{meaning}\n{error}") from None
    _judge_weights(found, "unusual")  # which ranks have trained from rank 0's


def _equal(own: float, expected: float) -> bool:
    """Whether two numbers are equal: integers to the last digit."""
    if isinstance(expected, int):
        return own == expected
    return math.isclose(own, expected, rel_tol=1e-6)
