"""Core of the working tree with the plugins of another commit, and the reverse: `nox -s skew`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sklearn.datasets import load_digits

if TYPE_CHECKING:
    from conftest import Environment

pytestmark = [pytest.mark.skew, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
COMMIT = os.environ.get("STRATAGEM_SKEW_COMMIT", "HEAD~1")
OURS = ("stratagem-core", "stratagem-backend-torch")
PLUGINS = ("tests/third_party/*/pyproject.toml", "examples/plugins/*/pyproject.toml")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the other commit."""
    folder = tmp_path_factory.mktemp("before")
    archive = folder / "tree.tar"
    subprocess.run(
        ["git", "archive", f"--output={archive}", COMMIT], cwd=ROOT, check=True, timeout=60
    )
    shutil.unpack_archive(archive, folder / "tree", filter="data")
    return folder / "tree"


def plugins_in(tree: Path) -> Iterator[Path]:
    """Yield the folders of the example plugins, each a distribution of its own."""
    for pattern in PLUGINS:
        yield from sorted(path.parent for path in tree.glob(pattern))


@pytest.mark.parametrize("older", ["plugins", "core"])
def test_plugins_and_core_of_two_commits_work_together(
    older: str,
    before: Path,
    build_wheel: Callable[[Path, Path], Path],
    new_environment: Callable[..., Environment],
    tmp_path: Path,
) -> None:
    of_core, of_plugins = (ROOT, before) if older == "plugins" else (before, ROOT)
    if older == "core" and api_version(before) < api_version(ROOT):
        pytest.skip(f"core of {COMMIT} has an earlier plugin API, and leaves these plugins out")
    if not (of_core / "packages/backend-torch").exists():
        pytest.skip(f"{COMMIT} has no stratagem-backend-torch, which plugins require")
    core = build_wheel(of_core / "packages/core", tmp_path / "core")
    torch_backend = build_wheel(of_core / "packages/backend-torch", tmp_path / "torch")
    plugins = list(plugins_in(of_plugins))
    assert len(plugins) >= 6
    environment = new_environment("both", f"{core}[testing]", torch_backend)
    for plugin in plugins:
        # Its plugin module needs nothing of the system that it brings, which pip may not find.
        wheel = build_wheel(plugin, tmp_path / plugin.name)
        environment.pip("install", "--quiet", "--no-deps", wheel)
    # Its status is 1: what torchft, hivemind and ColossalAI's strategies need is not there.
    diagnosis = json.loads(environment.script("stratagem", "doctor", "--json", status=1))
    names = [problem.partition(":")[0] for problem in diagnosis["problems"]]
    assert names == ["stratagem-colossalai", "stratagem-hivemind", "stratagem-torchft"]
    assert all(problem.endswith("which is not installed") for problem in diagnosis["problems"])
    status = {told["distribution"]: told["status"] for told in diagnosis["plugins"]}
    assert {plugin.name: status.get(plugin.name) for plugin in plugins} == {
        plugin.name: "loaded" for plugin in plugins
    }
    runnable = [plugin for plugin in plugins if stands_alone(plugin)]
    assert {plugin.name for plugin in runnable} >= {"stratagem-bagua", "stratagem-local-sgd"}
    for plugin in runnable:
        train_and_check(environment, plugin, tmp_path / f"{plugin.name} runs")


def api_version(tree: Path) -> int:
    """Return the version of the plugin API of the core in a tree."""
    text = (tree / "packages/core/src/stratagem/discovery/specs.py").read_text()
    found = re.search(r"^PLUGIN_API_VERSION = (\d+)$", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def stands_alone(plugin: Path) -> bool:
    """Whether a plugin needs only core and the torch backend; see the session `third_parties`."""
    text = (plugin / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = (\[[^]]*\])", text, re.MULTILINE)
    assert found is not None
    return all(needed.startswith(OURS) for needed in json.loads(found[1]))


def train_and_check(environment: Environment, plugin: Path, folder: Path) -> None:
    """Run what a plugin's own commit trains and tests it with, the kit among it."""
    folder.mkdir()
    threads = {"OMP_NUM_THREADS": "1"}
    if (plugin / "tests").is_dir():
        options = ("-q", "-p", "no:cacheprovider", "-c", plugin / "pyproject.toml")
        environment.python("-m", "pytest", *options, plugin / "tests", env=threads)
        return
    name = plugin.name.removeprefix("stratagem-").replace("-", "_")
    images, labels = load_digits(return_X_y=True)
    digits = {"images": torch.tensor(images / 16).float(), "labels": torch.tensor(labels)}
    torch.save(digits, folder / "digits.pt")
    script = plugin.parent / f"train_{name}.py"
    printed = environment.python("-W", "ignore", script, folder / "digits.pt", folder, env=threads)
    assert json.loads(printed)["trainer"]["losses"][-1] < 0.8
    script = plugin.parent / f"check_{name}.py"
    printed = environment.python("-W", "ignore", script, folder / "kit", env=threads)
    assert json.loads(printed) == {}
