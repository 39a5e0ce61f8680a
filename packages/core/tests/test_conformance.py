"""Our own strategies pass the kit that authors of strategies run against theirs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.strategies import ModelParallelStrategy
from stratagem.testing import StrategyConformance
from stratagem.testing.strategies.check import CHECKS

pytest_plugins = ["stratagem.testing.plugin"]


class TestDDP(StrategyConformance):
    strategy = "ddp"


# The others take a minute or two each: `nox -s conformance`.


@pytest.mark.conformance
class TestSingleDevice(StrategyConformance):
    strategy = "single_device"


@pytest.mark.conformance
class TestSpawnedDDP(StrategyConformance):
    strategy = "ddp_spawn"


@pytest.mark.conformance
class TestFSDP(StrategyConformance):
    strategy = "fsdp"


@pytest.mark.conformance
class TestDDPSharded(StrategyConformance):
    strategy = "ddp_sharded"


def on_a_mesh() -> ModelParallelStrategy:
    """Sharded over a mesh, without tensor parallelism: each model divides other layers for that."""
    return ModelParallelStrategy(tensor_parallel_size=1)


@pytest.mark.conformance
class TestModelParallel(StrategyConformance):
    strategy = on_a_mesh


# ---------------------------------------------------------------- the guide for authors

GUIDE = (Path(__file__).parents[3] / "docs" / "testing-a-plugin.md").read_text()


def test_the_guide_says_of_each_check_what_it_means() -> None:
    rows = [f"| `{name}` | {check.about} |" for name, check in CHECKS.items()]
    assert [row for row in rows if row not in GUIDE.splitlines()] == []
    assert GUIDE.count("\n| `") >= len(rows)


@pytest.mark.slow
def test_the_guides_example_passes(tmp_path: Path, script_environment: dict[str, str]) -> None:
    example = re.findall(r"^```python\n(.+?)^```$", GUIDE, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "test_mine.py").write_text(example)
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("test_mine.py", "-k", "barrier or order"),
        ],
        cwd=tmp_path,
        env=script_environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "2 passed" in finished.stdout
