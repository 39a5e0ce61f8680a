"""Components that are wrong on purpose, each in one way; test_planted_components.py says which.

Each class's docstring is the mistake. Other processes load this file by its path.
"""

from __future__ import annotations

import copy
import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from traceback import format_exception
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem import Callback, Module, Trainer
from stratagem.accelerators import CPUAccelerator, DeviceMemory
from stratagem.checkpoint import CheckpointIO, SingleFileCheckpointIO
from stratagem.discovery import Availability
from stratagem.environments import PlainEnvironment
from stratagem.errors import CheckpointCorruptError, CheckpointNotFoundError
from stratagem.launch import (
    Launcher,
    RunPlan,
    free_port,
    pack,
    rank_environment,
    rank_failure,
    run_packed,
)
from stratagem.loggers import CSVLogger, Logger
from stratagem.precision import Precision, TruePrecision
from stratagem.profilers import Profiler
from stratagem.state import from_bytes, to_bytes
from stratagem.storage import durable_replace

# ---------------------------------------------------------------- accelerators


class NoReason(CPUAccelerator):
    """Says how many devices there are, and not why."""

    def availability(self) -> Availability:
        return Availability(0, "")


class OneDeviceForAll(CPUAccelerator):
    """Every index is the same device, and devices have indices."""

    def availability(self) -> Availability:
        return Availability(4, "four")


class UnknownBackend(CPUAccelerator):
    """Nobody knows its process group's backend."""

    process_group_backend = "mine"


class NoState(CPUAccelerator):
    """A device whose random numbers come from nowhere, and that has no state of them."""

    is_host = False
    draws = itertools.count()

    def setup_device(self, device: torch.device) -> None:
        torch.rand = lambda *size, **options: torch.full(size, float(next(self.draws)))

    def rng_state(self, device: torch.device) -> Tensor | None:
        return None


class HostNumbers(CPUAccelerator):
    """Nothing is wrong: a device whose random numbers are the host's, and no host."""

    is_host = False

    def rng_state(self, device: torch.device) -> Tensor | None:
        return None


class LosesBatch(CPUAccelerator):
    """Moves the tensors of a dict, and drops what is nested."""

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        return lambda batch: {k: v.to(device) for k, v in batch.items() if isinstance(v, Tensor)}


class RoundsBatch(CPUAccelerator):
    """Makes every tensor of a batch a float32 one."""

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        move = super().batch_mover(device)
        from stratagem.data.pytree import convert_floats

        return lambda batch: convert_floats(move(batch), torch.float32)


class LeaksVariable(CPUAccelerator):
    """Sets a variable at each setup, and leaves it."""

    def setup(self) -> None:
        os.environ["MINE_SETUPS"] = os.environ.get("MINE_SETUPS", "") + "1"


class EverythingIsMemory(CPUAccelerator):
    """Every RuntimeError is one of memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError)


class MemoryByWord(CPUAccelerator):
    """An error that has the word is one of memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "memory" in str(error)


class AlwaysLost(CPUAccelerator):
    """Every error has lost the device."""

    def explain_lost_device(self, error: BaseException) -> str | None:
        return "replace the device"


class FloatBytes(CPUAccelerator):
    """Bytes in MB."""

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        return {"resident_bytes": 1.5}


class CountsKibibytes(CPUAccelerator):
    """Reports what /proc has in KiB as bytes."""

    def device_memory(self, device: torch.device) -> DeviceMemory:
        lines = Path("/proc/self/status").read_text().splitlines()
        (own,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
        return DeviceMemory(total=None, allocated=own, peak=own, reserved=own)


class CountsBytes(CountsKibibytes):
    """Nothing is wrong: KiB are made bytes."""

    def device_memory(self, device: torch.device) -> DeviceMemory:
        own = 1024 * super().device_memory(device).allocated
        return DeviceMemory(total=None, allocated=own, peak=own, reserved=own)


class ChoosesDevices(CPUAccelerator):
    """Sets a variable when it is made."""

    def __init__(self) -> None:
        os.environ["MINE_VISIBLE_DEVICES"] = "0"


class NeverForks(CPUAccelerator):
    """Says that a process cannot be forked, whatever it has done."""

    def fork_problem(self) -> str | None:
        return "has devices"


class OneAutocastOfAll(CPUAccelerator):
    """Hands out one autocast, which cannot be entered within itself."""

    def __init__(self) -> None:
        self.context = torch.autocast("cpu", dtype=torch.bfloat16)

    def autocast(self, dtype: torch.dtype) -> Any:
        return self.context if dtype is torch.bfloat16 else None


class MovesTensors(CPUAccelerator):
    """Leaves objects that can move themselves where they are."""

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        from stratagem.data.pytree import map_tensors

        return lambda batch: map_tensors(lambda tensor: tensor.to(device), batch)


class MakesDicts(CPUAccelerator):
    """Makes a dict of every mapping."""

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        move = super().batch_mover(device)

        def moved(batch: Any) -> Any:
            if isinstance(batch, dict):
                return {key: moved(value) for key, value in batch.items()}
            return move(batch)

        return moved


class HoldsHandle(CPUAccelerator):
    """Has a handle of the device's library from the beginning."""

    def __init__(self) -> None:
        self.handle = threading.RLock()


class KeepsKernels(CPUAccelerator):
    """Restores no setting of kernels."""

    def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
        torch.backends.cudnn.benchmark = benchmark
        return lambda: None


class KeepsDeterminism(CPUAccelerator):
    """After a deterministic run, products of the CPU stay so."""

    def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
        torch.backends.mkldnn.deterministic = deterministic  # type: ignore[assignment]
        return lambda: None


class LeavesMode(CPUAccelerator):
    """Sets a variable at each setup to the same value, and leaves it."""

    def setup(self) -> None:
        os.environ["MINE_MODE"] = "on"


class SwapsKernels(CPUAccelerator):
    """Deterministic kernels where nobody asks for them, and the others where somebody does."""

    def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
        backend: Any = torch.backends.cudnn
        before = backend.deterministic, backend.benchmark
        backend.deterministic, backend.benchmark = benchmark, deterministic

        def restore() -> None:
            backend.deterministic, backend.benchmark = before

        return restore


class StatsInKibibytes(CPUAccelerator):
    """Calls KiB bytes."""

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        return {"resident_bytes": super().device_stats(device)["resident_bytes"] // 1024}


# ---------------------------------------------------------------- precisions


class KeepsDefaultDtype(TruePrecision):
    """Leaves the default dtype behind."""

    def __init__(self) -> None:
        super().__init__("64-true")

    def init_context(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return nullcontext()


class LiesAboutDtype(Precision):
    """Says bfloat16, and computes in float32."""

    name = "lies"
    dtype = torch.bfloat16


class RoundsLabels(Precision):
    """Converts integers too."""

    name = "rounds"

    def input_converter(self) -> Callable[[Any], Any]:
        from stratagem.data.pytree import map_tensors

        return lambda batch: map_tensors(lambda tensor: tensor.float(), batch)


class FlatBatches(TruePrecision):
    """A dict is passed on as it is, and so are lists within lists."""

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self.name = "bf16-flat"

    def input_converter(self) -> Callable[[Any], Any]:
        def one(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self.dtype) if is_float else value

        def convert(batch: Any) -> Any:
            return type(batch)(map(one, batch)) if type(batch) in (tuple, list) else one(batch)

        return convert


class ForgetsNamedTuples(Precision):
    """A batch is taken apart and put together by hand, and a named tuple as a tuple."""

    name = "by-hand"

    def input_converter(self) -> Callable[[Any], Any]:
        def convert(batch: Any) -> Any:
            if isinstance(batch, torch.Tensor):
                return batch.float() if batch.is_floating_point() else batch
            if isinstance(batch, dict):
                return {key: convert(value) for key, value in batch.items()}
            return type(batch)(map(convert, batch)) if isinstance(batch, (list, tuple)) else batch

        return convert


class Scaled(Precision):
    """Nothing is wrong: losses are scaled by 8."""

    name = "scaled"
    scales_loss = True
    scale = 8.0

    def __init__(self) -> None:
        self.unscaled: set[int] = set()

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [parameter for parameter in parameters if parameter.grad is not None]
        for each in found:
            if each.grad.is_sparse:
                each.grad = each.grad.coalesce()
        return [each.grad.values() if each.grad.is_sparse else each.grad for each in found]

    def is_finite(self, gradients: list[Tensor]) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self.unscaled:
            for gradient in self.gradients(optimizer):
                gradient.div_(self.scale)
        self.unscaled.add(id(optimizer))

    def optimizer_step(self, optimizer: Optimizer) -> None:
        self.unscale_gradients(optimizer)
        self.unscaled.discard(id(optimizer))
        self.step_was_skipped = not self.is_finite(self.gradients(optimizer))
        if not self.step_was_skipped:
            optimizer.step()


class Dynamic(Scaled):
    """Nothing is wrong: an overflow halves the scale, from the next backward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"scale": 8.0}
        self.overflow = False

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.state["scale"]

    def adapt(self) -> None:
        if self.overflow:
            self.state["scale"] /= 2
            self.overflow = False

    def scale_loss(self, loss: Tensor) -> Tensor:
        self.adapt()
        return super().scale_loss(loss)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self.overflow |= self.step_was_skipped

    def state_dict(self) -> dict[str, Any]:
        self.adapt()
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.overflow = False
        self.state = {"scale": state.get("scale", 8.0)}


class ScalesInPlace(Scaled):
    """The user's loss is scaled, too."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss.mul_(self.scale)


class NeedsAllGradients(Scaled):
    """Takes each parameter to have a gradient."""

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [parameter.grad.detach() for parameter in parameters]


class UnscalesAgain(Scaled):
    """Each call of unscale_gradients divides."""

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self.unscaled.discard(id(optimizer))
        super().unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self.unscaled:
            super().unscale_gradients(optimizer)
        self.unscaled.clear()
        optimizer.step()


class OneMarkForAll(Scaled):
    """The first step of two optimizers forgets that the second one's gradients are unscaled."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self.unscaled.clear()


class AdaptsAtOnce(Dynamic):
    """Halves the scale between the steps of two optimizers."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self.adapt()


class TakesNaN(Scaled):
    """Looks for infinity only."""

    def is_finite(self, gradients: list[Tensor]) -> bool:
        return not any(bool(gradient.isinf().any()) for gradient in gradients)


class LastParameterDecides(Scaled):
    """The mark is set again for each parameter."""

    def is_finite(self, gradients: list[Tensor]) -> bool:
        finite = True
        for gradient in gradients:
            finite = bool(gradient.isfinite().all())
        return finite


class LiveState(Dynamic):
    """Returns the dict that later steps change."""

    def state_dict(self) -> dict[str, Any]:
        super().state_dict()
        return self.state


class NeverResets(Dynamic):
    """A checkpoint of another precision leaves the scale."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            super().load_state_dict(state)


class ShowsScale(Dynamic):
    """Scales by another number than its state has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 8.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        self.adapt()
        return loss * self.factor

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        super().unscale_gradients(optimizer)

    def adapt(self) -> None:
        if self.overflow:
            self.factor /= 2
        super().adapt()


class ScaleOfTheClass(Dynamic):
    """All of them have one scale."""

    shared: ClassVar[dict[str, float]] = {"scale": 8.0}

    def __init__(self) -> None:
        super().__init__()
        self.state = self.shared


class HoldsLock(Scaled):
    """Does not travel to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class SetsProducts(Precision):
    """Rounds all products of the process from now on."""

    name = "fast"

    def bind(self, accelerator: Any) -> None:
        torch.set_float32_matmul_precision("medium")


class EntersAutocast(Precision):
    """Is on from its making."""

    name = "enters"

    def bind(self, accelerator: Any) -> None:
        accelerator.autocast(torch.bfloat16).__enter__()


class OneAutocast(Precision):
    """Hands out one autocast, which cannot be entered within itself."""

    name = "one"
    dtype = torch.bfloat16

    def bind(self, accelerator: Any) -> None:
        self.autocast = accelerator.autocast(self.dtype)

    def forward_context(self) -> Any:
        return self.autocast


class _BF16(TruePrecision):
    def __init__(self) -> None:
        super().__init__("bf16-true")


class NewParameters(_BF16):
    """Makes a new parameter for each, and keeps ties."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        made: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            for name, own in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                made.setdefault(own, nn.Parameter(own.detach(), own.requires_grad))
                setattr(part, name, made[own])
        return super().convert_module(module)


class ConvertsForEvaluation(_BF16):
    """Leaves the module in evaluation mode."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return super().convert_module(module).eval()


class ConvertsWhatIsSaved(_BF16):
    """Goes by the state dict."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        for value in module.state_dict().values():
            if value.is_floating_point():
                value.data = value.data.to(self.dtype)
        for each in (*module.parameters(), *module.buffers()):
            saved = {value.data_ptr() for value in module.state_dict().values()}
            if each.is_floating_point() and each.data_ptr() in saved:
                each.data = each.data.to(self.dtype)
        return module


class BeginsRounded(Precision):
    """Computes in bfloat16 with weights in float32, and makes them in bfloat16."""

    name = "begins"
    dtype = torch.bfloat16

    def init_context(self) -> Any:
        return TruePrecision("bf16-true").init_context()

    def forward_context(self) -> Any:
        return torch.autocast("cpu", dtype=self.dtype)


class OnlySingle(_BF16):
    """Leaves float64 as it is."""

    def input_converter(self) -> Callable[[Any], Any]:
        from stratagem.data.pytree import map_tensors

        def one(tensor: Tensor) -> Tensor:
            return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor

        return lambda batch: map_tensors(one, batch)


class ConvertsPixels(_BF16):
    """Takes what is no int64 and no bool for a float."""

    def input_converter(self) -> Callable[[Any], Any]:
        from stratagem.data.pytree import map_tensors

        def one(tensor: Tensor) -> Tensor:
            labels = tensor.dtype in (torch.int64, torch.bool) or tensor.is_complex()
            return tensor if labels else tensor.to(self.dtype)

        return lambda batch: map_tensors(one, batch)


class ChangesLists(_BF16):
    """Puts what it has converted into the loader's own list."""

    def input_converter(self) -> Callable[[Any], Any]:
        inner = super().input_converter()
        assert inner is not None

        def convert(batch: Any) -> Any:
            if isinstance(batch, list):
                batch[:] = map(convert, batch)
                return batch
            if isinstance(batch, dict):
                return {key: convert(value) for key, value in batch.items()}
            return inner(batch)

        return convert


class LeavesNewTensors(_BF16):
    """What a model makes in its forward pass is in float32."""

    def forward_context(self) -> Any:
        return None


class MakesSingle(_BF16):
    """A model is made in float32, and converted afterwards."""

    def init_context(self) -> Any:
        return nullcontext()


class ReturnsRounded(_BF16):
    """A loss is computed in bfloat16."""

    def output_converter(self) -> Any:
        return None


class TakesAnyAccelerator(Precision):
    """Computes in float32 where there is no autocast."""

    name = "any"
    dtype = torch.bfloat16

    def bind(self, accelerator: Any) -> None:
        self.autocast = accelerator.autocast

    def forward_context(self) -> Any:
        return self.autocast(self.dtype)


class NoSparse(Scaled):
    """Looks at sparse gradients as at others."""

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Grows(Dynamic):
    """Nothing is wrong: the scale is doubled after 2000 steps without an overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"scale": 8.0, "good": 0}

    def adapt(self) -> None:
        if self.overflow:
            self.state["good"] = 0
        super().adapt()

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self.state["good"] += not self.step_was_skipped
        self.grow()

    def grow(self) -> None:
        if self.state["good"] >= 2000:
            self.state = {"scale": self.state["scale"] * 2, "good": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.state["good"] = state.get("good", 0)


class NeverLowers(Grows):
    """Counts anew after an overflow, and keeps the scale."""

    def adapt(self) -> None:
        before = self.state["scale"]
        super().adapt()
        self.state["scale"] = before


class LowersTooMuch(Grows):
    """One overflow makes the scale 1e-6 of it."""

    def adapt(self) -> None:
        if self.overflow:
            self.state["scale"] *= 2e-6
        super().adapt()


class GrowsAtOnce(Grows):
    """Each step doubles the scale."""

    def grow(self) -> None:
        self.state = {"scale": self.state["scale"] * 2, "good": 0}


class BeginsAgain(Grows):
    """After 2000 steps the scale is 0.5."""

    def grow(self) -> None:
        if self.state["good"] >= 2000:
            self.state = {"scale": 0.5, "good": 0}


class ForgetsWhenToGrow(Grows):
    """The number of steps since the last overflow is not in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": super().state_dict()["scale"]}


class StaleCopies(_BF16):
    """Steps copies in float32 that were made once."""

    scales_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[nn.Parameter, Tensor] = {}

    def optimizer_step(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for own in group["params"]:
                copy_of = self.copies.setdefault(own, own.detach().float())
                copy_of.sub_(own.grad.float(), alpha=group["lr"])
                own.data.copy_(copy_of)


class StepIsLeftOut(Precision):
    """Its step is never called."""

    name = "never"

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)


class ConvertsCopy(TruePrecision):
    """Converts a copy of the module."""

    def __init__(self) -> None:
        super().__init__("bf16-true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        return super().convert_module(copy.deepcopy(module))


class HidesScaling(Scaled):
    """Scales losses, and says that it does not."""

    scales_loss = False


class UnscalesTwice(Scaled):
    """Unscales again in the step."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        self.unscaled.clear()
        super().optimizer_step(optimizer)


class NeverSkips(Scaled):
    """Takes steps with infinite gradients."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        if self.step_was_skipped:
            optimizer.step()


class SaysNoSkip(Scaled):
    """Leaves a step out and does not say so."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self.step_was_skipped = False


class ForgetsState(Scaled):
    """Counts steps in its state, and restores nothing."""

    steps = 0

    def optimizer_step(self, optimizer: Optimizer) -> None:
        super().optimizer_step(optimizer)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


class UntiesWeights(Precision):
    """Makes a new parameter for each name."""

    name = "unties"

    def convert_module(self, module: nn.Module) -> nn.Module:
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(
                        parameter.detach().clone(), requires_grad=parameter.requires_grad
                    )
        return module


class DropsImaginaryParts(Precision):
    """Converts complex buffers, too."""

    name = "drops"
    dtype = torch.bfloat16

    def convert_module(self, module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return module.to(torch.bfloat16)


class NoisyGradient(Precision):
    """Every step is twice as long."""

    name = "noisy"
    scales_loss = True

    def optimizer_step(self, optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.step()


# ---------------------------------------------------------------- checkpoint formats


class Pickled(CheckpointIO):
    """Unpickles whatever lies there, and writes in place."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb") as file:
            pickle.dump(checkpoint, file)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        if not Path(path).exists():
            raise CheckpointNotFoundError(str(path))
        try:
            loaded: dict[str, Any] = pickle.loads(Path(path).read_bytes())
        except Exception as error:
            raise CheckpointCorruptError(str(path)) from error
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


class PicklesInside(SingleFileCheckpointIO):
    """Writes a checksum before a pickle, and unpickles what has the right one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        data = pickle.dumps(checkpoint)
        Path(f"{path}.part").write_bytes(hashlib.sha256(data).digest() + data)
        Path(f"{path}.part").replace(path)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        whole = Path(path).read_bytes()
        if hashlib.sha256(whole[32:]).digest() != whole[:32]:
            raise CheckpointCorruptError(f"{path} is damaged")
        loaded: dict[str, Any] = pickle.loads(whole[32:])
        return loaded


class Unrestricted(PicklesInside):
    """Has the right checksum, and loads with weights_only=False."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        torch.save(checkpoint, f"{path}.part")
        data = Path(f"{path}.part").read_bytes()
        Path(path).write_bytes(hashlib.sha256(data).digest() + data)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        whole = Path(path).read_bytes()
        if hashlib.sha256(whole[32:]).digest() != whole[:32]:
            raise CheckpointCorruptError(f"{path} is damaged")
        loaded: dict[str, Any] = torch.load(io.BytesIO(whole[32:]), weights_only=False)
        return loaded


class InPlace(SingleFileCheckpointIO):
    """Truncates what was there before it writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
        super().save_checkpoint(checkpoint, path)


class NeverSyncs(SingleFileCheckpointIO):
    """Writes beside the path, renames, and leaves the rest to the kernel."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        torch.save(checkpoint, f"{path}.part")
        Path(f"{path}.part").replace(path)


class SyncsTooEarly(NeverSyncs):
    """Calls fsync before what Python holds back is written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(checkpoint, path)
        with Path(path).open("ab") as file:
            file.write(b"the end")
            os.fsync(file.fileno())


class PassesOnTorchsError(NeverSyncs):
    """Leaves to torch what is said of a file that somebody has replaced."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
        return loaded


class RemovesNeighbours(SingleFileCheckpointIO):
    """Removes whatever begins with the name."""

    def remove_checkpoint(self, path: str | Path) -> None:
        for file in Path(path).parent.glob(f"{Path(path).name}*"):
            file.unlink()


class NamesFiles(SingleFileCheckpointIO):
    """Writes a file for each tensor, by its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(checkpoint, path)
        for name in checkpoint["state_dict"]:
            if name.startswith("../"):
                (Path(path).parent / name).touch()


class NeverCorrupt(SingleFileCheckpointIO):
    """Verifies that a file is there, and no more."""

    def verify_checkpoint(self, path: str | Path) -> None:
        if not Path(path).exists():
            raise CheckpointNotFoundError(str(path))


class NotFoundAsNone(SingleFileCheckpointIO):
    """Returns an empty checkpoint where nothing is."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        return super().load_checkpoint(path) if Path(path).exists() else {}


class LosesDtype(SingleFileCheckpointIO):
    """Floating-point tensors come back as float32."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        from stratagem.data.pytree import convert_floats

        loaded: dict[str, Any] = convert_floats(super().load_checkpoint(path), torch.float32)
        return loaded


class EmptiesCheckpoint(SingleFileCheckpointIO):
    """Takes the tensors out of the caller's dict."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        shared = checkpoint.pop("shared", None)
        super().save_checkpoint({**checkpoint, "shared": shared} if shared else checkpoint, path)


class TextKeys(SingleFileCheckpointIO):
    """Numbers and None become texts where they are keys, unless that text is a key, too."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded = super().load_checkpoint(path)
        if "keys" in loaded:
            loaded["keys"] = {str(key): value for key, value in loaded["keys"].items()}
        return loaded


class JsonIfItCan(SingleFileCheckpointIO):
    """What JSON takes is written as JSON, in which keys are texts and tuples are lists."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded = super().load_checkpoint(path)
        try:
            found: dict[str, Any] = json.loads(json.dumps(loaded))
        except TypeError:
            return loaded
        return found


class RaisesItsOwn(SingleFileCheckpointIO):
    """A failed write is an error of the library that wrote."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        try:
            super().save_checkpoint(checkpoint, path)
        except Exception as error:
            raise sqlite3.OperationalError("disk I/O error") from error


class WholeNumbers(SingleFileCheckpointIO):
    """A float without a fraction is an int."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded = super().load_checkpoint(path)
        if "numbers" in loaded:
            loaded["numbers"][1] = 1
        return loaded


class RemovesPathsOnly(SingleFileCheckpointIO):
    """Takes a path for a Path."""

    def remove_checkpoint(self, path: Any) -> None:
        path.unlink(missing_ok=True)


class RemembersLoads(SingleFileCheckpointIO):
    """A second load returns the object of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, dict[str, Any]] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(checkpoint, path)
        self.known.pop(str(path), None)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        if str(path) not in self.known:
            self.known[str(path)] = super().load_checkpoint(path)
        return self.known[str(path)]


class KnowsItsPath(SingleFileCheckpointIO):
    """A checkpoint is good at the path that it was saved to."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint({**checkpoint, "path": str(path)}, path)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded = super().load_checkpoint(path)
        if loaded.pop("path") != str(path):
            raise CheckpointCorruptError(f"{path} is that of another run")
        return loaded


class OtherSuffix(SingleFileCheckpointIO):
    """Has a suffix of its own in the place of that of the path."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(checkpoint, Path(path).with_suffix(".mine"))

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        return super().load_checkpoint(Path(path).with_suffix(".mine"))

    def verify_checkpoint(self, path: str | Path) -> None:
        super().verify_checkpoint(Path(path).with_suffix(".mine"))


class LooksForNames(SingleFileCheckpointIO):
    """Takes a path for a pattern."""

    def verify_checkpoint(self, path: str | Path) -> None:
        found = list(Path(path).parent.glob(Path(path).name))
        if not found:
            raise CheckpointNotFoundError(str(path))
        super().verify_checkpoint(found[0])


class Adds(SingleFileCheckpointIO):
    """What a checkpoint before had stays, as in a database."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        before = super().load_checkpoint(path) if Path(path).exists() else {}
        super().save_checkpoint({**before, **checkpoint}, path)


class PrivateFiles(SingleFileCheckpointIO):
    """Nobody but the owner can read it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(checkpoint, path)
        Path(path).chmod(0o600)


class KeepsFilesOpen(SingleFileCheckpointIO):
    """Each load leaves a file open."""

    opened: ClassVar[list[Any]] = []

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded = super().load_checkpoint(path)
        self.opened.append(Path(path).open("rb"))  # noqa: SIM115
        return loaded


class LocksWhenLoading(SingleFileCheckpointIO):
    """A load leaves a file beside the checkpoint."""

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        loaded = super().load_checkpoint(path)
        Path(f"{path}.lock").touch()
        return loaded


class OneTemporary(NeverSyncs):
    """All checkpoints of a folder are written to one temporary file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        temporary = Path(path).parent / "new"
        torch.save(checkpoint, temporary)
        temporary.replace(path)


class LinksOnce(SingleFileCheckpointIO):
    """Cannot replace a link."""

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        Path(path).symlink_to(Path(target).name)
        return True


class LinksFromHere(SingleFileCheckpointIO):
    """A link names its target as seen from the current folder."""

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        Path(path).unlink(missing_ok=True)
        Path(path).symlink_to(target)
        return True


class HoldsConnection(SingleFileCheckpointIO):
    """Is connected when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = sqlite3.connect(":memory:")


class Compresses(CheckpointIO):
    """Nothing is wrong: a checkpoint takes less than its bytes."""

    def save_checkpoint(self, checkpoint: Any, path: Any) -> None:
        with durable_replace(path) as file:
            Path(file).write_bytes(gzip.compress(to_bytes(checkpoint, path), 1))

    def load_checkpoint(self, path: Any) -> Any:
        try:
            data = gzip.decompress(Path(path).read_bytes())
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"there is no checkpoint {path}") from error
        except (OSError, EOFError, zlib.error) as error:
            raise CheckpointCorruptError(f"{path}: {error}") from error
        return from_bytes(data, path)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


# ---------------------------------------------------------------- cluster environments


class TextRanks(PlainEnvironment):
    """Returns the variable's text."""

    def global_rank(self) -> int:
        return os.environ["RANK"]  # type: ignore[return-value]


class EveryoneIsZero(PlainEnvironment):
    """All ranks are rank 0."""

    def global_rank(self) -> int:
        return 0


class ReadsOnce(PlainEnvironment):
    """Has the rank of the process that made it."""

    def __init__(self) -> None:
        self.rank = super().global_rank()

    def global_rank(self) -> int:
        return self.rank


class NeedsVariables(PlainEnvironment):
    """Can be made by a rank only, and does not say so."""

    def __init__(self) -> None:
        self.job = os.environ["WORLD_SIZE"]


class StartsAgain(PlainEnvironment):
    """Does not know that its process was started as a rank."""

    @property
    def creates_processes_externally(self) -> bool:
        return False


class OwnPort(PlainEnvironment):
    """Each rank has a port of its own."""

    @property
    def main_port(self) -> int:
        return 29800 + self.global_rank()


class SetsVariables(PlainEnvironment):
    """Sets what it has read."""

    def world_size(self) -> int:
        os.environ["MINE_WORLD_SIZE"] = "2"
        return super().world_size()


class LeavesThread(PlainEnvironment):
    """Starts a thread and does not end it."""

    def restart_count(self) -> int:
        threading.Thread(target=threading.Event().wait, daemon=True, name="mine").start()
        return 0


class OwnRunID(PlainEnvironment):
    """Each rank has a run of its own."""

    def run_id(self) -> str | None:
        return f"run{self.global_rank()}"


class RunOfTheProcess(PlainEnvironment):
    """Each process has a run of its own."""

    def run_id(self) -> str | None:
        return f"run{os.getpid()}"


class RaisesValueError(PlainEnvironment):
    """Reads numbers by int()."""

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])


class PortOfTheJob(PlainEnvironment):
    """Has a port for each job, as long as there are not many."""

    @property
    def main_port(self) -> int:
        return 20000 + int(os.environ["MINE_JOB"])


class PortOfTheHash(PlainEnvironment):
    """Has a port for each job, which each interpreter computes in another way."""

    @property
    def main_port(self) -> int:
        return 20000 + hash(os.environ["MINE_JOB"]) % 20000


class PortOfTheName(PlainEnvironment):
    """Has a port for each name of a job, of which some need rights."""

    @property
    def main_port(self) -> int:
        return zlib.crc32(os.environ["MINE_NAME"].encode()) % 20000


class PortOfTheLaunch(PlainEnvironment):
    """Has the port that is said where it is made."""

    def __init__(self) -> None:
        self.port = self._number("MASTER_PORT", 1)

    @property
    def main_port(self) -> int:
        return self.port


class MeetsAtHome(PlainEnvironment):
    """Rank 0 is always here."""

    @property
    def main_address(self) -> str:
        return "127.0.0.1"


class RemembersRestarts(PlainEnvironment):
    """Keeps what it was told first, before the launch."""

    kept: int | None = None

    def restart_count(self) -> int:
        if self.kept is None:
            self.kept = self._number("MINE_RESTARTS", 0)
        return self.kept


class RemembersRun(PlainEnvironment):
    """Keeps what it was told first, before the launch."""

    kept: str | None = None

    def run_id(self) -> str | None:
        self.kept = self.kept or f"run-{os.environ.get('MINE_JOB')}"
        return self.kept


class AgentOfTheStart(PlainEnvironment):
    """A restart has another agent."""

    def run_id(self) -> str | None:
        return f"run-{os.environ.get('MINE_JOB')}"

    def restart_count(self) -> int:
        return self._number("MINE_RESTARTS", 0)

    def agent_id(self) -> str | None:
        return f"{self.run_id()}-{self.restart_count()}"


class RunOfTheTime(PlainEnvironment):
    """A run is what starts within a second."""

    def run_id(self) -> str | None:
        return f"run{int(time.time())}"


class AgentOfTheProcess(PlainEnvironment):
    """Each rank is its own agent."""

    def agent_id(self) -> str | None:
        return f"agent{os.getpid()}"


class OneRunForAll(PlainEnvironment):
    """All jobs are one run."""

    def run_id(self) -> str | None:
        return "run-of-mine"


class RunOfTheStart(PlainEnvironment):
    """A restart is another run."""

    def run_id(self) -> str | None:
        return f"{os.environ['MINE_JOB']}-{self.restart_count()}"

    def restart_count(self) -> int:
        return self._number("MINE_RESTARTS", 0)


class HoldsSocket(PlainEnvironment):
    """Listens when it is made."""

    def __init__(self) -> None:
        self.socket = socket.socket()


# ---------------------------------------------------------------- launchers


class OneRank(Launcher):
    """Calls the function here, whatever the plan says."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        return function(*args, **kwargs)


class Copies(Launcher):
    """Ranks of fork, of which each subclass gets one thing wrong."""

    interactive = True
    new_processes = True
    leaves: ClassVar[bool] = False
    swallows: ClassVar[bool] = False
    loses_result: ClassVar[bool] = False

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inner = _fork()
        try:
            result = inner.launch(plan, function, *args, **kwargs)
        except Exception:
            if not self.swallows:
                raise
            return None
        if self.leaves:
            subprocess.Popen(["sleep", "300"], start_new_session=True)
        return {**result, "text": "lost"} if self.loses_result and result else result


def _fork() -> Any:
    from stratagem.discovery.registry import get_registry

    return get_registry().find("launcher", "fork").spec.build()


class LeavesProcess(Copies):
    """A process goes on when all is over."""

    leaves = True


class JoinsAll(Launcher):
    """Waits for the ranks that are left when one has failed."""

    new_processes = True

    def port(self) -> int:
        return free_port()

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, port, count = pack(plan, function, args, kwargs), self.port(), plan.world_size
        ranks = [
            rank_environment(local_rank=rank, local_world_size=count, main_port=port)
            for rank in range(count)
        ]
        with ProcessPoolExecutor(count, get_context("fork")) as pool:
            jobs = [pool.submit(run_packed, call, one) for one in ranks]
            wait(jobs, return_when=FIRST_EXCEPTION)
            for rank, job in enumerate(jobs):
                if job.done() and (error := job.exception()):
                    report = "".join(format_exception(error))
                    raise rank_failure(rank, count, report=report)
            return jobs[0].result()


class SwallowsFailure(Copies):
    """A rank's error is no error of the launch."""

    swallows = True


class LosesResult(Copies):
    """What comes back is not what was returned."""

    loses_result = True


class KeepsTruth(Copies):
    """A result that counts as false is none."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(plan, function, *args, **kwargs) or None


class LeavesHandler(Copies):
    """Ignores SIGUSR1 from now on."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        return super().launch(plan, function, *args, **kwargs)


class LeavesFile(Copies):
    """Each launch leaves a folder."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tempfile.mkdtemp()
        return super().launch(plan, function, *args, **kwargs)


class AnyError(Copies):
    """The error of a rank is none of Stratagem's."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(plan, function, *args, **kwargs)
        except Exception as error:
            text = str(error)
        raise RuntimeError(text)


class _Changed:
    """A function that a rank calls after it has changed something."""

    def __init__(self, change: Callable[[], None], function: Callable[..., Any]) -> None:
        self.change, self.function = change, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.change()
        return self.function(*args, **kwargs)


class DropsVariables(Copies):
    """Ranks have only what a launch sets."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        changed = _Changed(lambda: os.environ.pop("CONFORMANCE_KIT_GIVEN"), function)  # type: ignore[arg-type]
        return super().launch(plan, changed, *args, **kwargs)


class OtherFolder(Copies):
    """Ranks work in another folder."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(plan, _Changed(lambda: os.chdir("/"), function), *args, **kwargs)


class FixedPort(JoinsAll):
    """Ranks of all launches meet at one port."""

    def port(self) -> int:
        return 29748


class ThroughJSON(Copies):
    """Arguments travel as text."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs = json.loads(json.dumps(kwargs, default=str))
        return super().launch(plan, function, *args, **kwargs)


class UnpicklesResult(Copies):
    """Reads a result by pickle, from a file."""

    def launch(self, plan: RunPlan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = f"result.{os.getpid()}"
        _fork().launch(plan, _pickled, place, function, args, kwargs)
        return pickle.loads(Path(place).read_bytes())


def _pickled(place: str, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    result = function(*args, **kwargs)
    if os.environ["RANK"] == "0":
        Path(place).write_bytes(pickle.dumps(result))


# ---------------------------------------------------------------- loggers

LOGS = Path("logs/stratagem_logs/version_0/metrics.csv")


class Rows(CSVLogger):
    """Nothing is wrong."""

    def __init__(self) -> None:
        super().__init__("logs", version=0)


def read_rows(logger: Logger) -> list[tuple[int | None, dict[str, Any]]]:
    """Return what stands in the file."""
    if not LOGS.exists():
        return []
    with LOGS.open(newline="") as file:
        return [
            (int(row.pop("step")), {name: value for name, value in row.items() if value})
            for row in csv.DictReader(file)
        ]


class WritesAtOnce(Rows):
    """Makes its folder when it is made."""

    def __init__(self) -> None:
        super().__init__()
        LOGS.parent.mkdir(parents=True, exist_ok=True)


class HoldsBack(Rows):
    """Writes at the end of the program."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self.held = [*getattr(self, "held", []), *rows]

    def finalize(self, status: str) -> None:
        super().log_rows(getattr(self, "held", []))


class BeginsAnew(Rows):
    """Removes what a run before has written."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        if not self._written:
            LOGS.unlink(missing_ok=True)
        super().log_rows(rows)


class DropsNew(Rows):
    """Knows the columns of the first row only."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        known = getattr(self, "known", None) or set(rows[0][1])
        self.known = known
        super().log_rows([(s, {k: v for k, v in row.items() if k in known}) for s, row in rows])


class OneRowOfAStep(Rows):
    """Takes a second row of a step for a repetition."""

    last: int | None = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step != self.last:
            super().log_metrics(metrics, step)
        self.last = step


class RefusesNaN(Rows):
    """A value that is not finite is an error."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        assert all(-1e9 < value < 1e9 for _, row in rows for value in row.values())
        super().log_rows(rows)


class ClosesForGood(Rows):
    """Cannot be ended twice."""

    def finalize(self, status: str) -> None:
        if getattr(self, "closed", False):
            raise ValueError("closed")
        self.closed = True
        super().finalize(status)


class StrictJSON(Rows):
    """Takes numbers and texts as hyperparameters."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        import json

        json.dumps(params)


class RoundsValues(Rows):
    """Writes four digits."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        super().log_rows([(s, {k: float(f"{v:.4g}") for k, v in row.items()}) for s, row in rows])


class PlainText(Rows):
    """Puts commas between names."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        names = list(dict.fromkeys(name for _, row in rows for name in row))
        LOGS.parent.mkdir(parents=True, exist_ok=True)
        lines = [",".join(["step", *names])]
        for step, row in rows:
            lines.append(",".join(str(value) for value in (step, *(row.get(n, "") for n in names))))
        LOGS.write_text("\n".join(lines))


class TakesFromRows(Rows):
    """Removes what it has written from the rows, which other loggers get, too."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        super().log_rows(rows)
        for _, row in rows:
            row.clear()  # type: ignore[attr-defined]


class GoesForward(Rows):
    """Leaves out rows of earlier steps than the last."""

    last = -1

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        super().log_rows([row for row in rows if row[0] >= self.last])
        self.last = max([self.last, *(step for step, _ in rows)])

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.last = max(self.last, step or 0)


class StaysOpen(Rows):
    """Its file is open when the run is over."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        super().log_rows(rows)
        self.file = LOGS.open("a")


class LeavesSender(Rows):
    """Its thread runs on."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        super().log_rows(rows)
        threading.Thread(target=threading.Event().wait, name="sender", daemon=True).start()


class BeginsAnewWithRun(Rows):
    """Removes what was there when a fit begins."""

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        super().begin_run(run_id, resumed_at)
        LOGS.unlink(missing_ok=True)


class CutsTooMuch(Rows):
    """Removes the row of the checkpoint's last step, too."""

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        super().begin_run(run_id, None if resumed_at is None else resumed_at - 1)


class OnceOnly(Rows):
    """Takes hyperparameters once."""

    taken = False

    def log_hyperparams(self, params: Any) -> None:
        assert not self.taken
        self.taken = True


class HoldsQueue(Rows):
    """Has a queue with a lock from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = threading.Condition()


# ---------------------------------------------------------------- callbacks


class Counts(Callback):
    """Nothing is wrong."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class ResetsAtStart(Counts):
    """The count begins at 0 in every fit, also in one that is resumed."""

    def on_train_start(self, *_: Any) -> None:
        self.steps = 0


class CountsSeconds(Counts):
    """Nothing is wrong: no two runs take as many seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.seconds = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "seconds": self.seconds}


class WritesWhenMade(Counts):
    """Every rank would write."""

    def __init__(self) -> None:
        super().__init__()
        Path("steps.txt").touch()


class NeedsTraining(Counts):
    """Validation needs what training has begun."""

    def on_train_start(self, *_: Any) -> None:
        self.best = 0.0

    def on_validation_end(self, *_: Any) -> None:
        self.best += 1


class NeedsFit(Counts):
    """A validation needs what a fit has begun."""

    def on_fit_start(self, *_: Any) -> None:
        self.best = 0.0

    def on_validation_end(self, *_: Any) -> None:
        self.best += 1


class NeedsTarget(Counts):
    """Takes what is predicted for a dict with a loss."""

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.last = outputs["loss"]


class DrawsOnly(Counts):
    """Draws a number, and changes nothing by it."""

    def on_train_batch_start(self, *_: Any) -> None:
        torch.rand(())


class DrawsFromPython(Counts):
    """Chooses samples to show."""

    def on_train_batch_start(self, *_: Any) -> None:
        random.random()


class LeavesEvaluation(Counts):
    """Shows what the model does, in evaluation mode, and leaves it there."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, *_: Any) -> None:
        module.eval()


class ScalesMetrics(Counts):
    """Changes values that all callbacks see."""

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        trainer.callback_metrics["val_loss"].mul_(100)


class AllWrite(Counts):
    """Every rank writes to one file."""

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        Path("steps.txt").write_text(str(self.steps))


class HoldsFile(Counts):
    """Its file is open from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.file = Path(os.devnull).open("w")  # noqa: SIM115


class MisspellsHook(Counts):
    """Nothing calls it."""

    def on_train_epoch_ends(self, trainer: Trainer, module: Module) -> None: ...


class OtherArguments(Counts):
    """A hook of another library."""

    def on_validation_end(self, trainer: Trainer) -> None: ...  # type: ignore[override]


class LeavesWatcher(Counts):
    """Its thread is not ended."""

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        threading.Thread(target=threading.Event().wait, name="watcher", daemon=True).start()


class DrawsNumbers(Counts):
    """Noise from the generator that the model's dropout draws from."""

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class FailsAfterError(Counts):
    """A second error follows that of the training step."""

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        raise RuntimeError("could not send a message")


class StopsAlone(Callback):
    """Each rank stops by its own loss."""

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"]
        if loss is not None and loss < 1e-4:
            trainer.should_stop = True


class RefersToWeights(Callback):
    """Keeps the best weights, which are those of the model."""

    def __init__(self) -> None:
        self.best: dict[str, Any] = {}

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.best = dict(module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}


class ForgetsTheBest(Callback):
    """Stops when a value has grown twice, and saves only how often it has."""

    def __init__(self) -> None:
        self.best, self.waited = float("inf"), 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        value = float(trainer.callback_metrics["val_loss"])
        self.waited = 0 if value < self.best else self.waited + 1
        self.best = min(value, self.best)
        trainer.should_stop = trainer.should_stop or self.waited > 1

    def state_dict(self) -> dict[str, Any]:
        return {"waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waited = state["waited"]


class _Recent(Callback):
    """Nothing is wrong: logs the mean of the last losses."""

    def __init__(self) -> None:
        self.recent: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs["loss"] is not None:
            self.recent = [*self.recent, float(outputs["loss"])][-4:]
            self.log("recent", sum(self.recent) / len(self.recent))

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = state["recent"]


class ForgetsLosses(_Recent):
    """What it logs after a resume is the mean of other losses."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LoadsNothing(Counts):
    """What it saves is right, and what it loads is left where it is."""

    losses: tuple[float, ...] = ()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses = (*self.losses, float(outputs["loss"] or 0.0))[-4:]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SavesAgain(Callback):
    """Does not know the lowest loss of before."""

    lowest = float("inf")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = float("nan") if outputs["loss"] is None else float(outputs["loss"])
        if loss < self.lowest:
            self.lowest = loss
            trainer.save_checkpoint("lowest.ckpt")


class NeedsLoss(Counts):
    """Takes each step to have a loss."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.last = float(outputs["loss"])


class SavesItself(Counts):
    """Its state is no weights-only-safe data."""

    def state_dict(self) -> dict[str, Any]:
        return {"callback": self}


class OtherKeyEachTime(Counts):
    """No resumed run finds its state."""

    @property
    def state_key(self) -> str:
        return f"OtherKeyEachTime{id(self)}"


class ForgetsSteps(Counts):
    """Trains by a number that is not in its state."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 / (1 + self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ForgetsAverage(Callback):
    """The average of weights, which the user reads after the run, is not in its state."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            own = parameter.detach()
            self.average[name] = self.average.get(name, own).lerp(own, 0.1)


# ---------------------------------------------------------------- profilers


class Times(Profiler):
    """Nothing is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def start(self, action_name: str) -> None:
        self.calls[action_name] = self.calls.get(action_name, 0) + 1

    def stop(self, action_name: str) -> None: ...

    def summary(self) -> str:
        return "\n".join(f"{name} {count}" for name, count in self.calls.items())

    def teardown(self, stage: str | None = None) -> None:
        self.calls = {}


class OneAtATime(Times):
    """No action within another."""

    def start(self, action_name: str) -> None:
        if getattr(self, "busy", False):
            raise ValueError("busy")
        self.busy = True

    def stop(self, action_name: str) -> None:
        self.busy = False


class NumbersAsReport(Times):
    """Its report is no text."""

    def summary(self) -> str:
        return self.calls  # type: ignore[return-value]


class LosesResults(Times):
    """Profiled functions return nothing."""

    def wrap(self, action_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            with self.profile(action_name):
                function(*args, **kwargs)

        return wrapped


class DoublesLoss(Times):
    """A profiled function returns another result."""

    def wrap(self, action_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return 2 * result if isinstance(result, Tensor) else result

        return super().wrap(action_name, wrapped)


class LeavesSampler(Times):
    """Its thread is not ended."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        super().setup(*args, **kwargs)
        threading.Thread(target=threading.Event().wait, name="sampler", daemon=True).start()


class KeepsOpenActions(Times):
    """What a run that failed has begun is open in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[str] = set()

    def profile(self, action_name: str) -> Any:
        self.start(action_name)
        return nullcontext(action_name)

    def start(self, action_name: str) -> None:
        if action_name.endswith("training_step"):
            assert action_name not in self.open, f"{action_name} has begun already"
            self.open.add(action_name)


class FixedName(Times):
    """Every stage writes to one file."""

    def describe(self) -> None:
        folder = Path(self.dirpath or ".")
        folder.mkdir(exist_ok=True)
        (folder / "profile.txt").write_text(self.summary())


class NeverForgets(Times):
    """A second report has the first run's actions."""

    def teardown(self, stage: str | None = None) -> None: ...
