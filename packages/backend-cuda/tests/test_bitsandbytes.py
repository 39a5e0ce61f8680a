"""bitsandbytes on its CPU kernels: what is quantised, what trains, what is saved and loaded."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.errors import CheckpointMismatchError, ConfigurationError, UserCodeError
from stratagem.strategies import FSDPStrategy
from stratagem_cuda.precision import BitsandbytesPrecision

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
FROZEN = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
ERROR = {"nf4": 0.12, "nf4-dq": 0.12, "fp4": 0.18, "fp4-dq": 0.18, "int8": 0.02}
"""Measured relative errors of a product with normal weights are 0.09, 0.13 and 0.01."""


class Adapted(nn.Module):
    """A frozen layer with an adapter (LoRA) beside it, a norm, and a head."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        nn.init.zeros_(self.up.weight)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 8)
        self.shared: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.base(inputs) + self.up(self.down(inputs)))
        return self.head(hidden)  # type: ignore[no-any-return]


ADAPTER = {"down", "up", "head"}


def launched(mode: str, **options: Any) -> Lite:
    options.setdefault("ignore_modules", ADAPTER)
    lite = Lite(accelerator="cpu", plugins=BitsandbytesPrecision(mode, **options))
    lite.launch()
    return lite


def inputs() -> Tensor:
    return torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(2))


@needs_bitsandbytes
@pytest.mark.parametrize("mode", FROZEN)
def test_quantised_linear_approximates_the_exact_product(mode: str) -> None:
    lite = launched(mode, ignore_modules=())
    layer = nn.Linear(64, 96)
    exact = nn.functional.linear(inputs(), layer.weight, layer.bias).detach()
    model = lite.setup(layer)
    model.eval()
    with torch.no_grad():
        evaluated = model(inputs())
    model.train()
    trained = model(inputs().requires_grad_())
    for output in (evaluated, trained):
        assert output.shape == (6, 3, 96)
        assert output.dtype is torch.float32
        assert 0 < (output - exact).norm() / exact.norm() < ERROR[mode]
    assert layer.weight.element_size() * layer.weight.numel() <= 96 * 64
    assert not layer.weight.requires_grad
    assert f"mode={mode}" in repr(layer)


@needs_bitsandbytes
def test_only_linear_layers_that_are_not_ignored_are_quantised() -> None:
    net = Adapted()
    net.shared = net.head.weight
    launched("nf4", ignore_modules={"down", "up"}).setup(net)
    found = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    assert found["base.weight"] is torch.uint8
    # What shares its weight, and all else, is in the dtype of the computation.
    rest = ("down.weight", "norm.weight", "norm.bias", "base.bias", "head.weight")
    assert {found[name] for name in rest} == {torch.bfloat16}
    assert found["base.weight_nf4_absmax"] is torch.float32
    # Scales keep their dtype whatever the model is converted to.
    net.half()
    assert net.base.state_dict()["weight_nf4_absmax"].dtype is torch.float32


@needs_bitsandbytes
@pytest.mark.parametrize("mode", [*FROZEN, "int8-training"])
def test_adapters_train_and_frozen_weights_stay(mode: str) -> None:
    lite = launched(mode)
    net = Adapted()
    model, optimizer = lite.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    losses = []
    for _ in range(8):
        loss = mse_loss(model(inputs()), torch.ones(6, 3, 8))
        losses.append(loss.item())
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    changed = {n for n, value in net.state_dict().items() if not torch.equal(value, before[n])}
    assert losses[-1] < 0.5 * losses[0]
    assert {"up.weight", "head.weight", "norm.bias"} <= changed
    assert ("base.weight" in changed) == (mode == "int8-training")
    assert not any("absmax" in name or "scale" in name for name in changed)


@needs_bitsandbytes
def test_weights_that_train_are_evaluated_and_differentiated_in_evaluation_mode() -> None:
    lite = launched("int8-training")
    net = Adapted()
    exact = net(inputs()).detach()
    model = lite.setup(net)
    model.eval()
    with torch.no_grad():
        evaluated = model(inputs())
    with torch.inference_mode():
        assert torch.equal(model(inputs()), evaluated)
    assert 0 < (evaluated - exact).norm() / exact.norm() < 0.03
    lite.backward(model(inputs()).square().mean())  # as for the gradient of an input
    assert net.base.weight.grad is not None
    assert net.base.weight.grad.isfinite().all()


@needs_bitsandbytes
def test_a_quantised_layer_is_of_a_kind() -> None:
    from stratagem_cuda.precision.bitsandbytes import MODES
    from stratagem_cuda.precision.quantized_linear import KINDS, QuantizedLinear

    assert set(KINDS) == set(MODES)
    assert inspect.isabstract(QuantizedLinear)
    assert not any(map(inspect.isabstract, KINDS.values()))


@needs_bitsandbytes
@pytest.mark.parametrize("mode", [*FROZEN, "int8-training"])
def test_quantised_weights_round_trip_bit_for_bit(mode: str, tmp_path: Path) -> None:
    lite = launched(mode)
    model = lite.setup(Adapted())
    lite.save(tmp_path / "model.ckpt", {"model": model})
    other = lite.setup(Adapted(seed=9))
    with torch.no_grad():
        assert not torch.equal(other(inputs()), model(inputs()))
        lite.load(tmp_path / "model.ckpt", {"model": other})
        assert torch.equal(other(inputs()), model(inputs()))


@needs_bitsandbytes
def test_a_checkpoint_of_another_mode_or_precision_is_refused(tmp_path: Path) -> None:
    nf4, fp4, int8 = launched("nf4"), launched("fp4"), launched("int8")
    plain = Lite(accelerator="cpu")
    plain.launch()
    models = {lite: lite.setup(Adapted()) for lite in (nf4, fp4, int8, plain)}
    for name, lite in {"nf4": nf4, "fp4": fp4, "int8": int8, "plain": plain}.items():
        lite.save(tmp_path / name, {"model": models[lite]})

    def refused(lite: Lite, name: str, *, strict: bool = True) -> str:
        with pytest.raises((CheckpointMismatchError, RuntimeError)) as caught:
            lite.load(tmp_path / name, {"model": models[lite]}, strict=strict)
        return str(caught.value)

    assert "it lacks base.weight_fp4_absmax" in refused(fp4, "nf4")
    assert "base.weight_nf4_absmax" in refused(plain, "nf4")
    assert "base.weight (64, 64) (the model has (2048, 1))" in refused(nf4, "plain")
    for strict in (True, False):
        for name in ("nf4", "int8"):
            assert "(the model has (64, 64))" in refused(plain, name, strict=strict)
        assert "(the model has (4096, 1))" in refused(int8, "plain", strict=strict)
    # Names need not match then, and the bits of another mode would be read as this one's.
    assert (
        "base.weight is quantised here (fp4), and not in what is loaded, which lacks "
        "base.weight_fp4_absmax: load it before the model is set up"
    ) in refused(fp4, "nf4", strict=False)


@needs_bitsandbytes
def test_a_model_is_built_in_the_dtype_and_a_plain_checkpoint_loaded_before_set_up() -> None:
    lite = launched("nf4")
    with lite.init_module():
        net = Adapted(seed=3)
    assert net.base.weight.dtype is torch.bfloat16
    pretrained = Adapted(seed=4)
    net.load_state_dict(pretrained.state_dict())
    exact = pretrained.base(inputs()).detach()
    lite.setup(net)
    with torch.no_grad():
        output = net.base(inputs().bfloat16()).float()
    assert (output - exact).norm() / exact.norm() < ERROR["nf4"]


class AdaptedByPEFT(nn.Module):
    """What PEFT makes of a layer: the frozen one, and adapters in attributes that it names."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"on": nn.Linear(64, 4), "off": nn.Linear(64, 4)})
        self.lora_B = nn.ModuleDict({"on": nn.Linear(4, 64), "off": nn.Linear(4, 64)})
        for part in (self.lora_A, self.lora_B):
            part["off"].requires_grad_(False)


@needs_bitsandbytes
@pytest.mark.parametrize("mode", ["nf4", "int8", "int8-training"])
def test_adapters_of_peft_and_layers_that_train_beside_frozen_ones_are_not_quantised(
    mode: str,
) -> None:
    net = nn.Sequential(AdaptedByPEFT(), nn.Linear(64, 8))
    trains = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    launched(mode, ignore_modules=()).setup(net)
    # This mode freezes nothing, so it takes the head as well.
    converted = {"0.base_layer"} | ({"1"} if mode == "int8-training" else set())
    assert {name for name, part in net.named_modules() if hasattr(part, "mode")} == converted
    assert {name for name, parameter in net.named_parameters() if parameter.requires_grad} == trains


@needs_bitsandbytes
def test_a_model_of_peft_trains_its_adapters_alone() -> None:
    peft = pytest.importorskip("peft")
    module = Tuned()
    lora = peft.LoraConfig(target_modules=["base"], modules_to_save=["head"])
    module.net = peft.get_peft_model(Adapted(), lora)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    quantised = tuner("nf4", max_steps=3)
    quantised.fit(module, batches())
    changed = {
        name.removeprefix("net.base_model.model.")
        for name, value in module.state_dict().items()
        if name in before and value.shape == before[name].shape
        if not torch.equal(value.float(), before[name].bfloat16().float())
    }
    assert changed == {
        "base.lora_A.default.weight",
        "base.lora_B.default.weight",
        "head.modules_to_save.default.weight",
        "head.modules_to_save.default.bias",
    }


@needs_bitsandbytes
def test_a_fit_in_which_all_is_frozen_is_refused_before_its_first_step() -> None:
    module = Tuned()
    module.net = nn.Linear(64, 8, bias=False)  # type: ignore[assignment]
    frozen_by_the_precision = tuner("nf4", max_steps=3)
    module.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
        module.parameters()
    )
    with pytest.raises(UserCodeError) as caught:
        frozen_by_the_precision.fit(module, batches())
    assert str(caught.value) == (
        "no parameter of Tuned trains: requires_grad is False for each. Leave some to train. "
        "Precisions such as 'nf4' freeze the layers that they quantise: add an adapter, name the "
        "layers to train in ignore_modules, or freeze the others before, so that only those are "
        "quantised"
    )
    assert module.losses == []


def batches() -> DataLoader[Any]:
    inputs: Any = torch.split(torch.randn(24, 64, generator=torch.Generator().manual_seed(6)), 4)
    return DataLoader(inputs, batch_size=None)


def tuner(mode: str, ignore_modules: Any = (), **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        plugins=BitsandbytesPrecision(mode, ignore_modules=ignore_modules),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )


class Tuned(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Adapted()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # Both in float32: before torch 2.13, mse_loss has no backward of two dtypes.
        targets = torch.ones(*batch.shape[:-1], 8, dtype=torch.float32)
        loss = mse_loss(self.net(batch).float(), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(max_steps: int, ckpt_path: Path | None = None) -> tuple[Trainer, Tuned]:
    torch.manual_seed(5)
    module = Tuned()
    trainer = tuner("nf4", {f"net.{name}" for name in ADAPTER}, max_steps=max_steps)
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return trainer, module


@needs_bitsandbytes
def test_the_trainer_tunes_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    _, whole = fit(6)
    trainer, _ = fit(3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, rest = fit(6, tmp_path / "half.ckpt")
    assert rest.losses == whole.losses[3:]
    assert all(torch.equal(v, whole.state_dict()[n]) for n, v in rest.state_dict().items())


@needs_bitsandbytes
def test_bitsandbytes_warns_of_a_model_without_linear_layers() -> None:
    with pytest.warns(UserWarning, match=r"'int8' has converted nothing.*has no torch\.nn\.Linear"):
        launched("int8", ignore_modules=()).setup(nn.Sequential(nn.LayerNorm(4)))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mode='int4'\): expected one of 'nf4', 'nf4-dq'"):
        BitsandbytesPrecision("int4")
    with pytest.raises(ConfigurationError, match=r"computes in torch\.float16 only; leave dtype"):
        BitsandbytesPrecision("int8", dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="expected a floating-point dtype such as torch"):
        BitsandbytesPrecision("nf4", dtype=torch.int8)


@needs_bitsandbytes
def test_gathered_weights_are_not_converted_to_another_dtype() -> None:
    strategy = FSDPStrategy(mixed_precision=torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"mixed_precision=.* and precision='nf4' as well"):
        Trainer(accelerator="cpu", strategy=strategy, devices=2, precision="nf4", logger=False)


@needs_bitsandbytes
def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        net = Adapted()
    with pytest.raises(ConfigurationError, match="a linear layer of the model is on the meta devi"):
        BitsandbytesPrecision("nf4").convert_module(net)


@needs_bitsandbytes
def test_a_strategy_that_takes_few_precisions_names_them() -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(
        ConfigurationError, match=r"takes the precisions .*, received precision='nf"
    ):
        Trainer(accelerator="cpu", strategy="deepspeed_stage_3", devices=2, precision="nf4")
