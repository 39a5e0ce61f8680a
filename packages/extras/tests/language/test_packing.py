"""Documents packed into rows, and the module that trains on them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from stratagem import Trainer
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_extras.language import (
    LanguageModule,
    PackedDataset,
    check_packing,
    join_documents,
    pad_documents,
)


def test_documents_keep_their_order_and_their_own_labels() -> None:
    documents = [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"input_ids": [8, 9]},
        {"input_ids": [1, 2, 3, 4]},
    ]
    rows = PackedDataset(documents, 6, pad_token_id=99)
    assert rows.rows == [[0, 1], [2]]
    first, second = rows[0], rows[1]
    assert first["input_ids"].tolist() == [5, 6, 7, 8, 9, 99]
    assert first["labels"].tolist() == [-100, -100, 7, -100, 9, -100]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]
    assert second["labels"].tolist() == [-100, 2, 3, 4, -100, -100]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([[1, 2], [1, 2, 3]], 2, "document 1 has 3 tokens: expected 1 to 2, the length of a row"),
        ([[1], []], 2, "document 1 has 0 tokens: expected 1 to 2"),
        ([[1]], 0, "length=0: expected a number of tokens from 1 on"),
    ],
)
def test_documents_that_do_not_fit_are_refused(
    documents: list[list[int]], length: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PackedDataset(documents, length)


def test_long_documents_are_cut_on_request() -> None:
    rows = PackedDataset([[1, 2, 3], [4]], 2, truncate=True)
    assert [rows[index]["input_ids"].tolist() for index in (0, 1)] == [[1, 2], [4, 0]]


class Output(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Model(nn.Module):
    """Predicts the next token from the present one; from all earlier ones if it mixes."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.mixes = mixes

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Output:
        hidden = self.words(input_ids)
        logits = self.head(hidden.cumsum(1) if self.mixes else hidden)
        if labels is None:
            return Output(logits=logits)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss=loss, logits=logits)


def test_attention_across_documents_is_refused_before_training() -> None:
    check_packing(Model())
    with pytest.raises(ConfigurationError, match="documents in a row of Model see one another"):
        LanguageModule(Model(mixes=True), packed=True)
    assert LanguageModule(Model(), packed=True).model.training


DOCUMENTS = [[(index * step + 3) % 20 for step in range(2 + index % 5)] for index in range(24)]
SGD = partial(torch.optim.SGD, lr=0.5)


def fit(module: LanguageModule, loader: Any, **options: Any) -> dict[str, float]:
    options = {"accelerator": "cpu", "devices": 1, "logger": False, **options}
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **options)
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_step_of_packed_rows_equals_one_of_all_documents() -> None:
    """Losses count tokens, so that the rows of a step and its micro-batches do not matter."""
    rows = PackedDataset(DOCUMENTS, 8)
    apart = PackedDataset(DOCUMENTS, 6)
    assert len(rows) % 3 == 0
    assert len({len(row) for row in rows.rows}) > 1
    weights = []
    for data, accumulate in ((rows, 1), (rows, 3), (apart, len(apart))):
        module = LanguageModule(Model(), SGD, packed=True)
        size = len(data) // accumulate
        found = fit(module, DataLoader(data, size), accumulate_grad_batches=accumulate)
        weights.append([*module.parameters()])
        loss = found["val_loss"]
        weights[-1].append(torch.tensor(loss))  # type: ignore[arg-type]
    for other in weights[1:]:
        for own, expected in zip(other, weights[0], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_a_scheduler_steps_with_the_optimizer_and_frozen_weights_stay() -> None:
    model = Model()
    model.words.requires_grad_(False)
    before = model.words.weight.clone()
    rates: list[float] = []

    def decay(optimizer: torch.optim.Optimizer) -> Any:
        def note(step: int) -> float:
            rates.append(1 / (1 + step))
            return rates[-1]

        return torch.optim.lr_scheduler.LambdaLR(optimizer, note)

    fit(LanguageModule(model, SGD, decay), DataLoader(PackedDataset(DOCUMENTS, 8), 4))
    assert len(rates) > 2
    assert torch.equal(model.words.weight, before)


def test_a_batch_without_labels_is_refused() -> None:
    rows = [{"input_ids": torch.ones(4, dtype=torch.long)}] * 4
    with pytest.raises(UserCodeError, match=r"received a batch without labels \(input_ids\)"):
        fit(LanguageModule(Model(), SGD), DataLoader(rows, 2))  # type: ignore[arg-type]


def test_a_model_without_trained_weights_is_refused() -> None:
    module = LanguageModule(Model().requires_grad_(False))
    with pytest.raises(ConfigurationError, match="no parameter of Model has requires_grad=True"):
        fit(module, DataLoader(PackedDataset(DOCUMENTS, 8), 4))


def test_documents_are_padded_to_a_multiple() -> None:
    documents = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]}, [1, 2]]
    batch = pad_documents(documents, multiple=4, pad_token_id=50)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 50, 50, 50], [1, 2, *[50] * 6]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8, 9, *[-100] * 3], [1, 2, *[-100] * 6]]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] * 2 + [0] * 6]
    joined = join_documents(documents)
    assert joined["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 2]]
    assert joined["labels"].tolist() == [[-100, -100, 7, 8, 9, -100, 2]]
    assert joined["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]


def test_batches_that_cannot_be_padded_are_refused() -> None:
    for collate in (pad_documents, join_documents):
        with pytest.raises(ConfigurationError, match="document 1 of the batch has 0 tokens: exp"):
            collate([[1], []])
        with pytest.raises(ConfigurationError, match="document 0 of the batch has 1 labels and 2"):
            collate([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(ConfigurationError, match="multiple=0: expected a number of tokens from 1"):
        pad_documents([[1]], multiple=0)


def test_documents_without_a_length_are_refused() -> None:
    documents: Any = ([number] for number in range(3))
    with pytest.raises(ConfigurationError, match="received a generator, which has no length"):
        PackedDataset(documents, 4)
