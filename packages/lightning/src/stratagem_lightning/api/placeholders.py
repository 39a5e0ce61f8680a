"""Classes of Lightning's that nothing here is an instance of; libraries import them."""

from __future__ import annotations

from typing import Any

from stratagem.errors import ConfigurationError

_SPIKE = "a callback of your own that looks at the loss in on_train_batch_end"
_SERVE = "a server of your own, which loads a checkpoint with load_from_checkpoint"
_COLLECTIVE = "Fabric.all_gather, all_reduce, broadcast and barrier"
_COLUMNS = "RichProgressBar(theme=...), whose columns are fixed"
_CHECKPOINTS = "a CheckpointIO of stratagem.checkpoint, which every accelerator uses"
INSTEAD = {
    "BatchesProcessedColumn": _COLUMNS,
    "Collective": _COLLECTIVE,
    "CustomProgress": _COLUMNS,
    "CustomTimeColumn": _COLUMNS,
    "DataFetcher": "a step that reads its batches itself: training_step(self, dataloader_iter)",
    "HPUCheckpointIO": _CHECKPOINTS,
    "HPUPrecisionPlugin": "precision='bf16-mixed' with accelerator='hpu'",
    "LitLogger": "CSVLogger, TensorBoardLogger or WandbLogger",
    "MetricsTextColumn": _COLUMNS,
    "ProcessingSpeedColumn": _COLUMNS,
    "ServableModule": _SERVE,
    "ServableModuleValidator": _SERVE,
    "SpikeDetection": _SPIKE,
    "TrainingSpikeException": _SPIKE,
    "XLACheckpointIO": _CHECKPOINTS,
    "XLAEnvironment": "accelerator='tpu', which reads the ranks from PyTorch/XLA",
    "XLAProfiler": "PyTorchProfiler",
}
"""What to use in the place of each."""


class Placeholder(type):
    """The type of a class that nothing is an instance of, and that cannot be made.

    Example:
        >>> from stratagem_lightning.pytorch.loggers import LitLogger
        >>> isinstance("anything", LitLogger)
        False
    """

    error: Exception

    def __instancecheck__(cls, instance: object) -> bool:
        return False

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Raise instead of creating an object.

        Raises:
            ConfigurationError: always; the message names the replacement, or the package to
                install.
        """
        raise cls.error


def placeholder(name: str, error: Exception) -> Placeholder:
    """Return a class of this name; making an object of it, or of a subclass, raises the error."""
    return Placeholder(name, (), {"error": error, "__doc__": str(error)})


def __getattr__(name: str) -> Placeholder:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return placeholder(name, ConfigurationError(f"Stratagem has no {name}; use {INSTEAD[name]}"))
