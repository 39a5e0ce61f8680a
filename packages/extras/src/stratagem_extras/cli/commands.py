"""`stratagem fit`, `validate`, `test` and `predict`: runs of a Trainer that config files describe.

What they are made of is imported when one of them is called: torch, and jsonargparse.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from stratagem.discovery import require_package
from stratagem.errors import MissingPackageError


def fit(arguments: Sequence[str]) -> int:
    """Train a model; return the exit code."""
    return _run("fit", arguments)


def validate(arguments: Sequence[str]) -> int:
    """Validate a model; return the exit code."""
    return _run("validate", arguments)


def test(arguments: Sequence[str]) -> int:
    """Test a model; return the exit code."""
    return _run("test", arguments)


def predict(arguments: Sequence[str]) -> int:
    """Predict with a model; return the exit code."""
    return _run("predict", arguments)


def _run(command: str, arguments: Sequence[str]) -> int:
    """Run a command of this distribution; return the exit code.

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
