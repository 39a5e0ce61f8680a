"""`init_process_group`, and `with_bagua` on every module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from bagua.torch_api import communication
from bagua.torch_api.algorithms import Algorithm

__all__ = ["communication", "init_process_group"]


def init_process_group(store: Any = None) -> None:
    if communication.initialized:
        raise RuntimeError("trying to initialize the default process group twice")
    communication.initialized = True


def with_bagua(
    self: Any,
    optimizers: list[Optimizer],
    algorithm: Algorithm,
    process_group: Any = None,
    do_flatten: bool = True,
) -> Any:
    if not communication.initialized:
        raise RuntimeError("must call bagua.torch_api.init_process_group first")
    if "bagua_algorithm" in vars(self):
        raise RuntimeError("a module is given to with_bagua once")
    if not isinstance(optimizers, list) or not all(isinstance(o, Optimizer) for o in optimizers):
        raise TypeError("optimizers: a list of torch.optim.Optimizer")
    if not isinstance(algorithm, Algorithm):
        raise TypeError("algorithm: a bagua.torch_api.algorithms.Algorithm")
    owned = {id(p) for p in self.parameters()}
    if any(id(p) not in owned for o in optimizers for g in o.param_groups for p in g["params"]):
        raise ValueError("an optimizer of other parameters")
    self.bagua_optimizers, self.bagua_algorithm, self.do_flatten = optimizers, algorithm, do_flatten
    algorithm.calls.append("with_bagua")
    self.register_forward_pre_hook(
        lambda module, _: algorithm.forward() if module.training else None
    )
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: algorithm.calls.append("step"))
    return self


nn.Module.with_bagua = with_bagua  # type: ignore[assignment]
