"""A small recurrent model, and the sampler that lets it read a text piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler

from stratagem_lightning.api.core.module import LightningModule
from stratagem_lightning.api.demos.transformer import WikiText2


class SimpleLSTM(nn.Module):
    """An LSTM that returns the log probabilities of the next word.

    Args:
        vocab_size: number of words.
        ninp: features of a word.
        nhid: features of the state.
        nlayers: layers.
        dropout: probability that an activation is dropped.
    """

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 512,
        nhid: int = 512,
        nlayers: int = 4,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.vocab_size, self.nhid, self.nlayers = vocab_size, nhid, nlayers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(
        self, inputs: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return log probabilities, (batch * length, vocab_size), and the state."""
        output, hidden = self.rnn(self.drop(self.encoder(inputs)), hidden)
        decoded = self.decoder(self.drop(output)).reshape(-1, self.vocab_size)
        return functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return a state of zeros: (nlayers, batch_size, nhid), twice."""
        zeros = next(self.parameters()).new_zeros(self.nlayers, batch_size, self.nhid)
        return zeros, zeros.clone()


class SequenceSampler(Sampler[list[int]]):
    """Batches in which the n-th sample continues the n-th sample of the previous batch.

    Args:
        dataset: pieces of a text, in order.
        batch_size: samples in a batch.
    """

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.chunk_size = len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.chunk_size):
            yield [first + number * self.chunk_size for number in range(self.batch_size)]

    def __len__(self) -> int:
        return self.chunk_size


class LightningLSTM(LightningModule):
    """The LSTM with its training; the state is kept between batches.

    Args:
        vocab_size: number of words.
    """

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_end(self) -> None:
        """Begin with zeros again."""
        self.hidden = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        if self.hidden is None:
            self.hidden = self.model.init_hidden(len(inputs))
        hidden = self.hidden[0].detach(), self.hidden[1].detach()
        output, self.hidden = self.model(inputs, hidden)
        loss = functional.nll_loss(output, target.reshape(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def prepare_data(self) -> None:
        """Ask for the text before anything else."""
        WikiText2(download=True)

    def train_dataloader(self) -> Any:
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=20))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=20.0)
