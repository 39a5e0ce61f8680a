"""The `stratagem` program. Nothing here imports torch: `stratagem run` must start ranks at once."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the program with this process's arguments; return its exit code."""
    arguments = sys.argv[1:]
    # Ranks wait for nothing: typer and the plugins cost 80 ms that starting a script does not need.
    if arguments[:1] == ["run"]:
        from stratagem.cli.run import run

        return run(arguments[1:])

    from stratagem.cli.app import run_app

    return run_app()


__all__ = ["main"]
