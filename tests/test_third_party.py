"""A stranger's distribution is found, trained with, and missed once it is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sklearn.datasets import load_digits

if TYPE_CHECKING:
    from conftest import Environment

pytestmark = [pytest.mark.wheels, pytest.mark.slow]

FOLDER = Path(__file__).with_name("third_party")
NAME, VERSION = "stratagem-local-sgd", "1.2.0"
EVERY = 4


@pytest.fixture(scope="module")
def environment(
    wheelhouse: Path,
    new_environment: Callable[..., Environment],
    build_wheel: Callable[[Path, Path], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    """Core, the kits and the third party, each from its wheel, and torch."""
    (core,) = wheelhouse.glob("stratagem_core-*.whl")
    (kits,) = wheelhouse.glob("stratagem_testing-*.whl")
    plugin = build_wheel(FOLDER / NAME, tmp_path_factory.mktemp("third_party"))
    return new_environment("third_party_environment", core, kits, plugin)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script below saves its checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(environment: Environment, folder: Path) -> dict[str, Any]:
    """What the script prints, which trains in two processes in each of several ways."""
    images, labels = load_digits(return_X_y=True)
    digits = {"images": torch.tensor(images / 16).float(), "labels": torch.tensor(labels)}
    torch.save(digits, folder / "digits.pt")
    # numpy is optional to torch, which says so by a warning when it is missing.
    script = FOLDER / "train_local_sgd.py"
    printed = environment.python(
        "-W", "ignore", script, folder / "digits.pt", folder, env={"OMP_NUM_THREADS": "1"}
    )
    results: dict[str, Any] = json.loads(printed)
    return results


def test_the_plan_names_the_distribution_of_each_choice(trained: dict[str, Any]) -> None:
    plan = trained["trainer"]["plan"]
    stranger = f"{NAME} {VERSION}"
    assert plan["strategy"] == ["local_sgd", stranger]
    assert plan["accelerator"] == ["laptop", stranger]
    assert plan["checkpoint_io"] == ["json_sidecar", stranger]
    assert plan["world_size"][0] == "2"
    # The script has launched the ranks before, by Lite.
    assert plan["launcher"][0] == "external"
    assert plan["launcher"][1].startswith("stratagem-core ")


@pytest.mark.parametrize("front", ["trainer", "lite"])
def test_the_loss_falls(trained: dict[str, Any], front: str) -> None:
    losses = trained[front]["losses"]
    assert losses[0] == pytest.approx(2.3, abs=0.2)  # ten classes, untrained: log(10)
    assert losses[-1] < 0.8


@pytest.mark.parametrize("front", ["trainer", "lite"])
def test_ranks_agree_after_an_average_and_only_then(trained: dict[str, Any], front: str) -> None:
    for step, disagreement in enumerate(trained[front]["disagreements"], start=1):
        if step % EVERY == 0:
            assert disagreement == 0.0
        else:
            assert disagreement > 1e-3


@pytest.mark.parametrize("front", ["trainer", "lite"])
def test_averaging_after_every_step_is_ddp(trained: dict[str, Any], front: str) -> None:
    local = torch.tensor(trained[f"{front}, every=1"]["parameters"])
    ddp = torch.tensor(trained[f"{front}, ddp"]["parameters"])
    torch.testing.assert_close(local, ddp, rtol=0, atol=1e-6)


def test_saving_makes_the_ranks_agree(trained: dict[str, Any]) -> None:
    lite = trained["lite"]
    assert lite["disagreements"][-1] > 0, "the run has to end between two averages"
    assert lite["disagreement_once_saved"] == 0.0


def test_its_checkpoint_loads_under_another_strategy(trained: dict[str, Any], folder: Path) -> None:
    from stratagem.checkpoint import SingleFileCheckpointIO

    saved = SingleFileCheckpointIO().load_checkpoint(folder / "trainer.ckpt")
    flat = torch.cat([tensor.flatten() for tensor in saved["state_dict"].values()])
    torch.testing.assert_close(flat, torch.tensor(trained["trainer"]["parameters"]))
    assert saved["strategy"] == "local_sgd"


def test_json_file_describes_the_checkpoint(trained: dict[str, Any], folder: Path) -> None:
    described = json.loads((folder / "trainer.ckpt.json").read_text())
    assert described["step"] == len(trained["trainer"]["disagreements"])
    assert {"state_dict", "optimizer_states"} <= set(described["keys"])


def test_strategies_command_lists_the_third_party_plugin(environment: Environment) -> None:
    listed = {
        row["name"]: row
        for row in json.loads(environment.script("stratagem", "strategies", "--json"))
    }
    assert {"local_sgd", "local_sgd_16", "ddp", "single_device"} <= set(listed)
    for name in ("local_sgd", "local_sgd_16"):
        assert (listed[name]["distribution"], listed[name]["version"]) == (NAME, VERSION)
        assert listed[name]["usable"] is True


def test_listing_third_party_strategies_imports_no_torch(environment: Environment) -> None:
    code = (
        "import sys, stratagem\n"
        "assert 'local_sgd' in stratagem.StrategyRegistry\n"
        "print(sorted({'torch', 'stratagem_local_sgd.strategy'} & set(sys.modules)))"
    )
    assert environment.python("-c", code).strip() == "[]"


def test_its_class_comes_from_the_users_import_name(environment: Environment) -> None:
    code = (
        "from stratagem.strategies import LocalSGDStrategy\n"
        "print(LocalSGDStrategy(every=2).every, LocalSGDStrategy.__module__)"
    )
    printed = environment.python("-W", "ignore", "-c", code)
    assert printed.split() == ["2", "stratagem_local_sgd.strategy"]


def test_third_party_strategy_passes_the_conformance_kit(
    environment: Environment, tmp_path: Path
) -> None:
    script = FOLDER / "check_local_sgd.py"
    printed = environment.python("-W", "ignore", script, tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert json.loads(printed) == {}


# Last in this file, since it changes the environment.
def test_once_uninstalled_its_name_is_unknown(
    environment: Environment, trained: dict[str, Any]
) -> None:
    environment.pip("uninstall", "--quiet", "--yes", NAME)
    code = "from stratagem import Trainer; Trainer(strategy='local_sgd', devices=2)"
    with pytest.raises(AssertionError) as caught:
        environment.python("-W", "ignore", "-c", code)
    text = str(caught.value)
    assert "UnknownNameError: unknown strategy 'local_sgd'." in text
    assert "Installed: ddp, " in text
