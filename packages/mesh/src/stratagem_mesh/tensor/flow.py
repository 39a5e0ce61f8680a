"""A run of a model that follows divided features from layer to layer, without computing."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stratagem_mesh.tensor.marks import (
    ONE_INPUT,
    VIEWS,
    Mark,
    WholeNeededError,
    attention,
    is_pointwise,
    pointwise,
    product,
    viewed,
)
from stratagem_mesh.tensor.multihead import is_attention
from stratagem_mesh.tensor.styles import features, is_linear

_BY_SHAPE = (
    *VIEWS,
    *("expand", "repeat", "slice", "split", "split_with_sizes", "as_strided", "constant_pad_nd"),
)
_ALIASES = "detach", "alias", "clone"
"""Operations that depend on references and strides, which are not compared."""

_NAMES = dict.fromkeys(VIEWS, "view")
_LEAVES = type(None), str, bytes, int, float, complex, nn.Module, type, FunctionType, ModuleType
_VALUES = "_local_scalar_dense", "is_nonzero", "equal"


@dataclass
class Operation:
    """An operation of a run.

    Attributes:
        name: the name of the operation.
        constants: the numbers among its arguments; empty for an operation on shapes.
        shapes: the shapes of its outputs.
        mark: the mark of its outputs; None for whole outputs.
        layers: the divided layers of its inputs; of an operation on whole inputs, the last layer.
    """

    name: str
    constants: tuple[Any, ...]
    shapes: list[tuple[int, ...]]
    mark: Mark | None
    layers: frozenset[str]


@dataclass
class Roles:
    """The roles of layers in a run.

    Attributes:
        sources: layers with divided outputs, in order.
        sinks: layers with divided inputs, and the sources of these.
        partial: modules with parameters for each head, and the sources of the heads.
        whole: layers that must stay whole, and why.
        operations: all operations.
        sizes: the sizes of dimensions that are divided, by source.
        answer: the answer to questions about values.
    """

    sources: list[str] = field(default_factory=list)
    sinks: dict[str, frozenset[str]] = field(default_factory=dict)
    partial: dict[str, frozenset[str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    sizes: dict[str, set[int]] = field(default_factory=dict)
    answer: bool = False


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a model, and the calls of its linear layers.

    Args:
        model: the model that runs.
        ranks: the number of ranks that share a layer.
        answer: the answer to questions about values, such as conditions: False (0) or True (1).

    Attributes:
        has_answered: whether the model has read a value.
    """

    def __init__(self, model: nn.Module, ranks: int, *, answer: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_answered = False
        self._ranks, self._answer = ranks, answer
        self._paused = False
        # Divided or whole as one: the operations in it are not seen.
        self._attention = {n: part for n, part in model.named_modules() if is_attention(part)}
        self._layers = [
            (n, part)
            for n, part in model.named_modules()
            if is_linear(part) and n.rpartition(".")[0] not in self._attention
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which runs of the model are watched."""
        with ExitStack() as stack:
            for name, layer in self._layers:
                before = layer.register_forward_pre_hook(self._before(name), prepend=True)
                after = layer.register_forward_hook(self._after(name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            for name, part in self._attention.items():
                before = part.register_forward_pre_hook(self._attends(name), with_kwargs=True)
                after = part.register_forward_hook(self._attended)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(self)
            yield

    def _attends(self, name: str) -> Any:
        """Return the hook before an attention of this name."""

        def enter(part: nn.Module, args: Any, kwargs: Any) -> None:
            self._paused = True

        return enter

    def _attended(self, part: nn.Module, args: Any, output: Any) -> None:
        self._paused = False

    def _computed(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the outputs of an operation; the answer where a model reads a missing value."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if name not in _VALUES:
                raise
            self.has_answered = True
            return int(self._answer) if name == _VALUES[0] else self._answer

    @abstractmethod
    def _before(self, name: str) -> Any:
        """Return the hook before a layer of this name."""

    @abstractmethod
    def _after(self, name: str) -> Any:
        """Return the hook after a layer of this name."""


class Flow(Watch):  # type: ignore[no-untyped-call]
    """Follows the outputs of linear layers to the layers that read them.

    Args:
        model: the model that runs.
        ranks: the number of ranks that share a layer.
        packs: the number of layers that are packed in one, for layers that may be divided.
        answer: the answer to questions about values.
    """

    def __init__(
        self, model: nn.Module, ranks: int, packs: Mapping[str, int], *, answer: bool = False
    ) -> None:
        super().__init__(model, ranks, answer=answer)
        self.roles = Roles(answer=answer)
        self._model = model
        self._packs = packs
        self._marks: dict[int, Mark] = {}
        self._alive: list[Any] = []  # so that no two tensors have one id
        self._plain_uses: set[str] = set()
        parts = [*self._layers, *self._attention.items()]
        inside = {id(p): name for name, part in parts for p in part.parameters()}
        self._of_layer = inside
        self._owners: dict[int, frozenset[str]] = {
            id(p): frozenset([name])
            for name, part in model.named_modules()
            for p in part._parameters.values()
            if p is not None and id(p) not in inside
        }

    def end(self, output: Any) -> None:
        """Note that outputs of the model, and tensors in attributes, have to be whole."""
        attributes = [value for part in self._model.modules() for value in vars(part).values()]
        leaving = {
            "the model returns it": _tensors(output, in_objects=True),
            "the model keeps it in an attribute": _tensors(attributes, in_objects=False),
        }
        for reason, tensors in leaving.items():
            for mark in filter(None, map(self._find, tensors)):
                self._refuse(mark.layers, reason)
        for owner, names in self.roles.partial.items():
            if owner in self._plain_uses:
                self._refuse(names, f"{owner} is also used for whole features")

    # -- layers

    def _attends(self, name: str) -> Any:
        def enter(part: nn.Module, args: Any, kwargs: Any) -> None:
            self._paused = True
            for value in tree_leaves((args, kwargs)):
                mark = self._find(value) if isinstance(value, Tensor) else None
                if mark is not None:
                    self._refuse(mark.layers, f"{name} reads whole features")

        return enter

    def _before(self, name: str) -> Any:
        def enter(layer: nn.Module, args: tuple[Any, ...]) -> None:
            self._paused = True
            mark = self._find(args[0]) if args else None
            if mark is not None:
                self._sink(name, layer, args[0], mark)
            elif name in self.roles.sinks:
                self._refuse(self.roles.sinks[name], f"{name} also reads whole features")

        return enter

    def _sink(self, name: str, layer: nn.Module, values: Tensor, mark: Mark) -> None:
        fits = mark.dim == values.ndim - 1 and mark.outer == 1
        if not fits or name not in self._packs or features(layer)[0] != values.shape[-1]:
            self._refuse(mark.layers, f"{name} reads other features than the last, or stays whole")
            return
        if name in self.roles.sources:
            self._refuse(mark.layers, f"{name} also reads whole features")
        self.roles.sinks[name] = self.roles.sinks.get(name, frozenset()) | mark.layers

    def _after(self, name: str) -> Any:
        def leave(layer: nn.Module, args: Any, output: Tensor) -> None:
            self._paused = False
            packs = self._packs.get(name, 0)
            if not packs or name in self.roles.sinks:
                return
            count = output.shape[-1] // (packs * self._ranks)
            if name not in self.roles.sources:
                self.roles.sources.append(name)
            self._set(output, Mark(frozenset([name]), output.ndim - 1, packs, count))

        return leave

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        output = self._computed(func, name, args, kwargs)
        if self._paused or func.namespace == "prim":
            return output
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        self._alive.append((inputs, outputs))
        marked = [(t, mark) for t in inputs if (mark := self._find(t)) is not None]
        for tensor in inputs:
            if id(tensor) in self._of_layer:
                self.roles.whole[self._of_layer[id(tensor)]] = "its weight is read directly"
        mark = self._outcome(func, name, args, inputs, outputs, marked) if marked else None
        if not marked:
            self._derive(inputs, outputs)
        for tensor in outputs:
            if mark is not None and mark.dim < tensor.ndim:
                self._set(tensor, mark)
        self._log(name, args, outputs, mark, marked)
        return output

    def _outcome(
        self, func: Any, name: str, args: Any, inputs: Any, outputs: Any, marked: Any
    ) -> Mark | None:
        """Return the mark of the outputs, or note that the sources have to be whole."""
        names = frozenset().union(*(mark.layers for _, mark in marked))
        try:
            mark = self._rule(func, name, args, inputs, outputs, marked)
            self._check_others(inputs, marked, names)
        except WholeNeededError as error:
            self._refuse(names, str(error))
            return None
        changes = name.endswith("_") and not name.startswith("__")
        if changes and self._find(args[0]) is None:
            self._refuse(names, "a whole tensor is changed in place")
        return mark

    def _rule(
        self, func: Any, name: str, args: Any, inputs: Any, outputs: Any, marked: Any
    ) -> Mark:
        tensor, mark = marked[0]
        if name in VIEWS:
            return viewed(mark, tensor.shape, outputs[0].shape, self._ranks)
        if name in ("cat", "stack"):
            return self._joined(name, args, outputs[0], marked)
        if name.startswith("_scaled_dot_product") or name == "scaled_dot_product_attention":
            return attention(inputs, self._find)
        if name in ("mm", "bmm"):
            return product(name, args, self._find)
        if name == "baddbmm" and self._find(args[0]) is None and not args[0].requires_grad:
            return product(name, args, self._find)
        if name in ONE_INPUT and args and args[0] is tensor and len(marked) == 1:
            return ONE_INPUT[name](mark, tensor, args, outputs[0])  # type: ignore[return-value]
        if is_pointwise(func) and outputs:
            return pointwise(marked, inputs, outputs[0].shape)
        raise WholeNeededError(f"{name} reads it")

    def _joined(self, name: str, args: Any, output: Tensor, marked: Any) -> Mark:
        mark = marked[0][1]
        dim = (args[1] if len(args) > 1 else 0) % output.ndim
        alike = len(marked) == len(args[0]) and all(
            (m.dim, m.outer, m.inner) == (mark.dim, mark.outer, mark.inner) for _, m in marked
        )
        if not alike or (name == "cat" and dim == mark.dim):
            raise WholeNeededError(f"{name} joins divided features")
        names = frozenset().union(*(m.layers for _, m in marked))
        moved = mark.dim + (name == "stack" and dim <= mark.dim)
        return Mark(names, moved, mark.outer, mark.inner)

    def _check_others(self, inputs: Any, marked: Any, names: frozenset[str]) -> None:
        """Note parameters of which each rank has a part of the gradient; refuse other tensors.

        Raises:
            WholeNeededError: a whole tensor that depends on parameters meets divided features.
        """
        known = {id(tensor) for tensor, _ in marked}
        for tensor in inputs:
            if id(tensor) in known or not tensor.requires_grad:
                continue
            owners = self._owners.get(id(tensor))
            if owners is None:
                raise WholeNeededError("whole features that are trained meet it")
            for owner in owners:
                seen = self.roles.partial.get(owner, frozenset())
                self.roles.partial[owner] = seen | names

    def _derive(self, inputs: Any, outputs: Any) -> None:
        """Note outputs that depend on nothing but parameters, such as 1 + weight."""
        trained = [t for t in inputs if t.requires_grad]
        owners = [self._owners.get(id(t)) for t in trained]
        known = [names for names in owners if names is not None]
        if (
            trained
            and len(known) == len(owners)
            and all(t.requires_grad or t.ndim == 0 for t in inputs)
        ):
            for tensor in outputs:
                self._owners[id(tensor)] = frozenset().union(*known)
        else:
            self._plain_uses.update(*known)

    def _log(self, name: str, args: Any, outputs: Any, mark: Any, marked: Any) -> None:
        if name in _ALIASES:
            return
        names = frozenset().union(*(m.layers for _, m in marked))
        for source in names if mark is not None else ():
            sizes = {t.shape[mark.dim] for t in outputs if mark.dim < t.ndim}
            self.roles.sizes.setdefault(source, set()).update(sizes)
        last = frozenset(self.roles.sources[-1:])
        shapes = [tuple(t.shape) for t in outputs]
        constants = constants_of(name, args)
        name = _NAMES.get(name, name)
        self.roles.operations.append(Operation(name, constants, shapes, mark, names or last))

    def _find(self, tensor: Tensor) -> Mark | None:
        return self._marks.get(id(tensor))

    def _set(self, tensor: Tensor, mark: Mark) -> None:
        self._alive.append(tensor)
        self._marks[id(tensor)] = mark

    def _refuse(self, names: frozenset[str], reason: str) -> None:
        for name in names:
            self.roles.whole.setdefault(name, reason)


class Proof(Watch):  # type: ignore[no-untyped-call]
    """Runs a model with the shapes that one rank has, and compares each operation.

    Args:
        model: the model that runs.
        ranks: the number of ranks that share a layer.
        roles: the roles of layers in a run with whole shapes.
    """

    def __init__(self, model: nn.Module, ranks: int, roles: Roles) -> None:
        super().__init__(model, ranks, answer=roles.answer)
        self.count = 0
        self._roles = roles

    def _before(self, name: str) -> Any:
        def enter(layer: nn.Module, args: tuple[Any, ...]) -> Any:
            self._paused = True
            if name not in self._roles.sinks:
                return None
            values = args[0]
            if values.shape[-1] * self._ranks != features(layer)[0]:
                raise WholeNeededError(f"{name} reads {values.shape[-1]} features")
            return values.new_empty(*values.shape[:-1], features(layer)[0]), *args[1:]

        return enter

    def _after(self, name: str) -> Any:
        def leave(layer: nn.Module, args: Any, output: Tensor) -> Any:
            if name in self._roles.sources:
                output = output[..., : output.shape[-1] // self._ranks].clone()
            self._paused = False
            return output

        return leave

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        output = self._computed(func, name, args, kwargs or {})
        if self._paused or func.namespace == "prim" or name in _ALIASES:
            return output
        shapes = [tuple(t.shape) for t in tree_leaves(output) if isinstance(t, Tensor)]
        self._compare(_NAMES.get(name, name), constants_of(name, args), shapes)
        self.count += 1
        return output

    def _compare(self, name: str, constants: Any, shapes: list[tuple[int, ...]]) -> None:
        if self.count >= len(self._roles.operations):
            raise WholeNeededError("the model does more operations")
        whole = self._roles.operations[self.count]
        expected = [self._of_rank(shape, whole.mark) for shape in whole.shapes]
        if (name, constants, shapes) != (whole.name, whole.constants, expected):
            raise WholeNeededError(
                f"{name}{constants} has the shapes {shapes}, expected {whole.name}"
                f"{whole.constants} with {expected}"
            )

    def _of_rank(self, shape: tuple[int, ...], mark: Mark | None) -> tuple[int, ...]:
        if mark is None or mark.dim >= len(shape):
            return shape
        dim = mark.dim
        return *shape[:dim], shape[dim] // self._ranks, *shape[dim + 1 :]


def constants_of(name: str, args: Any) -> tuple[Any, ...]:
    """Return the numbers among the arguments, except sizes of a shape."""
    if name in _BY_SHAPE:
        return ()
    return tuple(value for value in tree_leaves(args) if isinstance(value, (int, float)))


def _tensors(value: Any, *, in_objects: bool, seen: set[int] | None = None) -> list[Tensor]:
    """Return the tensors in containers, and in objects such as dataclasses."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, _LEAVES) or id(value) in seen:
        return []
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside += value
    if in_objects:
        inside += getattr(value, "__dict__", {}).values()
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        inside += [getattr(value, name, None) for name in slots]
    return [t for one in inside for t in _tensors(one, in_objects=in_objects, seen=seen)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _Saved:
    """The attributes of a model's modules, and the values of its buffers.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(part, dict(vars(part))) for part in model.modules()]
        self._containers: list[tuple[Any, Any]] = []
        self._values: dict[int, tuple[Tensor, int, Tensor]] = {}
        for part, attributes in self._attributes:
            for value in (*attributes.values(), *part._buffers.values()):
                if type(value) in (dict, list):
                    self._containers.append((value, value.copy()))
                if isinstance(value, Tensor) and not (value.is_meta or value.is_inference()):
                    self._values[id(value)] = value, value._version, value.detach().clone()
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    def train(self) -> None:
        """Let all parameters have gradients, as frozen ones may have later."""
        for parameter in self._frozen:
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(True)

    def restore(self) -> None:
        """Give the model its attributes and values."""
        for part, attributes in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
        for container, content in self._containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        with torch.no_grad():
            for tensor, version, values in self._values.values():
                if tensor._version != version:
                    tensor.copy_(values)
        for parameter in self._frozen:
            parameter.requires_grad_(False)


def run_without_values(
    model: nn.Module, args: Any, kwargs: Any, mode: Flow | Proof, *, trains_all: bool = True
) -> None:
    """Run a model on tensors without values, and leave it as it was.

    Args:
        model: the model.
        args, kwargs: the arguments of the call.
        mode: a Flow or a Proof.
        trains_all: whether frozen parameters have gradients too.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True  # errors are raised as well
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would not call layers
    saved = _Saved(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        if trains_all:
            saved.train()
        with torch.enable_grad(), fake, mode.watching():
            output = model(*args, **kwargs)
        if isinstance(mode, Flow):
            mode.end(output)
    finally:
        log.disabled = was_disabled
        torch.backends.mha.set_fastpath_enabled(fast_path)
        saved.restore()
