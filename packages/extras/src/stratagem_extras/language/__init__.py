"""Language models: losses by tokens, losses of large vocabularies, packed documents."""

from stratagem_extras.language.chunked import chunk_loss, linear_cross_entropy
from stratagem_extras.language.module import LanguageModule, count_labels
from stratagem_extras.language.packing import PackedDataset, check_packing

__all__ = [
    "LanguageModule",
    "PackedDataset",
    "check_packing",
    "chunk_loss",
    "count_labels",
    "linear_cross_entropy",
]
