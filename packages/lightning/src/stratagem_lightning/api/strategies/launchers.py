"""Lightning's launchers, which are private to it: libraries ask which one a Trainer has."""

from __future__ import annotations

from typing import Any

from stratagem.errors import ConfigurationError
from stratagem_lightning.api.instance_check import InstanceCheck


def _of_name(*names: str) -> Any:
    return staticmethod(
        lambda one: getattr(one, "kind", "") == "launcher" and getattr(one, "name", "") in names
    )


class _Launcher(metaclass=InstanceCheck):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise ConfigurationError(
            f"{type(self).__name__} is a private class of Lightning's: pass launcher='script', "
            "'spawn' or 'fork' to the strategy, or a stratagem.launch.Launcher of your own as "
            "Trainer(plugins=...)"
        )


class ScriptLauncher(_Launcher):
    """Runs the script again for each further rank.

    Example:
        >>> from stratagem_lightning.pytorch import Trainer
        >>> from stratagem_lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
        >>> isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher)
        True
    """

    is_instance = _of_name("script")


class ProcessesLauncher(_Launcher):
    """Starts a process for each rank by multiprocessing."""

    is_instance = _of_name("spawn", "fork")
