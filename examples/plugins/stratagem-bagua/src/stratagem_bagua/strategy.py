"""BaguaStrategy: Bagua's communication algorithms. Contract-tested, never run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategies import Optimizers, PreparedModel
from stratagem_bagua.plugin import BAGUA
from stratagem_torch.parallel import ParallelStrategy

_ALGORITHMS = {
    "gradient_allreduce": ("gradient_allreduce", "GradientAllReduceAlgorithm"),
    "bytegrad": ("bytegrad", "ByteGradAlgorithm"),
    "decentralized": ("decentralized", "DecentralizedAlgorithm"),
    "low_precision_decentralized": ("decentralized", "LowPrecisionDecentralizedAlgorithm"),
    "qadam": ("q_adam", "QAdamAlgorithm"),
    "async": ("async_model_average", "AsyncModelAverageAlgorithm"),
}
"""Each with its module in `bagua.torch_api.algorithms`, and its class."""


class _Trained(nn.Module):
    """What training calls, and Bagua hooks; an evaluation calls the module itself, without hooks.

    Decentralized algorithms communicate in forward, and ranks may evaluate different numbers of
    batches.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the module."""
        return self.module(*arguments, **named)


class BaguaStrategy(ParallelStrategy):
    """Trains by one of Bagua's algorithms, which communicate in hooks of model and optimizer.

    Args:
        algorithm: "gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized",
            "qadam" (with Bagua's QAdamOptimizer only) or "async".
        flatten: let the tensors of a bucket share memory.
        **options: those of the algorithm's class, such as `sync_interval_ms` of "async"; all others
            go to `ParallelStrategy`.

    Raises:
        ConfigurationError: another algorithm; or, in `prepare`, an optimizer that it does not take.
    """

    capabilities = BAGUA

    def __init__(
        self, *, algorithm: str = "gradient_allreduce", flatten: bool = True, **options: Any
    ) -> None:
        if algorithm not in _ALGORITHMS:
            raise ConfigurationError(
                f"algorithm={algorithm!r}: expected one of {', '.join(map(repr, _ALGORITHMS))}"
            )
        own = inspect.signature(_class_of(algorithm)).parameters
        self.algorithm = algorithm
        self.flatten = flatten
        self.bagua_options = {name: options.pop(name) for name in own.keys() & options.keys()}
        super().__init__(**options)

    def init_process_group(self) -> None:
        """Join torch's process group, then Bagua's, once the device is set."""
        super().init_process_group()
        from bagua import torch_api

        if not torch_api.communication.is_initialized():
            # It reads the variables of torchrun, which a rank of Stratagem has.
            torch_api.init_process_group()

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return what Bagua is to hook."""
        return _Trained(module)

    def prepare(
        self, module: Any, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Let Bagua hook the model and its optimizers, which it wants together."""
        prepared = super().prepare(module, optimizers, move_to_device=move_to_device)
        if prepared.optimizers:  # an evaluation has none
            prepared.module.with_bagua(  # type: ignore[operator]  # Bagua's, on every module
                prepared.optimizers, self._make_algorithm(prepared), do_flatten=self.flatten
            )
            self._let_run(prepared)
        return prepared

    def _make_algorithm(self, prepared: PreparedModel) -> Any:
        options = dict(self.bagua_options)
        if self.algorithm == "qadam":
            from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

            kinds = [type(optimizer).__name__ for optimizer in prepared.optimizers]
            if len(kinds) != 1 or not isinstance(prepared.optimizers[0], QAdamOptimizer):
                raise ConfigurationError(
                    "algorithm='qadam' takes one bagua.torch_api.algorithms.q_adam.QAdamOptimizer, "
                    f"received {', '.join(kinds)}: return one from configure_optimizers()"
                )
            options["q_adam_optimizer"] = prepared.optimizers[0]
        return _class_of(self.algorithm)(**options)

    # -- the asynchronous algorithm averages in the background, from the first step until it is told

    def _let_run(self, prepared: PreparedModel) -> None:
        if self.algorithm == "async" and prepared.optimizers:
            prepared.module.bagua_algorithm.resume(prepared.module)  # type: ignore[union-attr,operator]

    def _hold(self, prepared: PreparedModel) -> None:
        if self.algorithm == "async" and prepared.optimizers:
            prepared.module.bagua_algorithm.abort(prepared.module)  # type: ignore[union-attr,operator]

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Evaluate weights that nobody changes meanwhile."""
        self._hold(prepared)
        yield
        self._let_run(prepared)

    def end_training(self, prepared: PreparedModel) -> None:
        """Stop averaging in the background."""
        self._hold(prepared)


def _class_of(algorithm: str) -> Any:
    from importlib import import_module

    module, name = _ALGORITHMS[algorithm]
    return getattr(import_module(f"bagua.torch_api.algorithms.{module}"), name)
