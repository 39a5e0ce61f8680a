"""DDPStrategy by Lightning's names."""

from __future__ import annotations

from stratagem import strategies
from stratagem_lightning.api.instance_check import InstanceCheck, of_class
from stratagem_lightning.api.utilities.phrases import in_lightnings_words
from stratagem_lightning.api.utilities.warnings import rank_zero_deprecation


class DDPStrategy(strategies.DDPStrategy, metaclass=InstanceCheck):
    """Stratagem's, with the attributes and messages that Lightning has. Arguments as there.

    Example:
        >>> isinstance(strategies.DDPStrategy(), DDPStrategy)
        True
    """

    is_instance = of_class(strategies.DDPStrategy)
    __init__ = in_lightnings_words(strategies.DDPStrategy.__init__)

    @property
    def is_distributed(self) -> bool:
        """True; Lightning's for earlier versions."""
        rank_zero_deprecation(
            f"The `{type(self).__name__}.is_distributed` is deprecated: it is True"
        )
        return True
