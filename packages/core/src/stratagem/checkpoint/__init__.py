"""Checkpoint formats, and the base to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.checkpoint.archive import (
        Manifest as Manifest,
        Sink as Sink,
        load_json as load_json,
        parse_manifest as parse_manifest,
    )
    from stratagem.checkpoint.catalog import (
        SUFFIX as SUFFIX,
        Description as Description,
        check_exists as check_exists,
        describe_checkpoint as describe_checkpoint,
        find_all as find_all,
        first_whole as first_whole,
    )
    from stratagem.checkpoint.checksum import (
        Checksum as Checksum,
        checksum_of_file as checksum_of_file,
    )
    from stratagem.checkpoint.entries import Refused as Refused
    from stratagem.checkpoint.trainer_format import (
        FORMAT_VERSION as FORMAT_VERSION,
        check_trainer_checkpoint as check_trainer_checkpoint,
    )
    from stratagem.interfaces.checkpoint_io import CheckpointIO as CheckpointIO
    from stratagem.one_device.archive_io import (
        MappedFile as MappedFile,
        StoredCheckpointIO as StoredCheckpointIO,
        manifest_of as manifest_of,
        open_archive as open_archive,
        write_archive as write_archive,
    )
    from stratagem.one_device.single_file import (
        SingleFileCheckpointIO as SingleFileCheckpointIO,
    )
    from stratagem.state.shards import (
        LazyTensor as LazyTensor,
        Shards as Shards,
        has_shards as has_shards,
        read_whole as read_whole,
    )
    from stratagem_extras.pretrained import (
        PretrainedWeights as PretrainedWeights,
        save_pretrained as save_pretrained,
    )
    from stratagem_torch.checkpoint.asynchronous import AsyncCheckpointIO as AsyncCheckpointIO
    from stratagem_torch.checkpoint.sharded.directory import (
        DirectoryCheckpointIO as DirectoryCheckpointIO,
        consolidate_checkpoint as consolidate_checkpoint,
    )
    from stratagem_torch.checkpoint.sharded.manifest import (
        describe_directory as describe_directory,
    )
else:
    __getattr__, __dir__ = exporter(__name__, "checkpoint_io")
