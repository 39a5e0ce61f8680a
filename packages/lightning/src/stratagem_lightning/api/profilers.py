"""Profilers: Stratagem's, with Lightning's exceptions."""

from __future__ import annotations

from stratagem import profilers
from stratagem_lightning.api.instance_check import InstanceCheck, of_class
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class SimpleProfiler(profilers.SimpleProfiler, metaclass=InstanceCheck):
    """Stratagem's; a wrong call of `start` or `stop` is a ValueError too.

    Example:
        >>> isinstance(profilers.SimpleProfiler(), SimpleProfiler)
        True
    """

    is_instance = of_class(profilers.SimpleProfiler)
    start = in_lightnings_words(profilers.SimpleProfiler.start)
    stop = in_lightnings_words(profilers.SimpleProfiler.stop)


class AdvancedProfiler(profilers.AdvancedProfiler, metaclass=InstanceCheck):
    """Stratagem's; a wrong call of `stop` is a ValueError too."""

    is_instance = of_class(profilers.AdvancedProfiler)
    stop = in_lightnings_words(profilers.AdvancedProfiler.stop)


class PyTorchProfiler(profilers.PyTorchProfiler, metaclass=InstanceCheck):
    """Stratagem's; a wrong key in `table_kwargs` is a KeyError too."""

    is_instance = of_class(profilers.PyTorchProfiler)
    __init__ = in_lightnings_words(profilers.PyTorchProfiler.__init__)
