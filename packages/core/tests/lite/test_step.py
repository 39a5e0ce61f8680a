"""`Lite.step`: one optimizer step over micro-batches, in a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from stratagem import Lite
from stratagem.errors import ConfigurationError, StratagemError, UserCodeError

BATCHES = [torch.arange(4.0).reshape(2, 2), torch.ones(1, 2), torch.tensor([[3.0, -1.0]] * 3)]


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def set_up(**options: Any) -> tuple[Lite, Any, Any]:
    lite = Lite(accelerator="cpu", devices=1, **options)
    net = network()
    model, optimizer = lite.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    return lite, model, optimizer


def by_hand(losses: Any, clip: float | None = None) -> nn.Linear:
    """Train three steps with a raw loop; `losses` returns the loss of a step."""
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        losses(net).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return net


def assert_equal(model: Any, expected: nn.Linear) -> None:
    for value, of_raw in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, of_raw, rtol=0, atol=1e-6)


def test_losses_are_averaged_over_micro_batches() -> None:
    lite, model, _ = set_up()

    def loss(batch: Tensor) -> Any:
        return model(batch).square().mean()

    means = [lite.step(model, BATCHES, loss, max_norm=0.5) for _ in range(3)]
    raw = by_hand(lambda net: sum(net(b).square().mean() for b in BATCHES) / len(BATCHES), 0.5)
    assert_equal(model, raw)
    assert all(p.grad is None for p in model.parameters())
    first = sum(network()(batch).square().mean().item() for batch in BATCHES) / len(BATCHES)
    assert means[0] is not None
    assert means[0].item() == pytest.approx(first)
    assert not means[0].requires_grad


def test_weights_give_the_mean_over_all_elements() -> None:
    lite, model, _ = set_up()
    weights = [len(batch) for batch in BATCHES]
    for _ in range(3):
        mean = lite.step(model, BATCHES, lambda b: model(b).square().mean(), weights=weights)
    raw = by_hand(lambda net: net(torch.cat(BATCHES)).square().mean())
    assert_equal(model, raw)
    assert mean is not None


def test_batches_without_elements_or_loss_are_left_out() -> None:
    lite, model, _ = set_up()
    batches = [torch.zeros(0, 2), BATCHES[0]]
    for _ in range(3):
        mean = lite.step(model, batches, lambda b: model(b).square().mean(), weights=[0, 2])
        assert mean is not None
        assert torch.isfinite(mean)
    assert_equal(model, by_hand(lambda net: net(BATCHES[0]).square().mean()))
    assert lite.step(model, batches, lambda b: None) is None


def test_gradients_are_clipped_by_value() -> None:
    lite, model, _ = set_up()
    before = [p.detach().clone() for p in model.parameters()]
    lite.step(model, BATCHES, lambda b: 1000 * model(b).sum(), clip_val=0.5)
    for value, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close((value - old).abs(), torch.full_like(old, 0.05))


def test_errors_of_the_step_are_explained() -> None:
    lite, model, _ = set_up()
    with pytest.raises(RuntimeError, match="does not require grad"):
        lite.step(model, BATCHES, lambda b: b.sum())


def refused(call: Any) -> str:
    with pytest.raises(StratagemError) as error:
        call()
    assert isinstance(error.value, (ConfigurationError, UserCodeError))
    return str(error.value)


def test_arguments_that_cannot_work_are_refused() -> None:
    lite, model, optimizer = set_up(accumulate_grad_batches=2)

    def loss(batch: Tensor) -> Any:
        return model(batch).mean()

    assert refused(lambda: lite.step(model, [], loss)) == (
        "step() received 0 micro-batch(es) and weights=None; expected at least one micro-batch, "
        "and a weight for each, or weights=None"
    )
    assert refused(lambda: lite.step(model, BATCHES, loss, weights=[1])) == (
        "step() received 3 micro-batch(es) and weights=[1]; expected at least one micro-batch, "
        "and a weight for each, or weights=None"
    )
    assert refused(lambda: lite.step(model, BATCHES, loss, weights=[1, 2, -1])) == (
        "weights=[1.0, 2.0, -1.0]: expected finite numbers of at least 0, such as the numbers of "
        "elements that the losses are means of"
    )
    assert refused(lambda: lite.step(model, BATCHES, loss, clip_val=1.0, max_norm=1.0)) == (
        "expected either clip_val or max_norm, received clip_val=1.0 and max_norm=1.0"
    )
    assert refused(lambda: lite.step(model, BATCHES, lambda b: loss(b).item())) == (
        "step(): loss(micro_batch) returned a float; expected a scalar tensor with a gradient, or "
        "None to skip the micro-batch"
    )
    with lite.accumulate(model):
        assert refused(lambda: lite.step(model, BATCHES, loss)) == (
            "step() within lite.accumulate(), which holds optimizer steps: pass the batches of the "
            "window to step() together, outside of the block"
        )
    alone = lite.setup(network())
    assert refused(lambda: lite.step(alone, BATCHES, loss)) == (
        "step() takes a model that was set up with one optimizer, received one with 0: call "
        "lite.setup(model, optimizer), or call backward and the optimizers' step yourself"
    )
    assert optimizer.state_dict()["state"] == {}


def test_a_step_takes_an_optimizer_that_was_set_up_after_the_model() -> None:
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    model = lite.setup(network())
    lite.setup_optimizers(SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        lite.step(model, BATCHES[:1], lambda batch: model(batch).square().mean())
    assert_equal(model, by_hand(lambda net: net(BATCHES[0]).square().mean()))
