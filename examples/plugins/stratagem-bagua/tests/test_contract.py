"""What Bagua is called with, and when; against a stub. Nothing here has run with Bagua itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.errors import ConfigurationError
from stratagem_bagua.plugin import BAGUA
from stratagem_bagua.strategy import BaguaStrategy


class OnCPU(BaguaStrategy):
    """The same where there is no GPU; what it calls does not communicate."""

    capabilities = replace(BAGUA, accelerators=("cpu",))


class Net(Module):
    def __init__(self, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.layer, self.optimizer = nn.Linear(1, 1), optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


def ones() -> DataLoader[Any]:
    """Return a loader of two batches."""
    data: Any = torch.ones(4, 1)
    return DataLoader(data, 2)


def calls_of(strategy: BaguaStrategy, net: Net, *, validates: bool = False) -> Any:
    """Fit two steps; return the algorithm, as the stub has kept it."""
    loader = ones()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(net, loader, loader if validates else None)
    return Algorithm.made[-1]


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("gradient_allreduce", {"hierarchical": True}, "GradientAllReduceAlgorithm"),
        ("bytegrad", {"average": False}, "ByteGradAlgorithm"),
        ("decentralized", {"communication_interval": 4}, "DecentralizedAlgorithm"),
        ("low_precision_decentralized", {}, "LowPrecisionDecentralizedAlgorithm"),
    ],
)
def test_an_algorithm_is_made_of_its_options_and_hooks_model_and_optimizers(
    name: str, options: dict[str, Any], kind: str
) -> None:
    made = calls_of(OnCPU(algorithm=name, timeout=60, **options), Net())
    assert type(made).__name__ == kind
    assert all(value in made.options.values() for value in options.values())
    assert made.calls == ["with_bagua", "forward", "step", "forward", "step"]


def test_the_asynchronous_algorithm_rests_in_evaluations_and_at_the_end() -> None:
    made = calls_of(OnCPU(algorithm="async", sync_interval_ms=50), Net(), validates=True)
    assert made.options["interval"] == 50
    step = ["forward", "step"]
    check = ["abort", "resume"]
    assert made.calls == ["with_bagua", "resume", *check, *step, *step, *check, "abort"]


def test_qadam_takes_its_own_optimizer_only() -> None:
    made = calls_of(OnCPU(algorithm="qadam"), Net(QAdamOptimizer))
    assert isinstance(made.options["optimizer"], QAdamOptimizer)
    with pytest.raises(ConfigurationError, match=r"takes one .*QAdamOptimizer, received SGD"):
        calls_of(OnCPU(algorithm="qadam"), Net())


def test_a_model_is_only_evaluated_without_bagua() -> None:
    before = len(Algorithm.made)
    trainer = Trainer(strategy=OnCPU(), accelerator="cpu", devices=1, logger=False)
    trainer.validate(Net(), ones(), verbose=False)
    assert len(Algorithm.made) == before


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'other': expected one of 'gradient_allreduce'"):
        BaguaStrategy(algorithm="other")
    with pytest.raises(ConfigurationError, match="sync_interval_ms"):
        BaguaStrategy(algorithm="bytegrad", sync_interval_ms=50)
    with pytest.raises(ConfigurationError, match="cuda"):
        Trainer(strategy="bagua", accelerator="cpu", devices=2, logger=False)
