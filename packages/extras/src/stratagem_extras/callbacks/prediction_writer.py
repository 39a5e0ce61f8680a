"""BasePredictionWriter: writes what is predicted, batch by batch or at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class BasePredictionWriter(Callback):
    """Writes the predictions of `trainer.predict`; override either method, or both.

    Each rank writes its own part of the data; the indices identify the samples. With
    `trainer.predict(..., return_predictions=False)` and "batch", predictions are not kept.

    Args:
        write_interval: when to write: "batch", "epoch", or "batch_and_epoch".

    Raises:
        ConfigurationError: `write_interval` has another value.

    Example:
        >>> import torch
        >>> from stratagem import Module, Trainer
        >>> from stratagem.callbacks import BasePredictionWriter
        >>> class Write(BasePredictionWriter):
        ...     def write_on_batch_end(
        ...         self, trainer, pl_module, prediction, batch_indices, batch, batch_idx,
        ...         dataloader_idx,
        ...     ):
        ...         print(batch_indices, prediction.tolist())
        >>> class Doubles(Module):
        ...     def predict_step(self, batch, batch_idx):
        ...         return 2 * batch
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, callbacks=Write(write_interval="batch"),
        ...     logger=False, enable_progress_bar=False,
        ... )
        >>> numbers = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
        >>> trainer.predict(Doubles(), numbers, return_predictions=False)
        [0, 1] [0, 2]
        [2, 3] [4, 6]
    """

    def __init__(
        self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch"
    ) -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ConfigurationError(
                f"{type(self).__name__}: `write_interval` should be one of ['batch', 'epoch', "
                f"'batch_and_epoch'], received {write_interval!r}"
            )
        self.interval = write_interval
        self._recorders: list[_RecordedIndices | None] = []
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    @property
    def epoch_batch_indices(self) -> list[list[Any]]:
        """The samples of each batch that is kept for the end, a list for each loader."""
        return self._indices

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write a batch.

        Args:
            trainer, pl_module: the objects of the run.
            prediction: the return value of `predict_step`.
            batch_indices: the dataset indices of the samples in the batch; None if samples are not
                read by index.
            batch: the input of the prediction.
            batch_idx, dataloader_idx: the number of the batch on this rank, and of its loader.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define write_on_batch_end()")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write all batches of this rank.

        Args:
            trainer, pl_module: of the run.
            predictions: of each batch; of several loaders, a list for each.
            batch_indices: a list for each loader, of each batch's indices.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define write_on_epoch_end()")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Note from here on which samples are read."""
        loaders = trainer.run.evaluation_loaders["predict"]
        self._recorders = []
        for number, one in enumerate(loaders):
            recorder = _recording(one.loader)
            self._recorders.append(None if recorder is None else recorder[1])
            if recorder is not None:
                loaders[number] = replace(one, loader=recorder[0])
        self._predictions = [[] for _ in loaders]
        self._indices = [[] for _ in loaders]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write a batch, or keep it."""
        recorder = self._recorders[dataloader_idx]
        indices = None if recorder is None else recorder.take(batch_idx)
        if self.interval != "epoch":
            self.write_on_batch_end(
                trainer, module, outputs, indices, batch, batch_idx, dataloader_idx
            )
        if self.interval != "batch":
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Write the predictions that were kept."""
        predictions, self._predictions = self._predictions, []
        if self.interval != "batch":
            several = len(predictions) > 1
            self.write_on_epoch_end(
                trainer, module, predictions if several else predictions[0], self._indices
            )


class _RecordedIndices:
    """A sampler of batches that notes which indices it has yielded."""

    def __init__(self, inner: Any, *, is_batched: bool) -> None:
        self._inner = inner
        self._is_batched = is_batched
        self._read: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        self._read = {}
        for number, indices in enumerate(self._inner):
            # Workers are handed some batches ahead of the one that is predicted for.
            self._read[number] = list(indices) if self._is_batched else [indices]
            yield indices

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)  # for example during a copy
        return getattr(self._inner, name)

    def take(self, batch_idx: int) -> Any:
        """Return the indices of a batch, which are not asked for again."""
        return self._read.pop(batch_idx, None)


def _recording(loader: Any) -> tuple[Any, _RecordedIndices] | None:
    """Return a copy of a loader that notes its indices; None: it does not read by index."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    is_batched = loader.batch_sampler is not None
    inner = loader.batch_sampler if is_batched else loader.sampler
    recorder = _RecordedIndices(inner, is_batched=is_batched)
    copied = copy.copy(loader)
    # DataLoader refuses assignments to these after __init__.
    copied.__dict__["batch_sampler" if is_batched else "sampler"] = recorder
    copied.__dict__["_iterator"] = None
    return copied, recorder
