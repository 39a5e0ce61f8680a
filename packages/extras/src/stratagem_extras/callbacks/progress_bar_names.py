"""RichProgressBar and TQDMProgressBar: the progress bar under the names that users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.callbacks import ProgressBar
from stratagem.errors import ConfigurationError


class RichProgressBar(ProgressBar):
    """`ProgressBar`, with Lightning's arguments.

    The bar is refreshed by time, independent of the duration of a batch, so `refresh_rate` only
    decides whether the bar is visible.

    Args:
        refresh_rate: 0 hides the bar; any other number shows it.
        leave: ignored: a line of each epoch stays in any case.
        console_kwargs: arguments of the `rich.console.Console` of the bar.

    Raises:
        ConfigurationError: `refresh_rate` is less than 0.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import RichProgressBar
        >>> trainer = Trainer(callbacks=RichProgressBar(leave=True), logger=False)
        >>> trainer.callbacks[0].is_enabled
        True
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        *,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if refresh_rate < 0:
            raise ConfigurationError(
                f"{type(self).__name__}(refresh_rate={refresh_rate!r}): expected 0, which shows no "
                "bar, or a number above it"
            )
        console = None
        if console_kwargs is not None:
            from rich.console import Console

            console = Console(**console_kwargs)
        super().__init__(console=console)
        self.refresh_rate = refresh_rate
        self.leave = leave

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return super().is_enabled and self.refresh_rate > 0


class TQDMProgressBar(RichProgressBar):
    """`RichProgressBar` under another name; tqdm is not needed.

    Args:
        refresh_rate: 0: show no bar.
        process_position: bars that other processes show above this one; ours needs no such number.
        leave: a line of each epoch stays in any case.

    Example:
        >>> from stratagem.callbacks import TQDMProgressBar
        >>> TQDMProgressBar(refresh_rate=0).is_disabled
        True
    """

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False
    ) -> None:
        super().__init__(refresh_rate, leave)
        self.process_position = process_position
