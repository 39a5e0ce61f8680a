"""One model may accumulate while another one communicates."""

import pytest
import torch

from stratagem import Lite
from stratagem_onebit.strategy import OneBitStrategy


def _gradients(lite: Lite) -> list[float]:
    """Return the gradient of a model while another one accumulates, on each rank."""
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    (first, _), (second, _) = (
        lite.setup(model, torch.optim.SGD(model.parameters(), 0.1)) for model in models
    )
    batch = torch.full((1, 1), lite.global_rank + 1.0)
    with lite.no_backward_sync(first):
        lite.backward(first(batch).sum(), model=first)
        lite.backward(second(batch).sum(), model=second)
    (weight,) = second.parameters()
    assert weight.grad is not None
    gradients: list[float] = lite.all_gather(weight.grad).flatten().tolist()
    return gradients


@pytest.mark.filterwarnings("ignore:this process has computed with several threads")
def test_accumulating_one_model_leaves_another_one_alone() -> None:
    strategy = OneBitStrategy(warmup_steps=9)
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy, plugins="fork")
    assert lite.launch(_gradients) == [1.5, 1.5]
