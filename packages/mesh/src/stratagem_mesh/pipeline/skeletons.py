"""Copies of the units of a model without values, for runs that need shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from stratagem.errors import ConfigurationError
from stratagem_mesh.pipeline.objects import flatten, is_object, leaves_of, tensors_in, unflatten

DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""Errors of operations whose result depends on values that a dry run does not have."""

_LARGEST = 65_536
"""Buffers of more elements are zeros where a unit runs on random values."""


class Skeletons:
    """Copies of the units of a model, with parameters that have shapes and no values.

    Made before layers are divided and sharded, the copies follow later changes of the dtype and
    the device of the model.

    Args:
        model: the user's model, whole.
        units: the names of the units.

    Raises:
        ConfigurationError: a unit cannot be copied.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[int, Tensor] = {}
        memo: dict[int, Any] = {}
        for tensor in _tensors(model):
            if id(tensor) not in memo:
                memo[id(tensor)] = fake = self._fake(tensor)
                is_small = not isinstance(tensor, nn.Parameter) and tensor.numel() <= _LARGEST
                if is_small and not tensor.is_meta and tensor.layout is torch.strided:
                    self._values[id(fake)] = tensor.detach().clone()
        self._units: dict[str, nn.Module] = {}
        for name in units:
            try:
                self._units[name] = copy.deepcopy(model.get_submodule(name), memo)
            except Exception as error:
                raise ConfigurationError(
                    f"the module {name!r} cannot be copied, which a run without values needs: "
                    f"{type(error).__name__}: {error}. Give it a __deepcopy__, or put it into a "
                    "module of which pipeline_cuts names the parts"
                ) from error
        self._policy = MixedPrecisionPolicy()

    def _fake(self, tensor: Tensor, dtype: torch.dtype | None = None, device: Any = None) -> Any:
        device = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        # Without a mode that counts memory: a simulation of a step is one.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(tuple(tensor.shape), dtype=dtype or tensor.dtype, device="meta")
            made = FakeTensor(self.mode, empty, torch.device(device))
            # Trained or frozen: the user may change it during training.
            learns = tensor.is_floating_point() or tensor.is_complex()
            return nn.Parameter(made, learns) if isinstance(tensor, nn.Parameter) else made

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield the name of each module in units, the key of a parameter in it, and a fake one."""
        for name, unit in self._units.items():
            for inner, part in unit.named_modules():
                for key, parameter in part._parameters.items():
                    if parameter is not None:
                        yield f"{name}.{inner}" if inner else name, key, parameter

    def buffers(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each module in units, and the key of a buffer in it."""
        for name, unit in self._units.items():
            for inner, part in unit.named_modules():
                for key, buffer in part._buffers.items():
                    if buffer is not None:
                        yield f"{name}.{inner}" if inner else name, key

    # -- conversions

    def follow(self, units: Mapping[str, nn.Module]) -> None:
        """Follow the dtype and the device that the parameters of this rank's units have now."""
        dtypes: dict[torch.dtype, torch.dtype] = {}
        device = None
        for name, unit in units.items():
            if isinstance(unit, FSDPModule):
                self._policy = unit._get_fsdp_state()._mp_policy
            for inner, part in self._units[name].named_modules():
                try:
                    real = unit.get_submodule(inner)
                except AttributeError:  # replaced when layers were divided
                    continue
                for key, fake in part._parameters.items():
                    parameter = real._parameters.get(key)
                    if fake is not None and parameter is not None and not parameter.is_meta:
                        dtypes[fake.dtype] = parameter.dtype
                        device = parameter.device
        if self._policy.param_dtype is not None:
            dtypes |= {one: self._policy.param_dtype for one in dtypes if one.is_floating_point}
        if all(one == other for one, other in dtypes.items()):
            dtypes = {}
        first = next((fake for _, _, fake in self.parameters()), None)
        if dtypes or (device is not None and first is not None and first.device != device):
            self._convert(dtypes, device)

    def _convert(self, dtypes: Mapping[torch.dtype, torch.dtype], device: Any) -> None:
        made: dict[int, Any] = {}
        for unit in self._units.values():
            for part in unit.modules():
                for held in (part._parameters, part._buffers):
                    for key, tensor in held.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in made:
                            is_buffer = held is part._buffers
                            dtype = None if is_buffer else dtypes.get(tensor.dtype)
                            made[id(tensor)] = fake = self._fake(tensor, dtype, device)
                            if id(tensor) in self._values:
                                self._values[id(fake)] = self._values.pop(id(tensor))
                        held[key] = made[id(tensor)]

    # -- calls

    def call(self, name: str, unit: nn.Module, args: Any, kwargs: Any, *modes: Any) -> Any:
        """Return the results of a unit without values.

        Args:
            name: the name of the unit.
            unit: the module, of which the copy takes over `training`.
            args, kwargs: the arguments of the call.
            *modes: the modes that see the operations.
        """
        skeleton = self._units[name]
        for inner, copied in skeleton.named_modules():
            try:
                part = unit.get_submodule(inner)
            except AttributeError:  # replaced when layers were divided
                copied.training = unit.training
            else:
                copied.training = part.training
                _take_hooks(copied, part)
        _drop_hooks(skeleton._forward_hooks)  # the caller calls them with the real unit
        policy = self._policy
        if next(skeleton.parameters(), None) is None:
            policy = MixedPrecisionPolicy()
        if policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        before = _copied((args, kwargs), lambda tensor: tensor)
        attributes = {part: dict(vars(part)) for part in skeleton.modules()}
        try:
            with self.mode, _all_of(modes):
                output = skeleton(*args, **kwargs)
        except Exception:  # also an operation that refuses fake tensors alone
            output = self._with_values(skeleton, args, kwargs, before, modes)
        _give_attributes(skeleton, unit, attributes)
        return _cast(output, policy.output_dtype)

    def _with_values(
        self, skeleton: nn.Module, args: Any, kwargs: Any, before: Any, modes: Any
    ) -> Any:
        """Return the results of a run on random values; their shapes should not depend on them.

        Objects that the run changes, such as caches, are those from before.
        """
        real: dict[int, Any] = {}

        def value_of(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return tensor
            if id(tensor) not in real:
                value = self._values.get(id(tensor))
                if value is None and tensor.dtype.is_floating_point:
                    value = torch.rand(tuple(tensor.shape), device=tensor.device).to(tensor.dtype)
                elif value is None:
                    shape = tuple(tensor.shape)
                    value = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
                real[id(tensor)] = value.clone()
            filled: Tensor = real[id(tensor)]
            return filled

        held = [*skeleton.parameters(), *skeleton.buffers()]
        memo: dict[int, Any] = {
            id(tensor): nn.Parameter(value_of(tensor), requires_grad=False)
            if isinstance(tensor, nn.Parameter)
            else value_of(tensor)
            for tensor in held
        }
        filled = copy.deepcopy(skeleton, memo)
        given, named = _copied(before, value_of)
        for mode in modes:
            if hasattr(mode, "watch"):
                mode.watch(leaves_of((given, named)))
        with torch.no_grad(), _all_of(modes):
            made = filled(*given, **named)
        learns = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*held, *_leaves_of((args, kwargs)))
        )
        before, after = _leaves_of((args, kwargs)), _leaves_of((given, named))
        same = {id(value): fake for fake, value in zip(before, after, strict=True)}

        def fake_of(leaf: Any) -> Any:
            if id(leaf) in same and isinstance(leaf, Tensor):
                return same[id(leaf)]
            if not isinstance(leaf, Tensor):
                return leaf
            fake = self._fake(leaf.detach())
            return fake.requires_grad_(learns and fake.is_floating_point())

        leaves, spec = flatten(made)
        return unflatten(leaves, [fake_of(leaf) for leaf in leaves], spec)


@contextmanager
def _all_of(modes: Iterable[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def call_hooks(unit: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Call the forward hooks of user code, which may collect the outputs of layers.

    Args:
        unit: the module that has the hooks.
        args, kwargs: the arguments of its call.
        output: the result of the call.

    Returns:
        The output, or the result of a hook.
    """
    for key, hook in unit._forward_hooks.items():
        if not _is_users(hook):
            continue
        with_kwargs = key in unit._forward_hooks_with_kwargs
        given = (unit, args, kwargs, output) if with_kwargs else (unit, args, output)
        result = hook(*given)
        output = output if result is None else result
    return output


def show_to_hooks(unit: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Let hooks of user code see copies of the output of a unit of another stage.

    The stage that has the unit has called them, too, and the output is what they returned.
    """
    if any(_is_users(hook) for hook in unit._forward_hooks.values()):
        leaves, spec = flatten(output)
        seen = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call_hooks(unit, args, kwargs, unflatten(leaves, seen, spec))


def _is_users(hook: Any) -> bool:
    """Whether a hook is of user code; others gather parameters and divide layers."""
    return not str(getattr(hook, "__module__", "")).startswith(("torch.", "stratagem"))


def _give_attributes(
    skeleton: nn.Module, unit: nn.Module, before: Mapping[nn.Module, Mapping[str, Any]]
) -> None:
    """Give a unit the attributes with tensors that its copy has set in a run.

    So user code finds them, as it finds a loss that a layer leaves in an attribute. `unchanged`
    undoes it.
    """
    for inner, copied in skeleton.named_modules():
        known = before.get(copied, {})
        for key, value in vars(copied).items():
            if key in _OF_MODULES or value is known.get(key, copied):
                continue
            if isinstance(value, Tensor) or (is_object(value) and tensors_in(value)):
                try:
                    unit.get_submodule(inner).__dict__[key] = value
                except AttributeError:  # replaced when layers were divided
                    continue


_OF_MODULES = frozenset(vars(nn.Module()))


def _drop_hooks(hooks: dict[int, Any]) -> None:
    for key in [key for key, hook in hooks.items() if _is_users(hook)]:
        del hooks[key]


def _take_hooks(copied: nn.Module, part: nn.Module) -> None:
    """Give a copy the hooks of user code that its module has now."""
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks, now = getattr(copied, kind), getattr(part, kind)
        _drop_hooks(hooks)
        hooks.update({key: hook for key, hook in now.items() if _is_users(hook)})
        with_kwargs = f"{kind}_with_kwargs"
        getattr(copied, with_kwargs).update(getattr(part, with_kwargs))


def _copied(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of arguments with other tensors; objects that cannot be copied stay."""
    tensors = tensors_in(data)
    memo = {id(tensor): change(tensor) for tensor in tensors}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:
            return leaf

    return tree_map(copied, data)


def _leaves_of(data: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(data) if isinstance(leaf, Tensor)]


def _cast(data: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return data

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, data)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers, and tensors that are plain attributes."""
    yield from model.parameters()
    yield from model.buffers()
    for part in model.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def _part(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # replaced when layers were divided
        return None


@contextmanager
def only_shapes(model: nn.Module, skeletons: Skeletons) -> Iterator[dict[int, str]]:
    """Give modules of units parameters without memory; yield the names of these by their ids.

    So user code finds the same parameters on each rank. The names of buffers are among them.
    """
    names: dict[int, str] = {}
    made: dict[int, nn.Parameter] = {}
    changed: list[tuple[nn.Module, str, Any, Any]] = []
    absent = object()
    try:
        for module, key, fake in skeletons.parameters():
            try:
                part = model.get_submodule(module)
            except AttributeError:
                continue
            kept = part._parameters.get(key, absent)
            plain = part.__dict__.pop(key, absent)
            changed.append((part, key, kept, plain))
            if id(fake) not in made:
                zero = torch.zeros((), dtype=fake.dtype, device=fake.device)
                made[id(fake)] = nn.Parameter(zero.expand(fake.shape), fake.requires_grad)
            part._parameters[key] = made[id(fake)]
            names.setdefault(id(made[id(fake)]), f"{module}.{key}")
        several = set()
        for module, key in skeletons.buffers():
            buffer = getattr(_part(model, module), key, None)
            if id(buffer) in names:
                several.add(id(buffer))
            elif isinstance(buffer, Tensor):
                names[id(buffer)] = f"{module}.{key}"
        for one in several:  # of several modules
            names.pop(one)
        yield names
    finally:
        for part, key, kept, plain in reversed(changed):
            if kept is absent:
                part._parameters.pop(key, None)
            else:
                part._parameters[key] = kept
            if plain is not absent:
                part.__dict__[key] = plain
