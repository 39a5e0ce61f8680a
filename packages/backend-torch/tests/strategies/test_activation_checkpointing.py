"""Trainer(activation_checkpointing=...) under each strategy: the same numbers, less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import (
    FSDPStrategy,
    Recompute,
    StepOptions,
    apply_activation_checkpointing,
)

SCRIPT = Path(__file__).parents[1] / "scripts" / "activation_checkpointing.py"
ONE_DEVICE = ("single_device",)
SEVERAL = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ONE_DEVICE + SEVERAL)
def test_numbers_are_those_without_checkpointing(strategy: str, tmp_path: Path) -> None:
    """Losses, weights and the statistics of batch norm are equal bit for bit, with dropout."""
    run_file(SCRIPT, "out.json", strategy, folder=tmp_path)
    ways = json.loads((tmp_path / "out.json").read_text())[strategy]
    assert len(ways) == 10
    for way, found in ways.items():
        assert found == ways["none"], way


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products and numbers drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "addmm" in func.name()
        self.draws += "dropout" in func.name() or "bernoulli" in func.name()
        return func(*args, **(kwargs or {}))


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(block() for _ in range(4)))


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8))


def kept_and_repeated(choice: Any) -> tuple[int, int]:
    """Return the bytes that autograd keeps, and the products that backward computes again."""
    model = blocks()
    apply_activation_checkpointing(model, choice)
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.ones(64, 8, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).sum()
    with Counted() as counted:
        loss.backward()
    return sum(storages.values()), counted.products


def test_kept_operations_do_not_run_again() -> None:
    whole, _ = kept_and_repeated(None)
    inputs, repeated = kept_and_repeated(True)
    _, selective = kept_and_repeated(Recompute(keep="matmul"))
    half, repeated_half = kept_and_repeated(Recompute(share=0.5))
    # Backward stops to run a module again once it has all it needs: before the last product.
    assert (repeated, selective, repeated_half) == (4, 0, 2)
    assert inputs < whole / 3
    assert inputs < half < whole


class InPlace(nn.Module):
    """Changes the outputs of its products in place, as torch's Linear of some engines does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4) + 0.1), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.matmul(self.weight.t())
            x += self.bias
            x = x.sin()
        return x


def test_what_an_operation_in_place_changes_is_copied_first() -> None:
    """Also in a second backward pass over the same graph."""
    gradients = []
    for choice in (None, Recompute(keep="matmul"), Recompute(keep=torch.ops.aten.mm)):
        torch.manual_seed(2)
        model = nn.Sequential(InPlace(), InPlace())
        apply_activation_checkpointing(model, choice)
        loss = model(torch.randn(2, 3, 4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert str(gradients[1]) == str(gradients[0]) == str(gradients[2])


class Growing(nn.Module):
    """Computes more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.eye(4)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        for _ in range(self.times):
            x.detach().mm(self.weight.detach())
        return x.mm(self.weight).sin()


def test_a_module_that_runs_other_operations_in_backward_is_refused() -> None:
    model = nn.Sequential(Growing())
    apply_activation_checkpointing(model, Recompute(Growing, keep="matmul"))
    loss = model(torch.ones(4, 4)).sum()
    with pytest.raises(UserCodeError, match="more often than forward, 3 time"):
        loss.backward()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("net.*", ["net.0", "net.1", "net.2", "net.3"]),
        (["net.1", "3"], ["net.1", "net.3", "net.0.3", "net.1.3", "net.2.3", "net.3.3"]),
        (Recompute("net.*", share=0.5), ["net.1", "net.3"]),
        (Recompute("net.*", share=0.25), ["net.3"]),
        (Recompute("net.*", share=0.01), ["net.3"]),
    ],
)
def test_names_and_shares_choose_modules(choice: Any, names: list[str]) -> None:
    model = nn.ModuleDict({"net": blocks()})
    chosen = apply_activation_checkpointing(model, choice)
    found = {name for name, part in model.named_modules() if part in chosen}
    assert found == set(names)


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.layers(batch)
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(choice: Any, **options: Any) -> Trainer:
    options = {"devices": 1, "logger": False, **options}
    return Trainer(accelerator="cpu", activation_checkpointing=choice, **options)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (5, "activation_checkpointing=5: expected True, names of modules such as"),
        ((), r"activation_checkpointing=\(\): expected True"),
        ([nn.Linear, "layers.*"], "expected True, names of modules such as 'layers.*', a class"),
    ],
)
def test_other_forms_are_refused_before_processes_start(choice: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(choice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": False}, r"Recompute\(modules=False\): expected True, names or classes"),
        ({"modules": 3}, "modules=3: expected True, names of modules"),
        ({"keep": "convolution"}, r"Recompute\(keep='convolution'\): expected 'matmul'"),
        ({"keep": ["mm"]}, r"Recompute\(keep=\['mm'\]\): expected 'matmul', operations such as"),
        ({"share": 0}, r"Recompute\(share=0\): expected a number above 0, and at most 1"),
        ({"share": True}, r"Recompute\(share=True\): expected a number"),
    ],
)
def test_recompute_refuses_other_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Recompute(**arguments)


def test_two_choices_are_refused() -> None:
    strategy = FSDPStrategy(activation_checkpointing=nn.Linear)
    with pytest.raises(
        ConfigurationError, match="was passed to the Trainer or in step_options, and"
    ):
        trainer(True, strategy=strategy, devices=2)


def test_a_name_of_no_module_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'layer.*', which names no module: .*'layers.*'"):
        trainer("layer.*", max_steps=1).fit(Net(), torch.ones(4, 8))


def test_lite_takes_it_in_its_step_options() -> None:
    lite = Lite(accelerator="cpu", step_options=StepOptions(activation_checkpointing=True))
    model = lite.setup(blocks())
    loss = model(torch.ones(4, 8)).sum()
    with Counted() as counted:
        lite.backward(loss)
    assert counted.products == 4
    assert counted.draws == 4


class Stacked(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(8, 1)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.head(self.body(batch)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's compiler
def test_layers_that_are_repeated_are_compiled_within_a_module() -> None:
    def losses(**options: Any) -> Tensor:
        model = Stacked()
        data: Any = torch.ones(8, 8)
        trainer = Trainer(
            **{"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, **options},
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(model, DataLoader(data, 2))
        return torch.stack(model.losses)

    both = losses(activation_checkpointing=True, compile={"backend": "aot_eager"})
    torch.testing.assert_close(both, losses())
