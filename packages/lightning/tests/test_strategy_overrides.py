"""What a user's strategy overrides of Lightning's is called as Lightning calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import SingleDeviceStrategy
from stratagem_lightning.api.demos.boring_classes import BoringModel, ManualOptimBoringModel
from stratagem_lightning.api.fabric import Fabric
from stratagem_lightning.api.strategies.called import _divide_data
from stratagem_lightning.api.strategies.ddp import DDPStrategy
from stratagem_lightning.api.trainer import Trainer

HERE = Path(__file__).parent
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 2,
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_a_strategy_that_averages_gradients_by_itself_trains_as_with_lightning(
    run_script: Any, tmp_path: Path
) -> None:
    text = (HERE / "scripts/strategy_overrides.py").read_text()
    printed = run_script(f"import stratagem_lightning\n{text}", str(tmp_path)).stdout
    notes = [line for line in printed.splitlines() if line.startswith("NOTE")]
    assert notes == (HERE / "data/strategy_overrides.txt").read_text().splitlines()


class OnNumberedDevice(SingleDeviceStrategy):
    @property
    def root_device(self) -> torch.device:
        return torch.device(super().root_device.type, 0)


@pytest.mark.parametrize("front", [Trainer, Fabric])
def test_an_own_root_device_is_where_a_rank_works(front: Any) -> None:
    strategy = OnNumberedDevice()
    if front is Trainer:
        Trainer(**QUIET, strategy=strategy).fit(BoringModel())
    else:
        Fabric(accelerator="cpu", devices=1, strategy=strategy).setup(BoringModel())
    assert strategy.device == strategy.ranks.device == torch.device("cpu", 0)


class Around(SingleDeviceStrategy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.seen.append("pre" if closure_loss.requires_grad else "detached")

    def post_backward(self, closure_loss: Tensor) -> None:
        self.seen.append("graph" if closure_loss.requires_grad else "post")


def test_manual_backward_calls_both_methods_too() -> None:
    strategy = Around()
    trainer = Trainer(**QUIET, strategy=strategy)
    trainer.fit(ManualOptimBoringModel())
    assert strategy.seen == ["pre", "post"] * 2
    strategy.seen.clear()
    trainer.fit(BoringModel())
    assert strategy.seen == ["pre", "post"] * 2


def test_a_checkpoint_is_loaded_by_an_own_method(tmp_path: Path) -> None:
    class Loading(SingleDeviceStrategy):
        loads = 0

        def load_checkpoint(self, checkpoint_path: Any) -> Any:
            self.loads += 1
            found = super().load_checkpoint(checkpoint_path)  # type: ignore[misc]
            found["state_dict"]["layer.bias"].fill_(7.0)
            return found

    class Forgetful(SingleDeviceStrategy):
        def load_checkpoint(self, checkpoint_path: Any) -> Any:
            super().load_checkpoint(checkpoint_path)  # type: ignore[misc]

    saving = Trainer(**QUIET)
    saving.fit(BoringModel())
    saving.save_checkpoint(path := tmp_path / "own.ckpt")
    strategy, model = Loading(), BoringModel()
    Trainer(**QUIET, strategy=strategy).validate(model, ckpt_path=path, verbose=False)
    assert (strategy.loads, model.layer.bias.tolist()) == (1, [7.0, 7.0])
    with pytest.raises(UserCodeError) as raised:
        Trainer(**QUIET, strategy=Forgetful()).validate(model, ckpt_path=path)
    assert str(raised.value) == (
        f"Forgetful.load_checkpoint({str(path)!r}) returned a NoneType: expected the checkpoint, "
        "a dict"
    )


class Ranks:
    """Stands for two ranks."""

    world_size = 2
    axes = ()

    def __init__(self, *given: tuple[int, int]) -> None:
        self.given = given

    def gather_objects(self, own: tuple[int, int]) -> list[tuple[int, int]]:
        return list(self.given)


def divided(kwargs: dict[str, Any], *given: tuple[int, int]) -> Any:
    kind: Any = type("Mine", (DDPStrategy,), {"distributed_sampler_kwargs": kwargs})
    strategy = kind()
    strategy.ranks = Ranks(*given)
    _divide_data(strategy)
    return strategy.ranks


def test_own_arguments_of_the_sampler_divide_the_data() -> None:
    one = {"num_replicas": 1, "rank": 0}
    assert divided(one, (0, 1), (0, 1)).data_groups == ((0, 1),)
    with pytest.raises(ConfigurationError, match=r"data_split is rank 0: \(0, 2\), rank 1"):
        divided(one, (0, 2), (0, 2))
    with pytest.raises(UserCodeError) as raised:
        divided({**one, "shuffle": False})
    assert str(raised.value) == (
        "Mine.distributed_sampler_kwargs is {'num_replicas': 1, 'rank': 0, 'shuffle': False}: "
        "expected a dict with num_replicas and rank; for another order of the samples, pass a "
        "loader with a sampler of your own and Trainer(use_distributed_sampler=False)"
    )
