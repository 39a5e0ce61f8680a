"""Checkpoint formats, and the base to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.checkpoint.catalog import (
        SUFFIX as SUFFIX,
        Description as Description,
        check_exists as check_exists,
        describe_checkpoint as describe_checkpoint,
        find_all as find_all,
    )
    from stratagem.checkpoint.trainer_format import (
        FORMAT_VERSION as FORMAT_VERSION,
        check_trainer_checkpoint as check_trainer_checkpoint,
    )
    from stratagem.interfaces.checkpoint_io import CheckpointIO as CheckpointIO
    from stratagem.native.checkpoint.asynchronous import AsyncCheckpointIO as AsyncCheckpointIO
    from stratagem.native.checkpoint.sharded.directory import (
        DirectoryCheckpointIO as DirectoryCheckpointIO,
        consolidate_checkpoint as consolidate_checkpoint,
    )
    from stratagem.native.checkpoint.single_file import (
        SingleFileCheckpointIO as SingleFileCheckpointIO,
    )
    from stratagem.state.shards import (
        LazyTensor as LazyTensor,
        Shards as Shards,
        read_whole as read_whole,
    )
else:
    __getattr__, __dir__ = exporter(__name__, "checkpoint_io")
