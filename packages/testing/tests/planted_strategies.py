"""Strategies that are wrong on purpose, each in one way; test_planted_bugs.py says which.

Each class's docstring is the mistake. Ranks load this file by its path.
"""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from stratagem.discovery import Capabilities
from stratagem.errors import CommunicationError, ConfigurationError, StratagemError
from stratagem.strategies import (
    DDPStrategy,
    FSDPStrategy,
    GradientClip,
    ParallelStrategy,
    PreparedModel,
    ProcessGroupRanks,
    Ranks,
    Strategy,
    TrainStep,
    make_optimizers,
    user_module,
)

REPLICAS = Capabilities(launchers=None, one_process=False, many_devices=True, multi_node=True)


class ByHand(ParallelStrategy):
    """Nothing is wrong: gradients are averaged before the step, by hand."""

    capabilities = REPLICAS

    def wrap(self, module: nn.Module) -> nn.Module:
        module.load_state_dict(self.ranks.broadcast(module.state_dict()))
        return module

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient.div_(self.ranks.world_size)

    def reduce_all(self, prepared: PreparedModel) -> None:
        for parameter in prepared.original.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.reduce(parameter.grad)

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        self.reduce_all(prepared)
        super().finish_step(prepared, step)


# ---------------------------------------------------------------- gradients


class AveragesUnderTheTrainer(ByHand):
    """Averages in what only the Trainer calls, so that replicas drift apart under Lite."""


class LeavesClippingToDDP(DDPStrategy):
    """engine_clips=True of a class that clips as DDP does, which leaves it to the front end."""

    capabilities = replace(DDPStrategy.capabilities, engine_clips=True)


class NotAveraged(ParallelStrategy):
    """Each rank steps with its own gradients."""

    capabilities = REPLICAS


class Summed(ByHand):
    """Gradients are summed, not averaged."""

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class DividedTwice(ByHand):
    """Gradients are averaged, and divided by the number of ranks once more."""

    def reduce(self, gradient: Tensor) -> None:
        super().reduce(gradient)
        gradient.div_(self.ranks.world_size)


class NotDividedByMicroBatches(DDPStrategy):
    """The loss of each micro-batch counts whole."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        return super().accumulate(prepared, step, micro_batch, 1)


class LastMicroBatchOnly(DDPStrategy):
    """Gradients are cleared before each micro-batch."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        for optimizer in prepared.optimizers:
            optimizer.zero_grad()
        return super().accumulate(prepared, step, micro_batch, count)


class DropsLastMicroBatch(ByHand):
    """The last of several micro-batches is begun and ended, and not trained on."""

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        batches = list(micro_batches)
        for position, micro_batch in enumerate(batches):
            if position and position == len(batches) - 1:
                step.begin(micro_batch)
            else:
                self.accumulate(prepared, step, micro_batch, len(batches))
            step.end(micro_batch)
        return True


class LossScaled(DDPStrategy):
    """The loss is scaled before backward, and gradients are not unscaled."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss * 5, *args, **kwargs)


class StepsTwice(DDPStrategy):
    """Each optimizer step is taken twice."""

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        super().optimizer_step(prepared, optimizer, closure)
        return super().optimizer_step(prepared, optimizer, closure)


class NeverSteps(DDPStrategy):
    """The optimizer is never stepped."""

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        return None


class ForgetsZeroGrad(DDPStrategy):
    """Gradients are never cleared."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(*arguments, **options)
        prepared.clear_gradients = [lambda: None for _ in prepared.clear_gradients]
        return prepared


class NeverCounts(DDPStrategy):
    """train_step never calls after_optimizer_step, so that max_steps is never reached."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        self.optimizer_step(prepared, prepared.optimizers[0])
        prepared.clear_gradients[0]()


class EndsNoMicroBatch(DDPStrategy):
    """train_step never calls step.end."""

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        for micro_batch in micro_batches:
            self.accumulate(prepared, step, micro_batch, len(micro_batches))
        return True


# ---------------------------------------------------------------- clipping


class ClipsBeforeReduction(ByHand):
    """Each rank clips its own gradients, then they are averaged."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        optimizer = prepared.optimizers[0]
        if step.clip is not None:
            self.clip_gradients(prepared, optimizer, step.clip)
        self.reduce_all(prepared)
        self.optimizer_step(prepared, optimizer)
        step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()


class ClipsBeforeUnscaling(ByHand):
    """Gradients are clipped while they are multiplied by a scale."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        self.reduce_all(prepared)
        optimizer, scale = prepared.optimizers[0], float(self.ranks.world_size)
        gradients = [p.grad for p in prepared.original.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, scale)
        if step.clip is not None:
            self.clip_gradients(prepared, optimizer, step.clip)
        torch._foreach_div_(gradients, scale)
        self.optimizer_step(prepared, optimizer)
        step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()


class ClipsByLocalNorm(DDPStrategy):
    """Each parameter is clipped by its own norm."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                nn.utils.clip_grad_norm_([parameter], clip.value)
        return None


class IgnoresClip(DDPStrategy):
    """clip_gradients does nothing."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        return None


class IgnoresClipAlgorithm(DDPStrategy):
    """gradient_clip_algorithm="value" is clipped by norm."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        return super().clip_gradients(prepared, optimizer, GradientClip(clip.value))


class NeverReadsClip(DDPStrategy):
    """A step of its own that does not look at step.clip."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        self.optimizer_step(prepared, prepared.optimizers[0])
        step.after_optimizer_step(prepared.optimizers[0])
        prepared.clear_gradients[0]()


# ---------------------------------------------------------------- models


class OwnInitialWeights(ByHand):
    """Ranks begin with the weights that each has made."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return module


class Unties(ByHand):
    """Weights that are tied become two when the model is moved."""

    def wrap(self, module: nn.Module) -> nn.Module:
        super().wrap(module)
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(layer, name, copied)
        return module


class TrainsFrozen(DDPStrategy):
    """Every parameter is trained, whatever its requires_grad was."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return super().wrap(module.requires_grad_(True))


class UnexplainedUnused(DDPStrategy):
    """An unused parameter ends in the engine's own error."""

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> Any:
        return None


class KeepsBatchNorm(DDPStrategy):
    """sync_batchnorm=True does nothing."""

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        pass


class OldParameters(DDPStrategy):
    """Preparing makes new parameters, and an optimizer that was made before keeps the old ones."""

    def prepare(self, module: nn.Module, optimizers: Any = (), **options: Any) -> PreparedModel:
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(parameter.detach().clone()))
        return super().prepare(module, optimizers, **options)


class IgnoresPrecision(DDPStrategy):
    """The model is never converted to the dtype that was asked for, nor its inputs."""

    def prepare(self, module: nn.Module, *arguments: Any, **options: Any) -> PreparedModel:
        return super().prepare(module, *arguments, **options)

    def bind(self, components: Any) -> None:
        super().bind(components)
        self.precision.convert_module = lambda module: module  # type: ignore[method-assign]
        self.precision.input_converter = lambda: None  # type: ignore[method-assign]


class OwnOptimizer(DDPStrategy):
    """An optimizer that is made afterwards is replaced by one of another learning rate."""

    def setup_optimizer(self, prepared: PreparedModel, optimizer: Optimizer) -> Optimizer:
        return torch.optim.SGD(optimizer.param_groups[0]["params"], lr=1e-3)


# ---------------------------------------------------------------- collectives


class OtherRanks(DDPStrategy):
    """Nothing is wrong: a base whose ranks are another class."""

    kind: type[ProcessGroupRanks] = ProcessGroupRanks

    def make_ranks(self) -> ProcessGroupRanks:
        world_size = self.components.device_count
        shards = [self.data_split_of(rank, world_size) for rank in range(world_size)]
        return self.kind(self.cluster_environment, world_size, shards)


class _NoBarrier(ProcessGroupRanks):
    def barrier(self, name: str = "") -> None:
        pass


class NoBarrier(OtherRanks):
    """A barrier does not wait."""

    kind = _NoBarrier


class _FromZero(ProcessGroupRanks):
    def broadcast(self, data: Any, src: int = 0) -> Any:
        return super().broadcast(data, 0)


class BroadcastsFromZero(OtherRanks):
    """broadcast ignores src."""

    kind = _FromZero


class _Reversed(ProcessGroupRanks):
    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, sync_grads=sync_grads).flip(0)


class GathersReversed(OtherRanks):
    """all_gather has another order than that of ranks."""

    kind = _Reversed


class _Truncated(ProcessGroupRanks):
    def gather_objects(self, data: Any) -> list[Any]:
        gathered = super().gather_objects(data)
        if isinstance(data, dict) and "uneven" in data:
            shortest = min(len(each["uneven"]) for each in gathered)
            return [{**each, "uneven": each["uneven"][:shortest]} for each in gathered]
        return gathered


class GathersEven(OtherRanks):
    """gather_objects cuts every rank's tensor to the shortest."""

    kind = _Truncated


class _Mean(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return super().all_reduce(tensor, "mean")


class ReducesToMean(OtherRanks):
    """all_reduce ignores op."""

    kind = _Mean


class _InPlace(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        reduced = super().all_reduce(tensor, op)
        if reduced.dtype == tensor.dtype:
            tensor.detach().copy_(reduced)
        return reduced


class ReducesInPlace(OtherRanks):
    """all_reduce changes the tensor that it is given."""

    kind = _InPlace


class NoSyncSyncs(DDPStrategy):
    """no_sync returns a context that changes nothing."""

    def no_sync(self, prepared: PreparedModel) -> AbstractContextManager[Any] | None:
        return nullcontext()


class NeverSyncsAgain(DDPStrategy):
    """Once gradients were held back, they are never communicated again."""

    def no_sync(self, prepared: PreparedModel) -> AbstractContextManager[Any] | None:
        module: Any = prepared.module
        module.require_backward_grad_sync = False
        return nullcontext()


# ---------------------------------------------------------------- data and evaluation


class _FirstPart(ProcessGroupRanks):
    @property
    def data_split(self) -> tuple[int, int]:
        return 0, self.world_size


class ReadsFirstPart(OtherRanks):
    """Every rank reads the first part of the data."""

    kind = _FirstPart


class ReadsEverything(DDPStrategy):
    """Every rank reads all of the data."""

    def data_split_of(self, rank: int, world_size: int) -> tuple[int, int]:
        return 0, 1


class _Local(ProcessGroupRanks):
    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        return tensor.expand(self.world_size, *tensor.shape)


class EvaluatesOwnPart(OtherRanks):
    """Logged values are those of this rank."""

    kind = _Local


class OwnBuffers(DDPStrategy):
    """Buffers are never made alike, not even for an evaluation."""

    def __init__(self, **components: Any) -> None:
        super().__init__(broadcast_buffers=False, **components)

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        yield


class StaysInEvaluationMode(DDPStrategy):
    """A step after an evaluation is taken in evaluation mode."""

    evaluated = False

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        self.evaluated = True
        yield

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        if self.evaluated:
            prepared.original.eval()
        super().train_step(prepared, step, micro_batches)


class HooksTwice(DDPStrategy):
    """after_backward is called twice for each micro-batch."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        had = super().accumulate(prepared, step, micro_batch, count)
        step.after_backward()
        return had


# ---------------------------------------------------------------- state


class PrefixesNames(DDPStrategy):
    """Names in the state begin with that of the wrapper."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        return {f"module.{name}": v for name, v in super().model_state(prepared).items()}


class SavesOwnPart(DDPStrategy):
    """Each rank returns its part of the names, and rank 0's alone are saved."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        items = list(super().model_state(prepared).items())
        return dict(items[self.ranks.global_rank :: self.ranks.world_size])


class SavesOwnRows(DDPStrategy):
    """Each rank returns its rows of each tensor."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        count, rank = self.ranks.world_size, self.ranks.global_rank
        state = super().model_state(prepared)
        return {name: value.chunk(count)[rank] if value.ndim and len(value) >= count else value
                for name, value in state.items()}  # fmt: skip


class LoadsNoWeights(DDPStrategy):
    """load_model_state does nothing."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        pass


class LoadsNoOptimizer(DDPStrategy):
    """load_optimizer_state does nothing."""

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        pass


class SavesOldWeights(DDPStrategy):
    """What is saved are the weights before training."""

    def prepare(self, module: nn.Module, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(module, *arguments, **options)
        self.first = {k: v.clone() for k, v in prepared.original.state_dict().items()}
        return prepared

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        return dict(self.first)


class ForgetsOwnState(DDPStrategy):
    """A count of rounds is saved, and not restored."""

    rounds = 0

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        super().train_step(prepared, step, micro_batches)
        self.rounds += 1

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"rounds": self.rounds}


class OwnNoise(DDPStrategy):
    """Draws random numbers of its own, whose generator no checkpoint holds."""

    def setup_environment(self) -> None:
        super().setup_environment()
        self.generator = torch.Generator().manual_seed(3)

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        noise = 1 + torch.rand((), generator=self.generator).item()
        super().backward(prepared, loss * noise, *args, **kwargs)


# ---------------------------------------------------------------- what is left


_kept: dict[str, Any] = {"models": {}, "runs": 0}
"""What outlives a strategy, where that is the mistake."""


class LeaksGroup(DDPStrategy):
    """Each preparation makes a process group that nobody frees."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        dist.new_group()
        return super().prepare(*arguments, **options)


class LeaksThread(DDPStrategy):
    """Each run starts a thread that nobody ends."""

    def setup(self, trainer: Any) -> None:
        threading.Thread(target=threading.Event().wait, name="mine", daemon=True).start()


class LeaksVariable(DDPStrategy):
    """Each run changes a variable of the environment."""

    def setup(self, trainer: Any) -> None:
        _kept["runs"] += 1
        os.environ["MINE_RUNS"] = str(_kept["runs"])


class LeaksPatch(DDPStrategy):
    """A function of torch is replaced, and not put back."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        torch.nn.functional.linear = partial(torch.nn.functional.linear)
        return super().prepare(*arguments, **options)


class LeaksProcess(DDPStrategy):
    """Starts a process that outlives the rank."""

    def setup_environment(self) -> None:
        super().setup_environment()
        if "process" not in _kept:
            code = "import time; time.sleep(120)"
            _kept["process"] = subprocess.Popen([sys.executable, "-c", code])


class KeepsEnvironment(DDPStrategy):
    """Its teardown leaves a variable."""

    def teardown(self) -> None:
        os.environ["MINE_DONE"] = "1"
        super().teardown()


class ByBackward(ByHand):
    """Nothing is wrong: gradients that any rank has are averaged after each backward."""

    def trained(self, prepared: PreparedModel) -> list[nn.Parameter]:
        return [p for p in prepared.original.parameters() if p.requires_grad]

    def reduce_all(self, prepared: PreparedModel) -> None:
        """Leave it to backward."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        trained = self.trained(prepared)
        used = self.ranks.all_reduce_ints([p.grad is not None for p in trained], "max")
        for p, is_used in zip(trained, used, strict=True):
            if is_used:
                p.grad = self.ranks.all_reduce(p.new_zeros(p.shape) if p.grad is None else p.grad)

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        for buffer in prepared.original.buffers():
            buffer.copy_(self.ranks.broadcast(buffer))
        yield


class ZerosForUnused(ByBackward):
    """A parameter that no rank has used gets a gradient of zeros, and decays."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad


class ListsTrainedOnce(ByBackward):
    """Looks at requires_grad in wrap, so that what is unfrozen later is not averaged."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self._listed = [p for p in module.parameters() if p.requires_grad]
        return super().wrap(module)

    def trained(self, prepared: PreparedModel) -> list[nn.Parameter]:
        return self._listed


class IgnoresClosure(ByBackward):
    """optimizer_step leaves the closure out."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        return super().optimizer_step(prepared, optimizer)


class PastRunBackward(ByBackward):
    """Calls loss.backward, whichever function of the Module is to run backward."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        run_backward, prepared.run_backward = prepared.run_backward, Tensor.backward
        super().backward(prepared, loss, *args, **kwargs)
        prepared.run_backward = run_backward


class HoldsAfterError(ByBackward):
    """An error within no_sync leaves gradients held back for ever."""

    holds = False

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        self.holds = True
        yield
        self.holds = False

    def trained(self, prepared: PreparedModel) -> list[nn.Parameter]:
        return [] if self.holds else super().trained(prepared)


class ListsMicroBatches(ByBackward):
    """Reads all micro-batches of a step before the first one is trained on."""

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        super().train_step(prepared, step, list(micro_batches))


class NotesNoBackward(ByBackward):
    """accumulate calls no hook before backward."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        loss = step.loss(step.begin(micro_batch), converted=True)
        if loss is None:
            return False
        self.backward(prepared, loss / count)
        step.after_backward()
        return True


class DividesLossInPlace(ByBackward):
    """accumulate divides the loss in place, which user code may have kept."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        loss = step.loss(step.begin(micro_batch), converted=True)
        if loss is None:
            return False
        step.before_backward(loss)
        loss /= count
        self.backward(prepared, loss)
        step.after_backward()
        return True


class OneFlatTensor(ByHand):
    """Gradients of all dtypes travel in one tensor, which has the dtype of the first one."""

    def reduce_all(self, prepared: PreparedModel) -> None:
        own = [p.grad for p in prepared.original.parameters() if p.grad is not None]
        flat = self.ranks.all_reduce(torch.cat([g.flatten().to(own[0].dtype) for g in own]))
        for gradient, part in zip(own, torch.split(flat, [g.numel() for g in own]), strict=True):
            gradient.copy_(part.view_as(gradient))


class ClipsBeforeHook(ByBackward):
    """Gradients are clipped before a hook sees them, and may change them."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        optimizer = prepared.optimizers[0]
        if step.clip is not None:
            self.clip_gradients(prepared, optimizer, step.clip)
        step.before_optimizer_step(optimizer)
        self.optimizer_step(prepared, optimizer)
        step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()


class CountsSkippedSteps(ByBackward):
    """A step that loss scaling has skipped is counted."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        optimizer = prepared.optimizers[0]
        if self.precision.scales_loss:
            self.precision.unscale_gradients(optimizer)
        step.before_optimizer_step(optimizer)
        if step.clip is not None:
            self.clip_gradients(prepared, optimizer, step.clip)
        self.optimizer_step(prepared, optimizer)
        step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()


class SavedBuffersOnly(ByBackward):
    """Buffers that no checkpoint has are those of each rank in an evaluation."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        saved = prepared.original.state_dict()
        for name, buffer in user_module(prepared.original).named_buffers():
            if name in saved:
                buffer.copy_(self.ranks.broadcast(buffer))
        yield


class StaysGathered(FSDPStrategy):
    """A step does not free the weights that a forward pass without a backward pass has gathered."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        return Strategy.optimizer_step(self, prepared, optimizer, closure)


class StepsWithoutLoss(ByBackward):
    """Takes a step, whether a micro-batch had a loss or not."""

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        self.accumulate_all(prepared, step, micro_batches)
        self.finish_step(prepared, step)


class SavesEveryBuffer(ByBackward):
    """Saves buffers that the model leaves out of its state_dict."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        module = user_module(prepared.original)
        return {**super().model_state(prepared), **dict(module.named_buffers())}


class LoadsWhatFits(ByBackward):
    """Loads the names that a checkpoint and the model share, and is silent on the others."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=False)


class StepsPastPrecision(ByBackward):
    """Steps the optimizer itself, past the precision that scales losses."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        return optimizer.step(closure)


class FirstLearningRates(ByBackward):
    """Steps with the learning rates that there were first, as a copy of param_groups does."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        groups = optimizer.param_groups
        first = self.__dict__.setdefault("_first", {}).setdefault(
            id(optimizer), [group["lr"] for group in groups]
        )
        now = [group["lr"] for group in groups]
        for group, rate in zip(groups, first, strict=True):
            group["lr"] = rate
        try:
            return super().optimizer_step(prepared, optimizer, closure)
        finally:
            for group, rate in zip(groups, now, strict=True):
                group["lr"] = rate


class FirstOptimizer(ByBackward):
    """Steps the first of two optimizers, and no other one."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        if self.__dict__.setdefault("_one", optimizer) is optimizer:
            return super().optimizer_step(prepared, optimizer, closure)
        return None


class LoadsFirstGroup(ByBackward):
    """All groups of an optimizer have the learning rate of the first one after a load."""

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        super().load_optimizer_state(prepared, optimizer, state)
        for group in optimizer.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"]


class IgnoresBackwardArguments(ByBackward):
    """backward drops retain_graph."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss)


class DropsPositionalArguments(ByBackward):
    """backward passes on what is named only."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, **kwargs)


class HoldsNothing(ByBackward):
    """backward communicates, and there is no no_sync."""


class OwnNorm(ByBackward):
    """clip_gradients clips, and returns no norm."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        super().clip_gradients(prepared, optimizer, clip)
        return None


class OwnInitialBuffers(ByBackward):
    """Ranks begin with rank 0's parameters, and with buffers of their own."""

    def wrap(self, module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(self.ranks.broadcast(parameter.detach()))
        return module


class SavesOtherDtype(ByBackward):
    """model_state returns tensors of another dtype."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        return {name: value.double() for name, value in super().model_state(prepared).items()}


class EvaluatesAnAverage(ByBackward):
    """Other weights are swapped in for an evaluation, and stay."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        with super().evaluation(prepared), torch.no_grad():
            for parameter in prepared.original.parameters():
                parameter.mul_(0.9)
            yield


class Unfreezes(ByBackward):
    """Each parameter requires a gradient after an evaluation, whether it did before or not."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        with super().evaluation(prepared):
            prepared.original.requires_grad_(False)
            yield
            prepared.original.requires_grad_(True)


class _LocalRanks(ProcessGroupRanks):
    @property
    def data_split(self) -> tuple[int, int]:
        return self.local_rank, self.world_size


class ReadsByLocalRank(ByHand):
    """Reads the part of the data of its local rank: two nodes read the same."""

    def make_ranks(self) -> Ranks:
        made = super().make_ranks()
        return _LocalRanks(self.cluster_environment, made.world_size)


class StepsByLocalRank(ByHand):
    """Each rank averages the gradients of a part of the parameters, by its local rank."""

    def reduce_all(self, prepared: PreparedModel) -> None:
        super().reduce_all(prepared)
        with torch.no_grad():
            for index, parameter in enumerate(prepared.original.parameters()):
                if parameter.grad is None:
                    continue
                if index % self.ranks.world_size != self.ranks.local_rank:
                    parameter.grad.zero_()
                dist.all_reduce(parameter.grad)


class _GatherByLocalRank(ProcessGroupRanks):
    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        gathered = super().all_gather(tensor, sync_grads=sync_grads)
        own = gathered.clone()
        own[self.local_rank] = tensor
        return own


class GathersByLocalRank(ByHand):
    """Puts its own tensor where its local rank is."""

    def make_ranks(self) -> Ranks:
        made = super().make_ranks()
        return _GatherByLocalRank(self.cluster_environment, made.world_size)


class LosesLayout(ByHand):
    """Copies the values of a weight in the order of memory, whatever its strides are."""

    def wrap(self, module: nn.Module) -> nn.Module:
        module = super().wrap(module)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(p.detach().as_strided((p.numel(),), (1,)).clone().reshape(p.shape))
        return module


class WaitsForTheFirst(ByHand):
    """The exchange of the last gradient has not ended when the step reads it."""

    def reduce_all(self, prepared: PreparedModel) -> None:
        last = list(prepared.original.parameters())[-2]
        own = None if last.grad is None else last.grad.clone()
        super().reduce_all(prepared)
        if last.grad is not None and own is not None:
            last.grad.copy_(own)


class Misspelled(ByHand):
    """A method of the interface has another name, and nothing calls it."""

    def end_trainig(self, prepared: PreparedModel) -> None:
        self.reduce_all(prepared)


class LosesComponents(ByBackward):
    """Its __init__ takes what is the base class's, and does not pass it on."""

    def __init__(self, **components: Any) -> None:
        super().__init__()
        self.components_given = components


class NoComponents(ByBackward):
    """Its __init__ takes nothing."""

    def __init__(self) -> None:
        super().__init__()


class GeneratorNoSync(ByBackward):
    """no_sync yields, and is no context: the decorator was forgotten."""

    def no_sync(self, prepared: PreparedModel) -> Any:
        yield


class AsyncWrap(ByBackward):
    """wrap is a coroutine."""

    async def wrap(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        return module


class KeepsSignalHandler(DDPStrategy):
    """Its setup_environment sets a signal's handler, and nobody puts back what was there."""

    def setup_environment(self) -> None:
        super().setup_environment()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class KeepsFirstModel(DDPStrategy):
    """A model that was prepared before is not prepared again."""

    def prepare(self, module: nn.Module, *arguments: Any, **options: Any) -> PreparedModel:
        first: PreparedModel | None = _kept["models"].get(type(module))
        if first is None:
            first = _kept["models"][type(module)] = super().prepare(module, *arguments, **options)
        return first


class SwallowsException(ByHand):
    """What user code raises is no error."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        try:
            return super().accumulate(prepared, step, micro_batch, count)
        except ValueError:
            return True


# ---------------------------------------------------------------- what only a second look shows


class SavesFirstWeights(ByBackward):
    """Every save after the first one holds the weights of the first one."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        if "_saved" not in vars(self):
            self._saved = {k: v.clone() for k, v in super().model_state(prepared).items()}
        return self._saved


class SavesFirstOptimizer(ByBackward):
    """Every save after the first one holds the optimizer of the first one."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        if "_saved" not in vars(self):
            self._saved = copy.deepcopy(super().optimizer_state(prepared, optimizer))
        return {**self._saved, "param_groups": optimizer_groups(self, prepared, optimizer)}


def optimizer_groups(strategy: Any, prepared: PreparedModel, optimizer: Optimizer) -> Any:
    return ByBackward.optimizer_state(strategy, prepared, optimizer)["param_groups"]


class SavesFirstRates(ByBackward):
    """Every save after the first one holds the learning rates of the first one."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(prepared, optimizer)
        if "_groups" not in vars(self):
            self._groups = copy.deepcopy(state["param_groups"])
        return {**state, "param_groups": self._groups}


class LoadsNoGroups(ByBackward):
    """A load leaves the learning rates that the optimizer was made with."""

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        super().load_optimizer_state(prepared, optimizer, state)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Holding(ByBackward):
    """Nothing is wrong: backward has to ask `holds` whether it is to communicate."""

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        own = prepared.strategy_data
        before, own["holds"] = own.get("holds", False), True
        try:
            yield
        finally:
            own["holds"] = before

    def holds(self, prepared: PreparedModel) -> bool:
        return bool(prepared.strategy_data.get("holds"))


class ErrorFeedback(Holding):
    """Nothing is wrong: signs are averaged, and what they leave out is added in the next step."""

    capabilities = replace(REPLICAS, parameters="same")

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(*arguments, **options)
        named = prepared.original.named_parameters()
        self.hold(prepared, {name: torch.zeros_like(p) for name, p in named})
        return prepared

    def hold(self, prepared: PreparedModel, error: dict[str, Tensor]) -> None:
        prepared.strategy_data["error"] = error

    def held(self, prepared: PreparedModel) -> dict[str, Tensor]:
        held: dict[str, Tensor] = prepared.strategy_data["error"]
        return held

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        ByHand.backward(self, prepared, loss, *args, **kwargs)
        if self.holds(prepared):
            return
        named, error = dict(prepared.original.named_parameters()), self.held(prepared)
        used = self.ranks.all_reduce_ints([p.grad is not None for p in named.values()], "max")
        for (name, p), is_used in zip(named.items(), used, strict=True):
            if not is_used:
                continue
            whole = error[name] + (torch.zeros_like(p) if p.grad is None else p.grad)
            sent = whole.sgn() * whole.abs().mean()
            p.grad = self.ranks.all_reduce(sent)
            if bool(p.grad.isfinite().all()):  # on every rank, or on none
                error[name] = whole - sent

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        own = {name: error.clone() for name, error in self.held(prepared).items()}
        return {"errors": self.ranks.gather_objects(own)}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        errors = state["errors"]
        if len(errors) == self.ranks.world_size:
            own = errors[self.ranks.global_rank]
            self.hold(prepared, {name: error.clone() for name, error in own.items()})


class ForgetsError(ErrorFeedback):
    """The error that compression leaves is not saved."""

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {}


class OwnRowOfError(ErrorFeedback):
    """A checkpoint of fewer ranks has no row for the last one."""

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        own = state["errors"][self.ranks.global_rank]
        self.hold(prepared, {name: error.clone() for name, error in own.items()})


class SlowWeights(ByBackward):
    """Nothing is wrong: every third step goes half of the way back to the slow weights."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(*arguments, **options)
        self.take_slow(prepared)
        return prepared

    def take_slow(self, prepared: PreparedModel) -> None:
        named = prepared.original.named_parameters()
        prepared.strategy_data["slow"] = {name: p.detach().clone() for name, p in named}

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        result = super().optimizer_step(prepared, optimizer, closure)
        own = prepared.strategy_data
        own["steps"] = own.get("steps", 0) + 1
        if own["steps"] % 3 == 0:
            with torch.no_grad():
                for name, p in prepared.original.named_parameters():
                    p.copy_(own["slow"][name].lerp_(p, 0.5))
        return result

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=strict)
        self.take_slow(prepared)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        slow = {name: value.clone() for name, value in prepared.strategy_data["slow"].items()}
        return {"slow": slow, "steps": prepared.strategy_data.get("steps", 0)}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        slow = {name: value.clone() for name, value in state["slow"].items()}
        prepared.strategy_data.update(slow=slow, steps=state["steps"])


class StaleSlowWeights(SlowWeights):
    """Slow weights are those of before, where weights alone are loaded."""

    def take_slow(self, prepared: PreparedModel) -> None:
        if "slow" not in prepared.strategy_data:
            super().take_slow(prepared)


class ForgetsAverage(ByBackward):
    """The average of weights, which evaluation uses, is in no checkpoint."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        named = dict(prepared.original.named_parameters())
        before = {name: p.detach().clone() for name, p in named.items()}
        average = prepared.strategy_data.setdefault("average", before)
        result = super().optimizer_step(prepared, optimizer, closure)
        for name, p in named.items():
            average[name].lerp_(p.detach(), 0.1)
        return result

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        named = dict(prepared.original.named_parameters())
        own = {name: p.detach().clone() for name, p in named.items()}
        with super().evaluation(prepared), torch.no_grad():
            for name, p in named.items():
                p.copy_(prepared.strategy_data.get("average", own)[name])
            yield
            for name, p in named.items():
                p.copy_(own[name])


class AveragesInFinishStep(ForgetsAverage):
    """Updates the average in finish_step, which manual optimization does not call."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        return super(ForgetsAverage, self).optimizer_step(prepared, optimizer, closure)

    def finish_step(self, prepared: PreparedModel, step: Any) -> None:
        named = dict(prepared.original.named_parameters())
        before = {name: p.detach().clone() for name, p in named.items()}
        average = prepared.strategy_data.setdefault("average", before)
        super().finish_step(prepared, step)
        for name, p in named.items():
            average[name].lerp_(p.detach(), 0.1)


class ForgetsOptions(DDPStrategy):
    """Wraps the model in DDP by itself, without the options of the base class."""

    def configure_ddp(self) -> None:
        self.model = DistributedDataParallel(self.model)


class SkipsAlone(DDPStrategy):
    """Each rank decides by its own loss whether to leave a step out."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        prepared.strategy_data["bad"] = not loss.isfinite()
        super().backward(prepared, loss, *args, **kwargs)

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        if not prepared.strategy_data["bad"]:
            return super().optimizer_step(prepared, optimizer, closure)
        return None


class KeepsAnOverflow(ByBackward):
    """Adds to gradients by a running norm, which one overflow makes infinite for good."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        own = prepared.strategy_data
        grads = [p.grad for p in self.trained(prepared) if p.grad is not None]
        own["norm"] = 0.5 * own.get("norm", 0.0) + sum(float(grad.norm()) for grad in grads)
        return self.step_with(own["norm"], grads, partial(super().optimizer_step, prepared))(
            optimizer, closure
        )

    def step_with(
        self, norm: float, grads: list[Tensor], take: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Change the gradients."""
        for grad in grads:
            grad.add_(0.0 * norm)
        return take


class StopsAfterAnOverflow(KeepsAnOverflow):
    """Takes no step while the running norm is infinite."""

    def step_with(
        self, norm: float, grads: list[Tensor], take: Callable[..., Any]
    ) -> Callable[..., Any]:
        if math.isfinite(norm):
            return take
        return self.leave_out

    def leave_out(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Say that the step was not taken."""
        self.precision.step_was_skipped = True


class ExplainsEverything(ByBackward):
    """Every RuntimeError is one of communication."""

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> StratagemError | None:
        return CommunicationError("a rank was lost: look at the network")


class ConvertsNothing(ByBackward):
    """Its prepare leaves out the conversion to the precision."""

    def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
        wrapped = self.wrap(module)
        return PreparedModel(wrapped, module, make_optimizers(optimizers), evaluation_module=module)


class Periodic(ByHand):
    """Nothing is wrong: replicas step on their own, and are averaged after every second step."""

    capabilities = replace(REPLICAS, parameters="drift")

    def __init__(self, *, every: int = 2, **components: Any) -> None:
        super().__init__(**components)
        self.every = every

    def count(self, prepared: PreparedModel) -> int:
        """Count a step of a model; return the number of them."""
        own = prepared.strategy_data
        own["steps"] = own.get("steps", 0) + 1
        return int(own["steps"])

    def average(self, prepared: PreparedModel, optimizers: Sequence[Optimizer] = ()) -> None:
        held: list[Tensor] = [*prepared.original.parameters()]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                held += [v for v in state.values() if isinstance(v, Tensor) and v.ndim]
        with torch.no_grad():
            for value in held:
                value.copy_(self.ranks.all_reduce(value.detach()))
            for buffer in prepared.original.buffers():
                buffer.copy_(self.ranks.broadcast(buffer))

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        returned = super().optimizer_step(prepared, optimizer, closure)
        if self.count(prepared) % self.every == 0:
            self.average(prepared)
        return returned

    def reduce_all(self, prepared: PreparedModel) -> None:
        """Leave gradients to each rank."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        held = [(p, p.detach().clone()) for p in prepared.original.parameters()]
        self.average(prepared)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in held:
                    parameter.copy_(own)

    def end_training(self, prepared: PreparedModel) -> None:
        self.average(prepared)

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        self.average(prepared)
        return super().model_state(prepared)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        self.average(prepared, [optimizer])
        return super().optimizer_state(prepared, optimizer)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"steps": prepared.strategy_data.get("steps", 0)}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        prepared.strategy_data["steps"] = state["steps"]


class AveragesWeightsOnly(Periodic):
    """Biases are not averaged every second step, only in evaluations and saves."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        returned = ByHand.optimizer_step(self, prepared, optimizer, closure)
        if self.count(prepared) % self.every == 0:
            with torch.no_grad():
                for p in prepared.original.parameters():
                    if p.ndim > 1:
                        p.copy_(self.ranks.all_reduce(p.detach()))
        return returned


class EvaluatesAverage(ByBackward):
    """Nothing is wrong: an evaluation uses an average over steps."""

    def average(self, prepared: PreparedModel) -> dict[str, Tensor]:
        begin = {name: p.detach().clone() for name, p in prepared.original.named_parameters()}
        average: dict[str, Tensor] = prepared.strategy_data.setdefault("average", begin)
        return average

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        self.average(prepared)
        result = super().optimizer_step(prepared, optimizer, closure)
        with torch.no_grad():
            self.update(prepared)
        return result

    def update(self, prepared: PreparedModel) -> None:
        average = self.average(prepared)
        for name, p in prepared.original.named_parameters():
            average[name].lerp_(p, 0.1)

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        named = dict(prepared.original.named_parameters())
        own = {name: p.detach().clone() for name, p in named.items()}
        average = self.average(prepared)
        with super().evaluation(prepared), torch.no_grad():
            for name, p in named.items():
                p.copy_(average[name])
            yield
            for name, p in named.items():
                p.copy_(own[name])

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=strict)
        prepared.strategy_data.pop("average", None)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"average": dict(self.average(prepared))}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        average = {name: value.clone() for name, value in state["average"].items()}
        prepared.strategy_data["average"] = average


class AverageOfWeightsBefore(EvaluatesAverage):
    """The average goes on from the weights before a load."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        ByBackward.load_model_state(self, prepared, state, strict=strict)


class AverageRunsAway(EvaluatesAverage):
    """The average moves away from the weights in each step."""

    def update(self, prepared: PreparedModel) -> None:
        average = self.average(prepared)
        for name, p in prepared.original.named_parameters():
            average[name].add_(average[name] - p, alpha=0.1)


class AverageOfWeightsOnly(EvaluatesAverage):
    """The average has the biases of the begin."""

    def update(self, prepared: PreparedModel) -> None:
        average = self.average(prepared)
        for name, p in prepared.original.named_parameters():
            if p.ndim > 1:
                average[name].lerp_(p, 0.1)


class AverageIsTheModel(EvaluatesAverage):
    """The average is no copy, so that it is the weights."""

    def average(self, prepared: PreparedModel) -> dict[str, Tensor]:
        begin = {name: p.detach() for name, p in prepared.original.named_parameters()}
        average: dict[str, Tensor] = prepared.strategy_data.setdefault("average", begin)
        return average

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        for name, value in self.average(prepared).items():
            value.copy_(state["average"][name])


class DiLoCo(Periodic):
    """Nothing is wrong: the model is the mean, and the state has each rank's replica."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        state = super().model_state(prepared)
        trained = dict(prepared.original.named_parameters())
        return {n: self.ranks.all_reduce(v) if n in trained else v for n, v in state.items()}

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        own = {
            "weights": {n: p.detach().clone() for n, p in prepared.original.named_parameters()},
            "moments": [self.optimizer_state(prepared, each)["state"] for each in optimizers],
        }
        steps = prepared.strategy_data.get("steps", 0)
        return {"replicas": self.ranks.gather_objects(own), "steps": steps}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        prepared.strategy_data["steps"] = state["steps"]
        own = state["replicas"][self.ranks.global_rank]
        with torch.no_grad():
            for name, p in prepared.original.named_parameters():
                p.copy_(own["weights"][name])
        for optimizer, moments in zip(optimizers, own["moments"], strict=True):
            held = {**self.optimizer_state(prepared, optimizer), "state": moments}
            self.load_optimizer_state(prepared, optimizer, held)


class RaisesRates(ByBackward):
    """The first steps have smaller learning rates, which stay in the parameter groups."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        steps = prepared.strategy_data["steps"] = prepared.strategy_data.get("steps", 0) + 1
        for group in optimizer.param_groups:
            group["lr"] *= min(1.0, steps / 4)
        return super().optimizer_step(prepared, optimizer, closure)


class ScalesFirstOptimizer(ByBackward):
    """Under a precision that scales losses, the model's first optimizer is stepped."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        stepped = prepared.optimizers[0] if self.precision.scales_loss else optimizer
        return super().optimizer_step(prepared, stepped, closure)


class StepsFirstByClosure(ByBackward):
    """A step with a closure is that of the model's first optimizer."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        stepped = optimizer if closure is None else prepared.optimizers[0]
        return super().optimizer_step(prepared, stepped, closure)


class AveragesForOthersOnly(Periodic):
    """Steps average nothing: only evaluations and saves do."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        return ByHand.optimizer_step(self, prepared, optimizer, closure)


class AnchorsOfTrained(Periodic):
    """Keeps the weights of each average, of what was trained in the first step."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        named = {n: p for n, p in prepared.original.named_parameters() if p.requires_grad}
        begin = {name: p.detach().clone() for name, p in named.items()}
        anchor = prepared.strategy_data.setdefault("anchor", begin)
        returned = super().optimizer_step(prepared, optimizer, closure)
        if prepared.strategy_data["steps"] % 8 == 0:
            for name, p in named.items():
                anchor[name].copy_(p.detach())
        return returned


class DriftsUnclipped(Periodic):
    """clip_gradients clips nothing."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        return None


class DriftsClippedByNorm(Periodic):
    """gradient_clip_algorithm="value" is clipped by norm."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        return super().clip_gradients(prepared, optimizer, replace(clip, algorithm="norm"))


class DriftsUndivided(Periodic):
    """The loss of each micro-batch counts whole."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        return super().accumulate(prepared, step, micro_batch, 1)


class DriftsByTheLast(Periodic):
    """Gradients are cleared before each micro-batch."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        prepared.clear_gradients[0]()
        return super().accumulate(prepared, step, micro_batch, count)


class CountsOfFormerFits(Periodic):
    """The count of steps is the strategy's, and not the model's: another fit goes on from it."""

    steps = 0

    def count(self, prepared: PreparedModel) -> int:
        self.steps += 1
        return self.steps

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        self.steps = state["steps"]


class MultipliesOption(Periodic):
    """bind multiplies an option by the number of ranks, each time that it is called."""

    def bind(self, components: Any) -> None:
        super().bind(components)
        self.every *= components.device_count


class DropsCountAtEnd(Periodic):
    """The end of a fit drops the count of steps, which a save after the fit would need."""

    def end_training(self, prepared: PreparedModel) -> None:
        prepared.strategy_data.clear()


class ForgetsCount(Periodic):
    """The count of steps since an average is not saved."""

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {}


class TrainsInEvaluation(Periodic):
    """The average that is evaluated is left in place."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        self.average(prepared)
        yield


class SaysAlike(Periodic):
    """Ranks differ between two averages, and the capabilities say that they do not."""

    capabilities = REPLICAS


class KeepsGradients(ByBackward):
    """Each gradient that was averaged is kept, as if its handle were to be waited for."""

    kept: list[Tensor] | None = None

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        kept = self.kept or []
        self.kept = kept + [p.grad.clone() for p in self.trained(prepared) if p.grad is not None]


class LastModelOnly(ByBackward):
    """Averages the gradients of the model that was wrapped last, whichever a loss is of."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self.last = super().wrap(module)
        return self.last

    def trained(self, prepared: PreparedModel) -> list[nn.Parameter]:
        return list(self.last.parameters())


class FirstGroups(ByBackward):
    """Steps the groups that the optimizer had at its first step."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        groups = optimizer.param_groups
        self.count = getattr(self, "count", len(groups))
        optimizer.param_groups = groups[: self.count]
        try:
            return super().optimizer_step(prepared, optimizer, closure)
        finally:
            optimizer.param_groups = groups


class _Broadcasts(nn.Module):
    """Broadcasts buffers in each forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.group = dist.group.WORLD

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0, group=self.group)
        return self.module(*args, **kwargs)


class BroadcastsInEvaluation(ByBackward):
    """Communicates in evaluation's forward passes, of which ranks may have different numbers."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        made = super().prepare(*arguments, **options)
        return replace(made, evaluation_module=_Broadcasts(made.evaluation_module))


class _Everybody(ProcessGroupRanks):
    """Ranks whose collectives wait for all ranks, also for those without a batch."""

    @contextmanager
    def among(self, members: Sequence[int]) -> Iterator[None]:
        yield


class WaitsForEverybody(DDPStrategy):
    """Collectives of an evaluation step need a rank without a batch."""

    def make_ranks(self) -> Ranks:
        return _Everybody(self.cluster_environment, self.components.device_count)


class EvaluatesByDDP(DDPStrategy):
    """Evaluation calls DDP, which sends buffers from rank 0 in each forward pass."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        made = super().prepare(*arguments, **options)
        return replace(made, evaluation_module=made.module)


class OwnGradients(ByBackward):
    """Averages the gradients that this rank has, whichever other ranks have."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        ByHand.backward(self, prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            if p.grad is not None:
                p.grad = self.ranks.all_reduce(p.grad)


class KeepsMasters(ByBackward):
    """Nothing is wrong: what rounding takes from a weight is added again in the next step."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(*arguments, **options)
        named = prepared.original.named_parameters()
        self.rest = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in named}
        return prepared

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        returned = super().optimizer_step(prepared, optimizer, closure)
        with torch.no_grad():
            for name, p in prepared.original.named_parameters():
                whole = 0.9999 * p.float() + self.rest[name]
                p.copy_(whole)
                self.rest[name] = whole - p.float()
        return returned

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"rest": {name: rest.clone() for name, rest in self.rest.items()}}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        self.rest = {name: rest.clone() for name, rest in state["rest"].items()}


class LosesMasters(KeepsMasters):
    """What rounding has taken is not saved."""

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {}


class ClipsTheModel(ByBackward):
    """clip_gradients clips all parameters of the model, whatever the optimizer has."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        whole = torch.optim.SGD(self.trained(prepared), lr=0.0)
        return super().clip_gradients(prepared, whole, clip)


class IgnoresNormType(ByBackward):
    """clip_gradients clips by the Euclidean norm, whatever is asked for."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        return super().clip_gradients(prepared, optimizer, replace(clip, norm_type=2.0))


class HidesNaN(ByBackward):
    """A gradient that is NaN becomes 0."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            if p.grad is not None:
                p.grad.nan_to_num_()


class SeedsInPrepare(DDPStrategy):
    """prepare seeds torch alike on all ranks."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        torch.manual_seed(0)
        return super().prepare(*arguments, **options)


class SeedsInEvaluation(DDPStrategy):
    """An evaluation seeds torch."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        torch.manual_seed(int(self.ranks.global_rank))
        with super().evaluation(prepared):
            yield


class Unpicklable(DDPStrategy):
    """Has a lock from the beginning, and takes any launcher."""

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        self.lock = threading.Lock()


class FirstBucketOnly(ByHand):
    """Averages a flat buffer of 1 MB, and nothing of what does not fit."""

    def reduce_all(self, prepared: PreparedModel) -> None:
        gradients = [p.grad for p in prepared.original.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        bucket = flat[: 1 << 18]
        bucket.copy_(self.ranks.all_reduce(bucket))
        parts = torch.split(flat, [g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class _InPairs(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        if op != "mean":
            return super().all_reduce(tensor, op)
        other = super().all_gather(tensor)[(self.global_rank + 1) % self.world_size]
        return (tensor + other) / 2


class InPairs(OtherRanks):
    """The mean is that of this rank and the next one: right for two ranks only."""

    kind = _InPairs

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in prepared.original.parameters():
            if p.grad is not None:
                p.grad = self.ranks.all_reduce(p.grad)


class KeepsModels(DDPStrategy):
    """Keeps every model that it has prepared."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(*arguments, **options)
        self.__dict__.setdefault("_models", []).append(prepared)
        return prepared


class RoundsOnTheWire(ByHand):
    """Gradients are averaged in bfloat16."""

    def reduce(self, gradient: Tensor) -> None:
        gradient.copy_(self.ranks.all_reduce(gradient.bfloat16()))


class MatricesOnly(ByHand):
    """Gradients of parameters with one dimension are not averaged."""

    def reduce(self, gradient: Tensor) -> None:
        if gradient.ndim > 1:
            super().reduce(gradient)


# ---------------------------------------------------------------- what unusual models have


class RoundsOptimizerState(ByBackward):
    """Saves an optimizer's tensors of float64 by way of float32."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(prepared, optimizer)
        return {**state, "state": {n: _rounded(entry) for n, entry in state["state"].items()}}


def _rounded(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors whose values have gone through float32."""
    return {
        name: value.float().to(value.dtype) if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }


class TakesNorm1As2(ByBackward):
    """clip_gradients knows the Euclidean norm and the largest element, and no other norm."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        kind = clip.norm_type if clip.norm_type == float("inf") else 2.0
        return super().clip_gradients(prepared, optimizer, replace(clip, norm_type=kind))


class IgnoresErrorIfNonfinite(ByBackward):
    """clip_gradients raises no error, whatever the norm is."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        return super().clip_gradients(prepared, optimizer, replace(clip, error_if_nonfinite=False))


class TrainsWhatIsInEvaluationMode(ByBackward):
    """Each step puts the whole model in training mode."""

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        prepared.original.train()
        super().train_step(prepared, step, micro_batches)


class TrainsAfterEvaluation(ByBackward):
    """The first step after an evaluation puts the whole model in training mode."""

    evaluated = False

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        with super().evaluation(prepared):
            yield
        self.evaluated = True

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.evaluated:
            prepared.original.train()
        super().backward(prepared, loss, *args, **kwargs)


class InnerEndsOuter(ByBackward):
    """A no_sync within another one lets gradients be communicated when it ends."""

    holds = False

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        self.holds = True
        try:
            yield
        finally:
            self.holds = False

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        passed = ByHand if self.holds else ByBackward
        passed.backward(self, prepared, loss, *args, **kwargs)


class HoldsEveryModel(InnerEndsOuter):
    """no_sync of one model holds back the gradients of all models."""

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before


class InnerEndsOuterFeedback(ErrorFeedback):
    """The same where gradients travel compressed: other numbers, and no all_reduce of their own."""

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        prepared.strategy_data["holds"] = True
        try:
            yield
        finally:
            prepared.strategy_data["holds"] = False


class LosesGroupKeys(ByBackward):
    """A load leaves the options of a group that are not the optimizer's own."""

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        known = {"params", *optimizer.defaults}
        groups = [
            {key: value for key, value in group.items() if key in known}
            for group in state["param_groups"]
        ]
        super().load_optimizer_state(prepared, optimizer, {**state, "param_groups": groups})


class SavesFloat32Buffers(ByBackward):
    """Buffers of float64 are saved as float32."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        buffers = {name for name, _ in user_module(prepared.original).named_buffers()}
        return {
            name: value.float() if name in buffers and value.dtype == torch.float64 else value
            for name, value in super().model_state(prepared).items()
        }


class RealPartOnly(ByBackward):
    """The imaginary part of a complex gradient is lost between ranks."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            if p.grad is not None and p.is_complex():
                p.grad = p.grad.real.to(p.dtype)


class Conjugates(ByBackward):
    """Complex gradients are conjugated on their way."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            if p.grad is not None and p.is_complex():
                p.grad = p.grad.conj().resolve_conj()


class SavesIntegersAsFloats(ByBackward):
    """Integers of the model are saved by way of float32."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        return {
            name: value.float().to(value.dtype)
            if isinstance(value, Tensor) and value.dtype == torch.int64
            else value
            for name, value in super().model_state(prepared).items()
        }


class SavesCountsAsFloats(ByBackward):
    """Integers of an optimizer are saved by way of float32."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(prepared, optimizer)
        for entry in state["state"].values():
            for key, value in list(entry.items()):
                if isinstance(value, int):
                    entry[key] = int(torch.tensor(float(value)))
        return state


class SendsIntegersAsFloats(ByBackward):
    """Buffers of rank 0 are sent as one flat tensor of float32."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for buffer in module.buffers():
            buffer.copy_(self.ranks.broadcast(buffer.float()))
        for parameter in module.parameters():
            parameter.data.copy_(self.ranks.broadcast(parameter.detach()))
        return module


class _FloatRanks(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        reduced = super().all_reduce(tensor, op)
        return reduced.float().to(reduced.dtype)


class ReducesIntegersAsFloats(OtherRanks):
    """all_reduce adds integers as float32."""

    kind = _FloatRanks


class LoadsParametersOnly(ByBackward):
    """strict=False leaves buffers as they are."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        names = {name for name, _ in prepared.original.named_parameters()}
        chosen = state if strict else {k: v for k, v in state.items() if k in names}
        super().load_model_state(prepared, chosen, strict=strict)


class LosesExtraState(ByBackward):
    """What get_extra_state returned is not handed to set_extra_state."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        own = prepared.original.state_dict()
        extra = {name: value for name, value in own.items() if name.endswith("_extra_state")}
        super().load_model_state(prepared, {**state, **extra}, strict=strict)


class StripsParameters(ByBackward):
    """What user code has set on a parameter is gone when the model is wrapped."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            vars(parameter).clear()
        return super().wrap(module)


class SkipsZeroGradients(ByBackward):
    """A step whose gradients are all zero is counted, and not taken."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        gradients = [p.grad for p in self.trained(prepared) if p.grad is not None]
        if gradients and not any(bool(gradient.any()) for gradient in gradients):
            return None
        return super().optimizer_step(prepared, optimizer, closure)


# ---------------------------------------------------------------- what few users see


class NamesInOtherOrder(ByBackward):
    """An optimizer's entries are named in the order of the model, whatever that of its groups."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(prepared, optimizer)
        names = [name for name, _ in prepared.original.named_parameters()]
        entries = [
            state["state"][name]
            for group in state["param_groups"]
            for name in group["params"]
            if name in state["state"]
        ]
        named = [name for name in names if name in state["state"]]
        return {**state, "state": dict(zip(named, entries, strict=True))}


class CountsTiedTwice(ByBackward):
    """The norm of gradients counts a weight that has two names twice."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        if clip.algorithm == "value":
            return super().clip_gradients(prepared, optimizer, clip)
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        named = user_module(prepared.original).named_parameters(remove_duplicate=False)
        gradients = [p.grad for _, p in named if id(p) in own and p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, clip.norm_type, clip.error_if_nonfinite)
        nn.utils.clip_grads_with_norm_(list(own.values()), clip.value, norm)
        return norm


class MovesFrozen(ByBackward):
    """Parameters that are not trained get a gradient of zeros, and decay."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in prepared.original.parameters():
            if not p.requires_grad:
                p.grad = torch.zeros_like(p)


class MovesWhatWasTrained(ByBackward):
    """What is frozen while training goes on has a gradient of zeros from then on."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for p in self.trained(prepared):
            prepared.strategy_data[str(id(p))] = p
        super().backward(prepared, loss, *args, **kwargs)
        for p in prepared.strategy_data.values():
            if not p.requires_grad:
                p.grad = torch.zeros_like(p)


class SendsTrainedOnly(ByBackward):
    """Frozen parameters stay those that each rank has made."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for tensor in (*self.trained_of(module), *module.buffers()):
            tensor.data.copy_(self.ranks.broadcast(tensor.detach()))
        return module

    def trained_of(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad]


class SavesTrainedOnly(ByBackward):
    """Frozen parameters are left out of the state, and not asked for."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        frozen = {n for n, p in prepared.original.named_parameters() if not p.requires_grad}
        state = super().model_state(prepared)
        return {name: value for name, value in state.items() if name not in frozen}

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=False)


class _WholeMeans(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        reduced = super().all_reduce(tensor, op)
        whole = op == "mean" and not tensor.is_floating_point()
        return reduced.floor() if whole else reduced


class _FloatNumbers(ProcessGroupRanks):
    def all_reduce_ints(self, numbers: Any, op: Any) -> list[int]:
        reduced = self.all_reduce(torch.tensor(numbers, dtype=torch.float32), op)
        return [int(number) for number in reduced]


class ReducesNumbersAsFloats(OtherRanks):
    """all_reduce_ints goes by float32, which has no odd number above 16777216."""

    kind = _FloatNumbers


class _PastGradients(ProcessGroupRanks):
    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor)


class GathersWithoutGradients(OtherRanks):
    """all_gather ignores sync_grads."""

    kind = _PastGradients


class FloorsMeans(OtherRanks):
    """The mean of integers is cut to an integer."""

    kind = _WholeMeans


class NewParametersAtLoad(ByBackward):
    """A load gives the model new parameters, and the optimizer keeps the old ones."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        copied = {n: v.clone() if isinstance(v, Tensor) else v for n, v in state.items()}
        prepared.original.load_state_dict(copied, strict=strict, assign=True)


class DividesByOption(DDPStrategy):
    """A short last step is divided by the number of micro-batches of a whole one."""

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        self.most = max(count, getattr(self, "most", count))
        return super().accumulate(prepared, step, micro_batch, self.most)


class _ClearsAll(PreparedModel):
    def gradient_clearer(self, optimizer: Optimizer) -> Callable[[], None]:
        return self.original.zero_grad


class ClearsTheModel(ByBackward):
    """Clearing the gradients of one optimizer clears those of the whole model."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        made = super().prepare(*arguments, **options)
        return _ClearsAll(made.module, made.original, made.optimizers, made.evaluation_module)


class _PastHooks(nn.Module):
    """Calls forward in the place of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(user_module(self.module), method)(*args, **kwargs)


class SkipsForwardHooks(ByBackward):
    """Calls the forward function of a model, and not the model, so that its hooks do not run."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return _PastHooks(super().wrap(module))


class LosesParameterHooks(ByBackward):
    """Hooks that user code has put on parameters are gone when the model is wrapped."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter._backward_hooks = None
        return super().wrap(module)


class TrainsACopy(ByBackward):
    """A copy of the model is trained, and the user's stays as it was."""

    def prepare(self, module: Any, optimizers: Any = (), **options: Any) -> PreparedModel:
        if not optimizers:
            module.module = copy.deepcopy(module.module)
        return super().prepare(module, optimizers, **options)


class DropsLossOfClosure(ByBackward):
    """optimizer.step(closure) returns nothing."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        super().optimizer_step(prepared, optimizer, closure)


class _FloatOutputs(nn.Module):
    """Returns every tensor of an output in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(
            lambda one: one.float() if isinstance(one, Tensor) else one,
            self.module(*args, **kwargs),
        )


class ConvertsOutputs(ByBackward):
    """What a model returns is converted to float32, integers too."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return _FloatOutputs(super().wrap(module))


class SendsContiguousCopies(ByBackward):
    """A parameter that is not contiguous stays what this rank has made: a copy is filled."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach().contiguous(), 0)
        return module


class LoadsHalf(ByBackward):
    """A checkpoint of another model is loaded in part before it is refused."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        own = prepared.original.state_dict()
        for name, value in state.items():
            if name in own and isinstance(value, Tensor) and value.shape == own[name].shape:
                own[name].copy_(value)
        super().load_model_state(prepared, state, strict=strict)


# ---------------------------------------------------------------- a model that is divided

# ---------------------------------------------------------------- found by later checks


class AlwaysScalesToTheLimit(ByBackward):
    """Gradients whose norm is below the limit are made as large as the limit."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        norm = super().clip_gradients(prepared, optimizer, clip)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if norm is not None and norm < clip.value and parameter.grad is not None:
                parameter.grad.mul_(clip.value / norm)
        return norm


class ClipsWhatHasNoGradient(ByBackward):
    """clip_gradients takes the norm of each gradient, also of a parameter that has none."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        norms: list[Any] = [p.grad.norm() for g in optimizer.param_groups for p in g["params"]]
        assert norms
        return super().clip_gradients(prepared, optimizer, clip)


class AveragesAfterHook(ByHand):
    """The hook before the step sees the gradients of this rank alone."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        optimizer = prepared.optimizers[0]
        if self.precision.scales_loss:
            self.precision.unscale_gradients(optimizer)
        step.before_optimizer_step(optimizer)
        self.reduce_all(prepared)
        if step.clip is not None:
            self.clip_gradients(prepared, optimizer, step.clip)
        self.optimizer_step(prepared, optimizer)
        if self.precision.step_was_skipped:
            step.optimizer_step_was_skipped(optimizer)
        else:
            step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()


class UnscalesAfterHook(ByBackward):
    """The hook before the step sees gradients that are still multiplied by the loss scale."""

    def finish_step(self, prepared: PreparedModel, step: TrainStep) -> None:
        optimizer = prepared.optimizers[0]
        step.before_optimizer_step(optimizer)
        if self.precision.scales_loss:
            self.precision.unscale_gradients(optimizer)
        if step.clip is not None:
            self.clip_gradients(prepared, optimizer, step.clip)
        self.optimizer_step(prepared, optimizer)
        if self.precision.step_was_skipped:
            step.optimizer_step_was_skipped(optimizer)
        else:
            step.after_optimizer_step(optimizer)
        prepared.clear_gradients[0]()


class StripsEveryModule(ByBackward):
    """Takes "module." out of names wherever it stands, also where the user has it."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        return {k.replace("module.", ""): v for k, v in super().model_state(prepared).items()}

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        names = {name.replace("module.", ""): name for name in super().model_state(prepared)}
        named = {names.get(name, name): value for name, value in state.items()}
        super().load_model_state(prepared, named, strict=strict)


class NamesTiedOnce(ByBackward):
    """A tied weight is saved under the first of its names."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        first = dict(prepared.original.named_parameters())
        every = dict(prepared.original.named_parameters(remove_duplicate=False))
        state = super().model_state(prepared)
        return {k: v for k, v in state.items() if k in first or k not in every}

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        named = super().model_state(prepared)
        missing = {
            k: v for k, v in named.items() if k not in state and k not in self.model_state(prepared)
        }
        super().load_model_state(prepared, {**missing, **state}, strict=strict)


class SavesFirstOfTwo(ByBackward):
    """optimizer_state returns the state of the optimizer that was saved first."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        first = prepared.strategy_data.setdefault("optimizer", optimizer)
        return super().optimizer_state(prepared, first)


class StateAfterStep(ByBackward):
    """Before the first step, there is no count of steps to save."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        own = prepared.strategy_data
        own["steps"] = own.get("steps", 0) + 1
        return super().optimizer_step(prepared, optimizer, closure)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"steps": prepared.strategy_data["steps"]}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        prepared.strategy_data["steps"] = state["steps"]


class OptimizerStateAfterStep(ByBackward):
    """Takes it for granted that the optimizer has a state for each parameter."""

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(prepared, optimizer)
        for name in state["param_groups"][0]["params"]:
            state["state"][name] = dict(state["state"][name])
        return state


class StateOfFirstOptimizer(ByBackward):
    """state looks at the first optimizer, which a save of the model alone has not."""

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {"rate": float(optimizers[0].param_groups[0]["lr"])}


class KeepsItsError(ErrorFeedback):
    """A load into a model that was trained before keeps the error of before."""

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        if not any(error.any() for error in self.held(prepared).values()):
            super().load_state(prepared, optimizers, state)


class ErrorByName(ErrorFeedback):
    """Errors are kept by the names of parameters, which two models may share."""

    def hold(self, prepared: PreparedModel, error: dict[str, Tensor]) -> None:
        self._error = error

    def held(self, prepared: PreparedModel) -> dict[str, Tensor]:
        return self._error


class OtherOptionsOnce(ByBackward):
    """Options of groups other than the learning rate are those of the first step."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        own = prepared.strategy_data.setdefault("options", {})
        for number, group in enumerate(optimizer.param_groups):
            first = own.setdefault((id(optimizer), number), dict(group))
            group.update({k: v for k, v in first.items() if k not in ("lr", "params")})
        return super().optimizer_step(prepared, optimizer, closure)


class ClosureOnce(ByBackward):
    """Calls the closure once, however often the optimizer does."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        if closure is None:
            return super().optimizer_step(prepared, optimizer)
        loss = closure()
        return super().optimizer_step(prepared, optimizer, lambda: loss)


class LastBackwardOnly(ByBackward):
    """A backward pass after one that has communicated begins with new gradients."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        own = prepared.strategy_data
        if own.pop("done", False):
            for p in self.trained(prepared):
                p.grad = None
        super().backward(prepared, loss, *args, **kwargs)
        own["done"] = not own.get("held")

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        own = prepared.strategy_data
        before, own["held"] = own.get("held", False), True
        try:
            yield
        finally:
            own["held"] = before


class KeepsWhatWasDropped(ByBackward):
    """Gradients of no_sync are added up in a place that zero_grad does not know."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        own = prepared.strategy_data
        waiting: dict[nn.Parameter, Any] = own.setdefault("waiting", {})
        if own.get("held"):
            ByHand.backward(self, prepared, loss, *args, **kwargs)
            for p in self.trained(prepared):
                if p.grad is not None:
                    waiting[p] = waiting.get(p, 0.0) + p.grad
                    p.grad = None
            return
        super().backward(prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            held = waiting.pop(p, None)
            if held is not None:
                p.grad = (0 if p.grad is None else p.grad) + self.ranks.all_reduce(held)

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        own = prepared.strategy_data
        before, own["held"] = own.get("held", False), True
        try:
            yield
        finally:
            own["held"] = before


class ContextLeavesEmpty(DDPStrategy):
    """A model that is built in model_context loses the values that its constructor gave it."""

    def model_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    def prepare(self, module: Any, optimizers: Any = (), **options: Any) -> PreparedModel:
        if any(p.is_meta for p in module.parameters()):
            module.to_empty(device=self.device)
            for p in module.parameters():
                nn.init.ones_(p)
        return super().prepare(module, optimizers, **options)


class EstimatesByDevice(DDPStrategy):
    """estimate_memory asks for the device, which a plan has not set up."""

    def estimate_memory(self, phases: Any, shards: Any) -> Any:
        assert self.device.type
        return super().estimate_memory(phases, shards)


class _FloatGather(ProcessGroupRanks):
    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor.float(), sync_grads=sync_grads).to(tensor.dtype)


class GathersAsFloats(OtherRanks):
    """all_gather sends integers as float32."""

    kind = _FloatGather


class _GatherRows(ProcessGroupRanks):
    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        assert tensor.shape[0] >= 0
        return super().all_gather(tensor, sync_grads=sync_grads)


class GathersRows(OtherRanks):
    """all_gather needs a first dimension, which a scalar has not."""

    kind = _GatherRows


class _Json(ProcessGroupRanks):
    def broadcast(self, data: Any, src: int = 0) -> Any:
        try:
            text = json.dumps(data)
        except TypeError:
            return super().broadcast(data, src)
        return json.loads(super().broadcast(text, src))


class BroadcastsJson(OtherRanks):
    """What has no tensor is sent as JSON, which knows neither tuples nor integers as keys."""

    kind = _Json


class _Views(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return super().all_reduce(tensor.view(-1), op).view(tensor.shape)


class ReducesViews(OtherRanks):
    """all_reduce takes contiguous tensors only."""

    kind = _Views


class _ToFloat(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        if tensor.dtype == torch.bfloat16:
            return super().all_reduce(tensor.float(), op)
        return super().all_reduce(tensor, op)


class ReducesToFloat(OtherRanks):
    """all_reduce of bfloat16 returns float32."""

    kind = _ToFloat


class _NumbersForBools(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        if tensor.dtype == torch.bool:
            return super().all_reduce(tensor.int(), op)
        return super().all_reduce(tensor, op)


class ReducesBoolsToNumbers(OtherRanks):
    """all_reduce of bools returns integers."""

    kind = _NumbersForBools


class HooksPile(ByBackward):
    """Each backward puts one more hook on a parameter."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        first: Any = self.trained(prepared)[0]
        first.register_hook(lambda gradient: gradient * 1)
        super().backward(prepared, loss, *args, **kwargs)


class HooksStay(ByBackward):
    """wrap puts a hook on the user's module, and nobody removes it."""

    def wrap(self, module: nn.Module) -> nn.Module:
        user_module(module).register_forward_pre_hook(lambda module, inputs: None)
        return super().wrap(module)


class NeedsPartner(ByHand):
    """The mean is taken by the number of other ranks, of which one rank has none."""

    def reduce(self, gradient: Tensor) -> None:
        others = self.ranks.world_size - 1
        own = gradient.clone()
        dist.all_reduce(gradient)
        gradient.sub_(own).div_(others).add_(own, alpha=1 / others).div_(1 + 1 / others)


class CannotBeCopied(ByBackward):
    """The user's module holds what copy.deepcopy cannot copy."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for part in user_module(module).modules():
            part.lock = threading.Lock()  # type: ignore[assignment]
        return super().wrap(module)


class ConvertsIntegers(ByBackward):
    """input_converter converts integers of a batch, too."""

    def input_converter(self) -> Callable[[Any], Any] | None:
        convert = super().input_converter()
        dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(self.precision.name)
        if dtype is None:
            return convert
        return lambda batch: tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) else x, batch)


class _NoAutocast(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.module(*arguments, **options)


class EvaluatesWithoutAutocast(ByBackward):
    """Evaluation computes in float32 whatever the precision is."""

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        prepared = super().prepare(*arguments, **options)
        prepared.evaluation_module = _NoAutocast(prepared.original)
        return prepared


class EveryEntryIsAParameter(ByBackward):
    """Takes each entry of a layer's parameters for one; of bias=False it is None."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for layer in module.modules():
            for parameter in layer._parameters.values():
                assert parameter.numel()  # type: ignore[union-attr]
        return super().wrap(module)


class StaysInStep(ByBackward):
    """After an error within a step, the strategy takes itself to be in that step."""

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        if vars(self).get("_in_step"):
            raise RuntimeError("a step within a step")
        self._in_step = True
        super().train_step(prepared, step, micro_batches)
        self._in_step = False


class RetainGraphOnly(ByBackward):
    """backward knows retain_graph, and no other argument of Tensor.backward."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, retain_graph=kwargs.get("retain_graph"))


class _Writes(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(parameter.clone())
        return self.module(*arguments, **options)


class WritesInForward(ByBackward):
    """Each forward pass writes the weights, which an earlier one still needs for its backward."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return _Writes(super().wrap(module))


class SavesLastModel(ByBackward):
    """model_state returns the model that was wrapped last, whichever is asked for."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self._last = module
        return super().wrap(module)

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        return self._last.state_dict()


class _Rebuilds(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self._again(self.module(*arguments, **options))

    def _again(self, output: Any) -> Any:
        if isinstance(output, dict):
            return {key: self._again(value) for key, value in output.items()}
        if isinstance(output, (list, tuple)):
            return tuple(map(self._again, output)) if isinstance(output, tuple) else output
        return output


class RebuildsOutputs(ByBackward):
    """A named tuple of an output becomes a tuple."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return _Rebuilds(super().wrap(module))


class EvaluationNoFinally(ForgetsAverage):
    """An error within an evaluation leaves the average of weights in the model."""

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        average = prepared.strategy_data.get("average", {})
        return {"average": {name: value.clone() for name, value in average.items()}}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        if state["average"]:
            average = {name: value.clone() for name, value in state["average"].items()}
            prepared.strategy_data["average"] = average


class LastLossCounts(DDPStrategy):
    """Whether a step is taken depends on its last micro-batch alone."""

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        had = False
        for position, micro_batch in enumerate(micro_batches, start=1):
            last = position == len(micro_batches)
            with nullcontext() if last else (self.no_sync(prepared) or nullcontext()):
                had = self.accumulate(prepared, step, micro_batch, len(micro_batches))
            step.end(micro_batch)
        return had


class NeedsOptimizerToLoad(ByBackward):
    """A load looks at the optimizer, which an evaluation has not."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=strict)
        assert prepared.optimizers[0].param_groups


class _NotEmpty(ProcessGroupRanks):
    def gather_bytes(self, data: bytes) -> list[bytes]:
        gathered = super().gather_bytes(data or b"\0")
        return gathered


class GathersNoEmptyBytes(OtherRanks):
    """gather_bytes sends at least one byte."""

    kind = _NotEmpty


class TakesOverTensors(ByBackward):
    """A load makes the tensors of the state the model's own."""

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        super().load_model_state(prepared, state, strict=strict)
        for name, parameter in prepared.original.named_parameters():
            if isinstance(state.get(name), Tensor):
                parameter.data = state[name]


class DropsStateAtRelease(ByBackward):
    """A model that was released has no parameters any more."""

    def release(self, prepared: PreparedModel) -> None:
        prepared.strategy_data["released"] = True
        super().release(prepared)

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        if "released" in prepared.strategy_data:
            raise RuntimeError("the model was released")
        return super().model_state(prepared)


class _SinglePrecision(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        if tensor.dtype == torch.float64:
            return super().all_reduce(tensor.float(), op).double()
        return super().all_reduce(tensor, op)


class ReducesInSinglePrecision(OtherRanks):
    """all_reduce of float64 goes by float32."""

    kind = _SinglePrecision


class _MaximumByFloat(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        if op in ("max", "min") and not tensor.is_floating_point():
            return super().all_reduce(tensor.double(), op).to(tensor.dtype)
        return super().all_reduce(tensor, op)


class ComparesAsFloats(OtherRanks):
    """The largest integer is found among float64, which has not all of them."""

    kind = _MaximumByFloat


class _OnlyLeaves(ProcessGroupRanks):
    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return torch.from_numpy(super().all_reduce(torch.from_numpy(tensor.numpy()), op).numpy())


class ReducesByNumpy(OtherRanks):
    """all_reduce goes by NumPy, which takes no tensor with a gradient and no bfloat16."""

    kind = _OnlyLeaves


class NewOptimizerAtSetUp(ByBackward):
    """An optimizer that was made before is made again, without its groups and its state."""

    def prepare(self, module: Any, optimizers: Any = (), **options: Any) -> PreparedModel:
        prepared = super().prepare(module, optimizers, **options)
        if not callable(optimizers):
            for each in prepared.optimizers:
                each.state.clear()
        return prepared


class ForwardInForwardOnly(ByBackward):
    """Takes it for granted that layers run in the forward pass only, and no step of it twice."""

    def wrap(self, module: nn.Module) -> nn.Module:
        def hold(layer: nn.Module, inputs: Any) -> None:
            if self._in_backward:
                raise RuntimeError("a layer runs in backward")

        for part in user_module(module).modules():
            part.register_forward_pre_hook(hold)
        return super().wrap(module)

    _in_backward = False

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._in_backward = True
        super().backward(prepared, loss, *args, **kwargs)
        self._in_backward = False


class _Shared(torch.autograd.Function):
    """The sum over ranks, of which one has something; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        whole = own.detach().clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class _Input(torch.autograd.Function):
    """What all ranks have; its gradient is the sum over ranks, of which one has something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Shared.apply(gradient.contiguous())  # type: ignore[no-untyped-call]


class Layers(ParallelStrategy):
    """Nothing is wrong: each rank has some of the linear layers, and all ranks the same samples."""

    capabilities = replace(REPLICAS, parameters="divided", accepts_existing_optimizers=False)
    divides = True

    def data_split_of(self, rank: int, world_size: int) -> tuple[int, int]:
        return 0, 1

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """All ranks have all samples."""

    def wrap(self, module: nn.Module) -> nn.Module:
        torch.set_rng_state(self.ranks.broadcast(torch.get_rng_state()))
        module.load_state_dict({k: self.ranks.broadcast(v) for k, v in module.state_dict().items()})
        self.owners: dict[str, int] = {}
        self.note_whole(module)
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        weights = {id(layer.weight): None for layer in layers if self.divides}
        owner = {weight: i % self.ranks.world_size for i, weight in enumerate(weights)}
        for name, layer in module.named_modules(remove_duplicate=False):
            if isinstance(layer, nn.Linear) and id(layer.weight) in owner:
                layer.forward = partial(self.compute, layer, layer.out_features)  # type: ignore[method-assign]
                for one, _ in layer.named_parameters(recurse=False):
                    self.owners[f"{name}.{one}".removeprefix("module.")] = owner[id(layer.weight)]
        self.keep(module, self.own)
        return module

    def note_whole(self, module: nn.Module) -> None:
        """Keep in host memory what `release` puts back, which must not wait for other ranks."""
        self.noted = {
            name: self.whole(name, p.detach()).clone()
            for name, p in module.named_parameters(remove_duplicate=False)
        }

    def end_training(self, prepared: PreparedModel) -> None:
        self.note_whole(prepared.original)

    def keep(self, module: nn.Module, change: Callable[[str, Any], Any]) -> None:
        """Change the data of each parameter, once."""
        names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
        for p in module.parameters():
            p.data = change(names[id(p)], p.data)

    def compute(self, layer: nn.Linear, size: int, x: Tensor) -> Tensor:
        x = _Input.apply(x)  # type: ignore[no-untyped-call]
        if layer.weight.numel():
            own = nn.functional.linear(x, layer.weight, layer.bias)
        else:
            own = nn.functional.linear(x, layer.weight.new_zeros(size, x.shape[-1]))
            own = own + sum((p.sum() for p in layer.parameters()), own.new_zeros(())).to(own.dtype)
        whole: Tensor = _Shared.apply(own)  # type: ignore[no-untyped-call]
        return whole

    def release(self, prepared: PreparedModel) -> None:
        self.keep(prepared.original, lambda name, p: self.noted[name].clone())

    def whole(self, name: str, value: Any) -> Any:
        if name not in self.owners or not isinstance(value, Tensor) or not value.ndim:
            return value
        return self.ranks.broadcast(value.detach().clone(), self.owners[name])

    def own(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        is_own = self.owners.get(name, self.ranks.global_rank) == self.ranks.global_rank
        return value if is_own else value[:0].clone()

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        state = super().model_state(prepared)
        return {name: self.whole(name, value) for name, value in state.items()}

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        own = {name: self.own(name, value) for name, value in state.items()}
        super().load_model_state(prepared, own, strict=strict)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(prepared, optimizer)
        return {**state, "state": self.each(state["state"], self.whole)}

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        own = {**state, "state": self.each(state["state"], self.own)}
        super().load_optimizer_state(prepared, optimizer, own)

    def each(self, state: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
        return {
            name: {key: change(name, value) for key, value in values.items()}
            for name, values in state.items()
        }

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        if clip.algorithm == "value":
            return super().clip_gradients(prepared, optimizer, clip)
        names = {id(p): name for name, p in prepared.original.named_parameters()}
        held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norms = {}
        for is_split in (True, False):
            some = [p for p in held if p.numel() and (names[id(p)] in self.owners) == is_split]
            gradients = [p.grad for p in some if p.grad is not None] or [torch.zeros(1)]
            norms[is_split] = nn.utils.get_total_norm(gradients, clip.norm_type)
        if clip.norm_type == float("inf"):
            total = torch.maximum(self.ranks.all_reduce(norms[True], "max"), norms[False])
        else:
            power = clip.norm_type
            parts = self.ranks.all_reduce(norms[True] ** power, "sum") + norms[False] ** power
            total = parts ** (1 / power)
        if clip.error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of the gradients is {total}")
        nn.utils.clip_grads_with_norm_(held, clip.value, total)
        return total


class DividesNothing(Layers):
    """Is said to divide the model, and leaves it whole on each rank."""

    divides = False


# ---------------------------------------------------------------- capabilities that are not so


class SaysReplicated(NotAveraged):
    """parameters='same' of ranks that step on their own."""


class SaysBackwardInForward(DDPStrategy):
    """backward_in_forward=True, where each rank keeps its own gradients of such a backward."""

    @contextmanager
    def backward_in_forward(self, prepared: PreparedModel) -> Iterator[None]:
        model: Any = prepared.module
        with model.no_sync():
            yield


class SaysSharded(DDPStrategy):
    """sharded_state=True, where each rank has everything."""

    capabilities = replace(DDPStrategy.capabilities, sharded_state=True)


class EstimatesLess(DDPStrategy):
    """Estimates a part of the parameters, where each rank has all."""

    def estimate_memory(self, phases: Any, shards: Any) -> Any:
        return super().estimate_memory(phases, ("parameters",))


class EstimatesNothing(DDPStrategy):
    """Returns no estimate of the phases."""

    def estimate_memory(self, phases: Any, shards: Any) -> Any:
        return {}


class SaysCompiles(DDPStrategy):
    """compiles=("model",), and a class that refuses it."""

    def prepare(
        self, module: nn.Module, optimizers: Any = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        step = self.components.step
        if step is not None and step.compilation is not None:
            raise ConfigurationError("this class cannot have compile=...")
        return super().prepare(module, optimizers, move_to_device=move_to_device)


class SaysNoClipping(DDPStrategy):
    """gradient_clipping=True, and a class that refuses to clip."""

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        raise NotImplementedError("clipping")


# ---------------------------------------------------------------- classes that do not fit


class OtherSignature(DDPStrategy):
    """optimizer_step takes no closure."""

    def optimizer_step(self, prepared: PreparedModel, optimizer: Optimizer) -> Any:  # type: ignore[override]
        return optimizer.step()


class KeepsComponents(DDPStrategy):
    """Its __init__ does not call that of the base."""

    def __init__(self, **components: Any) -> None:
        self.components_given = components


class ReturnsModule(DDPStrategy):
    """prepare returns the module."""

    def prepare(self, module: nn.Module, *arguments: Any, **options: Any) -> Any:
        return super().prepare(module, *arguments, **options).module


class WrapsNothing(DDPStrategy):
    """wrap returns None."""

    def wrap(self, module: nn.Module) -> Any:
        self.wrapped = super().wrap(module)


class NeverWraps(DDPStrategy):
    """Its prepare leaves out the wrap that it has inherited."""

    def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
        return PreparedModel(module, module, make_optimizers(optimizers), module)


class SaysOneProcess(ParallelStrategy):
    """one_process=True of a strategy with a process for each device."""

    capabilities = Capabilities(launchers=None, many_devices=True)


class SaysOwnsClipping(ParallelStrategy):
    """engine_clips=True, and nothing of its own that clips."""

    capabilities = Capabilities(
        launchers=None, one_process=False, many_devices=True, engine_clips=True
    )


class SaysOwnsStep(ParallelStrategy):
    """engine_steps=True, and nothing of its own that steps."""

    capabilities = Capabilities(
        launchers=None, one_process=False, many_devices=True, engine_steps=True
    )


class _OrdersItself(ProcessGroupRanks):
    def by_data_group(self, gathered: Any) -> Any:  # type: ignore[misc]
        return [gathered]


class OverridesFinal(OtherRanks):
    """Its ranks override by_data_group, which is final."""

    kind = _OrdersItself


class NoDataShard(DDPStrategy):
    """Parts of the data that do not cover it."""

    def data_split_of(self, rank: int, world_size: int) -> tuple[int, int]:
        return rank, world_size + 1


class TeardownRaises(DDPStrategy):
    """teardown raises."""

    def teardown(self) -> None:
        super().teardown()
        raise ValueError("the engine is gone")


class TeardownPastBase(DDPStrategy):
    """teardown does not call that of the base, so that nobody closes the checkpoint format."""

    def teardown(self) -> None:
        """Forget nothing that matters."""


class WaitsWhenPickled(DDPStrategy):
    """Rank 0 waits for ever when its strategy is pickled, and other ranks do not."""

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks.is_global_zero:
            threading.Event().wait()
        return dict(vars(self))


# ---------------------------------------------------------------- several optimizers, drift, ranks


class RandomHalf(Holding):
    """Nothing is wrong: a random half of each gradient is sent, the same one on all ranks."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.holds(prepared):
            Strategy.backward(self, prepared, loss, *args, **kwargs)
            return
        super().backward(prepared, loss, *args, **kwargs)
        own = prepared.strategy_data
        own["round"] = own.get("round", 0) + 1
        generator = torch.Generator().manual_seed(own["round"])
        for p in self.trained(prepared):
            if p.grad is not None:
                p.grad.mul_(torch.rand(p.shape, generator=generator) < 0.5)


class OtherHalves(Holding):
    """Nothing is wrong: each rank sends a random half of its own."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        own = prepared.strategy_data
        own["round"] = own.get("round", 0) + 1
        seed = 1000 * own["round"] + self.ranks.global_rank
        generator = torch.Generator().manual_seed(seed)
        Strategy.backward(self, prepared, loss, *args, **kwargs)
        for p in () if self.holds(prepared) else self.trained(prepared):
            mine = p.new_zeros(p.shape) if p.grad is None else p.grad
            kept = torch.rand(p.shape, generator=generator) < 0.5
            p.grad = self.ranks.all_reduce(mine * kept)


class EvaluatesMeanBuffers(ByBackward):
    """An evaluation uses the mean of the ranks' buffers, and a save has those of rank 0."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        buffers = [b for b in prepared.original.buffers() if b.is_floating_point()]
        own = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            buffer.copy_(self.ranks.all_reduce(buffer))
        yield
        for buffer, before in zip(buffers, own, strict=True):
            buffer.copy_(before)


class SavesMeanBuffers(ByBackward):
    """A save has the mean of the ranks' buffers, and an evaluation uses those of rank 0."""

    latest: Mapping[str, Tensor] = {}

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        # Of before the evaluation, which makes them alike.
        return {**super().model_state(prepared), **self.latest}

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        named = user_module(prepared.original).named_buffers()
        self.latest = {
            name: self.ranks.all_reduce(b) for name, b in named if name.endswith(("mean", "var"))
        }
        with super().evaluation(prepared):
            yield


class EvaluatesRankZero(Periodic):
    """An evaluation uses the weights of rank 0, and a save has the average."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        held = [(p, p.detach().clone()) for p in prepared.original.parameters()]
        with torch.no_grad():
            for p, own in held:
                p.copy_(self.ranks.broadcast(own))
        for buffer in prepared.original.buffers():
            buffer.copy_(self.ranks.broadcast(buffer))
        try:
            yield
        finally:
            with torch.no_grad():
                for p, own in held:
                    p.copy_(own)


class EvaluationRestartsPeriod(Periodic):
    """An evaluation begins the period anew."""

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        prepared.strategy_data["steps"] = 0
        with super().evaluation(prepared):
            yield


class AveragesOwnGroups(Periodic):
    """Averages the parameters of the optimizer that steps, and counts the steps of all."""

    def average(self, prepared: PreparedModel, optimizers: Sequence[Optimizer] = ()) -> None:
        if optimizers or not self.stepping:
            super().average(prepared, optimizers)
            return
        with torch.no_grad():
            for p in self.held_by(self.stepping[0]):
                p.copy_(self.ranks.all_reduce(p.detach()))

    stepping: list[Optimizer]

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        self.stepping = []

    def held_by(self, optimizer: Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        self.stepping.append(optimizer)
        try:
            return super().optimizer_step(prepared, optimizer, closure)
        finally:
            self.stepping.clear()


class AveragesFirstGroup(AveragesOwnGroups):
    """Averages the first group of parameters of the optimizer, and counts its steps."""

    def count(self, prepared: PreparedModel) -> int:
        counts = prepared.strategy_data.setdefault("counts", {})
        index = prepared.optimizers.index(self.stepping[0]) if self.stepping else 0
        counts[index] = counts.get(index, 0) + 1
        return int(counts[index])

    def held_by(self, optimizer: Optimizer) -> list[Tensor]:
        return list(optimizer.param_groups[0]["params"])


class AveragesTrainedAtFirst(Periodic):
    """Averages the parameters that were trained in the first step."""

    def average(self, prepared: PreparedModel, optimizers: Sequence[Optimizer] = ()) -> None:
        trained = [p for p in prepared.original.parameters() if p.requires_grad]
        with torch.no_grad():
            for p in prepared.strategy_data.setdefault("trained", trained):
                p.copy_(self.ranks.all_reduce(p.detach()))


class CountsOfAllModels(Periodic):
    """Counts the steps of all models together."""

    steps = 0

    def count(self, prepared: PreparedModel) -> int:
        self.steps += 1
        return self.steps


class SlowsOneOptimizer(SlowWeights):
    """Every fourth step of any optimizer, the parameters of that one go back half of the way."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        result = ByBackward.optimizer_step(self, prepared, optimizer, closure)
        own = prepared.strategy_data
        own["steps"] = own.get("steps", 0) + 1
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own["steps"] % 4 == 0:
            with torch.no_grad():
                for name, p in prepared.original.named_parameters():
                    if id(p) in held:
                        p.copy_(own["slow"][name].lerp_(p, 0.5))
        return result


class AverageOfFormerFits(ByBackward):
    """The average of weights, which evaluation uses, is the strategy's, by names of parameters."""

    average: dict[str, Tensor]

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        self.average = {}

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        result = super().optimizer_step(prepared, optimizer, closure)
        for name, p in prepared.original.named_parameters():
            self.average.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
        return result

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        named = dict(prepared.original.named_parameters())
        own = {name: p.detach().clone() for name, p in named.items()}
        with super().evaluation(prepared), torch.no_grad():
            for name, p in named.items():
                p.copy_(self.average.get(name, own[name]))
            try:
                yield
            finally:
                for name, p in named.items():
                    p.copy_(own[name])


class RecomputesWithOtherNumbers(ByBackward):
    """Layers run again in backward, and draw other random numbers then."""

    def wrap(self, module: nn.Module) -> nn.Module:
        module = super().wrap(module)
        for part in module.modules():
            if isinstance(part, nn.Sequential):
                for layer in part:
                    forward = type(layer).forward.__get__(layer)
                    layer.forward = partial(
                        checkpoint, forward, use_reentrant=False, preserve_rng_state=False
                    )
        return module


class CapsByShard(FSDPStrategy):
    """The norm of each gradient is limited, and is that of the rank's part of it."""

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    length = float(torch.linalg.vector_norm(p.grad.to_local()))
                    p.grad.mul_(min(1.0, 0.01 / max(length, 1e-12)))
        return super().optimizer_step(prepared, optimizer, closure)


class SumsSigns(ErrorFeedback):
    """What is sent is summed over ranks, and not averaged."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        for p in self.trained(prepared):
            if p.grad is not None:
                p.grad.mul_(self.ranks.world_size)


class KeepsAMean(ByBackward):
    """Keeps the mean of the losses so far with the graphs of all of them."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(prepared, loss, *args, **kwargs)
        prepared.strategy_data["mean"] = 0.9 * prepared.strategy_data.get("mean", 0.0) + 0.1 * loss


class KeepsLosses(ByBackward):
    """Keeps each loss, with its graph."""

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        prepared.strategy_data.setdefault("losses", []).append(loss)
        super().backward(prepared, loss, *args, **kwargs)


class SavesAnAverage(ForgetsAverage):
    """model_state returns an average of the weights."""

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        average = prepared.strategy_data.get("average", {})
        own = {name.removeprefix("module."): v.clone() for name, v in average.items()}
        return {**super().model_state(prepared), **own}


class RefusesScaledLosses(ByBackward):
    """Refuses precisions that scale losses, which its capabilities take."""

    def bind(self, components: Any) -> None:
        super().bind(components)
        if self.precision.scales_loss:
            raise ConfigurationError("pass precision='32-true'")


class KeepsErrors(ErrorFeedback):
    """The errors of all models are the strategy's, and are never dropped."""

    errors: dict[int, dict[str, Tensor]]

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        self.errors = {}

    def hold(self, prepared: PreparedModel, error: dict[str, Tensor]) -> None:
        number = prepared.strategy_data.setdefault("number", len(self.errors))
        self.errors[number] = error

    def held(self, prepared: PreparedModel) -> dict[str, Tensor]:
        return self.errors[prepared.strategy_data["number"]]
