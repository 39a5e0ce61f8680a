"""The `stratagem` program. Nothing here imports torch: `stratagem run` must start ranks at once."""

from __future__ import annotations

import io
import sys

from stratagem.launch.streams import open_standard_streams


def main() -> int:
    """Run the program with this process's arguments; return its exit code."""
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths may hold bytes that no encoding knows, and the locale may be C.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    # Ranks wait for nothing: typer and the plugins cost 80 ms that starting a script does not need.
    if arguments[:1] == ["run"]:
        from stratagem.cli.run import run

        return run(arguments[1:])

    from stratagem.cli.app import run_app

    return run_app()


__all__ = ["main"]
