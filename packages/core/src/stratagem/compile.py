"""torch.compile of a model's parts in place: names and hooks stay as they are."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.plan.step_options import Compilation

_MARK = "_stratagem_compiled"
_codes: dict[Any, CodeType] = {}


def check_compilation(compilation: Compilation, *, on_host: bool) -> None:
    """Check that torch.compile accepts the arguments and works on this system.

    Args:
        compilation: the requested compilation.
        on_host: whether the model is on the CPU, for which inductor generates C++.

    Raises:
        ConfigurationError: compilation is not possible; the message has the reason.
    """
    if on_host and compilation.needs_compiler and _cpp_compiler() is None:
        raise ConfigurationError(
            f"{compilation} generates C++ for the CPU, and there is no C++ compiler: install g++ "
            "or clang++ (apt-get install g++), set CXX to one, or pass compile={'backend': "
            "'aot_eager'}, which generates none"
        )
    try:
        backend = compilation.arguments.get("backend")
        if isinstance(backend, str):
            there = torch.compiler.list_backends(exclude_tags=())
            if backend not in there:
                raise ConfigurationError(
                    f"{compilation}: there is no backend {backend!r}; expected one of "
                    f"{', '.join(there)}, or a function (graph_module, example_inputs)"
                )
        with warnings.catch_warnings():
            # torch's own, when inductor is imported: of a function that torch uses there.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.compile(_nothing, **compilation.arguments)
            if compilation.needs_compiler:
                importlib.import_module("torch._inductor.compile_fx")
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"{compilation}: torch.compile refuses it: {error}") from error


def _nothing() -> None:
    return None


def _cpp_compiler() -> str | None:
    named = os.environ.get("CXX")
    candidates = (named,) if named else ("g++", "clang++")
    return next((found for name in candidates if (found := shutil.which(name))), None)


# -- which parts


def parts_to_compile(model: nn.Module, groups: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules of a model to compile.

    These are the model and its children with parameters, because the user's code may call any of
    them. A ModuleList or ModuleDict is replaced by its elements. A module that is called within
    another becomes a part of the other's graph. If the strategy has split the model into groups,
    only the groups are compiled, since their hooks would break larger graphs. With activation
    checkpointing, the repeated modules are compiled in place of modules around them.

    Args:
        model: the user's model.
        groups: the groups of a strategy that gathers parameters by group.

    Example:
        >>> model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2)), "loss": nn.MSELoss()})
        >>> parts_to_compile(model) == [model["net"]]
        True
    """
    if groups:
        chosen = set(groups)
        parts = [g for g in groups if not any(m in chosen for m in g.modules() if m is not g)]
    else:
        parts = [model] if _has_forward(model) else []
        parts += _children(model)
    return list(dict.fromkeys(each for part in parts for each in _repeated(part) or [part]))


def _repeated(part: nn.Module) -> list[nn.Module]:
    """Return the modules inside of a part whose activations are computed again."""
    inside = (each for each in part.modules() if each is not part)
    return [each for each in inside if hasattr(each.__dict__.get("forward"), "forward_to_repeat")]


def _children(part: nn.Module) -> Iterator[nn.Module]:
    for child in part.children():
        if next(child.parameters(), None) is None:
            continue  # a loss, a metric: their Python state would be guarded at each step
        if _has_forward(child):
            yield child
        else:
            yield from _children(child)


def _has_forward(part: nn.Module) -> bool:
    return getattr(type(part), "forward", None) is not nn.Module.forward


# -- compiling them


def compile_model(
    model: nn.Module, compilation: Compilation, groups: Collection[nn.Module] = ()
) -> None:
    """Compile the parts of a model in place, except parts that the user has compiled.

    Args:
        model: the user's.
        compilation: how.
        groups: see `parts_to_compile`.
    """
    for part in parts_to_compile(model, groups):
        if part._compiled_call_impl is None:
            _compile(part, functools.partial(torch.compile, **compilation.arguments))


def uncompile_model(model: nn.Module) -> None:
    """Undo `compile_model` on a model."""
    for part in model.modules():
        undo = part.__dict__.pop(_MARK, None)
        if undo is not None:
            part._compiled_call_impl = None
            holder, attribute, forward = undo
            if holder is not None:
                setattr(holder, attribute, forward)


def _compile(part: nn.Module, compile: Callable[..., Any]) -> None:
    """Compile a module in place, as `nn.Module.compile` does, which keeps names and hooks.

    That leaves modules of torch's own alone: it looks for frames of code that is not torch's. So
    their forward gets a frame here.
    """
    part.__dict__[_MARK] = None, "", None
    forward: Any = part.__dict__.get("forward")
    if hasattr(forward, "forward_to_repeat"):
        # Compile inside of activation checkpointing, which repeats the compiled forward.
        inner = forward.forward_to_repeat
        part.__dict__[_MARK] = forward, "forward_to_repeat", inner
        forward.forward_to_repeat = _Compiled(compile(_framed(inner, part)), inner)
        return
    is_torchs = str(getattr(type(part).forward, "__module__", "")).startswith("torch.")
    if not is_torchs:
        call = compile(part._call_impl)
    elif part._forward_pre_hooks or part._forward_hooks:
        # The hooks of a group gather its parameters; they stay outside of the graph.
        call = _Hooked(part, compile(_framed(part.forward, part)))
    else:
        call = compile(_framed(part._call_impl, part))
    part._compiled_call_impl = _Compiled(call, None)


class _Compiled:
    """The compiled function of one module; copies and pickles of the module do not contain it.

    A compiled function refers to its module: in a copy of the model, it would compute with the
    weights of the original.

    Args:
        call: the compiled function.
        instead: the value that a copy of the module has in its place.
    """

    def __init__(self, call: Callable[..., Any], instead: Callable[..., Any] | None) -> None:
        self.call, self.instead = call, instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.instead, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self.instead,)


def _as_it_is(instead: Any) -> Any:
    return instead


class _Hooked:
    """Calls a module with its hooks, and a compiled forward in the place of its own."""

    def __init__(self, part: nn.Module, forward: Callable[..., Any]) -> None:
        self._part, self._forward = part, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._part.__dict__
        own["forward"] = self._forward
        try:
            return self._part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            own.pop("forward", None)


def _framed(call: Callable[..., Any], part: nn.Module) -> Callable[..., Any]:
    """Return a function that does `call`, with code of its own for each structure of a module.

    torch.compile keeps graphs by code object, and no more than a few for each; modules that are
    alike share theirs.
    """
    if isinstance(call, MethodType):
        # Its two parts stay the same objects; a method is made anew for each fit, for which torch
        # 2.9 compiles again.
        function, owner = call.__func__, call.__self__

        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(owner, *args, **kwargs)

    else:

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    of_parameters = ((n, tuple(p.shape), p.dtype) for n, p in part.named_parameters())
    key = type(part).__qualname__, tuple(of_parameters), forward.__code__.co_freevars
    name = f"forward_of_{type(part).__name__}"
    forward.__code__ = _codes.setdefault(key, forward.__code__.replace(co_name=name))
    return forward


# -- functions compiled by users


def own_module(module: Any) -> Any:
    """Return the module inside the result of `torch.compile(module)`, compiled in place.

    Its options and its compiled code stay; its parameters have the module's own names, without
    the `_orig_mod.` that the wrapper puts before them. Anything else is returned as it is.

    Example:
        >>> from torch import nn
        >>> from stratagem.strategies import own_module
        >>> layer = nn.Linear(1, 1)
        >>> own_module(layer) is layer
        True
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return module
    inner: nn.Module = own_module(module._orig_mod)
    if inner._compiled_call_impl is None:
        _compile(inner, module.dynamo_ctx)
        inner.__dict__.pop(_MARK)  # the user's, which stays
    return inner


def adopt_compiled(model: nn.Module) -> None:
    """Replace each submodule that `torch.compile` has wrapped by the module itself.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stratagem.strategies import adopt_compiled
        >>> model = nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager"))
        >>> adopt_compiled(model)
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = own_module(child)
