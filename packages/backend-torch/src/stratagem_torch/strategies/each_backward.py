"""EachBackward: prepares DDP for every backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_torch.strategies.unfrozen import UnfrozenGradients, requiring_gradients

_will_run = torch._C._will_engine_execute_node
"""Whether the current backward comes to a node of the graph."""


class EachBackward:
    """Lets a model's DDP reduce the gradients of every backward pass.

    DDP prepares its reducer at the end of a forward pass, for one backward. In a second backward
    (`retain_graph=True`, or two forward passes before two backward passes), or in a backward within
    the forward pass, each rank would keep its own gradients, without an error. A hook on the
    outputs of each forward pass therefore prepares DDP if necessary. Within a forward pass, hooks
    on the parameters do the same.

    Args:
        model: DDP, before its first forward pass.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = ref(model)
        self._unfrozen = UnfrozenGradients.of(model)
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters()
        self._trained = [p for name, p in named if p.requires_grad and name not in ignored]
        self._is_within_forward = self._is_running = False
        self._is_ready = False
        """Whether DDP is prepared, and no backward has followed."""
        self._seen = -1
        """The last backward, by the number that the autograd engine gives it."""
        # The graph's nodes that add to `.grad`; their hooks live as long as this list.
        self._accumulators: list[Any] = []
        self._hooks: list[Any] = [model.register_forward_hook(self._watch_outputs)]
        finalize(model, self._remove)

    def _watch_outputs(self, model: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._is_ready = model.require_backward_grad_sync
            if self._unfrozen is not None:
                self._unfrozen.is_expected = self._is_ready
            for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._begin)

    @contextmanager
    def within_forward(self, model: DistributedDataParallel) -> Iterator[None]:
        """Return the context of a forward pass in which user code calls `backward`.

        Raises:
            ConfigurationError: static_graph=True counts the gradients of a forward pass.
        """
        if model.static_graph:
            raise ConfigurationError(
                "static_graph=True expects one backward pass after each forward pass, and with "
                "automatic_optimization = False training_step runs them within it: leave "
                "static_graph=True out of DDPStrategy(...), or pass find_unused_parameters=True if "
                "some parameters are not used"
            )
        self.watch_parameters()
        # DDP would prepare at the end of the forward, and wait for gradients that came before.
        model.require_backward_grad_sync = False
        self._is_within_forward = True
        try:
            yield
        finally:
            self._is_within_forward = False
            model.require_backward_grad_sync = True
            # The next forward pass broadcasts buffers.
            model.require_forward_param_sync = True

    def watch_parameters(self) -> None:
        """Notice every backward pass, also one that starts from no output of a forward pass."""
        if len(self._hooks) == 1:
            self._hooks += [node.register_prehook(self._begin) for node in self._nodes()]
            if self._unfrozen is not None:
                self._unfrozen.before = self._begin

    def _nodes(self) -> list[Any]:
        if not self._accumulators:
            with requiring_gradients(self._trained):
                edges = map(torch.autograd.graph.get_gradient_edge, self._trained)
                self._accumulators = [edge.node for edge in edges]
        return self._accumulators

    def run(self, backward: Callable[[], None], loss: Tensor, is_single: bool) -> None:
        """Run a backward pass on behalf of the strategy.

        Args:
            backward: runs it.
            loss: the tensor that it starts from.
            is_single: whether `backward` is one backward pass. User code may run several.
        """
        if not is_single:
            self.watch_parameters()
        model = self._model()
        if model is None or not self._reduces(model):
            backward()
            return
        if model.static_graph and not self._is_ready:
            backward()  # `_begin` refuses it, if it reaches the model
            return
        if self._is_within_forward:
            model.reducer._check_reducer_finalized()
        if not self._is_ready or model.find_unused_parameters:
            self._prepare(model, [loss])
        self._is_ready, self._is_running = True, is_single
        try:
            backward()
        finally:
            self._is_ready = self._is_running = False
        if is_single and (frozen := self._frozen(model)):
            self._complete(frozen)

    def _begin(self, gradients: Any) -> None:
        """Prepare, before any gradient of a backward reaches a parameter; called more than once."""
        backward = torch._C._current_graph_task_id()
        if self._is_running or backward == self._seen:
            return
        self._seen = backward
        model = self._model()
        if model is None or (model.static_graph and not self._adds_gradients(model)):
            return
        if self._is_ready or not self._reduces(model):
            self._is_ready = False
            return
        if model.static_graph:
            raise UserCodeError(
                "static_graph=True expects one backward pass for each forward pass of the model, "
                "received another one: add the losses and run backward once, or leave "
                "static_graph=True out of DDPStrategy(...)"
            )
        used: list[Tensor] = []
        if model.find_unused_parameters:
            pairs = zip(self._trained, self._nodes(), strict=True)
            with torch.enable_grad():
                used = [p.view_as(p) for p, node in pairs if p.requires_grad and _will_run(node)]
        self._prepare(model, used)
        if frozen := self._frozen(model):
            # At the end of this backward.
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(self._complete, frozen)
            )

    def _prepare(self, model: DistributedDataParallel, outputs: list[Tensor]) -> None:
        reducer = model.reducer
        try:
            reducer._check_reducer_finalized()
        except RuntimeError:
            # A backward over other parameters has begun the reduction, or a checkpointed segment
            # runs its own backward within the backward of the loss.
            return
        # Within a forward pass DDP has not seen the order of the last backward's gradients.
        reducer._rebuild_buckets()
        reducer.prepare_for_backward(outputs if model.find_unused_parameters else [])
        if self._unfrozen is not None:
            self._unfrozen.is_expected = True

    def _reduces(self, model: DistributedDataParallel) -> bool:
        return self._is_within_forward or bool(model.require_backward_grad_sync)

    def _adds_gradients(self, model: DistributedDataParallel) -> bool:
        """Return whether the current backward adds to gradients, unlike `torch.autograd.grad`."""
        if any(map(_will_run, self._nodes())):
            return True
        if not model._static_graph_delay_allreduce_enqueued:
            raise UserCodeError(
                "torch.autograd.grad ran through the model's output in the first step, and "
                "static_graph=True takes the first pass through it for the backward of the loss: "
                "leave static_graph=True out of DDPStrategy(...)"
            )
        return False

    def _frozen(self, model: DistributedDataParallel) -> list[nn.Parameter]:
        """Return the parameters that DDP waits for in vain, as `toggle_optimizer` has frozen them.

        With find_unused_parameters=True DDP does not wait for them.
        """
        if not self._is_within_forward or model.find_unused_parameters:
            return []
        return [p for p in self._trained if not p.requires_grad]

    def _complete(self, frozen: list[nn.Parameter]) -> None:
        """Let DDP finish: add zeros to the gradients of frozen parameters, on all ranks."""
        without = [p for p in frozen if p.grad is None]
        self._is_running = True
        try:
            with requiring_gradients(frozen):
                torch.autograd.backward(frozen, [torch.zeros_like(p) for p in frozen])
        finally:
            self._is_running = False
        for parameter in without:
            parameter.grad = None

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._accumulators.clear()
