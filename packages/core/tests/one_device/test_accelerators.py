"""What core asks an accelerator; tests/devices does it on a device that is not the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem import Lite, Module, Trainer
from stratagem.accelerators import CPUAccelerator, DeviceAccelerator
from stratagem.errors import ConfigurationError
from stratagem.interfaces.prepared_model import ParameterReferences
from stratagem.rng import rng_state, set_rng_state
from stratagem.strategies import DataParallelStrategy


class WithoutAutocast(CPUAccelerator):
    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any] | None:
        return None


class WithRNG(CPUAccelerator):
    """A CPU whose devices have RNGs of their own."""

    def __init__(self) -> None:
        self.states = {0: torch.tensor([1, 2], dtype=torch.uint8)}

    def device(self, index: int) -> torch.device:
        return torch.device("cpu", index)

    def rng_state(self, device: torch.device) -> Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        self.states[device.index] = state.clone()


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_mixed_precision_without_autocast_is_refused() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Lite(accelerator=WithoutAutocast(), devices=1, precision="bf16-mixed")
    assert str(refused.value) == (
        "precision='bf16-mixed': the accelerator 'cpu' cannot autocast to bfloat16, so the model "
        "would compute in float32: pass precision='32-true', or 'bf16-true' to keep parameters in "
        "bfloat16 too"
    )


def test_accelerator_autocast_has_device_type_and_dtype() -> None:
    context: Any = CPUAccelerator().autocast(torch.bfloat16)
    assert (context.device, context.fast_dtype) == ("cpu", torch.bfloat16)
    assert DeviceAccelerator("meta").autocast(torch.bfloat16) is None


def test_the_rng_state_of_a_device_is_saved_and_restored() -> None:
    accelerator, device = WithRNG(), torch.device("cpu", 0)
    state = rng_state(accelerator, device)
    assert state["device"][0] == "cpu"
    accelerator.states[0] = torch.zeros(2, dtype=torch.uint8)
    set_rng_state(state, accelerator, device)
    assert accelerator.states[0].tolist() == [1, 2]


def test_rng_states_of_another_type_of_device_are_passed_over() -> None:
    accelerator, device = WithRNG(), torch.device("cpu", 0)
    state = {**rng_state(), "device": ["other", torch.zeros(2, dtype=torch.uint8)]}
    set_rng_state(state, accelerator, device)
    set_rng_state({**rng_state(), "cuda": [torch.zeros(2)]}, accelerator, device)
    set_rng_state(rng_state(), accelerator, device)
    assert accelerator.states[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"benchmark": True}, [(True, False), "restored"]),
        ({"benchmark": True, "deterministic": True}, [(False, True), "restored"]),
        ({"deterministic": "warn"}, [(False, True), "restored"]),
        ({}, []),
    ],
)
def test_the_trainer_asks_for_kernels_and_restores_them(
    options: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    called: list[Any] = []

    class Kernels(CPUAccelerator):
        def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
            called.append((benchmark, deterministic))
            return lambda: called.append("restored")

    trainer = Trainer(
        accelerator=Kernels(), devices=1, max_steps=1, logger=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(Net(), [torch.ones(2, 2)])
    assert called == expected


def test_a_device_accelerator_needs_a_type() -> None:
    with pytest.raises(ConfigurationError) as refused:
        DeviceAccelerator()
    assert str(refused.value) == (
        "DeviceAccelerator(device_type=None): expected the type of device, as in "
        "DeviceAccelerator('xpu'), or a subclass with a name"
    )


def test_device_accelerator_without_devices_names_the_torch_version() -> None:
    accelerator = DeviceAccelerator("meta")
    assert (accelerator.name, accelerator.process_group_backend) == ("meta", "gloo")
    found = accelerator.availability()
    assert found.count == 0
    assert found.reason.startswith(f"torch {torch.__version__} finds ")


def test_a_device_accelerator_sets_up_devices_of_its_type_only() -> None:
    with pytest.raises(ConfigurationError) as refused:
        DeviceAccelerator("xpu").setup_device(torch.device("cpu"))
    assert str(refused.value) == "DeviceAccelerator expected a device xpu, received cpu"


def test_dp_on_the_cpu_is_refused() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        strategy = DataParallelStrategy()
    with pytest.raises(ConfigurationError) as refused:
        Lite(accelerator="cpu", strategy=strategy, devices=2)
    assert "received 2 devices of the accelerator 'cpu'" in str(refused.value)


def test_optimizers_and_ties_follow_parameters_that_are_replaced() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    references = ParameterReferences(model, [optimizer])
    for layer in (model[0], model[1]):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    references.restore(model)
    assert model[0].weight is model[1].weight
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)
    assert len(optimizer.state) == 3


def test_a_new_parameter_gets_the_attributes_and_hooks_of_the_former_one() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.decay = 0.5  # type: ignore[attr-defined]
    called: list[str] = []

    def doubled(grad: torch.Tensor) -> torch.Tensor:
        called.append("hook")
        return 2 * grad

    weight: Any = model.weight
    handle = weight.register_hook(doubled)
    weight.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    references = ParameterReferences(model, [])
    model.weight = nn.Parameter(torch.zeros(1, 2))
    references.restore(model)
    assert model.weight.decay == 0.5  # type: ignore[attr-defined]
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert (called, model.weight.grad.tolist()) == (["hook", "after"], [[2.0, 2.0]])
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert (called, model.weight.grad.tolist()) == (["hook", "after", "after"], [[3.0, 3.0]])


def test_optimizer_with_a_parameter_removed_by_conversion_is_refused() -> None:
    model = nn.Linear(2, 2)
    references = ParameterReferences(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    model.bias = None  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as refused:
        references.restore(model)
    assert str(refused.value) == (
        "the SGD holds the parameter 'bias', which the model has no longer after its conversion: "
        "make the optimizer after setup(model)"
    )


class Reading:
    """A tensor of a device whose copies to the host are recorded."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.copies: list[bool] = []

    def to(self, where: str, *, non_blocking: bool) -> Tensor:
        self.copies.append(non_blocking)
        return torch.tensor([1.5])


@pytest.mark.parametrize("pins", [True, False])
def test_start_reading_uses_pinned_memory_if_supported(
    pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = Reading()
    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    monkeypatch.setattr(torch, "stack", lambda tensors: values)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    kind = type("Device", (CPUAccelerator,), {"pins_memory": pins})
    assert kind().start_reading([torch.ones(())])() == [1.5]
    assert values.copies == [pins]
