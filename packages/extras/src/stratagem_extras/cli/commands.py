"""`stratagem fit`, `validate`, `test` and `predict`: runs of a Trainer that config files describe.

What they are made of is imported when one of them is called: torch, and jsonargparse.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from stratagem.discovery import require_package
from stratagem.errors import MissingPackageError

SUMMARIES = {
    "fit": "Train a model that a config file describes.",
    "validate": "Validate a model that a config file describes.",
    "test": "Test a model that a config file describes.",
    "predict": "Predict with a model that a config file describes.",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    try:
        require_package(f"stratagem {command}", "jsonargparse", "cli")
    except MissingPackageError as error:
        print(f"stratagem {command}: error: {error}", file=sys.stderr)
        return 2
    program = importlib.import_module("stratagem_extras.cli.trainer_cli")
    program.run_program([command, *arguments])
    return 0
