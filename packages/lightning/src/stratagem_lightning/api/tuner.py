"""Tuner: Stratagem's, with Lightning's margin and phrases."""

from __future__ import annotations

from typing import Any

from stratagem.errors import ConfigurationError
from stratagem_extras import tuner
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class Tuner(tuner.Tuner):
    """Chooses a batch size and a learning rate; as `stratagem.Tuner`.

    As in Lightning, `scale_batch_size(mode="binsearch")` takes its margin off also if memory never
    ran out, so a run has the same batch size.

    Args:
        trainer: the Trainer whose strategy, precision and options are tried.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> Tuner(Trainer(accelerator="cpu")).__class__.__name__
        'Tuner'
    """

    @in_lightnings_words
    def scale_batch_size(self, *args: Any, **options: Any) -> int | None:
        """Search for the largest batch size; as there.

        Raises:
            ConfigurationError: as there; or a BatchSizeFinder would search again in the run.
        """
        self._refuse_finder(tuner.BatchSizeFinder)
        return super().scale_batch_size(*args, **options)

    @in_lightnings_words
    def lr_find(self, *args: Any, **options: Any) -> Any:
        """Search for a learning rate; as there.

        Raises:
            ConfigurationError: as there; or a LearningRateFinder would search again in the run.
        """
        self._refuse_finder(tuner.LearningRateFinder)
        return super().lr_find(*args, **options)

    def _scale(self, job: Any, steps: int, limits: dict[str, Any]) -> int | None:
        return super()._scale(job, steps, {**limits, "always_has_margin": True})

    def _refuse_finder(self, kind: type) -> None:
        if any(isinstance(callback, kind) for callback in self._trainer.callbacks):
            raise ConfigurationError(
                f"Trainer is already configured with a `{kind.__name__}` callback, which searches "
                "again when the run begins: use either the Tuner or the callback"
            )
