"""Which dim of a tensor is divided over the devices: of batches, parameters and activations."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError
from stratagem_xla.library import import_torch_xla

Blocks = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None
"""Classes of modules, or a function of a module; None: elements of ModuleLists and Sequentials."""

_AXIS = "devices"
_hooked: WeakSet[nn.Module] = WeakSet()
"""The blocks whose outputs are divided; a block may be prepared again, by another strategy too."""


def check_mesh(planned: int) -> None:
    """Raise for devices that one process cannot drive.

    Args:
        planned: the number of devices of the plan; a warning names another number of the runtime.

    Raises:
        ConfigurationError: the devices are spread over several hosts.
    """
    runtime = import_torch_xla().runtime
    hosts, found = runtime.process_count(), runtime.global_runtime_device_count()
    if hosts > 1:
        raise ConfigurationError(
            f"the {found} XLA devices are spread over {hosts} processes or hosts, and this "
            "backend drives those of one: use a slice with one host"
        )
    if found != planned:
        warnings.warn(
            f"{planned} XLA devices were planned, and the runtime has {found}: all of them train, "
            "with the same results",
            stacklevel=2,
        )


@cache
def _mesh() -> Any:
    """Return the mesh of one axis over all XLA devices, of which a process has one set."""
    import numpy as np

    count = import_torch_xla().runtime.global_runtime_device_count()
    return _spmd().Mesh(np.arange(count), (count,), (_AXIS,))


def divided(tensor: Tensor, *, longest: bool = False) -> Tensor:
    """Divide an XLA tensor over all devices, in place; return it.

    Args:
        tensor: a tensor on any device; a tensor outside of XLA is returned unchanged.
        longest: divide the longest dim, with padding if necessary; otherwise divide the first dim,
            if the number of devices divides it.
    """
    if tensor.device.type != "xla" or not tensor.dim() or not tensor.numel():
        return tensor
    mesh = _mesh()
    dim = list(tensor.shape).index(max(tensor.shape)) if longest else 0
    if not longest and tensor.shape[0] % mesh.size():
        return tensor
    spmd = _spmd()
    axes = tuple(_AXIS if index == dim else None for index in range(tensor.dim()))
    before = import_torch_xla()._XLAC._get_xla_sharding_spec(tensor)
    if before:
        spmd.clear_sharding(tensor)  # it was under another strategy before
    spmd.mark_sharding(tensor, mesh, axes)
    return tensor


def blocks_of(module: nn.Module, choice: Blocks) -> list[nn.Module]:
    """Return the blocks of a model.

    Raises:
        ConfigurationError: the choice has an unsupported form.
    """
    return list(_blocks_of(module, choice))


def _blocks_of(module: nn.Module, choice: Blocks) -> Iterator[nn.Module]:
    for part in module.modules():
        if choice is None:
            if isinstance(part, (nn.ModuleList, nn.Sequential)):
                yield from part
        elif isinstance(choice, (type, tuple)):
            if isinstance(part, choice):
                yield part
        elif callable(choice):
            if choice(part):
                yield part
        else:
            raise ConfigurationError(
                f"blocks={choice!r}: expected classes of modules, or a function of a module that "
                "returns a bool"
            )


def divide_output(block: nn.Module) -> None:
    """Let the outputs of a block be divided by samples, and its backward end before the next.

    The compiler then gathers the block's parameters and not its activations, and does not fuse the
    sums of gradients of several blocks, which would keep all of them.
    """
    if block in _hooked:
        return
    _hooked.add(block)

    def hook(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        map_tensors(divided, output)
        first = next((one for one in inputs if isinstance(one, Tensor) and one.requires_grad), None)
        if first is not None and first.device.type == "xla":
            first.register_hook(partial(_end_backward, block))  # type: ignore[no-untyped-call]

    block.register_forward_hook(hook)


def _end_backward(block: nn.Module, gradient: Tensor) -> Tensor:
    """Keep the compiler from moving operations over this point of backward."""
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    import_torch_xla().core.xla_model.optimization_barrier_([*gradients, gradient])
    return gradient


def _spmd() -> Any:
    import_torch_xla()
    return importlib.import_module("torch_xla.distributed.spmd")
