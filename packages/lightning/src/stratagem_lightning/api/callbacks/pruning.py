"""ModelPruning: its messages show the module that has the parameter."""

from __future__ import annotations

from stratagem_extras.callbacks import pruning


class ModelPruning(pruning.ModelPruning):
    """Stratagem's. Arguments as there."""

    def _title(self, name: str) -> str:
        owner, attribute = self._pruned[name]
        return f"{owner!r}.{attribute}"
