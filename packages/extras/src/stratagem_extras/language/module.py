"""LanguageModule: a model of transformers as it is, with losses by tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem import Module
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_extras.language.packing import check_packing
from stratagem_extras.pretrained.adapters import configs_of

_IGNORED = -100


def count_labels(labels: Tensor, *, shift: bool = True, ignore_index: int = _IGNORED) -> Tensor:
    """Return the number of labels that a loss is a mean of; for `Module.loss_weight`.

    Args:
        labels: of shape (batch, sequence).
        shift: whether the model predicts the next token, so that the first label of each sequence
            does not count.
        ignore_index: a label that does not count.

    Example:
        >>> import torch
        >>> from stratagem_extras.language import count_labels
        >>> int(count_labels(torch.tensor([[5, -100, 7, 8]])))
        2
    """
    counted = labels[..., 1:] if shift else labels
    return (counted != ignore_index).sum()


class LanguageModule(Module):
    """Trains a model of transformers, or of PEFT, on batches with labels.

    The loss of a step is the mean over the labels of all micro-batches and ranks. Parameters
    with `requires_grad=False` stay frozen. The model is set to training mode, which
    `from_pretrained` does not do.

    Args:
        model: called as `model(**batch)`; its output has the `loss`.
        optimizer: called with the trained parameters. Default: AdamW with a learning rate of 2e-5.
        scheduler: called with the optimizer; stepped after each optimizer step. None: a constant
            learning rate.
        shift: whether the model predicts the next token. Default: whether its loss does.
        packed: whether batches have several documents in a row, as of `PackedDataset`. The model's
            attention is then checked by `check_packing`.

    Raises:
        ConfigurationError: `packed=True`, and the model lets documents of a row attend to one
            another.

    Example:
        >>> import torch
        >>> from stratagem_extras.language import LanguageModule
        >>> module = LanguageModule(torch.nn.Linear(2, 2), partial(torch.optim.SGD, lr=0.1))
        >>> module.loss_weight({"labels": torch.tensor([[-100, 3, 4]])}).item()
        2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        *,
        shift: bool | None = None,
        packed: bool = False,
    ) -> None:
        super().__init__()
        if packed:
            check_packing(model)
        self.model = model.train()
        self._optimizer = optimizer or partial(torch.optim.AdamW, lr=2e-5)
        self._scheduler = scheduler
        self._shifts = _shifts(model) if shift is None else shift
        self._packed = True if packed else None
        """Whether rows have several documents; None: the first batch shows it."""

    def forward(self, **batch: Any) -> Any:
        """Return the model's output."""
        return self.model(**batch)

    def loss_weight(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the number of labels that the loss of a batch is a mean of.

        Raises:
            UserCodeError: the batch has no labels.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
            has = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise UserCodeError(
                f"LanguageModule received a batch without labels ({has}): expected a dict with "
                "'input_ids' and 'labels', such as a collator of transformers returns; labels of "
                "-100 do not count"
            )
        return count_labels(batch["labels"], shift=self._shifts)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it as "loss"."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log "val_loss", the mean over all labels."""
        self._evaluate("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log "test_loss", the mean over all labels."""
        self._evaluate("test_loss", batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with the scheduler if one was given."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigurationError(
                f"no parameter of {type(self.model).__name__} has requires_grad=True: expected a "
                "model with some to train, such as the adapters of get_peft_model"
            )
        optimizer = self._optimizer(trained)
        if self._scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the configs of PEFT's adapters, so that a checkpoint can become their folder."""
        if configs := configs_of(self.model):
            checkpoint["adapters"] = configs

    def _evaluate(self, name: str, batch: Any) -> None:
        count = int(self.loss_weight(batch))
        if count:  # the mean over no label is NaN
            self.log(name, self._loss(batch), batch_size=count, prog_bar=True)

    def _loss(self, batch: Any) -> Tensor:
        if "position_ids" in batch:
            self._check_documents(batch)
        loss: Tensor = self.model(**batch).loss
        return loss

    def _check_documents(self, batch: Mapping[str, Any]) -> None:
        """Refuse what lets documents of a row attend to one another.

        Raises:
            UserCodeError: names it.
        """
        mask = batch.get("attention_mask")
        is_mask = isinstance(mask, Tensor) and mask.ndim == 2
        if self._packed is None:
            positions = batch["position_ids"]
            begins = positions[..., 1:] <= positions[..., :-1]
            if isinstance(mask, Tensor) and mask.shape == positions.shape:
                begins = begins & (mask[:, 1:] * mask[:, :-1]).bool()  # padding has no order
            self._packed = bool(begins.any())
        if self._packed and is_mask:
            raise UserCodeError(
                "a batch of rows with several documents has an attention_mask, with which models "
                "of transformers let the documents see one another: leave it out of the batch; "
                "position_ids that begin again separate documents, and labels of -100 mark padding"
            )
        if self._packed and getattr(getattr(self.model, "config", None), "use_cache", False):
            raise UserCodeError(
                "a batch has rows with several documents, and config.use_cache is True, with which "
                "models of transformers let the documents see one another: pass packed=True to "
                "LanguageModule, and leave config.use_cache as it is then"
            )


def _shifts(model: Any) -> bool:
    """Return whether the loss of a model is that of the next token."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(getattr(inner, "loss_function", None), "__name__", "") in ("", "ForCausalLMLoss")
