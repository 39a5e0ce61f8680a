"""TQDMProgressBar: on tqdm, refreshed by batches, made of bars that can be overridden."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigurationError
from stratagem_lightning.api.callbacks.progress import ProgressBar

if importlib.util.find_spec("ipywidgets") is None:
    from tqdm import tqdm as _tqdm  # type: ignore[import-untyped]
else:
    from tqdm.auto import tqdm as _tqdm  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class Tqdm(_tqdm):  # type: ignore[misc]  # without types
    """A tqdm bar whose numbers have a constant width."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Return a number's text; a float's, or a number's in a string, has at least 5 letters.

        Example:
            >>> Tqdm.format_num(0.1), Tqdm.format_num(3), Tqdm.format_num("abc")
            ('0.100', '3', 'abc')
        """
        text = n if isinstance(n, str) else str(_tqdm.format_num(n))
        if isinstance(n, int) or "e" in text:
            return text
        try:
            float(text)
        except ValueError:
            return text
        if "." not in text and len(text) < 5:
            text += "."
        return text if "." not in text else text.ljust(5, "0")


def _bar_of(stage: str) -> Any:
    """Return a property: the bar of a stage, an error before there is one."""

    def read(self: TQDMProgressBar) -> Any:
        if stage not in self._bars:
            raise ConfigurationError(
                f"{type(self).__name__}.{stage}_progress_bar: there is none before the first "
                f"{stage} batch; expected it to be read in a hook of a run"
            )
        return self._bars[stage]

    def write(self: TQDMProgressBar, bar: Any) -> None:
        self._bars[stage] = bar

    return property(read, write, doc=f"The bar of {stage} batches.")


class TQDMProgressBar(ProgressBar):
    """A bar of tqdm for training, and one for each evaluation; override `init_..._tqdm`.

    Args:
        refresh_rate: batches between two refreshes; 0: show no bar. The environment's
            TQDM_MINITERS is the least.
        process_position: bars that are shown above it.
        leave: keep the bar of each epoch.

    Example:
        >>> from stratagem_lightning.api.callbacks.tqdm_bar import TQDMProgressBar
        >>> class Named(TQDMProgressBar):
        ...     def init_validation_tqdm(self):
        ...         bar = super().init_validation_tqdm()
        ...         bar.set_description("running validation ...")
        ...         return bar
        >>> Named(refresh_rate=10).is_enabled
        True
    """

    BAR_FORMAT = (
        "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
    )

    train_progress_bar = _bar_of("train")
    val_progress_bar = _bar_of("val")
    test_progress_bar = _bar_of("test")
    predict_progress_bar = _bar_of("predict")

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False
    ) -> None:
        super().__init__()
        self.refresh_rate = max(int(os.environ.get("TQDM_MINITERS", 0)), refresh_rate)
        self.process_position = process_position
        self._leave = leave
        self._bars: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": {}}

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return super().is_enabled and self.refresh_rate > 0

    # -- bars

    def _new(self, description: str, *, leave: bool, below: int = 0, **options: Any) -> Tqdm:
        return Tqdm(
            desc=description,
            position=2 * self.process_position + below,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    def init_sanity_tqdm(self) -> Any:
        """Return the bar of the sanity check."""
        return self._new(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Any:
        """Return the bar of training."""
        return self._new(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Any:
        """Return the bar of a validation, below the training bar within a fit."""
        within = self.trainer.state.fn == "fit"
        return self._new(self.validation_description, leave=not within, below=int(within))

    def init_test_tqdm(self) -> Any:
        """Return the bar of testing."""
        return self._new(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Return the bar of predicting."""
        return self._new(self.predict_description, leave=True, smoothing=0)

    @staticmethod
    def _restart(bar: Any, total: float, description: str) -> None:
        bar.reset()
        bar.total = None if math.isinf(total) else total
        bar.initial = 0
        bar.set_description(description)

    def _advance(self, bar: Any, done: int) -> bool:
        """Show how many batches are done, if it is time; return whether it was."""
        due = self.is_enabled and (done % self.refresh_rate == 0 or done == bar.total)
        if due and not bar.disable:
            bar.n = done
            bar.refresh()
        return due

    def _close(self) -> None:
        super()._close()
        for bar in self._bars.values():
            bar.close()

    def print(self, *values: Any, **options: Any) -> None:
        """Print above the bars, if any is shown."""
        shown = next((bar for bar in self._bars.values() if not bar.disable), None)
        if shown is None:
            super().print(*values, **options)
        else:
            shown.write(options.pop("sep", " ").join(map(str, values)), **options)

    # -- training

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Nothing: the bars begin with their batches."""

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Nothing."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Make the bar."""
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Begin an epoch."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        epoch = f"Epoch {trainer.current_epoch}"
        self._restart(self.train_progress_bar, self.total_train_batches, epoch)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the batch if the refresh rate says so."""
        if self._advance(self.train_progress_bar, batch_idx + 1):
            self._show_values(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Show the epoch's values."""
        self._show_values(trainer, module)
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Leave the bar."""
        self.train_progress_bar.close()

    def _show_values(self, trainer: Trainer, module: Module) -> None:
        bar = self.train_progress_bar
        if not bar.disable:
            bar.set_postfix(self.get_metrics(trainer, module))

    # -- evaluation

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        """Make the bar."""
        self.val_progress_bar = self.init_sanity_tqdm()
        self.train_progress_bar = Tqdm(disable=True)

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """Take it away."""
        self._close()

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Make the bar."""
        if not trainer.sanity_checking:
            self.val_progress_bar = self.init_validation_tqdm()

    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            checks = trainer.sanity_checking
            what = self.sanity_check_description if checks else self.validation_description
            total = self.total_val_batches_current_dataloader
            self._restart(self.val_progress_bar, total, f"{what} DataLoader {dataloader_idx}")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the batch if the refresh rate says so."""
        self._advance(self.val_progress_bar, batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Remove the bar, and show the values beside the training bar."""
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn == "fit" and "train" in self._bars:
            self._show_values(trainer, module)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Make the bar."""
        self.test_progress_bar = self.init_test_tqdm()

    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_test_batches_current_dataloader
            name = f"{self.test_description} DataLoader {dataloader_idx}"
            self._restart(self.test_progress_bar, total, name)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the batch if the refresh rate says so."""
        self._advance(self.test_progress_bar, batch_idx + 1)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """Leave the bar."""
        self.test_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Make the bar."""
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_predict_batches_current_dataloader
            name = f"{self.predict_description} DataLoader {dataloader_idx}"
            self._restart(self.predict_progress_bar, total, name)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the batch if the refresh rate says so."""
        self._advance(self.predict_progress_bar, batch_idx + 1)

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        """Leave the bar."""
        self.predict_progress_bar.close()
        self.reset_dataloader_idx_tracker()
