"""Strategies and accelerators by Lightning's arguments and methods, with a Fabric and without."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from stratagem import Lite, StrategyRegistry, Trainer
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import ConfigurationError
from stratagem.strategies import (
    DDPStrategy,
    FSDPStrategy as OwnFSDP,
    SingleDeviceStrategy as OwnSingleDevice,
)
from stratagem_lightning.api.accelerators.accelerator import CPUAccelerator
from stratagem_lightning.api.accelerators.cuda import CUDAAccelerator
from stratagem_lightning.api.accelerators.mps import MPSAccelerator
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.plugins import precision as precisions
from stratagem_lightning.api.plugins.checkpoint_io import AsyncCheckpointIO
from stratagem_lightning.api.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from stratagem_lightning.api.plugins.precision import DoublePrecision
from stratagem_lightning.api.strategies.fsdp import FSDPStrategy
from stratagem_lightning.api.strategies.single_device import SingleDeviceStrategy
from stratagem_lightning.api.trainer import Trainer as LightningTrainer

# -- the device of one


def test_the_device_of_a_strategy_is_the_plans() -> None:
    strategy: Any
    for strategy in (OwnSingleDevice("cpu"), OwnSingleDevice(device=torch.device("cpu", 0))):
        plan = Lite(strategy=strategy).plan
        assert (plan.accelerator.name, plan.devices) == ("cpu", (0,))
        assert strategy.root_device == torch.device("cpu")
    assert OwnSingleDevice("cuda:1").requested == {"accelerator": "cuda", "devices": [1]}
    with pytest.raises(ConfigurationError, match=r"accelerator='cuda'"):
        Trainer(accelerator="cpu", strategy=OwnSingleDevice("cuda:1"), logger=False)
    with pytest.raises(ConfigurationError, match=r"device='cuda'\): expected a device of the.*cpu"):
        Lite(strategy=OwnSingleDevice("cuda", accelerator=CPUAccelerator()))
    with pytest.raises(ConfigurationError, match="device='gpu0': expected a device such as 'cpu'"):
        OwnSingleDevice("gpu0")


def test_a_strategy_knows_its_device_and_its_ranks_before_the_launch() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    before: Any = trainer.strategy
    assert before.root_device == torch.device("cpu")

    class Elsewhere(OwnSingleDevice):
        def setup_environment(self) -> None:
            super().setup_environment()
            self.device = torch.device("meta")

    lite = Lite(strategy=Elsewhere("cpu"))
    elsewhere: Any = lite.strategy
    assert elsewhere.root_device == torch.device("cpu")
    lite.launch()
    assert elsewhere.root_device == torch.device("meta")

    one: Any = Lite(accelerator="cpu", strategy="single_device").strategy
    assert one.all_reduce(torch.ones(2)).tolist() == [1, 1]
    assert one.reduce(torch.ones(2), reduce_op="sum").tolist() == [1, 1]
    assert one.all_gather(torch.ones(2)).shape == (1, 2)
    decisions = [(True, True), (False, True), (False, False)]
    assert [one.reduce_boolean_decision(*each) for each in decisions] == [True, False, False]


def test_fsdp_takes_lightnings_arguments() -> None:
    class Block(torch.nn.Linear):
        pass

    def is_block(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, Block) and not recurse

    config = MixedPrecision(param_dtype=torch.bfloat16)
    strategy = FSDPStrategy(
        mixed_precision=config, use_orig_params=True, precision="32-true", device_mesh=None
    )
    assert strategy.mixed_precision_config is config
    assert strategy.requested == {"precision": "32-true"}
    for policy in (ModuleWrapPolicy({Block}), is_block):
        choice: Any = FSDPStrategy(activation_checkpointing_policy=policy).activation_checkpointing
        assert [choice(Block(1, 1)), choice(torch.nn.Linear(1, 1))] == [True, False]
    assert FSDPStrategy(activation_checkpointing=[Block]).activation_checkpointing == {Block}
    with pytest.raises(
        ConfigurationError,
        match="you cannot set both `activation_checkpointing` and",
    ):
        FSDPStrategy(activation_checkpointing={Block}, activation_checkpointing_policy={Block})
    with pytest.raises(ConfigurationError, match=r"use_orig_params=False\): expected True"):
        FSDPStrategy(use_orig_params=False)
    annotation = inspect.signature(FSDPStrategy).parameters["device_mesh"].annotation
    assert annotation == tuple[int, int] | None
    assert isinstance(OwnFSDP(), FSDPStrategy)


def test_fsdp1_mixed_precision_becomes_a_policy() -> None:
    given = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert FSDPStrategy(mixed_precision=given).mixed_precision == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    with pytest.warns(UserWarning, match="buffer_dtype=torch.bfloat16, which is left out"):
        FSDPStrategy(mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    for given_offload in (True, CPUOffload(offload_params=True)):
        offload = FSDPStrategy(cpu_offload=given_offload).cpu_offload
        assert offload
        assert offload == CPUOffload(offload_params=True)
    assert not FSDPStrategy(cpu_offload=CPUOffload(offload_params=False)).cpu_offload
    chosen: Any = FSDPStrategy(sharding_strategy="NO_SHARD").sharding_strategy
    assert chosen == ShardingStrategy.NO_SHARD
    assert chosen != ShardingStrategy.FULL_SHARD
    assert chosen == chosen.name == "NO_SHARD"


# -- without a Fabric


def test_a_strategy_is_of_use_without_a_fabric() -> None:
    strategy = SingleDeviceStrategy(precision=DoublePrecision())
    assert (strategy.root_device, strategy.world_size) == (torch.device("cpu"), 1)
    assert strategy.is_global_zero
    thing = object()
    assert strategy.all_gather(thing) is thing
    assert strategy.all_reduce(thing) is thing
    assert strategy.broadcast(thing) is thing
    strategy.barrier()
    context = strategy.module_init_context()
    assert torch.get_default_dtype() is torch.float32
    with context:
        module = torch.nn.Linear(2, 1)
    strategy.module_to_device(module)
    assert strategy.setup_module(module).weight.dtype is torch.float64
    assert SingleDeviceStrategy("cuda:1").root_device == torch.device("cuda", 1)


def test_fabric_takes_the_precision_of_its_strategy() -> None:
    strategy = SingleDeviceStrategy("cpu")
    strategy.precision = DoublePrecision()
    fabric = Fabric(strategy=strategy)
    assert fabric.plan.precision.name == "64-true"
    assert fabric.strategy is strategy
    assert isinstance(Fabric(accelerator="cpu", devices=1).strategy, SingleDeviceStrategy)


def test_strategy_checkpoint_methods_save_and_fill_a_state(tmp_path: Path) -> None:
    strategy, path = SingleDeviceStrategy(), tmp_path / "state.ckpt"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = {"model": model, "optimizer": optimizer, "step": 3, "extra": {"a": 1}}
    strategy.save_checkpoint(path, state)
    assert set(strategy.load_checkpoint(path)) == set(state)

    other = torch.nn.Linear(2, 1)
    filled: dict[str, Any] = {
        "model": other,
        "optimizer": torch.optim.SGD(other.parameters(), lr=0.1),
        "step": 0,
    }
    assert strategy.load_checkpoint(path, filled) == {"extra": {"a": 1}}
    assert torch.equal(other.weight, model.weight)
    assert filled["optimizer"].param_groups[0]["lr"] == 0.5
    assert filled["step"] == 3

    filled["missing"] = 7
    with pytest.raises(KeyError, match="contains a key 'missing' that does not exist in"):
        strategy.load_checkpoint(path, filled)
    strategy.load_checkpoint(path, filled, strict=False)
    assert filled["missing"] == 7

    strategy.save_checkpoint(path, {"step": 1, "model": model}, filter={"model": no_bias})
    assert list(strategy.load_checkpoint(path)["model"]) == ["weight"]
    with pytest.raises(ConfigurationError, match=r"storage_options=\{'a': 1\}\): expected None"):
        strategy.save_checkpoint(path, {}, storage_options={"a": 1})


def test_a_fabric_saves_and_loads_by_the_strategys_own_methods(tmp_path: Path) -> None:
    class Noting(SingleDeviceStrategy):
        asked: ClassVar[list[Any]] = []

        def save_checkpoint(self, path: Any, state: Any, *more: Any, **options: Any) -> None:
            self.asked.append(type(state["model"]))
            super().save_checkpoint(path, state, *more, **options)

        def load_checkpoint(self, path: Any, state: Any = None, *more: Any, **options: Any) -> Any:
            self.asked.append(options["weights_only"])
            return super().load_checkpoint(path, state, *more, **options)

    fabric, path = Fabric(strategy=Noting("cpu")), tmp_path / "state.ckpt"
    model = fabric.setup(torch.nn.Linear(2, 1))
    fabric.save(path, {"model": model, "step": 3, "kept": 1})
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "step": 0}
    assert fabric.load(path, state, weights_only=True) == {"kept": 1}
    assert torch.equal(model.weight, weight)
    assert (state["step"], state["model"]) == (3, model)
    torch.save(torch.nn.Linear(2, 1).state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert not torch.equal(model.weight, weight)
    assert Noting.asked == [torch.nn.Linear, True, None]


def no_bias(key: str, value: Any) -> bool:
    return key != "bias"


def test_a_file_that_is_one_state_dict_fills_a_module_or_an_optimizer(tmp_path: Path) -> None:
    strategy, model = SingleDeviceStrategy(), torch.nn.Linear(2, 1)
    torch.save(strategy.get_module_state_dict(model), tmp_path / "model.pt")
    torch.save(torch.optim.SGD(model.parameters(), lr=0.5).state_dict(), tmp_path / "optimizer.pt")
    other = torch.nn.Linear(2, 1)
    assert strategy.load_checkpoint(tmp_path / "model.pt", other) == {}
    assert torch.equal(other.weight, model.weight)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    strategy.load_checkpoint(tmp_path / "optimizer.pt", optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


# -- plugins


def test_former_precision_names_warn() -> None:
    for kind, base, name in (
        (precisions.PrecisionPlugin, precisions.Precision, None),
        (precisions.DoublePrecisionPlugin, DoublePrecision, None),
        (precisions.HalfPrecisionPlugin, precisions.HalfPrecision, None),
        (precisions.MixedPrecisionPlugin, precisions.MixedPrecision, "bf16-mixed"),
        (precisions.FSDPPrecisionPlugin, precisions.FSDPPrecision, "bf16-mixed"),
        (precisions.DeepSpeedPrecisionPlugin, precisions.DeepSpeedPrecision, "32-true"),
    ):
        with pytest.warns(
            DeprecationWarning, match=rf"`{kind.__name__}` is deprecated.*{base.__name__}"
        ):
            made = kind() if name is None else kind(name)
        assert issubclass(kind, base)
        assert isinstance(made, base)
        assert isinstance(made, kind)

    class Own(precisions.PrecisionPlugin):  # type: ignore[misc]
        precision = "own"

    assert (type(Own()), Own().precision) == (Own, "own")


def test_deepspeeds_precision_lets_the_engine_run_backward() -> None:
    losses = []

    class Engine:
        def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
            losses.append((loss.item(), retain_graph))

    precisions.DeepSpeedPrecision("32-true").backward(torch.tensor(2.0), Engine(), True)
    assert losses == [(2.0, True)]


def test_a_format_is_written_in_the_background_by_lightnings_argument(tmp_path: Path) -> None:
    inner = SingleFileCheckpointIO()
    background, weights = AsyncCheckpointIO(checkpoint_io=inner), torch.zeros(1)
    assert background.checkpoint_io is inner
    background.save_checkpoint({"weights": weights}, tmp_path / "a.ckpt")
    weights.add_(1)
    background.teardown()
    assert inner.load_checkpoint(tmp_path / "a.ckpt")["weights"].item() == 0
    assert isinstance(AsyncCheckpointIO().checkpoint_io, SingleFileCheckpointIO)


# -- accelerators


def test_the_gpus_are_counted_without_an_object() -> None:
    kind = CUDAAccelerator
    assert kind.get_parallel_devices([3, 1]) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert kind.parse_devices("1, 3") == [1, 3]
    assert kind.parse_devices(2) == [0, 1]
    assert kind.is_available() is (kind.auto_device_count() > 0)
    with pytest.raises(ConfigurationError, match="devices='two': expected a number of devices"):
        kind.parse_devices("two")
    assert isinstance(kind(), kind)


def test_a_registered_strategy_is_shown_with_its_arguments() -> None:
    found = StrategyRegistry["ddp_find_unused_parameters_true"]
    assert found["strategy"] is DDPStrategy
    assert found["init_params"] == {"find_unused_parameters": True}
    assert found["strategy_name"] == "ddp_find_unused_parameters_true"
    assert found["description"]


def test_a_trainers_strategy_has_lightnings_names() -> None:
    """Also where nothing but the Trainer was imported."""
    code = """
from stratagem_lightning.api.trainer import Trainer
print(Trainer(accelerator="cpu", logger=False).strategy.root_device)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "cpu"


def test_an_mps_accelerator_can_be_made_and_asked_on_any_machine() -> None:
    from stratagem_mps.accelerator import MPSAccelerator as OfBackend

    made = MPSAccelerator()
    assert isinstance(made, OfBackend)
    assert isinstance(OfBackend(), MPSAccelerator)
    assert MPSAccelerator.auto_device_count() == 1
    assert MPSAccelerator.is_available() == torch.backends.mps.is_available()
    assert MPSAccelerator.get_parallel_devices(1) == [torch.device("mps", 0)]
    made.setup_device(torch.device("mps"))
    for one, other, what in (
        (made, "cpu", "MPS, received cpu"),
        (CUDAAccelerator(), "cpu", "CUDA, received cpu"),
        (CPUAccelerator(), "cuda:1", "CPU, received cuda:1"),
    ):
        with pytest.raises(ValueError, match=f"Device should be {what}"):
            one.setup_device(torch.device(other))


def test_layer_sync_of_torch_is_short_for_sync_batchnorm() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False}
    plugin = TorchSyncBatchNorm()
    for one in (
        LightningTrainer(plugins=plugin, **options),
        LightningTrainer(plugins=[plugin], **options),
    ):
        assert one._arguments["sync_batchnorm"]
    assert "sync_batchnorm" not in LightningTrainer(**options)._arguments

    class Own(LayerSync):
        def apply(self, model: torch.nn.Module) -> torch.nn.Module:
            return model

        revert = apply

    with pytest.raises(
        ConfigurationError, match=r"expected TorchSyncBatchNorm\(\) of the LayerSync"
    ):
        LightningTrainer(plugins=[Own()], **options)
    with pytest.raises(ConfigurationError, match="and provided a `LayerSync` plugin, but this is"):
        LightningTrainer(plugins=[Own()], sync_batchnorm=True, **options)


def test_synchronized_layers_are_reverted_with_their_values() -> None:
    plugin = TorchSyncBatchNorm()
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3))
    data = torch.randn(4, 2, 5)
    model(data)
    model.eval()
    expected = model(data)
    weight = model[1].weight
    synchronized: Any = plugin.apply(model)
    assert isinstance(synchronized[1], torch.nn.SyncBatchNorm)
    reverted: Any = plugin.revert(synchronized)
    assert not isinstance(reverted[1], torch.nn.SyncBatchNorm)
    assert reverted[1].weight is weight
    assert torch.equal(reverted(data), expected)
