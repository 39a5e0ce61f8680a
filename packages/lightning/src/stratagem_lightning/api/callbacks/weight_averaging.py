"""EMAWeightAveraging: with Lightning's meaning of `update_starting_at_epoch`."""

from __future__ import annotations

from stratagem_extras.callbacks.weight_averaging import EMAWeightAveraging as NativeAveraging


class EMAWeightAveraging(NativeAveraging):
    """Stratagem's, which also updates the average at the end of epochs.

    Args:
        update_starting_at_epoch: update at the end of this epoch and of each later one, in addition
            to the updates after steps, which it does not delay. None: only after steps.
        *args, **options: as in `stratagem.callbacks.EMAWeightAveraging`.

    Example:
        >>> from stratagem_lightning.api.callbacks.weight_averaging import EMAWeightAveraging
        >>> average = EMAWeightAveraging(update_every_n_steps=5, update_starting_at_epoch=2)
        >>> [epoch for epoch in range(4) if average.should_update(epoch_idx=epoch)]
        [2, 3]
        >>> average.should_update(step_idx=0)
        True
    """

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the average is updated after a step or an epoch."""
        if epoch_idx is not None:
            start = self.update_starting_at_epoch
            return start is not None and epoch_idx >= start
        return step_idx is not None and self._is_due(step_idx)
