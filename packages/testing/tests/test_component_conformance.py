"""Our own components pass the kits that authors of components run against theirs."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from stratagem.loggers import CSVLogger, Logger
from stratagem.precision import TruePrecision
from stratagem.strategies import DDPStrategy
from stratagem_testing import (
    AcceleratorConformance,
    CheckpointIOConformance,
    ClusterEnvironmentConformance,
    LauncherConformance,
    LoggerConformance,
    PluginConformance,
    PrecisionConformance,
)
from stratagem_testing.places import find, place_of


class TestCPU(AcceleratorConformance):
    accelerator = "cpu"


def stand_in() -> Any:
    """Return the accelerator of the page about accelerators."""
    page = Path(__file__).parents[3] / "docs/extend/accelerator.md"
    made: dict[str, Any] = {}
    exec(page.read_text().split("```python\n")[1].split("```")[0], made)
    return made["StandIn"]()


@pytest.mark.conformance
class TestExample(AcceleratorConformance):
    accelerator = f"{Path(__file__).parents[3]}/examples/custom_accelerator.py:PinnedCores"


@pytest.mark.conformance
class TestStandIn(AcceleratorConformance):
    accelerator = stand_in


class TestBF16Mixed(PrecisionConformance):
    precision = "bf16-mixed"


class TestBF16True(PrecisionConformance):
    precision = "bf16-true"


def two_ranks(**names: str) -> tuple[dict[str, str], ...]:
    """Return the variables of two ranks on this host: those of both, and those of one by `{}`."""
    return tuple({k: v.format(rank) for k, v in names.items()} for rank in range(2))


class TestSLURM(ClusterEnvironmentConformance):
    cluster_environment = "SLURM"
    ranks = two_ranks(
        SLURM_JOB_ID="7777",
        SLURM_STEP_ID="0",
        SLURM_NTASKS="2",
        SLURM_PROCID="{}",
        SLURM_LOCALID="{}",
        SLURM_NODEID="0",
        SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_STEP_NODELIST="localhost",
        SLURM_NNODES="1",
    )


def logger() -> Logger:
    return CSVLogger("logs", version=0)


def rows(logger: Logger) -> list[tuple[int | None, dict[str, Any]]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return [
            (int(row.pop("step")), {name: value for name, value in row.items() if value})
            for row in csv.DictReader(file)
        ]


class TestCSVLogger(LoggerConformance):
    logger = logger
    read = rows


# The others: `nox -s conformance`.

Class = type[Any]


def _conformance(kit: Class, kind: str, names: dict[str, dict[str, Any]]) -> dict[str, Class]:
    """Return a class of tests for each name, which only `nox -s conformance` runs."""
    made: dict[str, Class] = {}
    for name, attributes in names.items():
        title = "Test" + "".join(part.capitalize() for part in name.replace("-", "_").split("_"))
        made[f"{title}{kit.__name__.removesuffix('Conformance')}"] = pytest.mark.conformance(
            type(title, (kit,), {"__module__": __name__, kind: name, **attributes})
        )
    return made


def full() -> TruePrecision:
    return TruePrecision("32-true")


globals().update(
    {
        **_conformance(
            PluginConformance,
            "plugin",
            {
                "stratagem-core": {"cpu_seconds": 0.2},
                "stratagem-backend-cuda": {"cpu_seconds": 0.2},
                "stratagem-backend-deepspeed": {"cpu_seconds": 0.2},
                "stratagem-backend-xla": {"cpu_seconds": 0.2},
                "stratagem-backend-hpu-ipu": {"cpu_seconds": 0.2},
                "stratagem-backend-mps": {"cpu_seconds": 0.2},
                "stratagem-backend-xpu": {"cpu_seconds": 0.2},
            },
        ),
        **_conformance(
            PrecisionConformance,
            "precision",
            {"32-true": {}, "64-true": {}, "16-true": {}},
        ),
        **_conformance(
            CheckpointIOConformance,
            "checkpoint_io",
            {"single_file": {}, "directory": {}, "async": {}},
        ),
        **_conformance(
            LauncherConformance,
            "launcher",
            {"script": {}, "spawn": {}, "fork": {}, "in_process": {}, "external": {}},
        ),
        **_conformance(
            ClusterEnvironmentConformance,
            "cluster_environment",
            {
                "plain": {
                    "ranks": two_ranks(
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT="29741",
                        WORLD_SIZE="2",
                        LOCAL_WORLD_SIZE="2",
                        NODE_RANK="0",
                        LOCAL_RANK="{}",
                        RANK="{}",
                    )
                },
                "TorchElastic": {
                    "ranks": two_ranks(
                        TORCHELASTIC_RUN_ID="none",
                        TORCHELASTIC_RESTART_COUNT="0",
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT="29742",
                        WORLD_SIZE="2",
                        LOCAL_WORLD_SIZE="2",
                        GROUP_RANK="0",
                        LOCAL_RANK="{}",
                        RANK="{}",
                    )
                },
                "LSF": {
                    "ranks": two_ranks(
                        LSB_JOBID="88",
                        LSB_HOSTS="batch localhost localhost",
                        JSM_NAMESPACE_SIZE="2",
                        JSM_NAMESPACE_LOCAL_SIZE="2",
                        JSM_NAMESPACE_RANK="{}",
                        JSM_NAMESPACE_LOCAL_RANK="{}",
                    )
                },
                "MPI": {
                    "ranks": two_ranks(
                        OMPI_COMM_WORLD_SIZE="2",
                        OMPI_COMM_WORLD_LOCAL_SIZE="2",
                        OMPI_COMM_WORLD_RANK="{}",
                        OMPI_COMM_WORLD_LOCAL_RANK="{}",
                        PMIX_NAMESPACE="conformance",
                    )
                },
                "Kubeflow": {
                    "ranks": two_ranks(
                        KUBERNETES_PORT="tcp://10.0.0.1:443",
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT="29743",
                        WORLD_SIZE="2",
                        RANK="{}",
                    ),
                    "nodes": 2,
                },
            },
        ),
    }
)


@pytest.mark.conformance
class TestAnObject(PrecisionConformance):
    """A function in the place of a name."""

    precision = full


def test_a_class_of_an_editable_installation_is_imported_and_not_read_from_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose folder would hide what other modules are called, such as an SDK of the same name."""
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)
    assert place_of(DDPStrategy) == "stratagem_torch.strategies.ddp:DDPStrategy"


def test_two_files_of_one_name_are_two_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in one run of pytest over two distributions, which both have a test_own_strategy.py."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "test_own_strategy", raising=False)
    made = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "test_own_strategy.py"
        file.write_text(f"def make():\n    return {folder!r}\n")
        made.append(find(f"{file}:make"))
    assert [make() for make in made] == ["one", "two"]
    assert find(f"{tmp_path}/one/test_own_strategy.py:make") is made[0]
    # Where a process that a launcher spawns finds it, to which sys.path goes.
    assert made[0].__module__ == "test_own_strategy"
    assert sys.path[1] == str(tmp_path / "one")
    sys.modules.pop("test_own_strategy")


def test_logger_conformance_without_read_raises() -> None:
    class Unread(LoggerConformance):
        logger = "csv"

    with pytest.raises(TypeError, match="Unread has no `read`: set it to a function that takes"):
        Unread.options()
