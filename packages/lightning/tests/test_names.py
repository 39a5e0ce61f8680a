"""Lightning's names mean Stratagem once they are asked for; its scripts run unchanged."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stratagem
import stratagem.strategies
from stratagem.accelerators import Accelerator
from stratagem.callbacks import EarlyStopping
from stratagem.errors import ConfigurationError
from stratagem.strategies import Strategy
from stratagem_lightning.api.plugins.collectives import TorchCollective
from stratagem_torch.launch.run import parse

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
OURS = "stratagem_lightning"
OF_BACKENDS = (
    "Bitsandbytes",
    "CUDA",
    "DeepSpeed",
    "SingleDeviceXLA",
    "TransformerEngine",
    "XLA",
)
"""What begins names of classes that backends bring, which may not be installed."""


def is_lightnings(name: str) -> bool:
    """Whether a module has one of the names."""
    return name.partition(".")[0] in ROOTS or name == OURS or name.startswith(f"{OURS}.")


def forget() -> None:
    """Leave sys.modules without what has one of the names."""
    for name in filter(is_lightnings, list(sys.modules)):
        del sys.modules[name]
    vars(stratagem).pop("lightning", None)


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    """Give the modules back afterwards: other files hold classes of theirs."""
    modules = {name: module for name, module in sys.modules.items() if is_lightnings(name)}
    held = {name: vars(stratagem)[name] for name in ("lightning",) if name in vars(stratagem)}
    kinds: list[Any] = [Strategy, Accelerator]
    lookups = {kind: vars(kind).get("__getattr__") for kind in kinds}
    yield
    forget()
    for kind, lookup in lookups.items():
        if lookup is not None:
            kind.__getattr__ = lookup
    sys.modules.update(modules)
    vars(stratagem).update(held)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`stratagem_lightning`, for one test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    forget()
    yield importlib.import_module(OURS)
    forget()


def imported(text: str) -> dict[str, Any]:
    """Return what statements bind."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names


# -- names


def test_every_name_of_lightnings_is_the_same_object(lightning: ModuleType) -> None:
    names = imported(
        """
        import lightning as L
        import lightning.pytorch as pl
        import pytorch_lightning as old
        import lightning.fabric, lightning_fabric
        from lightning.pytorch.callbacks.early_stopping import EarlyStopping
        from pytorch_lightning.callbacks import EarlyStopping as OldEarlyStopping
        import stratagem_lightning.pytorch.callbacks.early_stopping as ours
        import lightning.pytorch.callbacks.early_stopping as theirs
        """.replace("\n        ", "\n")
    )
    assert names["L"] is lightning
    assert names["old"] is names["pl"] is lightning.pytorch
    assert names["lightning_fabric"] is lightning.fabric
    assert names["ours"] is names["theirs"]
    assert names["EarlyStopping"] is names["OldEarlyStopping"]
    assert issubclass(names["EarlyStopping"], EarlyStopping)
    assert names["ours"].__spec__.name == f"{OURS}.pytorch.callbacks.early_stopping"


def test_lightning_utilities_rank_zero_only_has_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helpers = ModuleType("lightning_utilities.core.rank_zero")
    helpers.rank_zero_only = lambda function: function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("RANK", "3")
    forget()
    importlib.import_module(OURS)
    forget()
    assert helpers.rank_zero_only.rank == 3


def test_a_module_of_lightnings_names_can_be_sent_to_another_process(
    lightning: ModuleType,
) -> None:
    # cloudpickle asks `copyreg` for modules of other types, as pickle does.
    for module in (lightning.pytorch, lightning.fabric.loggers):
        assert pickle.loads(pickle.dumps(module)) is module


def test_packages_are_attributes_without_an_import_of_their_own(lightning: ModuleType) -> None:
    L = imported("import lightning")["lightning"]
    assert issubclass(L.pytorch.callbacks.EarlyStopping, EarlyStopping)
    assert L.pytorch.utilities.rank_zero.rank_zero_only.rank == 0
    assert {"callbacks", "Trainer"} <= set(dir(L.pytorch))


def test_every_name_that_is_served_is_there(lightning: ModuleType) -> None:
    from stratagem_lightning.layout import LAYOUT

    for module, names in LAYOUT.items():
        if module == "pytorch.cli" and find_spec("jsonargparse") is None:
            continue  # of the extra [cli]
        found = importlib.import_module(f"lightning.{module}" if module else "lightning")
        for name in names:
            # Those say what to install.
            if not name.startswith(OF_BACKENDS):
                assert hasattr(found, name), (module, name)
        imported(f"from lightning.{module} import *" if module else "from lightning import *")


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("pytorch.loggers", "LitLogger", "CSVLogger, TensorBoardLogger or WandbLogger"),
        ("fabric.plugins.collectives", "Collective", "Fabric.all_gather, all_reduce"),
        ("pytorch.plugins.io", "HPUCheckpointIO", "a CheckpointIO of stratagem.checkpoint"),
        ("pytorch.plugins.precision.hpu", "HPUPrecisionPlugin", "accelerator='hpu'"),
        ("pytorch.serve", "ServableModule", "load_from_checkpoint"),
        (
            "pytorch.callbacks.progress.rich_progress",
            "CustomProgress",
            "RichProgressBar(theme=...)",
        ),
    ],
)
def test_a_class_that_is_not_here_can_be_imported_for_isinstance(
    module: str, name: str, instead: str, lightning: ModuleType
) -> None:
    kind = getattr(importlib.import_module(f"lightning.{module}"), name)
    assert not isinstance(object(), kind)
    for made in (kind, type("Own", (kind,), {})):
        with pytest.raises(ConfigurationError) as raised:
            made()
        text = str(raised.value)
        assert text.startswith(f"Stratagem has no {name}; use ")
        assert instead in text
    assert name not in importlib.import_module(f"lightning.{module}").__all__


@pytest.mark.parametrize(
    ("place", "name", "new"),
    [
        ("strategies.hpu_parallel", "HPUParallelStrategy", "HPUParallelStrategy"),
        ("plugins.precision.bitsandbytes", "BitsandbytesPrecisionPlugin", "BitsandbytesPrecision"),
    ],
)
def test_former_lightning_names_equal_the_present_classes(
    place: str, name: str, new: str, lightning: ModuleType
) -> None:
    package = importlib.import_module(f"lightning.pytorch.{place.rpartition('.')[0]}")
    leaf = importlib.import_module(f"lightning.pytorch.{place}")
    for module in (package, leaf):
        assert getattr(module, name).__name__ == getattr(package, new).__name__


def test_a_class_of_a_backend_that_is_not_installed_can_be_imported(
    lightning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = vars(stratagem.strategies)["__getattr__"]

    def missing(name: str) -> Any:
        if name == "XLAStrategy":
            raise ImportError("XLAStrategy is provided by stratagem-backend-xla: pip install it")
        return find(name)

    monkeypatch.setattr(stratagem.strategies, "__getattr__", missing)
    monkeypatch.delitem(vars(stratagem.strategies), "XLAStrategy", raising=False)
    kind = importlib.import_module("lightning.pytorch.strategies").XLAStrategy
    assert not isinstance(object(), kind)
    with pytest.raises(ImportError, match="provided by stratagem-backend-xla"):
        kind()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("from lightning import Unheard", "Stratagem has no 'lightning.Unheard'"),
        ("from lightning.pytorch import Unheard", "has no 'lightning.pytorch.Unheard'"),
        ("import pytorch_lightning.unheard", "has no 'lightning.pytorch.unheard'"),
        ("from lightning.pytorch.callbacks.timer import Unheard", "callbacks.timer.Unheard'"),
        ("import lightning.pytorch.loops.progress", "use Trainer's attributes, and stratagem.Lite"),
        ("import lightning.pytorch.utilities.upgrade_checkpoint", "use Lightning's own, where"),
        ("from lightning.pytorch import Trainr", "Trainr'; did you mean 'Trainer'?"),
        ("from lightning.pytorch.callbacks import ModelCheckpiont", "mean 'ModelCheckpoint'?"),
        ("import lightning.fabric._graveyard", "is private to Lightning"),
        ("from lightning.pytorch.trainer import _x", "is private to Lightning"),
    ],
)
def test_missing_lightning_name_raises_import_error_with_advice(
    statement: str, said: str, lightning: ModuleType
) -> None:
    with pytest.raises(ImportError) as caught:
        imported(statement)
    assert said in str(caught.value)


def test_missing_lightning_name_raises_attribute_error(lightning: ModuleType) -> None:
    assert not hasattr(lightning.pytorch, "Unheard")
    with pytest.raises(AttributeError, match=r"Stratagem has no 'lightning\.pytorch\.Unheard'"):
        _ = lightning.pytorch.Unheard


def test_lightning_that_was_imported_before_is_refused(
    lightning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    real = ModuleType("pytorch_lightning")
    real.__file__ = "/site-packages/pytorch_lightning/__init__.py"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", real)
    with pytest.raises(
        ConfigurationError, match=r"'pytorch_lightning' was imported before .*/site"
    ):
        importlib.import_module(OURS)


# -- what is said


def test_rank_0_prints_that_lightning_is_stratagem(
    lightning: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    capsys.readouterr()
    importlib.import_module(OURS)
    said = capsys.readouterr().err
    assert said == f"stratagem: in this process `lightning` is Stratagem {stratagem.__version__}\n"
    forget()
    monkeypatch.setenv("RANK", "1")
    importlib.import_module(OURS)
    assert capsys.readouterr().err == ""


def test_the_line_names_a_lightning_that_is_installed_and_not_used(
    lightning: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    info = tmp_path / "lightning-2.6.6.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.6.6\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Distribution.from_name("lightning").version == "2.6.6"
    forget()
    capsys.readouterr()
    importlib.import_module(OURS)
    said = capsys.readouterr().err
    assert "(the installed lightning 2.6.6 is not used)" in said


# -- scripts

SCRIPT = """
import sys

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_fit_start(self):
        print(f"{__name__} on rank {self.global_rank} of {self.trainer.world_size}")


if __name__ == "__main__":
    options = dict(logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2], max_steps=2, **options
    )
    trainer.fit(Model())
    trainer.print("done", trainer.global_step, sys.argv[1:], __file__)
"""


@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", []), ("ddp_spawn", []), ("ddp", ["--devices", "2"])]
)
def test_a_script_of_lightnings_runs_unchanged_on_all_its_ranks(
    strategy: str, options: list[str], tmp_path: Path, script_environment: dict[str, str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "stratagem", "run", "--as-lightning"]
    ran = subprocess.run(
        [*command, str(script), "2", strategy, *options],
        env=script_environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    main = "__mp_main__" if strategy == "ddp_spawn" else "__main__"
    for rank in range(2):
        assert f"{main} on rank {rank} of 2" in ran.stdout
    assert f"done 2 ['2', '{strategy}'] {script}" in ran.stdout
    assert ran.stderr.count("`lightning` is Stratagem") == 1


def test_run_needs_devices_unless_the_script_starts_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert parse(["--as-lightning", str(script)]).devices == 0
    launch = parse(["--as-lightning", str(script), "--lr", "1"])
    assert launch.command[1:] == [
        "-m",
        "stratagem_lightning_plugin.script",
        str(script),
        "--lr",
        "1",
    ]
    for arguments, said in [
        ([str(script)], "--devices"),
        (["--as-lightning", "--prefix", str(script)], "give --devices as well for"),
    ]:
        with pytest.raises(SystemExit):
            parse(arguments)
        assert said in capsys.readouterr().err


def test_docstring_examples_of_lightning_pass(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    code = """
import doctest, importlib.util, pkgutil, sys
import stratagem_lightning
import stratagem_lightning.api as api

names = [f"stratagem_lightning.{name}" for name in ("absent", "importing", "layout")]
names += [found.name for found in pkgutil.walk_packages(api.__path__, f"{api.__name__}.")]
names.append("stratagem_lightning")
if importlib.util.find_spec("jsonargparse") is None:  # of the extra [cli]
    names.remove("stratagem_lightning.api.cli")
results = [doctest.testmod(importlib.import_module(name)) for name in names]
print(sum(result.attempted for result in results))
sys.exit(sum(result.failed for result in results))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=script_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(ran.stdout.splitlines()[-1]) > 10


def test_collective_of_one_rank() -> None:
    collective = TorchCollective()
    assert collective.teardown().group is None
    with pytest.raises(ConfigurationError, match="expected several ranks, received a run of one"):
        collective.setup()
    with pytest.raises(AttributeError, match="has no 'shout'; expected one of all_gather, "):
        collective.shout  # noqa: B018
    store = dist.HashStore()  # type: ignore[attr-defined]  # no part of its typed names
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        collective.setup().create_group()
        assert (collective.rank, collective.world_size) == (0, 1)
        collective.broadcast_object_list(["run"], src=0)
        tensor = torch.ones(2)
        collective.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
        assert collective.teardown().group is None
    finally:
        dist.destroy_process_group()
