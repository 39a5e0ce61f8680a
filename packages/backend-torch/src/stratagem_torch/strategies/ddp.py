"""DDPStrategy: DistributedDataParallel."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError, StratagemError, UserCodeError, with_explanation
from stratagem.strategies import Components, PreparedModel, StepMemory
from stratagem_torch.distributed.parallel_strategy import ParallelStrategy
from stratagem_torch.plugin import DDP
from stratagem_torch.sharding.layout import broadcast_from_first
from stratagem_torch.strategies.communication_hooks import CommHook, CommunicationHook, CommWrapper
from stratagem_torch.strategies.each_backward import EachBackward

if TYPE_CHECKING:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager


_AVERAGING_STEP = "model_averaging_step"
_FORWARD_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""DDP's argument: whether rank 0's buffers are sent before each forward pass. The earlier name is
deprecated in torch 2.13, and needed up to 2.12."""


class DDPStrategy(ParallelStrategy):
    """Replicates the model on every rank and averages gradients during backward.

    Subclasses may override `configure_ddp`, which wraps `self.model`.

    Args:
        find_unused_parameters: allow parameters that a forward pass does not use; costs a
            traversal of the graph at each step.
        static_graph: every step uses the same parameters, which DDP records in the first step.
        gradient_as_bucket_view: let gradients share memory with the communication buckets.
        bucket_cap_mb: bucket size in MiB. None takes the default of torch, except for PowerSGD over
            gloo, where several buckets would deadlock: then one bucket holds all gradients.
        broadcast_buffers: give every rank the buffers of rank 0 before each forward.
        init_sync: give every rank the weights of rank 0 when the model is wrapped; with False, all
            ranks must have created the same weights.
        ddp_comm_hook: replaces the all-reduce of gradients, for example `fp16_compress_hook`; see
            torch.distributed.algorithms.ddp_comm_hooks.
        ddp_comm_state: the state of the hook, such as `PowerSGDState(process_group=None)`, which
            belongs to one model; or a function without arguments that creates the state, called for
            each model once process groups exist. A checkpoint does not contain the state: after a
            resume, PowerSGD starts without its accumulated error.
        ddp_comm_wrapper: wraps the hook, such as `fp16_compress_wrapper`.
        model_averaging_period: for `post_localSGD_hook`: the number of optimizer steps between two
            averagings of the weights over all ranks. Between two averagings ranks differ, and
            checkpoints contain the weights and optimizer state of rank 0.
        **components: see `ParallelStrategy`.

    Raises:
        ConfigurationError: arguments contradict each other, or (when the strategy is bound) the
            hook does not support the backend of the process group.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> from stratagem.strategies import DDPStrategy
        >>> DDPStrategy(static_graph=True).capabilities.multi_node
        True
        >>> half = DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook, start_method="spawn")
        >>> half.requested["launcher"]
        'spawn'
    """

    capabilities = DDP

    model: nn.Module
    """The module that `configure_ddp` wraps."""

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        ddp_comm_hook: CommHook | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: CommWrapper | None = None,
        model_averaging_period: int | None = None,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        if static_graph and find_unused_parameters:
            raise ConfigurationError(
                "static_graph=True and find_unused_parameters=True: a static graph finds its "
                "unused parameters in the first step, so leave find_unused_parameters out; if "
                "steps use different parameters, leave static_graph out"
            )
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise ConfigurationError(f"bucket_cap_mb={bucket_cap_mb!r}: expected MiB, more than 0")
        self.ddp_arguments = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
            "init_sync": init_sync,
            **({} if broadcast_buffers else {_FORWARD_SYNC_BUFFERS: False}),
        }
        self.communication_hook = CommunicationHook(
            ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, model_averaging_period
        )
        self._owner_of_state: ref[nn.Parameter] | None = None
        self._hook_state: Any = None
        """The state of the hook of the model that was wrapped last."""
        # Made on use: a strategy is pickled on its way to a spawned process, and these cannot be.
        self._each_backward: WeakKeyDictionary[DistributedDataParallel, EachBackward] | None = None
        self._averagers: WeakKeyDictionary[Optimizer, PeriodicModelAverager] | None = None

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `ParallelStrategy.bind`."""
        super().bind(components)
        self.communication_hook.check_backend(self.communication_backend)
        size, step = self.ddp_arguments["bucket_cap_mb"], components.step
        if step is not None and step.compilation is not None and size is not None and size < 1:
            raise ConfigurationError(
                f"{step.compilation}: torch cuts a compiled model's graphs at buckets of 1 MiB or "
                f"more, received bucket_cap_mb={size!r}: pass 1 or more, or leave it out"
            )

    # -- the model

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module in DDP.

        Evaluation calls it without DDP, whose forward broadcasts buffers: ranks may then run
        different numbers of batches.
        """
        self.model = module
        # DDP refuses a module without gradients; such a model (a metric, a frozen teacher) needs
        # no communication.
        if any(parameter.requires_grad for parameter in module.parameters()):
            self.configure_ddp()
            if isinstance(self.model, DistributedDataParallel):
                self._check_owner_of_state(module)
                self.model.__dict__[_NAMES] = _trained_names(self.model)
                self._hook_state = self.communication_hook.register(self.model)
                if self._each_backward is None:
                    self._each_backward = WeakKeyDictionary()
                self._each_backward[self.model] = EachBackward(self.model)
        return self.model

    def _check_owner_of_state(self, module: nn.Module) -> None:
        """Refuse a hook's state that another model has filled: it holds that one's gradients."""
        if not self.communication_hook.has_own_state:
            return
        first = next(module.parameters())
        if self._owner_of_state is not None and self._owner_of_state() is not first:
            raise ConfigurationError(
                f"ddp_comm_state={type(self.communication_hook.state).__name__}(...) belongs to "
                "the model that was prepared before: pass a function that makes one for each "
                "model, as in ddp_comm_state=lambda: PowerSGDState(process_group=None)"
            )
        self._owner_of_state = ref(first)

    def configure_ddp(self) -> None:
        """Wrap `self.model`.

        Raises:
            ConfigurationError: it has layers of torch's SyncBatchNorm, and the accelerator has no
                kernels for them.
        """
        if not self.accelerator.sync_batchnorm_kernels and any(
            isinstance(layer, nn.SyncBatchNorm) for layer in self.model.modules()
        ):
            raise ConfigurationError(
                "the model has torch.nn.SyncBatchNorm layers, whose kernels the accelerator "
                f"{self.accelerator.name!r} does not have: pass sync_batchnorm=True, which gives "
                "them a forward that runs here too"
            )
        # Devices without an index leave no choice.
        device_ids = None if self.device.index is None else [self.device]
        arguments: dict[str, Any] = dict(self.ddp_arguments)
        if self.communication_hook.needs_one_bucket(self.communication_backend):
            arguments["bucket_cap_mb"] = self._size_of_one_bucket(arguments["bucket_cap_mb"])
        self.model = DistributedDataParallel(self.model, device_ids=device_ids, **arguments)

    def _size_of_one_bucket(self, asked: float | None) -> float:
        """Return a bucket size, in MiB, that takes all gradients."""
        trained = (p for p in self.model.parameters() if p.requires_grad)
        whole = sum(p.numel() * p.element_size() for p in trained) / 2**20
        if asked is not None and asked < whole:
            raise ConfigurationError(
                f"bucket_cap_mb={asked!r} divides the {whole:.1f} MiB of gradients into several "
                "buckets, with which PowerSGD over gloo waits forever: leave bucket_cap_mb out"
            )
        return whole + 1

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Give every rank the buffers of rank 0, which are the ones that are saved."""
        broadcast_from_first(prepared.original.buffers())
        yield

    # -- a step

    def no_sync(self, prepared: PreparedModel) -> AbstractContextManager[Any] | None:
        """Return DDP's context without gradient communication."""
        model = prepared.module
        return model.no_sync() if isinstance(model, DistributedDataParallel) else None

    @contextmanager
    def backward_in_forward(self, prepared: PreparedModel) -> Iterator[None]:
        """Reduce the gradients of each backward within DDP's forward."""
        model = prepared.module
        if self._each_backward is None or not isinstance(model, DistributedDataParallel):
            yield
            return
        with self._each_backward[model].within_forward(model):
            yield

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward; see `Strategy.backward`."""
        model = prepared.module
        run = partial(super().backward, prepared, loss, *args, **kwargs)
        if self._each_backward is None or not isinstance(model, DistributedDataParallel):
            run()
            return
        self._each_backward[model].run(run, loss, prepared.run_backward is Tensor.backward)

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> StratagemError | None:
        """Return DDP's own errors with the names of parameters; see `Strategy.explain`."""
        model = prepared.module
        return explain(error, model) if isinstance(model, DistributedDataParallel) else None

    def estimate_memory(
        self, phases: Mapping[str, StepMemory], shards: Collection[str]
    ) -> dict[str, StepMemory]:
        """Return the same with the buckets, which are as large as the gradients, or are these."""
        buckets = max(memory.gradients for memory in phases.values())
        if self.components.device_count == 1 or self.ddp_arguments["gradient_as_bucket_view"]:
            buckets = 0
        return {
            phase: replace(memory, working=memory.working + buckets)
            for phase, memory in super().estimate_memory(phases, shards).items()
        }

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step one optimizer; in post-local SGD, average the weights if an averaging is due.

        Raises:
            UserCodeError: DDP still waits for gradients, so the gradients of this rank are not
                reduced.
        """
        if isinstance(prepared.module, DistributedDataParallel):
            try:
                prepared.module.reducer._check_reducer_finalized()
            except RuntimeError as error:
                raise self.explain(prepared, error) or error from None
        result = super().optimizer_step(prepared, optimizer, closure)
        if self.communication_hook.averaging_period is not None:
            averager = self._averager_of(optimizer)
            if averager is not None:
                averager.average_parameters(optimizer.param_groups)
        return result

    def _averager_of(self, optimizer: Optimizer) -> PeriodicModelAverager | None:
        if self._averagers is None:
            self._averagers = WeakKeyDictionary()
        found = self._averagers.get(optimizer)
        if found is None:
            found = self.communication_hook.averager(self._hook_state)
            if found is not None:
                self._averagers[optimizer] = found
        return found

    # -- state

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by names; in post-local SGD, with the steps so far."""
        state = super().optimizer_state(prepared, optimizer)
        averager = self._averager_of(optimizer)
        return state if averager is None else {**state, _AVERAGING_STEP: averager.step}

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a state from `optimizer_state`."""
        super().load_optimizer_state(prepared, optimizer, state)
        averager = self._averager_of(optimizer)
        if averager is not None and _AVERAGING_STEP in state:
            averager.step = self._hook_state.iter = state[_AVERAGING_STEP]


_NAMES = "_stratagem_trained_names"
"""An attribute of DDP: the names of its parameters, by the index that its reducer gives them."""
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_MARKED_TWICE = re.compile(r"Parameter at index (\d+)")


def explain(error: RuntimeError, ddp: DistributedDataParallel) -> UserCodeError | None:
    """Return a clearer error for an error of DDP's reducer; None for other errors.

    Args:
        error: the error of the forward or backward pass.
        ddp: the model.
    """
    text = str(error)
    still_waits = "Expected to have finished reduction in the prior iteration" in text
    if "Your training graph has changed" in text or (still_waits and ddp.static_graph):
        return UserCodeError(
            "DDP was told static_graph=True, but this step used other parameters than the first: "
            f"{_unused(text, ddp)}. Pass find_unused_parameters=True in its place, as in "
            "DDPStrategy(find_unused_parameters=True), or let every step use the same parameters"
        )
    if still_waits:
        message = (
            "the loss did not depend on every parameter, so DDP still waits for gradients: "
            f"{_unused(text, ddp)}. Let the loss use them, freeze them with "
            "requires_grad_(False) before training begins, or pass find_unused_parameters=True, as "
            "in strategy='ddp_find_unused_parameters_true' (static_graph=True costs less, if all "
            "steps leave out the same ones)"
        )
        return UserCodeError(with_explanation(message, "unused-parameters"))
    if "Expected to mark a variable ready only once" in text:
        found = _MARKED_TWICE.search(text)
        which = f"{_names(ddp)[int(found[1])]} " if found else "a parameter "
        return UserCodeError(
            f"{which}received its gradient twice in one backward: it is used in two checkpointed "
            "segments, or in several forward calls before one backward. Pass "
            "DDPStrategy(static_graph=True), use checkpoint(..., use_reentrant=False), or call "
            "forward once for each backward"
        )
    return None


def _unused(text: str, ddp: DistributedDataParallel) -> str:
    found = _INDICES.search(text)
    if found is None:
        return "which ones, a backward in one process shows (devices=1): their .grad stays None"
    names, trained = _names(ddp), dict(ddp.module.named_parameters())
    unused = [names[index] for index in map(int, found[1].split()) if index < len(names)]
    return "unused: " + ", ".join(
        name if trained[name].requires_grad else f"{name} (frozen since DDP was made)"
        for name in unused
    )


def _names(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters by the index that the reducer gives them."""
    names: list[str] = ddp.__dict__[_NAMES]
    return names


def _trained_names(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that require gradients now, in the reducer's order."""
    ignored = ddp.parameters_to_ignore
    return [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
