"""The `stratagem` program. Nothing here imports torch: `stratagem run` must start ranks at once."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names
from stratagem.launch.streams import open_standard_streams

if TYPE_CHECKING:
    from stratagem.trainer.cli.parser import LRSchedulerCallable as LRSchedulerCallable
    from stratagem.trainer.cli.parser import OptimizerCallable as OptimizerCallable
    from stratagem.trainer.cli.parser import TrainerArgumentParser as TrainerArgumentParser
    from stratagem.trainer.cli.save_config import SaveConfigCallback as SaveConfigCallback
    from stratagem.trainer.cli.trainer_cli import TrainerCLI as TrainerCLI
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "LRSchedulerCallable": "stratagem.trainer.cli.parser",
            "OptimizerCallable": "stratagem.trainer.cli.parser",
            "SaveConfigCallback": "stratagem.trainer.cli.save_config",
            "TrainerArgumentParser": "stratagem.trainer.cli.parser",
            "TrainerCLI": "stratagem.trainer.cli.trainer_cli",
        },
    )


AT_ONCE = ("run", "strategies", "explain", "doctor", "new-backend")
"""Commands whose modules read their own arguments, without typer, which costs more than they do.
Ranks wait for the first; the others are asked often, by people and by programs."""


TRAINING = ("fit", "validate", "test", "predict")
"""Commands that run a Trainer, which `stratagem.cli.training` answers."""


def module_of(command: str) -> ModuleType:
    """Return the module that answers one of the commands in `AT_ONCE`."""
    return importlib.import_module(f"stratagem.cli.{command.replace('-', '_')}")


def main() -> int:
    """Run the program with this process's arguments; return its exit code."""
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths may hold bytes that no encoding knows, and the locale may be C.
        sys.stdout.reconfigure(errors="backslashreplace")
    command, *arguments = sys.argv[1:] or [""]
    if command in TRAINING:
        from stratagem.cli import training

        return training.run(command, arguments)
    if command not in AT_ONCE:
        from stratagem.cli.app import run_app

        return run_app()
    if command != "run":
        # A listing is mostly imports, of which nothing is garbage before the process ends.
        gc.disable()
    try:
        code: int = module_of(command).run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads the output has enough, as `head` has; nothing more must be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


__all__ = [
    "LRSchedulerCallable",
    "OptimizerCallable",
    "SaveConfigCallback",
    "TrainerArgumentParser",
    "TrainerCLI",
    "main",
]


def __dir__() -> list[str]:
    return sorted(__all__)
