"""Losses of large vocabularies: torch's numbers, from the logits of some tokens at a time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stratagem.errors import ConfigurationError
from stratagem_extras.language import chunk_loss, linear_cross_entropy
from stratagem_extras.planner.plan import plan_memory


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_loss_and_gradients_are_torchs(
    reduction: str, options: dict[str, Any], chunk_size: int
) -> None:
    found = []
    targets = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(1))
    targets[0, :2] = options.get("ignore_index", -100)
    for chunks in (False, True):
        torch.manual_seed(2)
        hidden = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
        head = nn.Linear(8, 20).double()
        if chunks:
            loss = linear_cross_entropy(
                hidden, head, targets, reduction=reduction, chunk_size=chunk_size, **options
            )
        else:
            logits = head(hidden).flatten(0, 1)
            loss = cross_entropy(logits, targets.flatten(), reduction=reduction, **options)
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        found.append([loss, hidden.grad, head.weight.grad, head.bias.grad])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)


def test_a_weight_takes_the_place_of_a_layer_and_nothing_to_count_is_nan() -> None:
    hidden, weight = torch.ones(2, 3), torch.ones(5, 3)
    assert linear_cross_entropy(hidden, weight, torch.tensor([1, 2])).isfinite()
    assert linear_cross_entropy(hidden, weight, torch.tensor([-100, -100])).isnan()


def test_losses_of_bfloat16_are_computed_in_float32() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(64, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    targets = torch.arange(50).repeat(2)[:64]
    expected = cross_entropy((hidden @ weight.t()).float(), targets)
    assert torch.equal(linear_cross_entropy(hidden, weight, targets), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"targets": torch.zeros(3, dtype=torch.long)},
            r"shape \(2, 3\) and targets have \(3,\)",
        ),
        ({"reduction": "none"}, "reduction='none': expected 'mean' or 'sum'"),
        ({"chunk_size": 0}, "chunk_size=0: expected a number of tokens"),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"targets": torch.zeros(2, dtype=torch.long), **arguments}
    with pytest.raises(ConfigurationError, match=message):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), **given)


class Output(dict[str, Any]):
    """An output with attributes, as of transformers."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def ForCausalLMLoss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    flat = logits[:, :-1].float().flatten(0, 1)
    count = options.get("num_items_in_batch")
    total = cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum" if count else "mean")
    return total / count if count else total


class Model(nn.Module):
    """Has the form of a model of transformers."""

    def __init__(self, words: int = 50, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head = nn.Embedding(words, 8), nn.Linear(8, words, bias=False)
        self.loss_function: Any = ForCausalLMLoss
        self.scale = scale

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Output:
        logits = self.head(self.words(input_ids).tanh())
        if self.scale < 0:
            logits.neg_()
        elif self.scale != 1.0:
            logits = logits * self.scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.head.out_features, **kwargs)
        return Output(loss=loss, logits=logits)


IDS = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(4))
LABELS = IDS.masked_fill(IDS < 10, -100)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 9}])
def test_chunk_loss_changes_no_number(options: dict[str, Any]) -> None:
    plain, chunked = Model(), Model()
    chunk_loss(nn.ModuleList([chunked]), chunk_size=5)
    losses = [model(IDS, LABELS, **options).loss for model in (plain, chunked)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for own, expected in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_its_own_loss(copied: Callable[[Model], Model]) -> None:
    """As averaged weights and launchers that pickle the model make one."""
    model = Model()
    chunk_loss(model, chunk_size=5)
    copy = copied(model)
    with torch.no_grad():
        model.head.weight.zero_()
    loss = copy(IDS, LABELS).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(Model()(IDS, LABELS).loss.detach()))
    assert copy.head.weight.grad is not None
    assert torch.equal(copy(IDS).logits, Model()(IDS).logits)


def test_evaluation_and_calls_without_labels_have_their_logits() -> None:
    plain, chunked = Model(), Model()
    chunk_loss(chunked)
    assert chunked(IDS, LABELS).logits is None
    assert torch.equal(chunked(IDS).logits, plain(IDS).logits)
    with torch.no_grad():
        assert torch.equal(chunked(IDS, LABELS).logits, plain(IDS, LABELS).logits)
        assert torch.equal(chunked(IDS, LABELS).loss, plain(IDS, LABELS).loss)


@pytest.mark.parametrize("scale", [0.5, -1.0])
def test_a_model_that_scales_its_logits_is_refused(scale: float) -> None:
    model = Model(scale=scale)
    chunk_loss(model)
    with pytest.raises(ConfigurationError, match="Model changes its logits after its last layer"):
        model(IDS, LABELS)


def test_a_model_without_such_a_loss_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no part of Sequential is a model"):
        chunk_loss(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigurationError, match=r"chunk_size=0\.5: expected a number of tokens"):
        chunk_loss(Model(), chunk_size=0.5)  # type: ignore[arg-type]


def test_a_vocabulary_of_128_thousand_words_takes_a_quarter_of_the_memory() -> None:
    """Batches of 8 x 512 tokens; the planner counts each byte of a step."""
    batch = {"input_ids": torch.zeros(8, 512, dtype=torch.long)}
    batch["labels"] = batch["input_ids"]

    def working(model: Any) -> int:
        planned = plan_memory(model, batch, strategies=["single_device"], optimizer="SGD")
        memory = planned.strategies[0].memory
        assert memory is not None
        return memory.working

    def chunked() -> nn.Module:
        model = Model(128_000)
        chunk_loss(model)
        return model

    assert working(chunked) < 0.25 * working(lambda: Model(128_000))
