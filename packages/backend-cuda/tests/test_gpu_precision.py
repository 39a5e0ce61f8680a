"""On a GPU: float8, MXFP8, bitsandbytes, Transformer Engine and TF32 (`nox -s gpu`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem.errors import ConfigurationError
from stratagem.precision import Precision
from stratagem_cuda.accelerator import CUDAAccelerator
from stratagem_cuda.precision import (
    BitsandbytesPrecision,
    Float8Precision,
    MXFP8Precision,
    TransformerEnginePrecision,
)
from stratagem_cuda.precision.compute_capability import FLOAT8, MXFP8, visible_capabilities
from stratagem_cuda.precision.requirement import TORCHAO_MX

pytestmark = [
    pytest.mark.gpu,
    # torchao's own
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence:SyntaxWarning"),
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),
]


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package)
    return pytest.mark.skipif(found is None, reason=f"{package} is not installed")


def skip_without_float8() -> None:
    capability = torch.cuda.get_device_capability()
    if capability < FLOAT8:
        pytest.skip(f"this GPU has compute capability {capability}, and float8 begins with 8.9")


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 64)
    )


def batches() -> list[Tensor]:
    inputs = torch.randn(168, 64, generator=torch.Generator().manual_seed(2))
    return [*torch.split(inputs, 32)]  # the last one has 8


def launched(precision: str | Precision) -> Lite:
    given: dict[str, Any] = (
        {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    )
    lite = Lite(accelerator=CUDAAccelerator(), devices=1, **given)
    lite.launch()
    return lite


def losses(precision: str | Precision, path: Path | None = None, epochs: int = 5) -> list[float]:
    lite = launched(precision)
    net = network()
    model, optimizer = lite.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    found = []
    for _ in range(epochs):
        for batch in batches():
            inputs = lite.to_device(batch)
            loss = mse_loss(model(inputs), inputs)
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    if path is not None:
        lite.save(path, {"model": model})
    return found


def test_nvml_and_torch_agree_on_the_compute_capability() -> None:
    devices = range(torch.cuda.device_count())
    assert set(visible_capabilities().values()) == set(
        map(torch.cuda.get_device_capability, devices)
    )


@needs("torchao")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_trains_as_bfloat16_does(recipe: str, tmp_path: Path) -> None:
    skip_without_float8()
    if recipe != "tensorwise" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels that scale by rows begin with Hopper")
    half = losses("bf16-mixed")
    rounded = losses(Float8Precision(recipe=recipe), tmp_path / "float8.ckpt")
    assert rounded[-1] < 0.8 * rounded[0]
    # E4M3 has 3 bits of mantissa; the losses are around 1.
    assert max(abs(a - b) for a, b in zip(half, rounded, strict=True)) < 0.1
    weights = torch.load(tmp_path / "float8.ckpt", weights_only=True)["model"]
    assert weights.keys() == network().state_dict().keys()
    assert all(type(w) is Tensor and w.dtype is torch.float32 for w in weights.values())


@needs("torchao")
def test_float8_emulation_equals_the_kernels() -> None:
    skip_without_float8()
    outputs = []
    for emulate in (False, True):
        model = launched(Float8Precision(emulate=emulate)).setup(network())
        with torch.no_grad():
            outputs.append(model(batches()[0].cuda()))
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0.02)  # their sums differ in order


@needs("torchao")
def test_a_gpu_without_float8_is_refused() -> None:
    if torch.cuda.get_device_capability() >= FLOAT8:
        pytest.skip("this GPU has float8")
    with pytest.raises(ConfigurationError, match="needs a GPU with float8 arithmetic"):
        launched(Float8Precision()).setup(network())


needs_mxfp8 = pytest.mark.skipif(
    bool(TORCHAO_MX.why_not("mxfp8")), reason="torchao is not installed, or too old for MXFP8"
)


def skip_without_mxfp8() -> None:
    capability = torch.cuda.get_device_capability()
    if capability[0] != MXFP8:
        pytest.skip(f"this GPU has compute capability {capability}, and MXFP8 needs {MXFP8}")


@needs_mxfp8
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"])
def test_mxfp8_trains_as_bfloat16_does(recipe: str) -> None:
    skip_without_mxfp8()
    half, rounded = losses("bf16-mixed"), losses(MXFP8Precision(recipe=recipe))
    assert rounded[-1] < 0.8 * rounded[0]
    assert max(abs(a - b) for a, b in zip(half, rounded, strict=True)) < 0.1


@needs_mxfp8
def test_mxfp8_emulation_equals_the_kernels() -> None:
    skip_without_mxfp8()
    outputs = []
    for emulate in (False, True):
        model = launched(MXFP8Precision(emulate=emulate)).setup(network())
        with torch.no_grad():
            outputs.append(model(batches()[0].cuda()))
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0.02)  # their sums differ in order


@needs_mxfp8
def test_a_gpu_without_mxfp8_is_refused() -> None:
    if torch.cuda.get_device_capability()[0] == MXFP8:
        pytest.skip("this GPU has MXFP8")
    with pytest.raises(ConfigurationError, match="needs a GPU of compute capability 10"):
        launched(MXFP8Precision())


@needs("bitsandbytes")
@pytest.mark.parametrize(
    ("mode", "error"),
    [("nf4", 0.12), ("nf4-dq", 0.12), ("fp4", 0.18), ("fp4-dq", 0.18), ("int8", 0.02)],
)
def test_quantised_layers_compute_and_round_trip(mode: str, error: float, tmp_path: Path) -> None:
    lite = launched(BitsandbytesPrecision(mode))
    inputs = batches()[0]

    def layer(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        return nn.Linear(64, 128)

    exact = layer(3)(inputs).detach()
    model, other = lite.setup(layer(3)), lite.setup(layer(4))
    lite.save(tmp_path / "model.ckpt", {"model": model})
    lite.load(tmp_path / "model.ckpt", {"model": other})
    for train in (True, False):
        with torch.set_grad_enabled(train):
            moved = inputs.cuda().requires_grad_(train)
            output = model.train(train)(moved)
            assert torch.equal(other.train(train)(moved), output)
        difference = output.detach().cpu().float() - exact
        assert 0 < difference.norm() / exact.norm() < error
    # What a GPU has quantised, the processor computes with.
    cpu = Lite(accelerator="cpu", plugins=BitsandbytesPrecision(mode))
    cpu.launch()
    on_cpu = cpu.setup(layer(4))
    cpu.load(tmp_path / "model.ckpt", {"model": on_cpu})
    with torch.no_grad():
        there = on_cpu.eval()(inputs).float()
    assert (there - output.cpu().float()).norm() / exact.norm() < 0.02


@needs("bitsandbytes")
@pytest.mark.parametrize("mode", ["nf4-dq", "int8", "int8-training"])
def test_layers_beside_quantised_layers_train(mode: str) -> None:
    lite = launched(BitsandbytesPrecision(mode, ignore_modules={"4"}))
    net = network()
    parameters = [parameter for name, parameter in net.named_parameters() if name[0] in "14"]
    model, optimizer = lite.setup(net, torch.optim.SGD(parameters, lr=0.1))
    found = []
    for _ in range(10):
        inputs = batches()[0].cuda()
        loss = mse_loss(model(inputs), inputs)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0]


@needs("transformer_engine")
def test_transformer_engine_trains_as_bfloat16_does(tmp_path: Path) -> None:
    skip_without_float8()
    half = losses("bf16-true")
    rounded = losses(TransformerEnginePrecision(), tmp_path / "te.ckpt")
    assert rounded[-1] < 0.8 * rounded[0]
    assert max(abs(a - b) for a, b in zip(half, rounded, strict=True)) < 0.15
    weights = torch.load(tmp_path / "te.ckpt", weights_only=True)["model"]
    assert weights.keys() == network().state_dict().keys()
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    plain = launched("bf16-true")
    plain.load(tmp_path / "te.ckpt", {"model": plain.setup(network())})


@pytest.fixture
def _matmul_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "none"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("_matmul_precision")
@pytest.mark.skipif("NVIDIA_TF32_OVERRIDE" in os.environ, reason="the environment has decided")
def test_tf32_is_off_by_default() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    a, b = torch.randn(2, 256, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = a.double() @ b.double()
    accelerator, device = CUDAAccelerator(), torch.device("cuda", 0)
    (hint,) = accelerator.hints(device, torch.float32)
    assert "set_float32_matmul_precision('high')" in hint
    default = ((a @ b) - exact).abs().max()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert accelerator.hints(device, torch.float32) == ()
    assert ((a @ b) - exact).abs().max() > 10 * default
