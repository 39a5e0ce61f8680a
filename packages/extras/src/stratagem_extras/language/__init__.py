"""Language models: losses by tokens, losses of large vocabularies, packed and padded documents."""

from stratagem_extras.language.chunked import chunk_loss, linear_cross_entropy
from stratagem_extras.language.module import LanguageModule, count_labels
from stratagem_extras.language.packing import (
    PackedDataset,
    check_packing,
    join_documents,
    pad_documents,
)
from stratagem_extras.language.streaming import MixedDataset, PackedStream, StreamLoader

__all__ = [
    "LanguageModule",
    "MixedDataset",
    "PackedDataset",
    "PackedStream",
    "StreamLoader",
    "check_packing",
    "chunk_loss",
    "count_labels",
    "join_documents",
    "linear_cross_entropy",
    "pad_documents",
]
