"""The table of layers, as a class and as a function of a model."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import UninitializedParameter

from stratagem.callbacks import summarize as table_of
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn

NOT_APPLICABLE = "n/a"
UNKNOWN_SIZE = "?"
LEFTOVER_PARAMS_NAME = "other params"


PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]


def get_human_readable_count(number: int) -> str:
    """Return a number as text with a few digits and a unit.

    Example:
        >>> get_human_readable_count(123), get_human_readable_count(1234)
        ('123  ', '1.2 K')
        >>> get_human_readable_count(int(4e14)), get_human_readable_count(int(5e15))
        ('400 T', '5,000 T')
    """
    value, unit = float(number), 0
    while value >= 1000 and unit < len(PARAMETER_NUM_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = ",d" if unit == 0 or value >= 100 else ",.1f"
    return f"{int(value) if digits == ',d' else value:{digits}} {PARAMETER_NUM_UNITS[unit]}"


class ModelSummary:
    """The layers of a model; as a string, their table.

    Args:
        model: the model; its `example_input_array` gives sizes and FLOPs.
        max_depth: the depth of listed submodules; -1: unlimited; 0: no submodules.

    Attributes:
        layer_names, layer_types, param_nums, in_sizes, out_sizes: lists with an entry per layer.
        total_parameters, trainable_parameters: numbers of parameters of the model.
        total_layer_params: number of parameters in listed layers; the model itself owns the others.
        model_size: size of the parameters in MB.
        total_flops: FLOPs of one forward of the example; 0 if unknown.

    Raises:
        ConfigurationError: `max_depth` is less than -1 or not an int.

    Example:
        >>> from torch import nn
        >>> from stratagem_lightning.api.callbacks.summary import ModelSummary
        >>> summary = ModelSummary(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        >>> summary.layer_types, summary.param_nums, summary.total_parameters
        (['Linear', 'ReLU'], [9, 0], 9)
    """

    def __init__(self, model: Any, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ConfigurationError(f"`max_depth` can be -1, 0 or > 0, got {max_depth}")
        self._model = model
        example = getattr(model, "example_input_array", None)
        table = table_of(model, max_depth, example=example, call=model)
        self._table = table
        self.max_depth = max_depth
        self.layer_names = [layer.name for layer in table.layers]
        self.layer_types = [layer.kind for layer in table.layers]
        self.param_nums = [layer.parameters for layer in table.layers]
        self.in_sizes = [_known(layer.in_size) for layer in table.layers]
        self.out_sizes = [_known(layer.out_size) for layer in table.layers]
        self.training_modes = [layer.mode == "train" for layer in table.layers]
        self.trainable_parameters = table.trainable_parameters
        self.total_layer_params = sum(
            layer.parameters for layer in table.layers if "." not in layer.name
        )
        self.model_size = table.model_size
        self.total_flops = table.total_flops or 0

    @property
    def total_parameters(self) -> int:
        """Numbers in the whole model; warns if some of its layers are lazy."""
        if any(isinstance(part, UninitializedParameter) for part in self._model.parameters()):
            rank_zero_warn(
                "The total number of parameters detected may be inaccurate because the model has "
                "layers that take their sizes from the first input: set example_input_array"
            )
        return int(self._table.total_parameters)

    @property
    def total_training_modes(self) -> dict[str, int]:
        """The number of submodules in each mode at present."""
        modes = [part.training for part in self._model.modules() if part is not self._model]
        return {"train": sum(modes), "eval": len(modes) - sum(modes)}

    def __str__(self) -> str:
        return str(self._table)

    __repr__ = __str__


def _known(size: Any) -> Any:
    return UNKNOWN_SIZE if isinstance(size, list) and not size else size


def summarize(lightning_module: Any, max_depth: int = 1) -> ModelSummary:
    """Return the table of a model's layers.

    Args:
        lightning_module: the model.
        max_depth: how deep submodules are listed; -1: all.

    Raises:
        ConfigurationError: as for `ModelSummary`.
    """
    return ModelSummary(lightning_module, max_depth)
