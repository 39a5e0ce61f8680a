"""The version of Lightning whose public names these are."""

from __future__ import annotations

from stratagem.launch import rank_zero_info
from stratagem_lightning_plugin.checkpoint_format import WRITTEN_VERSION

LIGHTNING_VERSION = WRITTEN_VERSION
"""What `lightning.__version__` is, for scripts that compare it."""


def cli_lightning_logo() -> None:
    """Print the name of the library that runs the script; Lightning's examples call it."""
    rank_zero_info("Stratagem, by Lightning's names")
