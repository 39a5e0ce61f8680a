"""DivergenceCheck: what is compared between ranks, and what its error says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import DivergenceError
from stratagem.strategies import DivergenceCheck, Ranks

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
def test_parameter_drift_names_the_rank_and_the_parameter(
    run_script: RunScript,
) -> None:
    text = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from stratagem import Module, Trainer

    class Net(Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def training_step(self, batch, batch_idx):
            if batch_idx == 5 and self.trainer.global_rank == 1:
                with torch.no_grad():
                    self.net[1].bias += 1
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        max_epochs=1, detect_divergence=4, enable_checkpointing=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=4))
    """
    stderr = run_script(text, expect=1).stderr
    assert "DivergenceError: after step 8 parameters differ from those of rank 0" in stderr
    assert "rank 1 in net.1.bias." in stderr
    assert "\nFor an explanation: stratagem errors divergence\n" in stderr.replace("[rank0]: ", "")


class TwoRanks(Ranks):
    """Rank 0 of two; `other` returns what rank 1 sends, of what rank 0 sends."""

    def __init__(self, other: Callable[[Any], Any]) -> None:
        super().__init__(world_size=2)
        self.other = other

    def gather_objects(self, data: Any) -> list[Any]:
        return [data, self.other(data)]


def test_ranks_are_compared_at_due_steps_only() -> None:
    def fail(_: Any) -> Any:
        raise AssertionError

    check = DivergenceCheck(TwoRanks(fail), nn.Linear(2, 2), 3)
    check.check(1, True)
    check.check(2, True)
    check = DivergenceCheck(TwoRanks(lambda sent: sent), nn.Linear(2, 2), 3)
    check.check(3, True)


def test_another_step_and_a_missing_loss_are_named() -> None:
    net = nn.Linear(2, 2)
    later = TwoRanks(lambda sent: {**sent, "step": 4})
    with pytest.raises(DivergenceError, match=r"the optimizer step \(rank 0: 3, rank 1: 4\)"):
        DivergenceCheck(later, net, 3).check(3, True)
    without_loss = TwoRanks(lambda sent: {**sent, "has_loss": 0})
    with pytest.raises(DivergenceError, match=r"training_step has a loss \(rank 0: 1, rank 1: 0\)"):
        DivergenceCheck(without_loss, net, 3).check(3, True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (torch.zeros(8), torch.full((8,), 5.0)),
        (torch.arange(6.0).reshape(3, 2), torch.arange(6.0).reshape(3, 2).flip(0)),
        (torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)),
    ],
    ids=["constant", "permuted", "bfloat16"],
)
def test_parameters_that_differ_in_value_or_position_are_named(
    theirs: torch.Tensor, ours: torch.Tensor
) -> None:
    differ = error_of(holding(same=ours, value=ours), holding(same=ours, value=theirs))
    assert "after step 1 parameters differ from those of rank 0: rank 1 in value. " in differ
    assert error_of(holding(value=theirs), holding(value=theirs.clone())) == ""


def test_other_names_and_another_number_of_parameters_are_refused() -> None:
    value = torch.ones(2)
    assert "parameters differ from those of the other ranks: they have other names. " in error_of(
        holding(value=value), holding(another=value + 1)
    )
    assert "ranks differ in how many parameters they hold (rank 0: 1, rank 1: 2). " in error_of(
        holding(value=value), holding(value=value, more=value)
    )


def holding(**parameters: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value))
    return module


def error_of(*modules: nn.Module) -> str:
    """Return the error of a check on ranks that hold these modules; all of them raise it."""
    meeting = Barrier(len(modules), timeout=10)
    sent: dict[int, Any] = {}

    class InThread(Ranks):
        def gather_objects(self, data: Any) -> list[Any]:
            sent[self.global_rank] = data
            meeting.wait()
            of_all = [sent[rank] for rank in range(self.world_size)]
            meeting.wait()
            return of_all

    def check(rank: int) -> str:
        ranks = InThread(global_rank=rank, world_size=len(modules))
        try:
            DivergenceCheck(ranks, modules[rank], 1).check(1, True)
        except DivergenceError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(modules)) as threads:
        (error,) = set(threads.map(check, range(len(modules))))
    return error
