"""What a progress bar of your own is made of, as Lightning's has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem import callbacks
from stratagem.callbacks import batches_to_evaluate, batches_to_train

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return `v_num`, the version of the first logger that has one: at most its last 4 letters."""
    versions = (getattr(logger, "version", None) for logger in trainer.loggers)
    version = next((one for one in versions if one not in ("", None)), None)
    if version is None:
        return {}
    text = str(version).removeprefix("version_")
    return {"v_num": int(text) if text.isdecimal() else text[-4:]}


class ProgressBar(callbacks.ProgressBar):
    r"""A bar of your own: it shows nothing, and has the parts of a bar.

    Example:
        >>> from stratagem_lightning.api.callbacks.progress import ProgressBar
        >>> class Percent(ProgressBar):
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         print(f"{batch_idx / self.total_train_batches:.0%}", end="\\r")
    """

    sanity_check_description = "Sanity Checking"
    train_description = "Training"
    validation_description = "Validation"
    test_description = "Testing"
    predict_description = "Predicting"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._loader: int | None = None

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Note the Trainer; only rank 0 shows a bar."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, Any]:
        """Return the values beside a bar: the version of the logs, and values for the bar."""
        return {**get_standard_metrics(trainer), **super().get_metrics(trainer, module)}

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether another loader is read than when this was asked last."""
        before, self._loader = self._loader, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget which loader was read."""
        self._loader = None

    @property
    def total_train_batches(self) -> float:
        """Batches of the epoch, up to `max_steps`; infinity: not known."""
        return batches_to_train(self.trainer)

    @property
    def total_val_batches(self) -> float:
        """The number of batches of this epoch's validation, over all loaders."""
        of, run = self.trainer, self.trainer.latest_run
        if (
            run is not None
            and run.stage == "fit"
            and not run.validation.is_in_epoch(of.current_epoch)
        ):
            return 0
        return sum(batches_to_evaluate(of, "validation"))

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Batches of the loader that is read."""
        return batches_to_evaluate(self.trainer, "validation")[self._loader or 0]

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of the loader that is read."""
        return batches_to_evaluate(self.trainer, "test")[self._loader or 0]

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Batches of the loader that is read."""
        return batches_to_evaluate(self.trainer, "predict")[self._loader or 0]
