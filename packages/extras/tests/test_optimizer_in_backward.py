"""OptimizerInBackward: the numbers and the state of a fit without it, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import OptimizerInBackward
from stratagem.checkpoint import DirectoryCheckpointIO
from stratagem.errors import ConfigurationError
from stratagem.precision import TruePrecision

SCRIPT = Path(__file__).parent / "scripts" / "optimizer_in_backward.py"


def read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        found: dict[str, Any] = DirectoryCheckpointIO().load_checkpoint(path)
        return found
    return dict(torch.load(path, weights_only=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "kept"),
    [("single_device", 1, 0), ("fsdp", 2, 1), ("hybrid", 4, 1), ("tensor", 4, 1)],
)
def test_numbers_and_state_are_those_of_a_fit_without_it(
    name: str, ranks: int, kept: int, tmp_path: Path
) -> None:
    run_file(SCRIPT, str(tmp_path), name, str(ranks), folder=tmp_path)
    whole, within = read(tmp_path / "whole"), read(tmp_path / "within")
    torch.testing.assert_close(within["state_dict"], whole["state_dict"], atol=0, rtol=0)
    for part in ("optimizer_states", "lr_schedulers"):
        assert tree_leaves(within[part]), part
        same = tree_map(
            lambda one, other: bool(
                (one == other) if not isinstance(one, torch.Tensor) else torch.equal(one, other)
            ),
            within[part],
            whole[part],
        )
        assert all(tree_leaves(same)), part
    assert within["global_step"] == whole["global_step"] == 5
    # Under shards, the scale has no dimension and stays whole: it is stepped after backward.
    assert (tmp_path / "held0").read_text() == f"14 {kept}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp", "strategy='ddp' averages gradients over ranks after they are computed"),
        ("deepspeed", "the engine of strategy='DeepSpeedStrategy' takes the steps"),
    ],
)
def test_strategies_that_reduce_later_are_refused(name: str, message: str, tmp_path: Path) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    shown = run_file(SCRIPT, str(tmp_path), name, "2", folder=tmp_path).stdout
    assert message in shown
    if name == "deepspeed":
        assert "ScheduleFree changes weights between steps, and the engine" in shown


class Net(Module):
    def __init__(self, kind: Any = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 2)
        self.kind, self.options = kind, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), **self.options)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Reads(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Hooked(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *arguments: None)
        return optimizer


class Scaled(TruePrecision):
    scales_loss = True


class Foreign(torch.optim.SGD):
    pass


def fit(module: Module, path: Path, *callbacks: Any, **options: Any) -> Any:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        callbacks=list(callbacks),
        default_root_dir=path,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        **options,
    )
    data: Any = torch.ones(12, 2)
    trainer.fit(module, DataLoader(data, 2))
    return trainer


@pytest.mark.parametrize(
    "kind",
    [
        getattr(torch.optim, name)
        for name in (
            "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam",
            "RMSprop", "Rprop", "SGD",
        )
    ],
)  # fmt: skip
def test_optimizers_of_torch_have_their_own_numbers(kind: Any, tmp_path: Path) -> None:
    modules = Net(kind, lr=0.1), Net(kind, lr=0.1)
    fit(modules[0], tmp_path)
    fit(modules[1], tmp_path, OptimizerInBackward())
    for name, value in modules[0].state_dict().items():
        assert torch.equal(modules[1].state_dict()[name], value)


def test_hooks_are_gone_after_a_fit(tmp_path: Path) -> None:
    module = Net(lr=0.1)
    fit(module, tmp_path, OptimizerInBackward())
    module.training_step(torch.ones(2, 2), 0).backward()
    assert module.net.weight.grad is not None


def test_hooks_are_gone_after_an_error(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("stop")
            return super().training_step(batch, batch_idx)

    module = Fails(lr=0.1)
    with pytest.raises(ValueError, match="stop"):
        fit(module, tmp_path, OptimizerInBackward())
    module.training_step(torch.ones(2, 2), 0).backward()
    assert module.net.weight.grad is not None


class ReadsNorm(Callback):
    def on_before_optimizer_step(self, *arguments: Any) -> None:
        pass


def test_callbacks_that_read_gradients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"ReadsNorm\.on_before_optimizer_step would find no"
    ):
        fit(Net(), tmp_path, OptimizerInBackward(), ReadsNorm())


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Net, {"accumulate_grad_batches": 2}, "Leave accumulate_grad_batches out"),
        (Net, {"gradient_clip_val": 1.0}, "clipping needs all gradients at once"),
        (Net, {"plugins": Scaled()}, "a scaled loss needs all gradients"),
        (Manual, {}, "automatic_optimization = False calls the optimizer itself"),
        (lambda: Net(Foreign, lr=0.1), {}, "Foreign is not known to step each parameter by itself"),
        (lambda: Net(torch.optim.LBFGS), {}, "LBFGS is not known to step each parameter by itself"),
        (Reads, {}, "Reads.on_before_optimizer_step works on gradients after backward"),
        (Hooked, {}, "the SGD has hooks of step"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_depends_on_all_gradients_is_refused(
    module: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(module(), tmp_path, OptimizerInBackward(), **options)
