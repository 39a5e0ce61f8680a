"""ModelSummary: a table of a model's layers, with parameters, sizes, modes and FLOPs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.callbacks import Callback, full_numel, short_count
from stratagem.data import move_to_device
from stratagem.errors import ConfigurationError
from stratagem.rng import preserve_rng_state

if TYPE_CHECKING:
    from stratagem import Module, Trainer


class ModelSummary(Callback):
    """Prints a table of the model's layers when a fit begins, on rank 0, to stderr.

    Parameters count as the whole model has them, however a strategy shards them. With
    `example_input_array` set in the Module, one forward without gradients adds the sizes that go
    into and come out of each layer, and its FLOPs. It leaves RNG states, buffers and modes as they
    were; a model that is compiled is left alone.

    Args:
        max_depth: how deep submodules are listed; -1: all; 0: no table.

    Raises:
        ConfigurationError: `max_depth` is less than -1.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ModelSummary
        >>> trainer = Trainer(callbacks=ModelSummary(max_depth=2), logger=False)
        >>> sum(isinstance(each, ModelSummary) for each in trainer.callbacks)
        1
    """

    prints_parameters = True
    """The report of a fit leaves out what this table says."""
    keeps_rng_state = True
    """Whether the forward of the example leaves RNG states as they were; False under Lightning's
    names, where training then draws other numbers, as there."""
    reads_of_example = 1
    """How often the Module is asked for its example; 3 times under Lightning's names, as there: a
    property may draw one each time."""

    def __init__(self, max_depth: int = 1) -> None:
        if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
            raise ConfigurationError(
                f"ModelSummary(max_depth={max_depth!r}): expected -1 (all), 0 (none) or a depth"
            )
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Print the table; a forward needs all ranks."""
        if self.max_depth == 0:
            return
        examples = [
            getattr(module, "example_input_array", None) for _ in range(self.reads_of_example)
        ]
        example = examples[-1]
        if trainer.options.step_options.compilation is not None:
            example = None  # it would be compiled for
        strategy = trainer.strategy
        convert, context = strategy.input_converter(), strategy.precision.forward_context()
        example = example if example is None or convert is None else convert(example)
        prepared = trainer.run.require_prepared()
        # A strategy with sharded parameters gathers them around the call of the prepared module.
        call = partial(prepared.evaluation_module, "forward")
        with strategy.evaluation(prepared), context or nullcontext():
            keeps = self.keeps_rng_state
            summary = _summarize(module, self.max_depth, example, call, keeps_rng_state=keeps)
        if trainer.is_global_zero:
            print(summary, file=sys.stderr, flush=True)


@dataclass
class Layer:
    """A line of the table.

    Attributes:
        name: the qualified name of the submodule.
        kind: the name of its class.
        parameters: the number of its parameters, including its submodules; shared parameters count
            once.
        mode: "train" or "eval".
        in_size, out_size: shapes of inputs and outputs; "?": unknown.
        flops: FLOPs of one forward; None: unknown.
    """

    name: str
    kind: str
    parameters: int
    mode: str
    in_size: Any = "?"
    out_size: Any = "?"
    flops: int | None = None


@dataclass
class Summary:
    """The result of `summarize`; as a string, a table.

    Attributes:
        layers: the layers, down to the requested depth.
        total_parameters, trainable_parameters: numbers of parameters of the model.
        model_size: MB (10**6 bytes) of its parameters.
        training_modules, evaluation_modules: how many submodules are in which mode.
        total_flops: of one forward of the example; None: not known.
        has_sizes: whether there was an example.
    """

    layers: list[Layer] = field(default_factory=list)
    total_parameters: int = 0
    trainable_parameters: int = 0
    model_size: float = 0.0
    training_modules: int = 0
    evaluation_modules: int = 0
    total_flops: int | None = None
    has_sizes: bool = False

    @property
    def non_trainable_parameters(self) -> int:
        """Numbers that do not require a gradient."""
        return self.total_parameters - self.trainable_parameters

    def __str__(self) -> str:
        heads = ["", "Name", "Type", "Params", "Mode", "FLOPs"]
        rows = [
            [
                str(index),
                one.name,
                one.kind,
                short_count(one.parameters),
                one.mode,
                _flops(one.flops),
            ]
            for index, one in enumerate(self.layers)
        ]
        if self.has_sizes:
            heads += ["In sizes", "Out sizes"]
            for row, one in zip(rows, self.layers, strict=True):
                row += [str(one.in_size), str(one.out_size)]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in (heads, *rows)
        ]
        rule = "-" * max(map(len, lines))
        totals = [
            (short_count(self.trainable_parameters), "Trainable params"),
            (short_count(self.non_trainable_parameters), "Non-trainable params"),
            (short_count(self.total_parameters), "Total params"),
            (f"{self.model_size:.3f}", "Total estimated model params size (MB)"),
            (str(self.training_modules), "Modules in train mode"),
            (str(self.evaluation_modules), "Modules in eval mode"),
            (_flops(self.total_flops), "Total FLOPs"),
        ]
        ends = [f"{number:<9} {what}" for number, what in totals]
        return "\n".join([lines[0], rule, *lines[1:], rule, *ends])


def summarize(
    module: nn.Module,
    max_depth: int = 1,
    *,
    example: Any = None,
    call: Callable[..., Any] | None = None,
) -> Summary:
    """Return a summary of a model's layers.

    Args:
        module: the model.
        max_depth: how deep submodules are listed; -1: all.
        example: a batch for one forward: a tensor, a tuple of arguments, or a dict of them by name;
            None: sizes and FLOPs are not looked for.
        call: runs the model's forward; None: the module itself.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
        >>> summary = summarize(layers, example=torch.zeros(1, 4))
        >>> summary.total_parameters, summary.total_flops, summary.layers[0].out_size
        (10, 16, [1, 2])
    """
    return _summarize(module, max_depth, example, call or module, keeps_rng_state=True)


def _summarize(
    module: nn.Module,
    max_depth: int,
    example: Any,
    call: Callable[..., Any],
    *,
    keeps_rng_state: bool,
) -> Summary:
    numbers = {p: full_numel(p) for p in module.parameters()}
    summary = Summary(
        total_parameters=sum(numbers.values()),
        trainable_parameters=sum(n for p, n in numbers.items() if p.requires_grad),
        # One that is not made yet has no element.
        model_size=sum(n and n * p.element_size() for p, n in numbers.items()) / 1e6,
    )
    listed: dict[str, tuple[nn.Module, Layer]] = {}
    for name, part in module.named_modules():
        if not name:
            continue
        if part.training:
            summary.training_modules += 1
        else:
            summary.evaluation_modules += 1
        if max_depth == -1 or name.count(".") < max_depth:
            count = sum(numbers[p] for p in part.parameters())
            mode = "train" if part.training else "eval"
            listed[name] = part, Layer(name, type(part).__name__, count, mode)
    summary.layers = [layer for _, layer in listed.values()]
    if example is not None:
        summary.has_sizes = True
        with preserve_rng_state() if keeps_rng_state else nullcontext():
            summary.total_flops = _run_example(module, listed, example, call)
    return summary


def _run_example(
    module: nn.Module,
    listed: Mapping[str, tuple[nn.Module, Layer]],
    example: Any,
    call: Callable[..., Any],
) -> int:
    """Run one forward, note sizes and FLOPs in the layers, and return the FLOPs of all."""
    from torch.utils.flop_counter import FlopCounterMode

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    example = move_to_device(example, device)
    counter = FlopCounterMode(display=False)
    handles = []
    for part, layer in listed.values():
        if isinstance(part, torch.jit.ScriptModule):
            continue  # it takes no such hooks
        handles += _noting(part, layer, counter.get_total_flops)
    try:
        with _evaluating(module), torch.no_grad(), counter:
            if isinstance(example, Mapping):
                call(**example)
            elif isinstance(example, tuple):
                call(*example)
            else:
                call(example)
    finally:
        for handle in handles:
            handle.remove()
    return int(counter.get_total_flops())


def _noting(part: nn.Module, layer: Layer, total: Callable[[], int]) -> list[Any]:
    """Let a module's calls note sizes, and the FLOPs that the total has grown by."""
    before: list[int] = []

    def begin(module: nn.Module, inputs: Any) -> None:
        before.append(total())

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        layer.flops = (layer.flops or 0) + total() - before.pop()
        if layer.out_size == "?":
            layer.in_size, layer.out_size = _sizes(inputs), _sizes(output)

    return [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _sizes(data: Any) -> Any:
    if isinstance(data, Tensor):
        return list(data.shape)
    if isinstance(data, Mapping):
        return {name: _sizes(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        sizes = [_sizes(value) for value in data]
        return sizes[0] if len(sizes) == 1 else sizes or "?"
    return "?"


def _flops(count: int | None) -> str:
    return "?" if count is None else short_count(count)
