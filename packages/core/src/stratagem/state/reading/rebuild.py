"""Tensors of a checkpoint, made of its storages: each within its own, and none of them copied.

What is here has the names under which `torch.save` asks for it, and does what torch's functions
of these names do, after it has compared the numbers with the storage. What is rare (sparse, nested
and quantized tensors, tensors of other classes) is left to torch's own functions after that.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint.entries import Refused
from stratagem.errors import format_value
from stratagem.state.reading.unpickler import SafeUnpickler, check_dims

ReadStorage = Callable[[str, int, torch.dtype], torch.UntypedStorage]
"""Returns the storage of a key and a size in bytes, of elements of a dtype."""

_LARGEST = 1 << 62


class Stored:
    """A storage and its dtype, with the `TypedStorage` attributes that torch's functions read."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self._untyped_storage = storage
        self.dtype = dtype
        self.device = storage.device


class ArchiveUnpickler(SafeUnpickler):
    """Reads the `data.pkl` of an archive; its tensors are views of the archive's storages.

    Args:
        data: the pickle.
        read_storage: returns a storage; raises if the archive has no storage of that size.
    """

    def __init__(self, data: bytes, read_storage: ReadStorage) -> None:
        users = _users_classes()
        super().__init__(data, _MAKERS, users, _VALUES)
        self.types = {*map(id, users.values()), id(Tensor), id(torch.nn.Parameter)}
        self._read_storage = read_storage
        self._storages: dict[str, torch.UntypedStorage] = {}

    def call(self, maker: Any, args: Any) -> Any:
        """Call an allowed function, and pass this reader to functions that need it."""
        if maker is _set or maker is _of_type:
            args = (self, *args)
        return super().call(maker, args)

    def persistent_load(self, pid: Any) -> Stored:
        """Return a storage."""
        what, dtype, key, _, count = pid
        if what not in ("storage", b"storage") or not isinstance(dtype, torch.dtype):
            raise Refused(f"its pickle asks for {format_value(what)}, expected storages")
        if type(key) is not str or type(count) is not int or count < 0:
            raise Refused("its pickle names a storage by something else than a text and a size")
        size = count * dtype.itemsize
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = self._read_storage(key, size, dtype)
        if storage.nbytes() != size:
            raise Refused(f"its pickle gives the storage {format_value(key)} two sizes")
        return Stored(storage, dtype)


def _torchs(module: Any, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None:
        raise Refused(f"it needs {name}, which this version of torch has no more")
    return found


def _users_classes() -> dict[str, Any]:
    """Return what was registered by `torch.serialization.add_safe_globals`, by name."""
    found = {}
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):
            found[entry[1]] = entry[0]
        else:
            found[f"{entry.__module__}.{entry.__qualname__}"] = entry
    return found


# -- tensors


def _check_range(
    stored: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype
) -> tuple[int, ...]:
    """Refuse a tensor whose elements are not all in its storage."""
    check_dims(size)
    check_dims(stride)
    numbers = (offset, *size, *stride)
    if type(stored) is not Stored or any(type(n) is not int or n < 0 for n in numbers):
        listed = ", ".join(map(format_value, numbers))
        raise Refused(f"a tensor has the offset, size and stride {listed}")
    if len(size) != len(stride):
        raise Refused(f"a tensor has the size {tuple(size)} and the stride {tuple(stride)}")
    count, held = math.prod(size), stored._untyped_storage.nbytes()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if max(count, math.prod(n or 1 for n in size), *numbers) >= _LARGEST or (
        count and (last + 1) * dtype.itemsize > held
    ):
        raise Refused(
            f"a tensor of the size {tuple(size)} and the stride {tuple(stride)} from {offset} on "
            f"leads out of its storage of {held} bytes"
        )
    return tuple(size)


def _strided(
    stored: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype, metadata: Any
) -> Tensor:
    _check_range(stored, offset, size, stride, dtype)
    tensor = torch.empty((0,), dtype=dtype, device="cpu")
    tensor.set_(stored._untyped_storage, offset, tuple(size), tuple(stride))
    if metadata:  # the tensor is conjugate or negative
        _torchs(torch._utils, "set_tensor_metadata")(tensor, metadata)
    return tensor


def _tensor(stored: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _strided(stored, offset, size, stride, stored.dtype, None)


# Hooks cannot be saved; their placeholder is ignored.
def _tensor_v2(
    stored: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    return _tensor_v3(stored, offset, size, stride, grad, hooks, stored.dtype, metadata)


def _tensor_v3(stored: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    grad, _hooks, dtype, metadata = rest if len(rest) > 3 else (*rest, None)
    return _strided(stored, offset, size, stride, dtype, metadata).requires_grad_(bool(grad))


def _parameter(data: Any, grad: Any, hooks: Any) -> Tensor:
    return torch.nn.Parameter(_plain(data), bool(grad))


def _parameter_with_state(data: Any, grad: Any, hooks: Any, state: Any) -> Any:
    return _torchs(torch._utils, "_set_obj_state")(_parameter(data, grad, hooks), state)


def _plain(data: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise Refused(f"a tensor is made of a {type(data).__name__}")
    return data


def _sparse(layout: Any, data: Any) -> Tensor:
    *tensors, size = data[:3] if layout is torch.sparse_coo else data
    for tensor in tensors:
        _plain(tensor)
    # torch's function makes sparse tensors with indices out of bounds.
    if layout is torch.sparse_coo:
        indices, values = tensors
        order: Any = {"is_coalesced": data[3] if len(data) > 3 else None}
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, **order)
    rows, columns, values = tensors
    return torch.sparse_compressed_tensor(
        rows, columns, values, size, layout=layout, check_invariants=True
    )


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Any:
    length = _plain(buffer).numel()
    check_dims(_plain(sizes)[:1].flatten()[: 1 << 10].tolist())
    starts = _plain(offsets).tolist()
    for size, stride, start in zip(sizes.tolist(), strides.tolist(), starts, strict=True):
        last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if min(start, *size, *stride) < 0 or (math.prod(size) and last >= length):
            raise Refused("a nested tensor leads out of its buffer")
    return _torchs(torch._utils, "_rebuild_nested_tensor")(buffer, sizes, strides, offsets)


def _quantized(stored: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    size = _check_range(stored, offset, size, stride, stored.dtype)
    if math.prod(size) * stored.dtype.itemsize > stored._untyped_storage.nbytes():
        raise Refused(f"a quantized tensor of the size {size} is larger than its storage")
    typed = _torchs(torch.storage, "TypedStorage")(
        wrap_storage=stored._untyped_storage, dtype=stored.dtype, _internal=True
    )
    return _torchs(torch._utils, "_rebuild_qtensor")(typed, offset, size, stride, *rest)


def _of_device(data: Any, dtype: Any, device: Any, grad: Any) -> Tensor:
    tensor = _plain(data)
    if tensor.dtype is not dtype:
        raise Refused(f"a tensor of {tensor.dtype} is to become one of {dtype}")
    return tensor.detach().requires_grad_(bool(grad))


def _of_numpy(data: Any, dtype: Any, device: Any, grad: Any) -> Tensor:
    return _of_device(torch.from_numpy(data), dtype, device, grad)


def _meta(dtype: Any, size: Any, stride: Any, grad: Any) -> Tensor:
    check_dims(size)
    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=bool(grad))


def _wrapper(
    kind: Any, dtype: Any, size: Any, stride: Any, offset: Any, layout: Any, device: Any, grad: Any
) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        kind,
        size,
        strides=stride,
        dtype=dtype,
        storage_offset=offset,
        layout=layout,
        device=torch.device("cpu"),
        requires_grad=bool(grad),
    )


def _of_type(reader: ArchiveUnpickler, maker: Any, kind: Any, args: Any, state: Any) -> Any:
    if id(kind) not in reader.types:
        raise Refused(f"a tensor is to be a {type(kind).__name__}")

    def make(*args: Any) -> Any:
        return reader.call(maker, args)

    return _torchs(torch._tensor, "_rebuild_from_type_v2")(make, kind, args, state)


# -- plain values


def _set(reader: ArchiveUnpickler, members: Any = ()) -> set[Any]:
    if type(members) not in (list, tuple):
        raise Refused(f"a set is made of a {type(members).__name__}")
    return set(map(reader.hashed, members))


def _encode(text: Any, encoding: Any = None) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise Refused(f"bytes are made of a {type(text).__name__} by {format_value(encoding)}")
    return text.encode("latin-1")


def _bytearray(*args: Any) -> bytearray:
    if args and type(args[0]) is not bytes:
        return bytearray(_encode(*args))
    return bytearray(*args)


def _of(kind: type, *taken: type) -> Callable[..., Any]:
    """Return what makes a value of a kind of nothing, or of one of those that are taken."""

    def make(*args: Any) -> Any:
        if [type(arg) for arg in args] not in ([], *([t] for t in taken)):
            raise Refused(f"a {kind.__name__} is made of {[type(arg).__name__ for arg in args]}")
        return kind(*args)

    return make


def _layout(name: Any) -> Any:
    return torch.serialization._get_layout(name)  # type: ignore[no-untyped-call]


_LEGACY = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}

# A storage's class stands for the dtype of its elements.
_VALUES: Mapping[str, Any] = {
    **{
        f"{module}.{name}Storage": dtype
        for module in ("torch", "torch.cuda")
        for name, dtype in _LEGACY.items()
    },
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.Tensor": Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    **{
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if isinstance(value, (torch.dtype, torch.qscheme))
    },
}

_MAKERS: Mapping[str, Callable[..., Any]] = {
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _of(bytes),  # as protocol 2 writes the empty ones
    "builtins.complex": complex,
    "builtins.set": _set,
    "_codecs.encode": _encode,
    "collections.Counter": _of(Counter, dict),
    "collections.OrderedDict": _of(OrderedDict, dict),
    "torch.Size": _of(torch.Size, list, tuple),
    "torch.device": torch.device,
    "torch.serialization._get_layout": _layout,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_device,
    "torch._utils._rebuild_device_tensor_from_numpy": _of_numpy,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
}
