"""PlanningMode: fake tensors for plans, whose operations take little time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READS = {_ATEN._local_scalar_dense.default, _ATEN.item.default}
_EQUAL = _ATEN.equal.default
_LIFT = _ATEN.lift_fresh.default
_LSTM = getattr(_ATEN, "mkldnn_rnn_layer", None)
_WORKSPACE = {4: (24, 38), 2: (20, 23)}
"""Bytes of a weight: bytes that oneDNN's LSTM keeps of a sample of a step for each number of the
wider of input and state, and for each number of the state.

They were fitted to its workspaces for 60 shapes, of which none differs by more than 13%.
"""
_KEEP_VALUES = {
    _ATEN.unbind.int,
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.view.default,
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN._to_copy.default,
}
_KEPT = "_stratagem_numbers"
"""The attribute of a fake tensor for the whole numbers that are known to be in it."""
_BY_VALUES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
"""Tags of operations whose results differ between arguments of the same shapes."""
_CONSTANTS = {int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device}
_CONSTANTS |= {torch.memory_format, torch.layout}
_recipes: dict[Any, Any] = {}
"""How to make the result of an operation of some arguments; None: only by running it."""
_OF_RANKS = {
    _ATEN.as_strided.default,
    _ATEN.view.default,
    _ATEN.select.int,
    _ATEN.eq.Scalar,
    _ATEN.nonzero.default,
}
"""Operations by which a mesh of devices, whose ranks are real numbers, finds its own."""
_MOST_RANKS = 100_000
_UNTRIED = "untried"
_NOTHING = "nothing"
"""The recipe of None."""


class PlanningMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` in which code reads values, and which remembers results by shapes.

    Integers that code has put into a tensor keep the values of rank 0: engines compare them between
    ranks. In other tensors each number is 1, by which optimizers may divide (their count of steps),
    and no flag is set: gradients have not overflowed.

    The base class caches results too, in Python code for symbolic sizes and for tensors that do not
    occur here, and takes several times as long.

    Attributes:
        reads: lines of the user's code that have read a number of a tensor.
        note: called with each top-level operation, its arguments and its result; None: no call.
    """

    note: Callable[[Any, Any, Any, Any], None] | None = None

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.reads: dict[str, None] = {}
        self._guard = torch._C._set_throw_on_mutable_data_ptr
        if self._allow_unsafe_data_ptr_access:
            self._guard = torch._C._set_warn_deprecated_on_mutable_data_ptr
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """The attributes of a new fake tensor, by its device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and each operation would enter Dynamo's guard

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the result of an operation."""
        if func is _DEVICE:  # most operations ask for it
            return args[0].device
        kwargs = kwargs or {}
        if (note := self.note) is None:
            return self._run(func, types, args, kwargs)
        self.note = None
        try:
            result = self._run(func, types, args, kwargs)
            if result is NotImplemented:  # the class of its arguments runs it
                with self:
                    result = func(*args, **kwargs)
        finally:
            self.note = note
        note(func, args, kwargs, result)
        return result

    def _run(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        if func in _READS:
            return self._read(args[0])
        if func is _EQUAL:
            self._note_reading()
            return args[0].shape == args[1].shape
        if func in _OF_RANKS and _is_of_ranks(args[0]):
            with _disable_current_modes():
                return func(*args, **kwargs)
        result = _way_to_run(func)(self, func, types, args, kwargs)
        if func is _LIFT:
            if args[0].dtype in (torch.int32, torch.int64):
                setattr(result, _KEPT, args[0])
        elif func in _KEEP_VALUES and type(args[0]) is FakeTensor and _KEPT in vars(args[0]):
            with _disable_current_modes():
                values = func(getattr(args[0], _KEPT), *args[1:], **kwargs)
            for part, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
                setattr(part, _KEPT, value)
        return result

    def _read(self, tensor: Tensor) -> Any:
        """Return the number in a tensor."""
        if (kept := getattr(tensor, _KEPT, None)) is not None:
            with _disable_current_modes():
                return kept.item()
        if tensor.dtype in (torch.bool, torch.uint8):
            return 0
        self._note_reading()
        return 1

    def _note_reading(self) -> None:
        if place := _reading_line():
            self.reads[place] = None

    # -- ways to run an operation, of the same arguments as `__torch_dispatch__`

    def _by_base(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _without_tensors(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _collective(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with in_kernel_invocation_manager(self):
            return func(*args, **kwargs)  # which returns its arguments

    def _lift(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        given = args[0]
        if type(given) is not Tensor or given.dim() or not given.is_floating_point():
            return self._by_base(func, types, args, kwargs)
        # A number, such as an optimizer's count of steps, of which the base keeps a copy.
        return self._made(((), (), given.dtype, given.device), ())

    def _lstm(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return outputs with the workspace for backward, which torch leaves empty."""
        *outputs, workspace = self._by_base(func, types, args, kwargs)
        (steps, samples, width), state, trains = args[0].shape, args[10], args[15]
        wider, own = _WORKSPACE.get(args[1].element_size(), (0, 0))
        size = (steps + 1) * samples * (wider * max(width, state) + own * state)
        return (*outputs, workspace.new_empty(size if trains else 0))

    def _view(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if DTensor in types:
            return NotImplemented
        if not _is_plain(args[0]):
            return self._by_base(func, types, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(result, Tensor):
            return self._fake(result, device)
        return [self._fake(part, device) for part in result]

    def _by_shapes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if DTensor in types:
            return NotImplemented
        tensors: list[FakeTensor] = []
        try:
            key = func, torch.get_default_dtype(), _key(args, tensors), _key(kwargs, tensors)
        except _Unknown:
            return self._by_base(func, types, args, kwargs)
        recipe = _recipes.get(key, _UNTRIED)
        if recipe is not None and recipe is not _UNTRIED:
            return self._made(recipe, tensors)
        result = self._by_base(func, types, args, kwargs)
        if recipe is _UNTRIED:
            _recipes[key] = None if _BY_VALUES & {*func.tags} else _recipe(result, tensors)
        return result

    def _made(self, recipe: Any, tensors: Sequence[FakeTensor]) -> Any:
        if type(recipe) is int:
            return tensors[recipe]
        if type(recipe) is list:
            return [self._made(part, tensors) for part in recipe]
        if recipe is _NOTHING:
            return None
        shape, stride, dtype, device = recipe
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return self._fake(empty, device)

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return what `FakeTensor(mode, meta, device)` returns, whose constructor is slow."""
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(made)
        vars(made).update(attributes)
        return made


@cache
def _way_to_run(func: Any) -> Callable[..., Any]:
    """Return the method of `PlanningMode` that runs an operation."""
    if func.namespace == "profiler":
        return PlanningMode._without_tensors
    if func.namespace == "c10d":
        return PlanningMode._collective
    if func is _LIFT:
        return PlanningMode._lift
    if func.overloadpacket is _LSTM:
        return PlanningMode._lstm
    if func.namespace == "fsdp":
        return PlanningMode._by_shapes
    if func.namespace != "aten":
        return PlanningMode._by_base
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    may_copy = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
    if func is _ATEN._unsafe_view.default or (func.is_view and not may_copy):
        return PlanningMode._view
    return PlanningMode._by_shapes


def _is_of_ranks(value: Any) -> bool:
    whole = (torch.bool, torch.int32, torch.int64)
    return type(value) is Tensor and value.dtype in whole and value.numel() <= _MOST_RANKS


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense fake tensor of unknown numbers."""
    return (
        type(value) is FakeTensor
        and value.constant is None
        and value.layout == torch.strided
        and not value.dtype.is_complex
    )


class _Unknown(Exception):
    """An argument is not described by a key."""


def _key(value: Any, tensors: list[FakeTensor]) -> Any:
    """Return the description of an argument; add its tensors.

    Raises:
        _Unknown: the object has another type, or its value matters.
    """
    kind = type(value)
    if kind is FakeTensor:
        if not _is_plain(value):
            raise _Unknown
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.fake_device
    if kind in (tuple, list):
        return tuple([_key(part, tensors) for part in value])
    if kind is dict:
        return tuple([(name, _key(part, tensors)) for name, part in value.items()])
    if kind in _CONSTANTS:
        return kind, value
    raise _Unknown


def _recipe(result: Any, tensors: Sequence[FakeTensor]) -> Any:
    """Return how to make the result again of tensors of the same shapes; None: not by them alone.

    Returns:
        The place of an argument; or shape, strides, dtype and device; or a list of such.
    """
    if result is None:
        return _NOTHING
    if isinstance(result, (list, tuple)):
        parts = [_recipe(part, tensors) for part in result]
        return None if None in parts else parts
    if type(result) is not FakeTensor or result.constant is not None:
        return None
    places = [place for place, tensor in enumerate(tensors) if tensor is result]
    if places:
        return places[0] if len(places) == 1 else None
    storage = result.untyped_storage()
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    shape, stride = tuple(result.shape), result.stride()
    ends = [size and (size - 1) * step for size, step in zip(shape, stride, strict=True)]
    size = (sum(ends) + 1) * result.element_size() if 0 not in shape else 0
    if storage._cdata in given or result.storage_offset() or storage.nbytes() != size:
        return None
    return shape, stride, result.dtype, result.fake_device


def _reading_line() -> str:
    """Return the line of the model that reads a value; "": an optimizer or an engine does."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("torch.optim", "stratagem", "deepspeed")) and name != __name__:
            break
        if name.partition(".")[0] != "torch" and name != __name__:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
