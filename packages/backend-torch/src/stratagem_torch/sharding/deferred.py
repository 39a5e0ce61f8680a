"""Building a model that is larger than one rank's memory, with the same values as in one process.

The meta device, which other libraries build on, runs no initialisation: what a constructor
computes is lost, and must be computed again by `reset_parameters`, which many modules lack. Here
constructors run as they are. Once more than a few parameters are whole, the oldest is sharded
eagerly: each rank keeps a piece of it. When the constructor comes back to it
(`self.apply(init_weights)`), the pieces are gathered again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from stratagem.accelerators import Accelerator

WHOLE_BYTES = 64 * 2**20
"""Bytes of parameters that are whole at a time, or one parameter if that is larger."""

_SMALL = 4096
"""Elements up to which a parameter stays whole."""

_PIECE = "_stratagem_piece"

# Attributes of a parameter that was sharded eagerly.
_METADATA = {
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.requires_grad_,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim")
    ),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}


class DeferredBuild(TorchFunctionMode):
    """A context that shards the parameters which a model's constructor creates.

    Parameters that an earlier context sharded eagerly are restored here as well when they take part
    in an operation. Every rank runs the same constructors, under the RNG states of rank 0.

    Args:
        accelerator: the accelerator of the ranks.
        device: the device of this rank; its RNG state is shared, like the RNG state of the host.
        whole_bytes: see `WHOLE_BYTES`.

    Example:
        >>> from torch.overrides import TorchFunctionMode
        >>> from stratagem_torch.sharding import DeferredBuild
        >>> issubclass(DeferredBuild, TorchFunctionMode)
        True
    """

    def __init__(
        self, accelerator: Accelerator, device: torch.device, *, whole_bytes: int = WHOLE_BYTES
    ) -> None:
        super().__init__()
        self._accelerator, self._device = accelerator, device
        self._whole_bytes = whole_bytes
        self._whole: OrderedDict[int, ReferenceType[nn.Parameter]] = OrderedDict()

    def __enter__(self) -> DeferredBuild:
        self._restore_random_numbers = _share_rng(self._accelerator, self._device)
        self._hook = register_module_parameter_registration_hook(self._register)
        self._deepcopy = nn.Parameter.__deepcopy__
        build = self

        def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            copied: nn.Parameter = build._deepcopy(parameter, memo)  # type: ignore[no-untyped-call]
            build._keep(copied)
            return copied

        nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        nn.Parameter.__deepcopy__ = self._deepcopy  # type: ignore[method-assign]
        self._hook.remove()
        self._restore_random_numbers()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, after bringing back what it works on."""
        kwargs = kwargs or {}
        if func not in _METADATA:
            wanted = [p for p in _parameters_in((*args, *kwargs.values())) if is_put_away(p)]
            for parameter in wanted:
                restore(parameter, parameter.device)
                self._whole[id(parameter)] = ref(parameter)
            if wanted:
                self._make_room({id(p) for p in wanted})
        return func(*args, **kwargs)

    def _register(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is None:
            return
        replaced = module._parameters.get(name)
        if isinstance(parameter, DTensor) and replaced is not None and not replaced.requires_grad:
            # torch 2.9's parallelize_module makes sharded parameters trainable.
            parameter.requires_grad_(False)
        self._keep(parameter)

    def _keep(self, parameter: nn.Parameter) -> None:
        """Count a new parameter among those that are whole; put others away if there are many."""
        with torch._C.DisableTorchFunction():
            if (
                type(parameter) is nn.Parameter  # no other class, such as a DTensor
                and parameter.is_floating_point()
                and not parameter.is_meta
                and parameter.numel() > _SMALL
                and not is_put_away(parameter)
            ):
                self._whole[id(parameter)] = ref(parameter)
                self._make_room({id(parameter)})

    def _make_room(self, in_use: set[int]) -> None:
        with torch._C.DisableTorchFunction():
            alive = [(key, found()) for key, found in self._whole.items()]
            held = sum(p.nbytes for _, p in alive if p is not None)
            for key, parameter in alive:
                if parameter is None:
                    del self._whole[key]
                elif held > self._whole_bytes and key not in in_use:
                    held -= parameter.nbytes
                    del self._whole[key]
                    put_away(parameter)


def put_away(parameter: nn.Parameter) -> None:
    """Keep only this rank's piece of a parameter, and set the parameter's data to NaN."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flat = parameter.detach().reshape(-1)
    size = -(-flat.numel() // world_size)
    piece = flat.new_zeros(size)
    mine = flat[rank * size : (rank + 1) * size]
    piece[: mine.numel()] = mine
    setattr(parameter, _PIECE, piece)
    parameter.data = flat.new_full((1,), torch.nan).expand(parameter.shape)


def is_put_away(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter of which this rank holds a piece."""
    return hasattr(tensor, _PIECE)


def restore(parameter: nn.Parameter, device: torch.device) -> bool:
    """Gather a parameter that was sharded eagerly, on every rank; return whether it was."""
    piece: Tensor | None = getattr(parameter, _PIECE, None)
    if piece is None:
        return False
    with torch._C.DisableTorchFunction():
        piece = piece.to(device)
        world_size = dist.get_world_size()
        whole = piece.new_empty(piece.numel() * world_size)
        dist.all_gather(list(whole.chunk(world_size)), piece)
        dtype = parameter.dtype
        parameter.data = whole[: parameter.numel()].view(parameter.shape).to(dtype)
        delattr(parameter, _PIECE)
    return True


def _parameters_in(arguments: tuple[Any, ...]) -> Iterator[nn.Parameter]:
    for argument in arguments:
        if isinstance(argument, nn.Parameter):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _parameters_in(tuple(argument))
        elif isinstance(argument, dict):
            yield from _parameters_in(tuple(argument.values()))


def _share_rng(accelerator: Accelerator, device: torch.device) -> Callable[[], None]:
    """Let this rank draw from rank 0's RNG state; return what restores its own RNG states.

    The RNGs of ranks that share a seed go on after the build, as after one in one process.
    """
    rngs: list[Any] = [(torch.get_rng_state, torch.set_rng_state)]
    if accelerator.rng_state(device) is not None:
        of_device = accelerator.rng_state, accelerator.set_rng_state
        rngs.append([partial(function, device) for function in of_device])
    restores = []
    for get_state, set_state in rngs:
        own = get_state()
        shared = own.to(device, copy=True)
        dist.broadcast(shared, 0)
        shared = shared.to(own.device)
        if not torch.equal(own, shared):
            set_state(shared)
            restores.append(partial(set_state, own))

    def restore_own() -> None:
        for restore in restores:
            restore()

    return restore_own
