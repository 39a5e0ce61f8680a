"""Preparing a model: what both front ends do around `Strategy.prepare`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.compile import adopt_compiled, check_compilation, uncompile_model
from stratagem.errors import ConfigurationError, PluginError
from stratagem.interfaces.prepared_model import Optimizers, PreparedModel, StepModule
from stratagem.interfaces.strategy import Strategy
from stratagem.plan.plan import RunPlan
from stratagem.plan.step_options import Compilation, check_compiles

Compile = bool | Mapping[str, Any] | None
"""What `Lite.setup` takes as `compile`."""

_latest: WeakKeyDictionary[nn.Module, tuple[ref[Strategy], ref[PreparedModel]]] = (
    WeakKeyDictionary()
)
"""What each module was prepared as last, in this process."""


def prepare(
    strategy: Strategy,
    module: nn.Module,
    optimizers: Optimizers = (),
    *,
    move_to_device: bool = True,
    compilation: Compilation | Literal[False] | None = None,
) -> PreparedModel:
    """Prepare a model with a strategy, and release its earlier preparation.

    Args:
        strategy: the strategy of a launched run.
        module: the user's module.
        optimizers, move_to_device: see `Strategy.prepare`.
        compilation: the options of the compilation. None: the strategy's step options. False: no
            compilation.

    Raises:
        ConfigurationError: if an existing optimizer has no parameter of the module.
        PluginError: if the strategy returned a wrong type, or never called its `wrap`.
    """
    if not callable(optimizers):
        _check_parameters(module, optimizers)
    release(module)
    uncompile_model(module)
    adopt_compiled(module)
    step_module = StepModule(module)
    if strategy.sync_batchnorm:
        strategy.synchronize_batch_norm(step_module)
    step = strategy.components.step
    if step is not None and step.activation_checkpointing:
        strategy.checkpoint_activations(step_module, step.activation_checkpointing)
    with _wrap_is_called(strategy):
        prepared: Any = strategy.prepare(step_module, optimizers, move_to_device=move_to_device)
    if not isinstance(prepared, PreparedModel):
        raise PluginError(
            f"{type(strategy).__name__}.prepare returned a {type(prepared).__name__}; expected a "
            "PreparedModel(module, original, optimizers, evaluation_module), as super().prepare "
            "returns: what is to be called instead of the model belongs into its `module`"
        )
    _latest[module] = ref(strategy), ref(prepared)
    for optimizer in prepared.optimizers:
        warn_of_lost_epsilon(strategy, optimizer)
        if strategy.capabilities.engine_steps:
            vars(optimizer)["add_param_group"] = partial(_refuse_group, type(strategy).__name__)
    if compilation is None and strategy.components.step is not None:
        compilation = strategy.components.step.compilation
    if compilation:
        prepared.compile(compilation)
    return prepared


_calls_wrap: WeakSet[type[Strategy]] = WeakSet()
"""The classes with a `prepare` and a `wrap` that was called, once for each."""


@contextmanager
def _wrap_is_called(strategy: Strategy) -> Iterator[None]:
    """Raise if the `prepare` of a class does not call its own or an inherited `wrap`.

    Raises:
        PluginError: training would skip the work of `wrap`, such as averaging gradients.
    """
    kind = type(strategy)
    own = kind.prepare is not Strategy.prepare and kind.wrap is not Strategy.wrap
    if not own or kind in _calls_wrap:
        yield
        return
    wrap = strategy.wrap

    def noted(module: nn.Module) -> nn.Module:
        _calls_wrap.add(kind)
        return wrap(module)

    strategy.wrap = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del strategy.wrap
    if kind not in _calls_wrap:
        raise PluginError(
            f"{kind.__name__}.prepare has not called wrap, so that {kind.wrap.__qualname__} does "
            "nothing: call super().prepare(...) or self.wrap(module) there, or override wrap to "
            "return the module"
        )


def release(module: nn.Module, only: PreparedModel | None = None) -> None:
    """Let the strategy of a module's last preparation free its resources.

    Args:
        module: the module of the user.
        only: release only if this is the latest preparation; None releases it in any case.
    """
    if only is not None and _latest.get(module, (_nothing, _nothing))[1]() is not only:
        return
    strategy, prepared = (one() for one in _latest.pop(module, (_nothing, _nothing)))
    if isinstance(strategy, Strategy) and isinstance(prepared, PreparedModel):
        strategy.release(prepared)
        for optimizer in prepared.optimizers:
            vars(optimizer).pop("add_param_group", None)


def _refuse_group(strategy: str, param_group: object) -> None:
    """Stand in for `add_param_group` of an optimizer that an engine steps.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"add_param_group: the engine of {strategy} trains the parameters that the optimizer had "
        "when it was set up, and no others: give the optimizer all parameter groups at once, and "
        "freeze those that are not to train yet with requires_grad_(False)"
    )


def _nothing() -> None:
    return None


def check_backward(plan: RunPlan, *, by_step: bool = False) -> None:
    """Check that a loop of the user's own can call backward, or with `by_step` `Lite.step`.

    Raises:
        ConfigurationError: the strategy runs backward itself.
    """
    can = plan.capabilities
    if not (can.manual_backward or (by_step and can.lite_step)):
        use = "lite.step, the Trainer" if can.lite_step else "the Trainer"
        raise ConfigurationError(
            f"the strategy {plan.strategy.name!r} runs backward itself "
            "(manual_backward=False in its capabilities), so that a loop of your own cannot "
            f"train with it: use {use}, or another strategy"
        )


def check_setup(plan: RunPlan, optimizers: Sequence[Optimizer]) -> None:
    """Check that `Lite.setup` can prepare a model together with its optimizers.

    Raises:
        ConfigurationError: the optimizers were made too early.
    """
    if optimizers and not plan.capabilities.accepts_existing_optimizers:
        raise ConfigurationError(
            f"the strategy {plan.strategy.name!r} cannot take an optimizer that was made "
            "before the model is sharded: call setup(model), make the optimizer from "
            "its parameters, then setup_optimizers(optimizer)"
        )
    if optimizers:
        check_backward(plan, by_step=True)


def compilation_of_setup(
    plan: RunPlan, strategy: Strategy, given: Any
) -> Compilation | Literal[False]:
    """Return how `Lite.setup(compile=given)` compiles a model; False: not at all.

    Raises:
        ConfigurationError: it cannot be compiled so.
    """
    compilation = Compilation.parse(given)
    if given is None and strategy.components.step is not None:
        compilation = strategy.components.step.compilation
    if compilation is None:
        return False
    check_compiles(plan.strategy.name, plan.capabilities, compilation)
    check_compilation(compilation, on_host=strategy.accelerator.is_host)
    return compilation


def prepared_of(optimizer: Optimizer, models: Sequence[PreparedModel]) -> PreparedModel:
    """Return the prepared model that has the parameters of an optimizer.

    Raises:
        ConfigurationError: no model has these parameters.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for prepared in models:
        if any(id(p) in held for p in prepared.original.parameters()):
            return prepared
    raise ConfigurationError(
        "setup_optimizers() received an optimizer without any parameter of a model that was "
        "set up: call setup(model) first, and make the optimizer from its parameters"
    )


def warn_of_lost_epsilon(strategy: Strategy, optimizer: Optimizer) -> None:
    """Warn on rank 0 of an optimizer that divides by 0, since its `eps` is 0 in float16.

    torch's optimizers add it to a denominator in the dtype of the parameters, except fused
    optimizers; float16 has no number between 0 and 6e-8 (2**-24), and AdamW's eps is 1e-8.

    Args:
        strategy: the strategy; if its engine implements the precision, the engine steps float32
            copies, and no warning is needed.
        optimizer: the optimizer to step.
    """
    engine = strategy.precision.name in strategy.capabilities.engine_precisions
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    if engine or not is_torchs or not strategy.ranks.is_global_zero:
        return
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or eps <= 0 or group.get("fused"):
            continue
        for dtype in {p.dtype for p in group["params"] if p.is_floating_point()}:
            if torch.tensor(eps, dtype=dtype) == 0:
                warnings.warn(
                    f"{type(optimizer).__name__}(eps={eps:g}) divides by 0 where a gradient is 0 "
                    f"or small: its parameters are in {dtype}, in which {eps:g} is 0, and weights "
                    "become infinite or not a number. Pass eps=1e-4, or precision='bf16-true', "
                    "which has the range of float32",
                    stacklevel=2,
                )
                return


def _check_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    own = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ConfigurationError(
                f"setup() received a {type(optimizer).__name__} that holds none of the model's "
                "parameters, so its steps would change nothing: make it from model.parameters()"
            )
