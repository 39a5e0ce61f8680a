"""Ranks without a batch follow the communication of another rank's forward passes at stage 3.

An engine decides what to gather, ahead of time too, by the modules that ran before. So a follower
lets its engine see the same modules begin and end, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_RESET, _BEFORE, _AFTER, _OUTSIDE, _RETURNED = range(5)
"""A forward of the model begins; a module begins, and ends; a parameter is used outside of its
module, and is returned by its module."""


class Following:
    """Announces the modules of a forward pass at stage 3, and runs them on another rank.

    Numbers are `5 * index` of a module or parameter, plus the number of the event.

    Args:
        zero: the optimizer of the engine.
    """

    def __init__(self, zero: Any) -> None:
        from deepspeed.runtime.zero import parameter_offload

        self._library = parameter_offload
        self._offload = getattr(zero, "parameter_offload", zero)
        self._coordinator = self._offload.get_param_coordinator()
        self._modules = list(self._offload.module.modules())
        self._parameters = list(self._offload.module.parameters())

    @contextmanager
    def announcing(self, announce: Callable[[int], None]) -> Iterator[None]:
        """Return a context that announces each event of forward passes before it happens.

        Args:
            announce: called with the number.
        """
        modules = {id(module): index for index, module in enumerate(self._modules)}
        parameters = {id(one): index for index, one in enumerate(self._parameters)}

        def of_module(what: int, act: Callable[[Any], None]) -> Callable[[Any], None]:
            def announced(module: Any) -> None:
                announce(5 * modules[id(module)] + what)
                act(module)

            return announced

        def reset() -> None:
            announce(_RESET)
            reset_step()

        def use_outside(module: Any, parameter: Any) -> None:
            what = _RETURNED if parameter.is_external_param else _OUTSIDE
            announce(5 * parameters[id(parameter)] + what)
            register(module, parameter)

        reset_step, register = (
            self._coordinator.reset_step,
            self._library.register_external_parameter,
        )
        before = of_module(_BEFORE, self._offload.pre_sub_module_forward_function)
        after = of_module(_AFTER, self._offload.post_sub_module_forward_function)
        self._coordinator.reset_step = reset
        self._offload.pre_sub_module_forward_function = before
        self._offload.post_sub_module_forward_function = after
        self._library.register_external_parameter = use_outside
        try:
            yield
        finally:
            del self._coordinator.reset_step
            del self._offload.pre_sub_module_forward_function
            del self._offload.post_sub_module_forward_function
            self._library.register_external_parameter = register

    @torch.no_grad()
    def follow(self, announced: Iterable[int]) -> None:
        """Repeat the announced events, so that the engine gathers the same parameters.

        Args:
            announced: the numbers.
        """
        for number in announced:
            index, what = divmod(number, 5)
            if what == _RESET:
                self._coordinator.reset_step()
            elif what == _BEFORE:
                self._offload.pre_sub_module_forward_function(self._modules[index])
            elif what == _AFTER:
                self._library.FWD_MODULE_STACK.pop()
                self._offload.post_sub_module_forward_function(self._modules[index])
            else:
                self._gather_outside(self._parameters[index], is_returned=what == _RETURNED)

    def _gather_outside(self, parameter: Any, *, is_returned: bool) -> None:
        """Do what the engine does where a parameter is used outside of its module."""
        user, running = self._library.FWD_MODULE_STACK[-2:]
        if is_returned:
            parameter.is_external_param = True
            if id(parameter) in running._external_params:
                self._library.unregister_external_parameter(running, parameter)
        self._library.register_external_parameter(user if is_returned else running, parameter)
        parameter.all_gather()
