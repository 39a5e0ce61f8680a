"""float8 by torchao, whose emulation rounds as a GPU does and multiplies in full precision."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer
from stratagem.discovery import Availability
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.plan.plan import RunRequest
from stratagem.plan.resolution import resolve
from stratagem_cuda import probe
from stratagem_cuda.accelerator import CUDAAccelerator
from stratagem_cuda.precision import Float8Precision, MXFP8Precision, compute_capability
from stratagem_cuda.precision.requirement import (
    BITSANDBYTES,
    TORCHAO,
    TORCHAO_MX,
    TRANSFORMER_ENGINE,
)

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
needs_mxfp8 = pytest.mark.skipif(
    bool(TORCHAO_MX.why_not("mxfp8")), reason="torchao is not installed, or too old for MXFP8"
)
KINDS = [Float8Precision, pytest.param(MXFP8Precision, marks=needs_mxfp8)]


class Classifier(Module):
    """Three layers on fixed data; the last one (of 5) cannot be in float8 or MXFP8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(32, 64)
        self.middle = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32))
        self.last = nn.Linear(32, 5)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.middle(torch.relu(self.first(inputs)))
        return self.last(torch.relu(hidden))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        loss = cross_entropy(self(inputs), classes)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(70, 32, generator=generator)  # the last batch has 6
    classes = (inputs @ torch.randn(32, 5, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(inputs, classes), batch_size=16)


def fit(
    precision: Any, *, ckpt_path: Path | None = None, epochs: int = 6
) -> tuple[Trainer, Classifier]:
    module = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        precision=precision if isinstance(precision, str) else "32-true",
        plugins=None if isinstance(precision, str) else precision,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer, module


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_near_full_precision(kind: Any) -> None:
    _, exact = fit("32-true")
    _, half = fit("bf16-mixed")
    _, rounded = fit(kind(emulate=True))
    differences = [abs(a - b) for a, b in zip(exact.losses, rounded.losses, strict=True)]
    # E4M3 has 3 bits of mantissa: a product is off by up to 6 %, and a sum of 64 by less.
    assert 0 < max(differences) < 0.1
    assert max(abs(a - b) for a, b in zip(exact.losses, half.losses, strict=True)) < 0.1
    assert rounded.losses[-1] < 0.5 * rounded.losses[0]


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_plain_and_load_into_other_precisions(kind: Any, tmp_path: Path) -> None:
    trainer, module = fit(kind(emulate=True), epochs=1)
    trainer.save_checkpoint(tmp_path / "float8.ckpt")
    weights = torch.load(tmp_path / "float8.ckpt", weights_only=True)["state_dict"]
    assert weights.keys() == Classifier().state_dict().keys()
    assert all(type(w) is Tensor and w.dtype is torch.float32 for w in weights.values())
    assert all(torch.equal(w, module.state_dict()[name]) for name, w in weights.items())
    _, plain = fit("32-true", ckpt_path=tmp_path / "float8.ckpt", epochs=2)
    trainer, _ = fit("32-true", epochs=1)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    _, rounded = fit(kind(emulate=True), ckpt_path=tmp_path / "plain.ckpt", epochs=2)
    assert len(plain.losses) == len(rounded.losses) == 5
    _, whole = fit(kind(emulate=True), epochs=2)
    _, rest = fit(kind(emulate=True), ckpt_path=tmp_path / "float8.ckpt", epochs=2)
    assert rest.losses == whole.losses[5:]


@needs_torchao
def test_layers_stay_themselves() -> None:
    lite = Lite(accelerator="cpu", plugins=Float8Precision(emulate=True, ignore_modules="1"))
    lite.launch()
    first, inner, last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    net = nn.Sequential(first, nn.Sequential(inner), last)
    weight, seen = first.weight, []
    first.register_forward_hook(lambda *_: seen.append(1))
    model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    output = model(torch.randn(4, 16))
    assert output.dtype is torch.float32
    lite.backward(output.square().mean())
    before = weight.clone()
    optimizer.step()
    assert net[0] is first
    assert first.weight is weight
    assert seen == [1]
    assert not torch.equal(before, weight)
    kinds = [type(part).__name__ for part in (first, inner, last)]
    assert kinds == ["Float8Linear", "Linear", "Linear"]
    # Converted before, it is left as it is.
    assert type(lite.setup(net).module[0]).__name__ == "Float8Linear"


@needs_torchao
def test_a_model_may_be_one_layer() -> None:
    lite = Lite(accelerator="cpu", plugins=Float8Precision(emulate=True))
    lite.launch()
    alone = nn.Linear(16, 16)
    assert lite.setup(alone)(torch.randn(4, 16)).shape == (4, 16)
    assert type(alone).__name__ == "Float8Linear"


@needs_torchao
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_the_recipes_compute(recipe: str) -> None:
    _, rounded = fit(Float8Precision(recipe=recipe, emulate=True), epochs=2)
    assert rounded.losses[-1] < rounded.losses[0]


@needs_torchao
def test_float8_warns_of_a_model_without_suitable_layers() -> None:
    lite = Lite(accelerator="cpu", plugins=Float8Precision(emulate=True))
    lite.launch()
    with pytest.warns(UserWarning, match="precision='float8' has converted nothing.*multiples of"):
        lite.setup(nn.Sequential(nn.Linear(16, 3), nn.ReLU()))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"recipe='fast'\): expected one of 'tensorwise', "
    ):
        Float8Precision(recipe="fast")
    with pytest.raises(ConfigurationError, match="expected 'float8'"):
        Float8Precision("fp8")
    with pytest.raises(ConfigurationError, match="ignore_modules=5: expected names of modules"):
        Float8Precision(ignore_modules=5)  # type: ignore[arg-type]


@needs_torchao
def test_a_module_that_is_not_there_cannot_be_ignored() -> None:
    lite = Lite(accelerator="cpu", plugins=Float8Precision(emulate=True, ignore_modules={"head"}))
    lite.launch()
    with pytest.raises(ConfigurationError, match="names 'head', which the model does not have: ex"):
        lite.setup(nn.Sequential(nn.Linear(16, 16)))


# -- what is refused before a process starts


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of distributions that metadata is made to say."""
    versions = {"torchao": "0.18.0", "bitsandbytes": "0.50.2", "transformer-engine": "2.20.2"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("precision", "package"),
    [
        ("float8", "torchao"),
        ("mxfp8", "torchao"),
        ("nf4", "bitsandbytes"),
        ("int8-training", "bitsandbytes"),
    ],
)
def test_missing_precision_library_names_the_pip_command(
    precision: str, package: str, installed: dict[str, str]
) -> None:
    del installed[package]
    with pytest.raises(ConfigurationError) as planned:
        resolve(RunRequest(accelerator="cpu", precision=precision), get_registry())
    with pytest.raises(ConfigurationError) as caught:
        Trainer(accelerator="cpu", precision=precision, logger=False)
    assert str(planned.value) == str(caught.value)
    assert f"precision={precision!r} needs {package}>=" in str(caught.value)
    extra = precision if package == "torchao" else package
    assert f"is not installed: pip install 'stratagem-backend-cuda[{extra}]'" in str(caught.value)


@pytest.mark.parametrize("version", ["0.9.0", "1.0.0"])
def test_float8_refuses_another_torchao_version(version: str, installed: dict[str, str]) -> None:
    installed["torchao"] = version
    with pytest.raises(ConfigurationError) as caught:
        Float8Precision().bind(CUDAAccelerator())
    assert str(caught.value) == (
        f"precision='float8' needs torchao>=0.13,<1, received torchao {version}: pip install "
        "'stratagem-backend-cuda[float8]' installs one that fits"
    )


def test_float8_refuses_torchao_for_another_torch(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["torch"] = "2.9.1"
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    with pytest.raises(ConfigurationError) as caught:
        Float8Precision(emulate=True).convert_module(nn.Linear(16, 16))
    assert str(caught.value) == (
        "precision='float8': torchao 0.18.0 cannot be imported beside torch 2.9.1 (import of "
        "torchao.float8 halted; None in sys.modules): upgrade torch, or pip install "
        "'torchao<0.18.0'"
    )


def test_the_extras_are_the_versions_that_are_looked_for() -> None:
    declared = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for needed in (TORCHAO, TORCHAO_MX, BITSANDBYTES, TRANSFORMER_ENGINE):
        name = needed.distribution
        what = name + ("[pytorch]" if name == "transformer-engine" else "") + needed.versions
        assert f'\n{needed.extra} = ["{what}"]\n' in declared


def test_a_device_without_float8_kernels_is_refused(installed: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(accelerator="cpu", precision="float8", logger=False)
    assert "precision='float8': the accelerator 'cpu' has no float8 kernels" in str(caught.value)
    # The same is said without torch (`stratagem explain`), and of an object.
    with pytest.raises(ConfigurationError) as planned:
        resolve(RunRequest(accelerator="cpu", precision="float8"), get_registry())
    with pytest.raises(ConfigurationError) as of_object:
        Trainer(accelerator="cpu", plugins=Float8Precision(), logger=False)
    assert str(caught.value) == str(planned.value) == str(of_object.value)
    assert "plugins=Float8Precision(emulate=True)" in str(caught.value)


@needs_torchao
def test_a_model_is_evaluated_with_the_trainers_defaults() -> None:
    class Validated(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    trainer = Trainer(
        accelerator="cpu",
        plugins=Float8Precision(emulate=True),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Validated()
    trainer.fit(module, data(), data())
    (results,) = trainer.validate(module, data(), verbose=False)
    assert results == {"val_loss": pytest.approx(trainer.callback_metrics["val_loss"].item())}


def play_nvml(monkeypatch: pytest.MonkeyPatch, gpus: dict[str, tuple[int, int]]) -> None:
    """Play the driver of a machine with these GPUs."""
    names = list(gpus)
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: SimpleNamespace(index=index),
        "nvmlDeviceGetName": lambda handle: names[handle.index],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle.index}",
        "nvmlDeviceGetMigMode": lambda handle: (0, 0),
        "nvmlDeviceGetComputeMode": lambda handle: pynvml.NVML_COMPUTEMODE_DEFAULT,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: gpus[names[handle.index]],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(probe, "driver_is_missing", lambda: False)


@pytest.mark.parametrize("precision", ["float8", "transformer-engine"])
def test_gpus_without_float8_are_refused(
    precision: str, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    play_nvml(monkeypatch, {"A100": (8, 0), "T4": (7, 5)})
    monkeypatch.setattr(CUDAAccelerator, "availability", lambda self: Availability(2, "played"))
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator=CUDAAccelerator(), devices=1, precision=precision)
    assert str(caught.value) == (
        f"precision={precision!r} needs a GPU with float8 arithmetic, of compute capability 8.9 or "
        "more (Ada, Hopper, Blackwell): A100 has 8.0, T4 has 7.5. Pass precision='bf16-mixed'"
    )


def test_a_gpu_with_float8_is_taken_and_the_others_found_on_their_ranks(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play_nvml(monkeypatch, {"A100": (8, 0), "H100": (9, 0)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    precision = Float8Precision()
    with pytest.raises(ConfigurationError, match=r"Blackwell\): A100 has 8.0"):
        precision.bind(CUDAAccelerator())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(CUDAAccelerator, "autocast", lambda self, dtype: torch.autocast("cpu"))
    precision.bind(CUDAAccelerator())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(ConfigurationError, match=r"A100 has 8\.0\. Pass precision='bf16-mixed'"):
        precision.convert_module(nn.Linear(16, 16))


# -- MXFP8


@needs_mxfp8
@pytest.mark.parametrize("recipe", ["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"])
@pytest.mark.parametrize("rows", [3, 64])
def test_mxfp8_products_and_gradients_are_near_bfloat16(recipe: str, rows: int) -> None:
    torch.manual_seed(1)
    lite = Lite(accelerator="cpu", plugins=MXFP8Precision(recipe=recipe, emulate=True))
    lite.launch()
    layer = nn.Linear(64, 96)
    exact = nn.Linear(64, 96)
    exact.load_state_dict(layer.state_dict())
    inputs = torch.randn(2, rows, 64)
    found: dict[str, list[Tensor]] = {}
    for name, model in {"mxfp8": lite.setup(layer), "exact": exact}.items():
        given = inputs.clone().requires_grad_()
        output = model(given)
        output.float().square().sum().backward()
        found[name] = [output, given.grad, *(weight.grad for weight in model.parameters())]  # type: ignore[list-item]
    assert type(layer).__name__ == "MXFP8Linear"
    for own, expected in zip(found["mxfp8"], found["exact"], strict=True):
        # E4M3 rounds by up to 6 %, in both factors.
        assert 0 < (own.float() - expected).norm() / expected.norm() < 0.1


@needs_mxfp8
def test_mxfp8_converts_layers_of_whole_blocks() -> None:
    lite = Lite(accelerator="cpu", plugins=MXFP8Precision(emulate=True, ignore_modules={"2"}))
    lite.launch()
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 48), nn.Linear(48, 32), nn.Linear(32, 32))
    lite.setup(net)
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["MXFP8Linear", "Linear", "Linear", "MXFP8Linear"]
    lite = Lite(accelerator="cpu", plugins=MXFP8Precision(emulate=True))
    lite.launch()
    with pytest.warns(UserWarning, match="'mxfp8' has converted nothing.*are multiples of 32"):
        lite.setup(nn.Sequential(nn.Linear(16, 16)))


def test_wrong_arguments_of_mxfp8_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"recipe='fast'\): expected one of 'mxfp8_rceil"):
        MXFP8Precision(recipe="fast")
    with pytest.raises(ConfigurationError, match="expected 'mxfp8'"):
        MXFP8Precision("nvfp4")


def test_mxfp8_needs_torchao_with_its_layers(installed: dict[str, str]) -> None:
    installed["torchao"] = "0.17.0"
    with pytest.raises(
        ConfigurationError, match=r"needs torchao>=0\.18,<1, received torchao 0\.17"
    ):
        MXFP8Precision(emulate=True).bind(CUDAAccelerator())


def test_a_device_without_mxfp8_kernels_is_refused(installed: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(accelerator="cpu", precision="mxfp8", logger=False)
    with pytest.raises(ConfigurationError) as planned:
        resolve(RunRequest(accelerator="cpu", precision="mxfp8"), get_registry())
    with pytest.raises(ConfigurationError) as of_object:
        Trainer(accelerator="cpu", plugins=MXFP8Precision(), logger=False)
    assert str(caught.value) == str(planned.value) == str(of_object.value)
    assert str(caught.value) == (
        "precision='mxfp8': the accelerator 'cpu' has no MXFP8 kernels: pass precision="
        "'bf16-mixed', or plugins=MXFP8Precision(emulate=True) to try the rounding, slowly"
    )


@pytest.mark.parametrize(
    ("name", "capability", "is_taken"),
    [("H200", (9, 0), False), ("B200", (10, 0), True), ("RTX 5090", (12, 0), False)],
)
def test_mxfp8_is_for_gpus_that_torchao_has_kernels_for(
    name: str,
    capability: tuple[int, int],
    is_taken: bool,
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    play_nvml(monkeypatch, {name: capability})
    monkeypatch.setattr(CUDAAccelerator, "autocast", lambda self, dtype: torch.autocast("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    if is_taken:
        MXFP8Precision().bind(CUDAAccelerator())
        return
    with pytest.raises(ConfigurationError) as caught:
        MXFP8Precision().bind(CUDAAccelerator())
    with pytest.raises(ConfigurationError) as on_rank:
        MXFP8Precision().convert_module(nn.Linear(32, 32))
    major, minor = capability
    assert str(caught.value) == str(on_rank.value)
    assert str(caught.value) == (
        "precision='mxfp8' needs a GPU of compute capability 10.0 or 10.3 (B200, GB200, B300), for "
        f"which torchao has kernels: {name} has {major}.{minor}. Pass precision='float8' on an Ada "
        "or Hopper GPU, 'bf16-mixed' on others, or plugins=MXFP8Precision(emulate=True)"
    )


def test_mxfp8_on_rocm_is_refused(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_capability, "_has_rocm", lambda: True)
    with pytest.raises(ConfigurationError, match="has kernels: this is a build of torch for ROCm"):
        MXFP8Precision().bind(CUDAAccelerator())
