"""compile="step": forward, backward, clipping and the optimizer's step as one graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.stepping import Stepping
from stratagem.trainer.step.step import Step

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.plan.step_options import Compilation
    from stratagem.trainer.run import Run

_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
_PARTS = (
    *("train_step", "accumulate_all", "accumulate", "finish_step"),
    *("no_sync", "backward", "clip_gradients", "optimizer_step"),
)


class _Logged(NamedTuple):
    """One call of `Module.log` within the graph."""

    name: str
    value: Any
    options: Any
    batch_size: int | None


class _Recorder:
    """Replaces the metrics during tracing, and records logged values as outputs of the graph."""

    def __init__(self) -> None:
        self.values: list[_Logged] = []

    def log(self, name: str, value: Any, options: Any, batch_size: int | None) -> None:
        """Keep a value; see `Metrics.log`."""
        if isinstance(value, Tensor):
            value = value.detach()
        self.values.append(_Logged(name, value, options, batch_size))


class GraphStep(Step):
    """A step that torch.compile compiles into one graph.

    The first step of a new fit runs uncompiled, since the optimizer creates its state in that step.
    A resumed fit already has the state. All later steps run the graph. Logged values are outputs of
    the graph, and are logged after it. Learning rates are tensors, so that a new learning rate does
    not need a new graph.

    Args:
        run: a fit.
        prepared: the prepared model, with an optimizer of torch's kind.
        compilation: the options of the compilation.

    Raises:
        ConfigurationError: if the strategy, the precision, a hook or the optimizer does work within
            the step that a graph cannot contain. The error names this work.
    """

    def __init__(self, run: Run, prepared: PreparedModel, compilation: Compilation) -> None:
        super().__init__(run, prepared)
        _check(run, prepared.optimizers[0], compilation)
        self._compilation = compilation
        self._on_host = run.strategy.accelerator.is_host
        self._strategy = run.strategy
        self._prepared = prepared
        self._optimizer = prepared.optimizers[0]
        self._traced = _traced(self._optimizer)
        self._raw_step = inspect.unwrap(type(self._optimizer).step)
        self._rates: list[Tensor] = []
        self._recorder = _Recorder()
        self._keeps_outputs = bool(self._on_batch_end)
        arguments = dict(compilation.arguments)
        if not self._on_host and not {"mode", "options", "backend"} & arguments.keys():
            arguments["mode"] = "reduce-overhead"  # CUDA graphs, or what the device has like them
        whole = _with_own_code(self._whole)
        self._graph: Any = torch.compile(whole, **{**arguments, "fullgraph": True})

    def epoch_context(self) -> AbstractContextManager[Any]:
        """Return the context in which torch.compile takes backward into graphs."""
        return torch._dynamo.config.patch(trace_autograd_ops=True)  # type: ignore[no-any-return]

    def step_function(self) -> Callable[..., None]:
        """Return the step function."""
        return self._take

    def _take(self, prepared: PreparedModel, step: Step, micro_batches: Collection[Any]) -> None:
        """Take the place of `Strategy.train_step`."""
        if self._progress.global_step == 0:
            self._strategy.train_step(prepared, step, micro_batches)
            return
        first = self.batch_idx
        inputs = []
        for micro_batch in micro_batches:
            inputs.append((self.begin(micro_batch), self.batch_idx))
            self.batch_idx += 1
        self.batch_idx = first
        results = self._run_graph(inputs)
        logged, self._recorder.values = self._recorder.values, []
        before = 0
        for (batch, _), (loss, outputs, after) in zip(inputs, results, strict=True):
            self._batch = self._logged.batch = batch
            self._loss, self._outputs = loss, outputs
            for one in logged[before:after]:
                self._logged.log(*one)
            before = after
            self.end(batch)
        self._has_loss = True
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        self.after_optimizer_step(self._optimizer)

    def _run_graph(self, inputs: list[tuple[Any, int]]) -> list[tuple[Tensor, Any, int]]:
        self._hand_over_options()
        if not self._on_host:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            with self._module.logging_to(self._recorder):  # type: ignore[arg-type]
                results: list[tuple[Tensor, Any, int]] | None = self._graph_or_not(inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserCodeError(
                f"{self._compilation}: torch.compile cannot take this step of "
                f"{type(self._module).__name__} with {type(self._optimizer).__name__} into one "
                f"graph: {_first_lines(error)}. Change that, or pass compile=True, which compiles "
                "the model and leaves the step as it is"
            ) from error
        if results is None:
            raise UserCodeError(_NO_LOSS)
        return results

    def _graph_or_not(self, inputs: list[tuple[Any, int]]) -> Any:
        """Run the graph; or the same uncompiled, once torch has made as many graphs as it may."""
        try:
            return self._graph(inputs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self._graph = self._whole  # or torch would say so again in each step
            return self._whole(inputs)

    def _hand_over_options(self) -> None:
        """Copy the options of the user's optimizer to the traced optimizer, and share its state.

        The learning rate of each group is the same tensor in all steps, filled with its value.
        """
        traced, groups = self._traced, self._optimizer.param_groups
        if len(traced.param_groups) != len(groups):
            device = self._strategy.device
            self._rates = [torch.zeros((), device=device) for _ in groups]
            traced.param_groups = [{} for _ in groups]
            traced.rates = [None for _ in groups]
        if traced.state is not self._optimizer.state:
            traced.state = self._optimizer.state
            if not self._on_host:
                _move_state(self._optimizer)
        for index, (own, group) in enumerate(zip(traced.param_groups, groups, strict=True)):
            own.update(group)
            rate = group["lr"]
            if isinstance(rate, Tensor):
                continue
            if rate != traced.rates[index]:
                traced.rates[index] = rate
                self._rates[index].fill_(rate)
            own["lr"] = self._rates[index]
            if not self._on_host and "capturable" in own:
                own["capturable"] = True

    def _whole(self, inputs: list[tuple[Any, int]]) -> list[tuple[Tensor, Any, int]] | None:
        """Forward, backward, clipping, step: what becomes the graph; None: there is no loss."""
        results = []
        for batch, batch_idx in inputs:
            arguments = (batch, batch_idx) if self._takes_index else (batch,)
            with nullcontext() if self._context is None else self._context:
                outputs = self._module.training_step(*arguments)
            loss = outputs if isinstance(outputs, Tensor) else self._loss_in(outputs)
            if loss is None:
                return None
            (loss if len(inputs) == 1 else loss / len(inputs)).backward()  # type: ignore[no-untyped-call]
            kept = _detached(outputs) if self._keeps_outputs else None
            results.append((loss.detach(), kept, len(self._recorder.values)))
        if self.clip is not None:
            # Not by the user's optimizer: a new learning rate in it would need a new graph.
            self._strategy.clip_gradients(self._prepared, self._traced, self.clip)
        with torch.no_grad():
            self._raw_step(self._traced)
        for group in self._traced.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return results


_NO_LOSS = (
    "training_step returned None, which skips a batch, and under compile='step' the step is one "
    "graph: return a loss for every batch, or pass compile=True"
)


def _with_own_code(method: Any) -> Any:
    """Return a method with a code object of its own, by which torch.compile keeps graphs."""
    function = method.__func__
    code = function.__code__.replace(co_name="whole_step")
    own = FunctionType(code, function.__globals__, "whole_step", None, function.__closure__)
    return MethodType(own, method.__self__)


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {k: v.detach() if isinstance(v, Tensor) else v for k, v in outputs.items()}
    return outputs.detach()


def _traced(optimizer: Optimizer) -> Any:
    """Return an object that replaces the optimizer while its `step` is traced.

    torch.compile does not trace an optimizer's own class with gradients of the same graph. So this
    object has the unwrapped methods of the class, and its own options, in which the learning rate
    is a tensor.
    """
    methods = {
        name: inspect.unwrap(method)
        for name, method in inspect.getmembers(type(optimizer), inspect.isfunction)
        if not name.startswith("__")
    }
    for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        methods[check] = _nothing
    traced: Any = type(f"Traced{type(optimizer).__name__}", (), methods)()
    traced.__dict__.update(vars(optimizer))
    traced.__dict__.pop("step", None)  # a scheduler's, which counts
    traced.param_groups, traced.state, traced.rates = [], None, []
    return traced


def _nothing(optimizer: Any) -> None:
    return None


def _move_state(optimizer: Optimizer) -> None:
    """Put state that is on the host onto the device, at addresses that stay: for CUDA graphs."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value = value.to(parameter.device)
                torch._dynamo.mark_static_address(value)


def _first_lines(error: Exception) -> str:
    """Return torch's message, and the line of code that it names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ")]
    explained = [line for line in lines[:4] if line.startswith("Explanation: ")]
    # "backend='inductor' raised:", and then what it was.
    first = 2 if lines and lines[0].endswith(":") else 1
    return " ".join((lines or [type(error).__name__])[:first] + explained + where[-1:])


def _check(run: Run, optimizer: Optimizer, compilation: Compilation) -> None:
    """Raise if a component does work within the step that the graph would leave out."""
    strategy, kind = run.strategy, type(run.strategy)
    problem = ""
    if own := [name for name in _PARTS if getattr(kind, name) is not getattr(Stepping, name)]:
        problem = f"{kind.__name__} has {' and '.join(own)} of its own"
    elif strategy.precision.scales_loss:
        problem = (
            f"precision={strategy.precision.name!r} scales the loss, and leaves steps out by "
            "what it finds in gradients"
        )
    elif not isinstance(strategy.precision.forward_context(), torch.autocast | None):
        problem = (
            f"precision={strategy.precision.name!r} changes torch's default dtype within it (of "
            "the precisions, '32-true' and 'bf16-mixed' do not)"
        )
    elif run.trainer.options.detect_anomaly:
        problem = "detect_anomaly=True looks at each loss"
    elif hooks := [name for name in _HOOKS if run.hooks.of(name)]:
        problem = f"{' and '.join(hooks)} would be called in the middle of it"
    elif any(group.get("fused") for group in optimizer.param_groups):
        problem = f"{type(optimizer).__name__}(fused=True) is a kernel that is not traced"
    elif any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        problem = f"{type(optimizer).__name__} has hooks around its step"
    if problem:
        raise ConfigurationError(
            f"{compilation} makes one graph of the step, and {problem}: leave one of the two out, "
            "or pass compile=True, which compiles the model and leaves the step as it is"
        )
