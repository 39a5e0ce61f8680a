"""Trainer, Module and DataModule from the command line and config files, by jsonargparse.

`stratagem.cli` serves the public names.
"""

from stratagem.discovery import require_package

require_package("TrainerCLI", "jsonargparse", "cli")
