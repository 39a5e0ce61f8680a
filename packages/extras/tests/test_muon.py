"""Muon: the numbers of torch's optimizers, on one process and under strategies of four ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn

from stratagem.checkpoint import DirectoryCheckpointIO
from stratagem.errors import ConfigurationError
from stratagem_extras.optimizers import Muon, muon
from stratagem_extras.optimizers.exchange import balanced
from stratagem_extras.parameter_groups import parameter_groups

SCRIPTS = Path(__file__).parent / "scripts"
NAMES: Any = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "muon_strategies.py")))


def expected_weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Return the weights of torch's Muon in float32 and AdamW after four steps."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    model = NAMES.Net()
    experts = [nn.Parameter(one.clone()) for one in model.experts.detach()]
    hidden = [model.layers["up"].weight, model.layers["down"].weight, model.square.weight]
    ids = {*map(id, hidden), id(model.experts)}
    optimizers = [
        torch.optim.Muon(hidden, lr=0.02),
        torch.optim.Muon(experts, lr=0.01),
        torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in ids], lr=0.01, weight_decay=0.1
        ),
    ]
    for inputs, labels in NAMES.batches(0, 4):
        model.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        for expert, of_expert in zip(experts, model.experts.grad, strict=True):
            expert.grad = of_expert.clone()
        for optimizer in optimizers:
            optimizer.step()
        model.experts.data.copy_(torch.stack([e.detach() for e in experts]))
    return {name: value.clone() for name, value in model.state_dict().items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        state: Any = DirectoryCheckpointIO().load_checkpoint(path)
    else:
        state = torch.load(path, weights_only=True)
    model: dict[str, torch.Tensor] = state["model"]
    return model


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp", "hybrid", "mesh", "tensor"])
def test_four_ranks_have_the_numbers_of_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for strategy in ("single_device", name):
        run_file(SCRIPTS / "muon_strategies.py", str(tmp_path), strategy, folder=tmp_path)
    expected = expected_weights(monkeypatch)
    for form in ("single_file", "directory"):
        alone = read(tmp_path / f"single_device.{form}.end")
        assert farthest(alone, expected) < 1e-6
        trained = read(tmp_path / f"{name}.{form}.end")
        assert farthest(trained, expected) < 1e-6
        again = read(tmp_path / f"{name}.{form}.from.{name}")
        # DDP arranges its buckets anew after its first step, and sums in another order.
        assert farthest(again, trained) <= (1e-6 if name.startswith("ddp") else 0.0)
        assert farthest(read(tmp_path / f"{name}.{form}.from.single_device"), expected) < 1e-6


def test_deepspeed_refuses_it_by_name(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    shown = run_file(
        SCRIPTS / "muon_strategies.py", str(tmp_path), "deepspeed", folder=tmp_path
    ).stdout
    assert "Muon steps whole tensors, and DeepSpeed steps flat slices of them" in shown


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}],
    ids=["default", "plain", "matched"],
)
def test_one_process_has_the_bits_of_torchs_muon(
    shape: tuple[int, int], options: dict[str, Any]
) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=draw))
    other = nn.Parameter(weight.detach().clone())
    mine: Any = Muon([{"params": [weight], "muon": True}], lr=0.02, **options)
    torchs: Any = torch.optim.Muon([other], lr=0.02, **options)
    for _ in range(3):
        gradient = torch.randn(shape, generator=draw)
        weight.grad, other.grad = gradient, gradient.clone()
        mine.step()
        torchs.step()
    assert torch.equal(weight, other)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 8, bias=False)
        self.kernel = nn.Conv1d(4, 4, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def test_a_model_gives_embeddings_heads_and_norms_to_adamw() -> None:
    model = Tied()
    model.hidden.bias.requires_grad_(False)
    hidden, others = Muon(model).param_groups
    assert hidden["names"] == ["hidden.weight"]
    assert others["names"] == [
        "words.weight", "norm.weight", "norm.bias", "out.weight", "kernel.weight", "kernel.bias",
    ]  # fmt: skip


def test_options_of_a_group_hold_for_both_of_its_parts() -> None:
    groups = parameter_groups(Tied(), {"hidden.*": {"lr": 0.5}})
    optimizer = Muon(groups, lr=0.1, adamw_lr=0.2, adamw_names=("words*", "out*"))
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates["hidden.weight"] == rates["hidden.bias"] == 0.5
    assert rates["norm.weight"] == 0.2


def test_unfrozen_layers_are_divided_as_the_others_are() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[:2].requires_grad_(False)
    optimizer = Muon(model, lr=0.02, adamw_lr=1e-3)
    model.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[:2].parameters()), "lr": 1e-4})
    assert [(g["muon"], g["names"], g["lr"]) for g in optimizer.param_groups[2:]] == [
        (True, ["1.weight"], 1e-4),
        (False, ["0.weight", "1.bias"], 1e-4),
    ]
    with pytest.raises(ConfigurationError, match="Muon received a group without names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_owners_have_about_the_same_work() -> None:
    owners = balanced([10, 1, 1, 1, 9, 8, 2], 3)
    works = [10, 1, 1, 1, 9, 8, 2]
    loads = [sum(w for w, o in zip(works, owners, strict=True) if o == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Muon([nn.Parameter(torch.ones(2, 2))]),
            "received parameters without names: names tell embeddings and heads from hidden layers",
        ),
        (lambda: Muon([]), "received no parameters"),
        (
            lambda: Muon([{"params": [nn.Parameter(torch.ones(2, 2))]}]),
            'received a group without names: expected "names"',
        ),
        (
            lambda: Muon([{"params": [nn.Parameter(torch.ones(2))], "muon": True}]),
            'of shape (2,) and torch.float32 in a group with "muon": True; expected a real matrix',
        ),
        (lambda: Muon(Tied(), lr=-1), "Muon(lr=-1): expected a number from 0 on"),
        (lambda: Muon(Tied(), ns_steps=100), "Muon(ns_steps=100): expected 0 to 99 steps"),
        (
            lambda: Muon(Tied(), adjust_lr_fn="other"),
            "Muon(adjust_lr_fn='other'): expected 'original' or 'match_rms_adamw'",
        ),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        call()


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="expected a dense, real one"):
        Muon(model).step()


def test_a_matrix_and_a_batch_of_one_are_orthogonalized_alike() -> None:
    matrix = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    options: Any = ((3.4445, -4.775, 2.0315), 5, 1e-7)
    alone = muon.orthogonalize(matrix, *options)
    torch.testing.assert_close(muon.orthogonalize(matrix[None], *options)[0], alone)


def test_ranks_with_other_gradients_or_matrices_are_refused(tmp_path: Path) -> None:
    shown = run_file(SCRIPTS / "muon_refusals.py", folder=tmp_path).stdout
    # Noted where another rank has stepped the matrix, before the step that follows.
    assert "step 2" in shown
    assert "and the gradients of the ranks differ: expected gradients that are averaged" in shown
    assert "Muon expected the same matrices on each rank, in one order and with gradients" in shown
    assert "Muon(distributed=False): the parameters are sharded over ranks" in shown
