"""Our own strategies pass the kit that authors of strategies run against theirs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stratagem_testing as testing
from stratagem.errors import ConfigurationError
from stratagem.strategies import ModelParallelStrategy
from stratagem_testing import StrategyConformance
from stratagem_testing.components.check import MODULES
from stratagem_testing.guide import BEGIN, END, class_name, tables

ROOT = Path(__file__).parents[3]


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


@pytest.mark.conformance
class TestExample(StrategyConformance):
    strategy = f"{ROOT}/examples/custom_strategy.py:LocalSGDStrategy"
    equal_to_single_device = False  # replicas drift apart between two averages


# ---------------------------------------------------------------- the guide for authors

GUIDE = (ROOT / "docs/extend/testing-a-plugin.md").read_text()
CHECKS = (ROOT / "docs/extend/kit-checks.md").read_text()


def test_kit_checks_guide_lists_each_check() -> None:
    assert CHECKS.partition(BEGIN)[2].partition(END)[0].strip() == tables().strip(), (
        "python -m stratagem_testing.guide docs/extend/kit-checks.md"
    )


def test_every_class_of_a_kit_is_public() -> None:
    assert sorted(testing.__all__) == sorted(map(class_name, ("strategy", *MODULES)))
    for name in testing.__all__:
        assert getattr(testing, name).__doc__


@pytest.mark.conformance
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


def test_a_former_or_misspelled_attribute_of_a_kit_is_refused() -> None:
    text = "TestOld.parts is a former name, which nothing reads or calls: use data_groups"
    with pytest.raises(ConfigurationError, match=text):
        type("TestOld", (StrategyConformance,), {"parts": 1})
    text = r"TestNew.data_group is no attribute of the kit: did you mean data_groups\?"
    with pytest.raises(ConfigurationError, match=text):
        type("TestNew", (StrategyConformance,), {"data_group": 1})
    type("TestOwn", (StrategyConformance,), {"data_groups": 1, "port": 1, "test_it": len})
