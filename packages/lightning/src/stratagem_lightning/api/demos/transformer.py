"""A small language model, and text to train it with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from stratagem.errors import ConfigurationError
from stratagem_lightning.api.core.module import LightningModule


class Transformer(nn.Module):
    """A transformer that returns the log probabilities of the next word.

    Args:
        vocab_size: number of words.
        ninp: features of a word.
        nhead: heads of attention.
        nhid: features within a layer.
        nlayers: layers of the encoder, and of the decoder.
        dropout: probability that an activation is dropped.
    """

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True
        )
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp, self.vocab_size = ninp, vocab_size

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log probabilities: (batch * length, vocab_size).

        Args:
            inputs, target: indices of words: (batch, length).
            mask: of the target's attention: (length, length); None: no word sees a later one.
        """
        if mask is None:
            length = inputs.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length, inputs.device)
        source = self.pos_encoder(self.embedding(inputs) * math.sqrt(self.ninp))
        wanted = self.pos_encoder(self.embedding(target) * math.sqrt(self.ninp))
        output = self.decoder(self.transformer(source, wanted, tgt_mask=mask))
        return functional.log_softmax(output.reshape(-1, self.vocab_size), dim=-1)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position.

    Args:
        dim: features.
        dropout: probability that a feature is dropped.
        max_len: longest text.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(max_len).unsqueeze(1) / 10000 ** (torch.arange(0, dim, 2) / dim)
        encoding = torch.zeros(max_len, dim)
        encoding[:, 0::2], encoding[:, 1::2] = angles.sin(), angles.cos()[:, : dim // 2]
        self.register_buffer("pe", encoding, persistent=False)

    def forward(self, x: Tensor) -> Any:
        """Return the features with their positions: (batch, length, dim)."""
        encoding: Any = self.pe
        return self.dropout(x + encoding[: x.shape[1]])


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the same piece shifted by one word.

    Args:
        data_dir: folder of the file `wikitext-2.txt`.
        block_size: the number of words of a piece.
        download: ignored; the file must exist.

    Raises:
        ConfigurationError: the file does not exist.
    """

    def __init__(
        self, data_dir: Path = Path("./data"), block_size: int = 35, download: bool = True
    ) -> None:
        path = Path(data_dir) / "wikitext-2.txt"
        if not path.is_file():
            raise ConfigurationError(
                f"WikiText2 reads {str(path)!r}, which is not there: put a text there, such as "
                "train.txt of PyTorch's word_language_model example"
            )
        words = path.read_text(encoding="utf-8").replace("\n", " <eos> ").split()
        self.vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
        self.data = torch.tensor([self.vocabulary[word] for word in words])
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(self.vocabulary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block_size
        piece = self.data[start : start + self.block_size + 1]
        return piece[:-1], piece[1:]


class LightningTransformer(LightningModule):
    """The transformer with its training.

    Args:
        vocab_size: number of words.
    """

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Any:
        """Return log probabilities: (batch * length, vocab_size)."""
        return self.model(inputs, target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return functional.nll_loss(self(inputs, target), target.reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(WikiText2())
