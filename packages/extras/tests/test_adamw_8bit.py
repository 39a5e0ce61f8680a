"""AdamW8bit: its numbers beside AdamW and bitsandbytes, its memory, and its state on ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.checkpoint import DirectoryCheckpointIO
from stratagem.errors import ConfigurationError
from stratagem_extras.optimizers import AdamW8bit, adamw_8bit
from stratagem_extras.optimizers.blocks import Map, dynamic_map

SCRIPT = Path(__file__).parent / "scripts" / "adamw_8bit_strategies.py"


def read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        stored: Any = DirectoryCheckpointIO().load_checkpoint(path)
    else:
        stored = torch.load(path, weights_only=True)
    return dict(stored)


def bits(state: Any) -> Any:
    """Return a state with its tensors as bytes."""
    if isinstance(state, Tensor):
        return state.dtype, state.shape, state.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {name: bits(value) for name, value in state.items()}
    return state


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that the model and the optimizer of two checkpoints are equal."""
    for part in ("model", "optimizer"):
        assert bits(one[part]) == bits(other[part])


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp", "mesh", "tensor"])
def test_two_ranks_have_the_numbers_and_the_codes_of_one_process(name: str, tmp_path: Path) -> None:
    for arguments in (["single_device"], [name], ["alone", name]):
        run_file(SCRIPT, str(tmp_path), *arguments, folder=tmp_path)
    for form in ("single_file", "directory"):
        alone, trained = (read(tmp_path / f"{one}.{form}") for one in ("single_device", name))
        assert farthest(trained["losses"], alone["losses"]) < 1e-6
        entry = trained["optimizer"]["state"]["layers.down.weight"]
        assert entry["exp_avg_codes"].dtype == entry["exp_avg_sq_codes"].dtype == torch.uint8
        assert entry["exp_avg_codes"].shape == (128, 512)
        assert entry["exp_avg_scales"].shape == (128, 2)
        # From one process to two ranks, from two ranks to two, and from two to one.
        assert_same_bits(read(tmp_path / f"{name}.{form}.again.single_device"), alone)
        assert_same_bits(read(tmp_path / f"{name}.{form}.again.{name}"), trained)
        assert_same_bits(read(tmp_path / f"{name}.{form}.alone"), trained)
        end, resumed = (
            read(tmp_path / f"{name}.{form}.{kind}") for kind in ("end", f"from.{name}")
        )
        if name.startswith("ddp"):
            # DDP arranges its buckets anew after its first step, and sums in another order.
            assert farthest(resumed["losses"], end["losses"]) < 1e-6
        else:
            assert resumed["losses"] == end["losses"]
            assert_same_bits(resumed, end)
        end, resumed = (
            read(tmp_path / f"{kind}.{form}.{part}")
            for kind, part in (("single_device", "end"), (name, "from.single_device"))
        )
        assert farthest(resumed["losses"], end["losses"]) < 1e-6


def test_ranks_that_cut_blocks_are_refused_with_a_block_size_that_fits(tmp_path: Path) -> None:
    shown = run_file(SCRIPT, str(tmp_path), "cut", folder=tmp_path).stdout
    assert (
        "AdamW8bit received the parameter 'layers.down.weight' of shape (128, 512), whose last "
        "dimension is divided into 2 parts over ranks; expected parts of whole blocks of 512"
    ) in shown
    assert 'pass block_size=256 to a new run, or put it into a group with "min_8bit_size"' in shown
    assert '"min_8bit_size": 65537, which keeps its state in float32' in shown


def test_deepspeed_refuses_it_by_name(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    shown = run_file(SCRIPT, str(tmp_path), "deepspeed", folder=tmp_path).stdout
    assert "AdamW8bit steps whole tensors, and DeepSpeed steps flat slices of them" in shown


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    expected = functional.create_dynamic_map(signed)
    torch.testing.assert_close(torch.tensor(dynamic_map(signed)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_each_code_is_the_nearest_number_of_its_block(signed: bool) -> None:
    values = torch.randn(5, 19, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    values[1, 8:16] = 0.0
    coder = Map(signed, torch.float32, torch.device("cpu"))
    codes, scales = coder.encode(values, 8)
    assert scales.shape == (5, 3)
    numbers = torch.tensor(dynamic_map(signed))
    for row in range(5):
        for column in range(19):
            scale = scales[row, column // 8]
            assert scale == values[row, column // 8 * 8 : column // 8 * 8 + 8].abs().max()
            distances = (numbers * scale - values[row, column]).abs()
            assert distances[int(codes[row, column])] <= distances.min() + 1e-7
    decoded = coder.decode(codes, scales, 8)
    assert torch.equal(decoded[1, 8:16], torch.zeros(8))
    assert torch.equal(decoded, numbers[codes.int()] * scales.repeat_interleave(8, 1)[:, :19])


class Predictor(nn.Module):
    """A small transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(64, 64)
        self.places = nn.Parameter(torch.randn(16, 64) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.words(tokens) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(16)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def losses_of(make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> list[float]:
    """Return the losses of 50 steps on sequences that count by 1, 2 or 3."""
    model, losses = Predictor(), []
    optimizer = make(model.parameters())
    draw = torch.Generator().manual_seed(3)
    for _ in range(50):
        first = torch.randint(0, 64, (8, 1), generator=draw)
        tokens = (first + torch.arange(17) * torch.randint(1, 4, (8, 1), generator=draw)) % 64
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_are_as_near_to_adamw_as_those_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    expected = losses_of(lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert expected[-1] < expected[0] / 3
    own = farthest(losses_of(lambda p: AdamW8bit(p, lr=1e-3)), expected)
    theirs = farthest(losses_of(lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-3)), expected)
    assert 0 < own < 2 * theirs < 0.01


def stepped(parameter: nn.Parameter, steps: int = 3, **options: Any) -> AdamW8bit:
    """Return the optimizer of a parameter after some steps on drawn gradients."""
    optimizer = AdamW8bit([parameter], lr=1e-2, **options)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        gradient = torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return optimizer


def matrix(rows: int = 64, columns: int = 600, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    draw = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(rows, columns, generator=draw).to(dtype))


def test_the_state_has_two_bytes_for_an_element_and_a_scale_for_a_block() -> None:
    weight = matrix(1024, 1024)
    state = stepped(weight).state[weight]
    held = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))
    assert held == 2 * weight.numel() + 2 * 4 * 1024 * 4  # AdamW: 8 * weight.numel()
    small = nn.Parameter(torch.ones(4095, 1))
    assert set(stepped(small).state[small]) == {"step", "exp_avg", "exp_avg_sq"}
    vector = nn.Parameter(torch.ones(5000))
    assert set(stepped(vector).state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


def test_states_in_float32_give_the_bits_of_torchs_adamw() -> None:
    weight, other = matrix(), matrix()
    torchs = torch.optim.AdamW([other], lr=1e-2)
    stepped(weight, min_8bit_size=10**6)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        other.grad = torch.randn(other.shape, generator=draw)
        torchs.step()
    assert torch.equal(weight, other)


def test_a_closure_gives_the_loss() -> None:
    weight = matrix()

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before = float(weight.detach().square().sum())
    assert AdamW8bit([weight]).step(closure).item() == before
    assert float(weight.detach().square().sum()) < before


def test_parts_of_the_rows_give_the_bits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, in_parts = matrix(), matrix()
    one = stepped(at_once)
    monkeypatch.setattr(adamw_8bit, "_CHUNK", 7 * 600)
    other = stepped(in_parts)
    assert torch.equal(at_once, in_parts)
    torch.testing.assert_close(one.state[at_once], other.state[in_parts], rtol=0, atol=0)


def test_a_transposed_parameter_is_stepped_as_its_copy() -> None:
    copied = matrix()
    turned = nn.Parameter(copied.detach().T.contiguous().T)
    assert not turned.is_contiguous()
    stepped(copied)
    stepped(turned)
    assert torch.equal(copied, turned)


def test_a_bfloat16_parameter_has_the_states_of_float32_and_loads_them() -> None:
    weight, other = matrix(dtype=torch.bfloat16), matrix(dtype=torch.bfloat16)
    one = stepped(weight)
    assert one.state[weight]["exp_avg_scales"].dtype == torch.float32
    two = AdamW8bit([other], lr=1e-2)
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(two.state[other], one.state[weight], rtol=0, atol=0)
    assert two.state[other]["exp_avg_codes"].dtype == torch.uint8


def parameters() -> list[nn.Parameter]:
    return [matrix()]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AdamW8bit(parameters(), lr=-1), "AdamW8bit(lr=-1): expected a number from 0 on"),
        (lambda: AdamW8bit(parameters(), eps=-1), "AdamW8bit(eps=-1): expected a number from 0"),
        (
            lambda: AdamW8bit([{"params": parameters(), "weight_decay": -0.5}]),
            "AdamW8bit(weight_decay=-0.5): expected a number from 0 on",
        ),
        (
            lambda: AdamW8bit(parameters(), betas=(0.9, 1.0)),
            "AdamW8bit(betas=(0.9, 1.0)): expected two numbers from 0 to less than 1",
        ),
        (
            lambda: AdamW8bit(parameters(), block_size=0),
            "AdamW8bit(block_size=0): expected a whole number from 1 on",
        ),
        (
            lambda: AdamW8bit([{"params": parameters(), "min_8bit_size": 1.5}]),
            "AdamW8bit(min_8bit_size=1.5): expected a whole number from 0 on",
        ),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        call()


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    message = (
        "AdamW8bit received a gradient of torch.float32 and torch.sparse_coo; expected a dense"
    )
    with pytest.raises(ConfigurationError, match=message):
        AdamW8bit(model.parameters()).step()


def test_states_of_another_optimizer_or_shape_are_refused() -> None:
    weight = matrix()
    state = stepped(weight).state_dict()
    with pytest.raises(ConfigurationError, match=re.escape("exp_avg_codes of shape (64, 600)")):
        AdamW8bit([matrix(64, 500)]).load_state_dict(state)
    state["state"][0] = {"momentum_buffer": torch.zeros(64, 600)}
    with pytest.raises(ConfigurationError, match="received a state with momentum_buffer; expected"):
        AdamW8bit([weight]).load_state_dict(state)
