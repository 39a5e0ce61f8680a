"""A stub of poptorch 3.4 that computes on the CPU, and enforces its states.

Options freeze once a model or a loader has taken them; a model that is wrapped for training must be
destroyed before it is wrapped again; a device holds one program, which is compiled before it is
attached, detached before another one is, and nothing after it is destroyed. The model's Python code
runs once, while it is compiled (`torch.jit.trace`); then the graph does, on weights of its own,
which change nothing on the host before `copyWeightsToHost`, and are lost with the device. Stricter
than poptorch where that copies weights and attaches by itself.
"""

from __future__ import annotations

import enum
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

calls: list[str] = []
"""What was called, in order; "training" or "inference" before the names of methods."""
handed_over: list[Any] = []
"""The learning rates that setOptimizer was given."""
available = 64
"""How many IPUs there are."""

_held: PoplarExecutor | None = None
_losses: list[Tensor] = []


class Error(RuntimeError):
    """What poptorch's C++ raises."""


class OutputMode(enum.Enum):
    All = 0
    Sum = 1
    Final = 2
    EveryN = 3


class _Freezes:
    _is_frozen = False

    def _set(self, name: str, value: Any) -> Any:
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")
        self.__dict__[name] = value
        return self


class _Training(_Freezes):
    gradient_accumulation = 1

    def gradientAccumulation(self, gradient_accumulation: int) -> Any:
        return self._set("gradient_accumulation", int(gradient_accumulation))


class Options(_Freezes):
    device_iterations = 1
    replication_factor = 1
    random_seed: int | None = None
    output_mode: OutputMode | None = None
    target = ""

    def __init__(self) -> None:
        self.Training = _Training()

    def deviceIterations(self, device_iterations: int) -> Any:
        return self._set("device_iterations", int(device_iterations))

    def replicationFactor(self, replication_factor: int) -> Any:
        return self._set("replication_factor", int(replication_factor))

    def randomSeed(self, random_seed: int) -> Any:
        if not isinstance(random_seed, int):
            raise AssertionError("random_seed must be an integer")
        return self._set("random_seed", random_seed)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Any:
        if not isinstance(output_mode, OutputMode):
            raise AssertionError("output_mode must be a poptorch.OutputMode")
        return self._set("output_mode", output_mode)

    def useIpuModel(self, use_model: bool) -> Any:
        return self._use("model" if use_model else "")

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Any:
        return self._use("offline")

    def _use(self, target: str) -> Any:
        if target and self.target not in ("", target):
            raise Error("useIpuModel and useOfflineIpuTarget exclude each other")
        return self._set("target", target)

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = self.Training.__dict__["_is_frozen"] = True

    @property
    def parts(self) -> int:
        return (
            self.device_iterations * self.replication_factor * self.Training.gradient_accumulation
        )


class DataLoader(torch.utils.data.DataLoader[Any]):
    def __init__(self, options: Options, dataset: Any, batch_size: int = 1, **arguments: Any):
        options._freeze()
        super().__init__(dataset, batch_size * options.parts, **arguments)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    calls.append(f"ipuHardwareIsAvailable({num_ipus})")
    return num_ipus <= available


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Unsupported reduction type {reduction!r}")
    _losses.append(x * 1)
    return _losses[-1]


def trainingModel(
    model: nn.Module, options: Options | None = None, optimizer: Any = None
) -> PoplarExecutor:
    supported = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
    if optimizer is not None and not isinstance(optimizer, supported):
        raise ValueError(f"Unsupported optimizer type {type(optimizer)}")
    if any(isinstance(p, PoptorchParameter) for p in model.parameters()):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on "
            "the model to unwrap before wrapping again."
        )
    return PoplarExecutor(model, options or Options(), optimizer, training=True)


def inferenceModel(model: nn.Module, options: Options | None = None) -> PoplarExecutor:
    options = options or Options()
    if options.Training.gradient_accumulation != 1:
        raise AssertionError("Gradient accumulation should be left to its default for inference")
    return PoplarExecutor(model, options, None, training=False)


class PoptorchParameter(nn.Parameter):
    """What parameters are made instances of."""


class _Traced(nn.Module):
    """Calls the model, and finds which of its outputs is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[int] = []

    def forward(self, *inputs: Tensor) -> Any:
        _losses.clear()
        outputs = self.model(*inputs)
        self.losses = [i for i, out in enumerate(outputs) if any(out is x for x in _losses)]
        return outputs


class PoplarExecutor:
    """A program: of the model, and for training of its backward pass and its optimizer."""

    def __init__(self, model: nn.Module, options: Options, optimizer: Any, *, training: bool):
        options._freeze()
        self._model, self._options, self._training = model, options, training
        self._program: Any = None
        self._optimizer: Any = None
        self._is_attached = self._is_destroyed = False
        self._kinds = [type(p) for p in model.parameters()]
        if training:
            if optimizer is None:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for parameter in model.parameters():
                parameter.__class__ = PoptorchParameter
        self._host_optimizer = optimizer
        self._note("wrapped")

    def _note(self, what: str) -> None:
        calls.append(f"{'training' if self._training else 'inference'} {what}")

    def isCompiled(self) -> bool:
        return self._program is not None

    def isAttachedToDevice(self) -> bool:
        return self._is_attached

    def _need(self, *, attached: bool | None = None) -> None:
        if self._program is None:
            raise Error("Model has not been compiled or has been destroyed.")
        if attached is not None and attached is not self._is_attached:
            raise Error(f"Device is {'not' if attached else 'already'} attached")

    def attachToDevice(self) -> None:
        self._need(attached=False)
        self._note("attached")
        self._take_device()
        self._upload()

    def _take_device(self) -> None:
        global _held
        if _held is not None:
            raise Error("Failed to acquire the IPUs: another program holds them")
        _held, self._is_attached = self, True

    def detachFromDevice(self) -> None:
        global _held
        self._need(attached=True)
        self._note("detached")
        _held, self._is_attached = None, False

    def copyWeightsToHost(self) -> None:
        self._need(attached=True)
        self._note("weights to host")
        with torch.no_grad():
            for name, tensor in _tensors(self._model):
                tensor.copy_(self._weights[name])

    def copyWeightsToDevice(self) -> None:
        self._need(attached=True)
        self._note("weights to device")
        self._upload()

    def _upload(self) -> None:
        with torch.no_grad():
            for name, tensor in _tensors(self._model):
                self._weights[name].copy_(tensor)

    def setOptimizer(self, optimizer: Any) -> None:
        if type(optimizer) is not type(self._host_optimizer):
            raise ValueError("setOptimizer: expected an optimizer of the same type")
        self._note("optimizer set")
        handed_over.append([group["lr"] for group in optimizer.param_groups])
        self._host_optimizer = optimizer
        if self._optimizer is not None:
            groups = zip(self._optimizer.param_groups, optimizer.param_groups, strict=True)
            for own, given in groups:
                own.update({k: v for k, v in given.items() if k != "params"})

    def destroy(self) -> None:
        global _held
        self._note("destroyed")
        if self._is_attached:
            _held = None
        self._program, self._is_attached, self._is_destroyed = None, False, True
        for parameter, kind in zip(self._model.parameters(), self._kinds, strict=True):
            parameter.__class__ = kind

    def compile(self, *inputs: Tensor) -> None:
        if self._is_destroyed:
            raise Error("Model has not been compiled or has been destroyed.")
        self._note("compiled")
        for tensor in inputs:
            size = tensor.shape[0] if tensor.dim() else 1
            if size % self._options.parts:
                raise AssertionError("Invalid batch dimension")
        self._shapes = [tensor.shape for tensor in inputs]
        before = {name: tensor.clone() for name, tensor in _tensors(self._model)}
        traced = _Traced(self._model)
        part = tuple(tensor[: len(tensor) // self._options.parts] for tensor in inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.jit.trace(traced, part, check_trace=False)  # type: ignore[no-untyped-call]
            # By way of a file, so that its weights are its own.
            torch.jit.save(graph, file := io.BytesIO())  # type: ignore[no-untyped-call]
            file.seek(0)
            program = torch.jit.load(file)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, tensor in _tensors(self._model):
                tensor.copy_(before[name])
        if self._training and len(traced.losses) != 1:
            raise Error(f"expected one loss, by identity_loss; found {len(traced.losses)}")
        self._losses = traced.losses
        self._take_device()
        self._program = program
        self._weights = {
            name.removeprefix("model."): tensor for name, tensor in _tensors(self._program)
        }
        self._upload()
        if self._training:
            self._optimizer = self._make_optimizer()

    def _make_optimizer(self) -> Any:
        names = {id(p): name for name, p in self._model.named_parameters()}
        groups = [
            {**group, "params": [self._weights[names[id(p)]] for p in group["params"]]}
            for group in self._host_optimizer.param_groups
        ]
        return type(self._host_optimizer)(groups)

    def __call__(self, *inputs: Tensor) -> Any:
        if not all(isinstance(value, Tensor) for value in inputs):
            raise TypeError("All forward function arguments must be Tensors")
        if self._program is None:
            self.compile(*inputs)
        if not self._is_attached:
            raise Error("the program is not attached, which this stub leaves to the caller")
        if [tensor.shape for tensor in inputs] != self._shapes:
            raise Error("the shapes of the inputs differ from those that it was compiled for")
        self._note("called")
        parts = list(zip(*(tensor.chunk(self._options.parts) for tensor in inputs), strict=True))
        returned: list[Any] = []
        per_step = len(parts) // self._options.device_iterations
        for start in range(0, len(parts), per_step):
            returned += self._iterate(parts[start : start + per_step])
        if len(returned) == 1:
            outputs = [tensor.detach() for tensor in returned[0]]
        else:
            outputs = [
                torch.cat([t.detach().reshape(1) if not t.dim() else t.detach() for t in column])
                for column in zip(*returned, strict=True)
            ]
        if self._options.output_mode is not OutputMode.All:
            raise NotImplementedError("this stub has OutputMode.All alone")
        return outputs[0] if len(outputs) == 1 else outputs

    def _iterate(self, parts: list[Any]) -> list[Any]:
        if not self._training:
            with torch.no_grad():
                return [self._program(*part) for part in parts]
        with torch.enable_grad():
            self._optimizer.zero_grad()
            outputs = [self._program(*part) for part in parts]
            torch.stack([out[self._losses[0]] for out in outputs]).mean().backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return outputs


def _tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
