"""Several documents in a row of tokens, each separate."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stratagem.errors import ConfigurationError, format_text

_IGNORED = -100


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, each with as many documents as fit, in their order.

    Position ids begin again with each document, by which models of transformers keep attention
    within documents. The first label of a document is -100, since its predecessor belongs to
    another one. Rows are padded by documents of one token that does not count.

    Args:
        documents: each a sequence of token ids, or a mapping with "input_ids" and maybe "labels".
            Each is read once when the rows are made, and again with its row.
        length: tokens in a row.
        pad_token_id: the token of the padding.
        truncate: cut documents that are longer than `length`, in place of an error.

    Raises:
        ConfigurationError: a document is longer than `length`, or has no token.

    Example:
        >>> from stratagem_extras.language import PackedDataset
        >>> rows = PackedDataset([[5, 6, 7], [8, 9], [1, 2, 3]], length=6)
        >>> len(rows), rows[0]["input_ids"].tolist(), rows[0]["position_ids"].tolist()
        (2, [5, 6, 7, 8, 9, 0], [0, 1, 2, 0, 1, 0])
        >>> rows[0]["labels"].tolist()
        [-100, 6, 7, -100, 9, -100]
    """

    def __init__(
        self,
        documents: Sequence[Any],
        length: int,
        *,
        pad_token_id: int = 0,
        truncate: bool = False,
    ) -> None:
        if type(length) is not int or length < 1:
            raise ConfigurationError(f"length={length!r}: expected a number of tokens from 1 on")
        if not hasattr(documents, "__len__") or not hasattr(documents, "__getitem__"):
            raise ConfigurationError(
                f"PackedDataset received a {type(documents).__name__}, which has no length or no "
                "items by number: expected a list of documents; PackedStream takes an iterable"
            )
        self._documents = documents
        self._length = length
        self._pad = pad_token_id
        self.rows: list[list[int]] = []
        """The indices of the documents in each row."""
        free = 0
        for index in range(len(documents)):
            tokens = tokens_of(documents[index], f"document {index}", length, truncate=truncate)
            size = min(len(tokens), length)
            if size > free:
                self.rows.append([])
                free = length
            self.rows[-1].append(index)
            free -= size

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return "input_ids", "labels" and "position_ids", each of shape (length,)."""
        documents = [
            read_document(self._documents[number], f"document {number}", self._length)
            for number in self.rows[index]
        ]
        return make_row(documents, self._length, self._pad)


Document = tuple[list[int], list[int]]
"""The tokens of a document, and their labels."""


def read_document(document: Any, name: str, length: int, *, truncate: bool = True) -> Document:
    """Return the tokens and labels of a document.

    Args:
        document: a sequence of token ids, or a mapping with "input_ids" and maybe "labels".
        name: the document in messages.
        length: the largest number of tokens.
        truncate: cut a longer document.

    Raises:
        ConfigurationError: the document is longer, or has no token, or another number of labels.
    """
    tokens = tokens_of(document, name, length, truncate=truncate)
    ids = [int(token) for token in islice(tokens, length)]
    labels = document.get("labels") if isinstance(document, Mapping) else None
    if labels is None:
        return ids, ids
    if len(labels) != len(tokens):
        raise ConfigurationError(
            f"{name} has {len(labels)} labels and {len(tokens)} tokens: expected a label for each "
            "token, -100 where it does not count"
        )
    return ids, [int(label) for label in islice(labels, length)]


def tokens_of(document: Any, name: str, length: int, *, truncate: bool) -> Any:
    """Return the tokens of a document, as it has them.

    Args:
        document, name, length, truncate: as for `read_document`.

    Raises:
        ConfigurationError: the document is longer, or has no token.
    """
    tokens = document["input_ids"] if isinstance(document, Mapping) else document
    if not len(tokens) or (len(tokens) > length and not truncate):
        raise ConfigurationError(
            f"{name} has {len(tokens)} tokens: expected 1 to {length}, the length of a row; "
            "truncate=True cuts longer ones"
        )
    return tokens


def make_row(documents: Sequence[Document], length: int, pad_token_id: int) -> dict[str, Tensor]:
    """Return documents as one row of tokens, with padding up to a length.

    Args:
        documents: the documents, as of `read_document`.
        length: the number of tokens with padding.
        pad_token_id: the token of the padding.
    """
    ids = [token for tokens, _ in documents for token in tokens]
    labels = [label for _, given in documents for label in (_IGNORED, *given[1:])]
    positions = [position for tokens, _ in documents for position in range(len(tokens))]
    free = length - len(ids)
    return {
        "input_ids": torch.tensor(ids + [pad_token_id] * free),
        "labels": torch.tensor(labels + [_IGNORED] * free),
        "position_ids": torch.tensor(positions + [0] * free),
    }


def pad_documents(
    documents: Sequence[Any], *, multiple: int = 8, pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Return a batch with a document in each row, padded at the right; a `collate_fn`.

    Args:
        documents: each a sequence of token ids, or a mapping with "input_ids" and maybe "labels".
        multiple: rows have the least length that holds each document and is a multiple of this
            number.
        pad_token_id: the token of the padding.

    Returns:
        "input_ids", "labels" with -100 for padding, and "attention_mask".

    Raises:
        ConfigurationError: a document has no token, or `multiple` is less than 1.

    Example:
        >>> from stratagem_extras.language import pad_documents
        >>> batch = pad_documents([[5, 6, 7], [8, 9]], multiple=4)
        >>> batch["labels"].tolist()
        [[5, 6, 7, -100], [8, 9, -100, -100]]
    """
    if type(multiple) is not int or multiple < 1:
        raise ConfigurationError(f"multiple={multiple!r}: expected a number of tokens from 1 on")
    read = _read_documents(documents)
    length = -(-max(len(tokens) for tokens, _ in read) // multiple) * multiple
    free = [length - len(tokens) for tokens, _ in read]
    padded = {
        "input_ids": [ids + [pad_token_id] * n for (ids, _), n in zip(read, free, strict=True)],
        "labels": [labels + [_IGNORED] * n for (_, labels), n in zip(read, free, strict=True)],
        "attention_mask": [[1] * (length - n) + [0] * n for n in free],
    }
    return {name: torch.tensor(rows) for name, rows in padded.items()}


def join_documents(documents: Sequence[Any]) -> dict[str, Tensor]:
    """Return a batch with all documents in one row, without padding; a `collate_fn`.

    Labels and position ids are as in `PackedDataset`.

    Args:
        documents: each a sequence of token ids, or a mapping with "input_ids" and maybe "labels".

    Raises:
        ConfigurationError: a document has no token.

    Example:
        >>> from stratagem_extras.language import join_documents
        >>> batch = join_documents([[5, 6, 7], [8, 9]])
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]])
    """
    read = _read_documents(documents)
    row = make_row(read, sum(len(tokens) for tokens, _ in read), 0)
    return {name: values.unsqueeze(0) for name, values in row.items()}


def _read_documents(documents: Sequence[Any]) -> list[Document]:
    return [
        read_document(document, f"document {index} of the batch", sys.maxsize)
        for index, document in enumerate(documents)
    ]


def check_packing(model: nn.Module) -> None:
    """Check that documents of a row do not see one another, by a run with four tokens.

    Models of transformers derive the mask from position ids that begin again, if the call has no
    `attention_mask`, and `config.use_cache` is False. This function sets it to False.

    Args:
        model: a model of transformers with whole weights.

    Raises:
        ConfigurationError: the logits of the second document depend on the first document.

    Example:
        >>> import torch
        >>> from stratagem_extras.language import check_packing
        >>> class Mixes(torch.nn.Module):
        ...     def forward(self, input_ids, position_ids):
        ...         return input_ids.float().cumsum(-1)
        >>> check_packing(Mixes())
        Traceback (most recent call last):
            ...
        stratagem.errors.ConfigurationError: documents in a row of Mixes see one another: ...
    """
    config = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # type: ignore[union-attr]
    device = next((parameter.device for parameter in model.parameters()), None)
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            first, second = (
                _logits(model(input_ids=torch.tensor([ids], device=device), position_ids=positions))
                for ids in ([0, 1, 0, 1], [1, 1, 0, 1])
            )
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be called with input_ids and position_ids of four "
            f"tokens ({type(error).__name__}: {format_text(str(error), 200)}): expected a decoder, "
            "which packed rows need"
        ) from error
    finally:
        for part, mode in modes:
            part.training = mode
    apart = (first[:, 2:] - second[:, 2:]).abs().max()
    if not apart <= 1e-5 * second[:, 2:].abs().max():
        raise ConfigurationError(
            f"documents in a row of {type(model).__name__} see one another: its logits of the "
            f"second document change by {float(apart):.1e} with the first one. Expected attention "
            "that follows position_ids, as of attn_implementation='sdpa', 'flex_attention' or "
            "'flash_attention_2' of transformers; else train on one document in each row"
        )


def _logits(output: Any) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return logits.float()
