"""A check of a user's plan, by a run of the model on an example without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem_mesh.tensor.flow import Flow, run_without_values
from stratagem_mesh.tensor.search import alike, inputs_of

_PACKS = {"colwise": 1, "colwise_packed_2": 2, "colwise_packed_3": 3}
INNER = "replicated_with_grad_allreduce"
_CUT = "divided features are cut"
_WRONG = (
    _CUT,
    "an operation reduces divided features",
    "divided features are repeated",
    "one of the divided features is taken",
    "operands are divided in different ways",
    "whole features that are trained meet it",
    "a product of matrices contracts divided features",
    "queries, keys and values are not all divided by heads",
)
"""Reasons for whole features whose loss or gradients would differ, without an error."""


class _Planned(Flow):  # type: ignore[no-untyped-call]
    """Follows the features of layers that a plan divides."""

    def __init__(self, model: nn.Module, ranks: int, styles: Mapping[str, Any]) -> None:
        packs = {name: _PACKS.get(style, 1) for name, style in styles.items()}
        super().__init__(model, ranks, packs)
        self._styles = styles

    def _after(self, name: str) -> Any:
        leave = super()._after(name)

        def resume(layer: nn.Module, args: Any, output: Any) -> None:
            self._paused = False

        return leave if self._styles.get(name) in _PACKS else resume

    def _outcome(
        self, func: Any, name: str, args: Any, inputs: Any, outputs: Any, marked: Any
    ) -> Any:
        """Return the mark of the outputs; features that have no gradients may be used whole."""
        known = dict(self.roles.whole)
        mark = super()._outcome(func, name, args, inputs, outputs, marked)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t, _ in marked)):
            self.roles.whole = known
        return mark


def refuse_wrong(
    model: nn.Module, ranks: int, example: Any, styles: Mapping[str, Any], *, in_blocks: bool
) -> None:
    """Refuse a plan by which ranks would differ from one process.

    A model without an example, or whose run fails, is not checked.

    Args:
        model: the whole model.
        ranks: the number of ranks that share a layer.
        example: an input of the model, if it has one.
        styles: the style of each module.
        in_blocks: whether blocks hold parts of sequences, and sum gradients of their parameters.

    Raises:
        ConfigurationError: names the layer, and the operation or module that reads its features.
    """
    given = example if example is not None else getattr(model, "example_input_array", None)
    if given is None or not all(isinstance(style, str) for style in styles.values()):
        return
    [(_, _, args, kwargs)] = inputs_of(model, given)
    linear = {n: s for n, s in styles.items() if s in _PACKS or s == "rowwise"}
    flow = _Planned(model, ranks, linear)
    try:
        run_without_values(model, *alike(model, args, kwargs), flow, trains_all=False)
    except Exception:  # the model may count on divided sizes
        return
    for name, reason in flow.roles.whole.items():
        if name in linear and reason in _WRONG:
            is_cut = reason == _CUT and linear[name] == "colwise"
            packed = "'colwise_packed_2' for two layers packed in one, or " if is_cut else ""
            raise ConfigurationError(
                f"tensor_plan divides {name!r} by {linear[name]!r}, and in a run on the example "
                f"input {reason}: ranks would compute something else than one process. Expected "
                f"{packed}a tensor_plan without this layer and those that read its features"
            )
    used = frozenset().union(*flow.roles.sinks.values())
    for owner, names in flow.roles.partial.items():
        if not in_blocks and names & used and owner not in styles:
            raise ConfigurationError(
                f"tensor_plan divides {min(names & used)!r}, and each rank uses the parameters of "
                f"{owner or 'the model'!r} for its part of the features: expected {owner!r}: "
                f"{INNER!r} in tensor_plan, which sums their gradients over ranks"
            )
