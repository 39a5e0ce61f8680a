"""Profilers: Stratagem's, with Lightning's exceptions."""

from __future__ import annotations

from stratagem_extras.profilers import advanced, pytorch, simple
from stratagem_lightning.api.instance_check import InstanceCheck, of_class
from stratagem_lightning.api.utilities.phrases import in_lightnings_words


class SimpleProfiler(simple.SimpleProfiler, metaclass=InstanceCheck):
    """Stratagem's; a wrong call of `start` or `stop` is a ValueError too.

    Example:
        >>> isinstance(simple.SimpleProfiler(), SimpleProfiler)
        True
    """

    is_instance = of_class(simple.SimpleProfiler)

    @in_lightnings_words
    def start(self, action_name: str) -> None:
        """Note when an action begins."""
        super().start(action_name)

    @in_lightnings_words
    def stop(self, action_name: str) -> None:
        """Note how long an action took."""
        super().stop(action_name)


class AdvancedProfiler(advanced.AdvancedProfiler, metaclass=InstanceCheck):
    """Stratagem's; a wrong call of `stop` is a ValueError too."""

    is_instance = of_class(advanced.AdvancedProfiler)

    @in_lightnings_words
    def stop(self, action_name: str) -> None:
        """Attribute the calls from this moment on to the enclosing action."""
        super().stop(action_name)


class PyTorchProfiler(pytorch.PyTorchProfiler, metaclass=InstanceCheck):
    """Stratagem's; a wrong key in `table_kwargs` is a KeyError too."""

    is_instance = of_class(pytorch.PyTorchProfiler)
    __init__ = in_lightnings_words(pytorch.PyTorchProfiler.__init__)
