"""Profilers: Stratagem's, with Lightning's exceptions."""

from __future__ import annotations

from stratagem import profilers
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class SimpleProfiler(profilers.SimpleProfiler):
    """Stratagem's; a wrong call of `start` or `stop` is a ValueError too."""

    start = in_lightnings_words(profilers.SimpleProfiler.start)
    stop = in_lightnings_words(profilers.SimpleProfiler.stop)


class AdvancedProfiler(profilers.AdvancedProfiler):
    """Stratagem's; a wrong call of `stop` is a ValueError too."""

    stop = in_lightnings_words(profilers.AdvancedProfiler.stop)


class PyTorchProfiler(profilers.PyTorchProfiler):
    """Stratagem's; a wrong key in `table_kwargs` is a KeyError too."""

    __init__ = in_lightnings_words(profilers.PyTorchProfiler.__init__)
