"""Core alone, in an empty environment: one device trains, and the rest says what to install."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Environment

pytestmark = [pytest.mark.wheels, pytest.mark.slow]

INSTALL = "pip install stratagem-backend-torch"
TRAIN = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from stratagem import Module, Trainer, seed_everything


class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def train(epochs, resumed=None):
    seed_everything(1)
    data = torch.utils.data.DataLoader(torch.randn(16, 4), 4, shuffle=True)
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, logger=False,
                      enable_progress_bar=False, enable_checkpointing=False)
    net = Net()
    trainer.fit(net, data, ckpt_path=resumed)
    return trainer, net.layer.weight.detach().clone()


first, _ = train(2)
first.save_checkpoint("half.ckpt")
_, resumed = train(4, "half.ckpt")
_, whole = train(4)
print(torch.equal(resumed, whole))
"""
REFUSED = {
    "a strategy": "from stratagem import Trainer; Trainer(strategy='ddp', accelerator='cpu')",
    "devices": "from stratagem import Trainer; Trainer(devices=2, accelerator='cpu')",
    "a strategy class": "from stratagem.strategies import FSDPStrategy",
    "a launcher": "from stratagem import Lite; Lite(plugins='spawn', accelerator='cpu')",
    "a part of a launcher": "from stratagem.launch import pack",
    "a cluster environment": "from stratagem.environments import SLURMEnvironment",
    "a checkpoint format": "from stratagem import Lite; Lite(plugins='directory')",
}


@pytest.fixture(scope="module")
def alone(wheelhouse: Path, new_environment: Callable[..., Environment]) -> Environment:
    (core,) = wheelhouse.glob("stratagem_core-*.whl")
    return new_environment("only_core", core)


def test_one_device_trains_saves_and_resumes_exactly(alone: Environment) -> None:
    assert alone.python("-c", TRAIN).splitlines()[-1] == "True"


@pytest.mark.parametrize("what", REFUSED)
def test_core_alone_names_the_torch_backend_to_install(alone: Environment, what: str) -> None:
    code = f"try:\n    {REFUSED[what]}\nexcept Exception as error:\n    print(error)\n"
    (line,) = alone.python("-W", "ignore", "-c", code).splitlines()
    assert INSTALL in line


@pytest.mark.parametrize(
    ("started_by", "variables"),
    [
        ("SLURM", {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}),
        ("MPI", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}),
        ("TorchElastic", {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
    ],
)
def test_a_process_of_a_cluster_does_not_train_alone(
    alone: Environment, started_by: str, variables: dict[str, str]
) -> None:
    code = (
        "from stratagem import Trainer\n"
        "try:\n    Trainer(accelerator='cpu', devices=1)\n"
        "except Exception as error:\n    print(error)\n"
    )
    (line,) = alone.python("-W", "ignore", "-c", code, env=variables).splitlines()
    assert f"one of 2 that {started_by} has started" in line
    assert INSTALL in line
    alone.python("-W", "ignore", "-c", code, env={**variables, "STRATAGEM_CLUSTER": "none"})


def test_run_command_of_core_alone_names_the_package(alone: Environment) -> None:
    done = alone.shell("stratagem run train.py --devices 2 || echo exit code $?", alone.folder)
    assert done.splitlines() == [
        "stratagem run: error: the command 'run' needs stratagem-backend-torch, which is not "
        f"installed: {INSTALL}.",
        "exit code 2",
    ]


def test_core_alone_refuses_a_directory_checkpoint_with_the_package(
    alone: Environment, tmp_path: Path
) -> None:
    from stratagem import Lite

    lite = Lite(accelerator="cpu", plugins="directory")
    lite.launch()
    lite.save(tmp_path / "step=1", {"step": 1})
    code = (
        "import sys\nfrom stratagem import Lite\nlite = Lite(accelerator='cpu')\nlite.launch()\n"
        "try:\n    lite.load(sys.argv[1])\nexcept Exception as error:\n    print(error)\n"
    )
    path = str(tmp_path / "step=1")
    (line,) = alone.python("-W", "ignore", "-c", code, path).splitlines()
    assert f"{path!r} is a directory" in line
    assert INSTALL in line
