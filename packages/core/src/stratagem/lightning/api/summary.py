"""The table of layers, as a function of a model."""

from __future__ import annotations

from typing import Any

from stratagem.callbacks import model_summary


def summarize(lightning_module: Any, max_depth: int = 1) -> model_summary.Summary:
    """Return the table of a model's layers.

    Args:
        lightning_module: the model.
        max_depth: how deep submodules are listed; -1: all.
    """
    example = getattr(lightning_module, "example_input_array", None)
    return model_summary.summarize(
        lightning_module, max_depth, example=example, call=lightning_module
    )


ModelSummary = summarize
