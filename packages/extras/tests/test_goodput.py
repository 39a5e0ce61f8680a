"""Goodput: where the time of a run goes, over its restarts; MFU, slow ranks, full memory."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callback_runs import Net, loader, trainer
from fixtures import run_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module
from stratagem.callbacks import Goodput, ModelCheckpoint
from stratagem.errors import ConfigurationError
from stratagem.loggers import CSVLogger
from stratagem_extras.callbacks.memory_history import MemoryHistory
from stratagem_extras.callbacks.step_flops import StepFlops, counting, peak_by_name
from stratagem_extras.callbacks.stragglers import Stragglers
from stratagem_extras.callbacks.time_ledger import KINDS, TimeLedger

SCRIPT = Path(__file__).parent / "scripts" / "stragglers.py"


class Slow(Net):
    """A step takes 20 ms, a validation batch 30 ms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.03)


class SlowRows(TensorDataset):
    """A batch of four takes 40 ms."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.01)
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


def slow_loader() -> DataLoader[Any]:
    return DataLoader(SlowRows(*loader().dataset.tensors), 4)  # type: ignore[attr-defined]


def rows_of(count: int) -> Any:
    return torch.randn(count, 64)


class SlowSave(Callback):
    def on_save_checkpoint(self, *_: Any) -> None:
        time.sleep(0.1)


class Fails(Callback):
    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.step, self.error = step, error or RuntimeError("the node is gone")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_goodput_divides_the_time_of_a_fit(tmp_path: Path) -> None:
    goodput, logger = Goodput(), CSVLogger(tmp_path)
    began = time.perf_counter()
    goodput = Goodput()
    one = trainer(
        goodput,
        SlowSave(),
        ModelCheckpoint(tmp_path / "saved"),
        logger=logger,
        max_epochs=3,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    one.fit(Slow(), slow_loader(), loader())
    took = time.perf_counter() - began
    seconds = goodput.ledger.seconds
    assert sum(seconds.values()) == pytest.approx(took, abs=0.5)
    # 18 steps, of which 2 belong to the start; 3 validations of 6 batches; 3 saves.
    assert seconds["training"] >= 16 * 0.02
    assert seconds["data"] >= 16 * 0.04
    assert seconds["validation"] >= 18 * 0.03
    assert seconds["saving"] >= 3 * 0.1
    assert seconds["starting"] >= 2 * 0.02
    assert seconds["repeated"] == seconds["down"] == 0
    logged = [row for row in rows(logger) if row.get("goodput")]
    last = {name: float(value) for name, value in logged[-1].items() if value}
    assert last["goodput"] == pytest.approx(
        last["goodput/training"] / sum(last[f"goodput/{kind}"] for kind in KINDS)
    )
    assert last["goodput/data"] == pytest.approx(seconds["data"], abs=0.05)
    assert len(logged) == 18 + 1
    assert re.match(r"goodput [\d.]+% of [\d.]+ s: training steps that count ", goodput.ending)
    assert "waiting for data" in goodput.ending


def test_goodput_counts_what_restarts_have_cost(tmp_path: Path) -> None:
    def fit(*callbacks: Callback, path: Any = None, epochs: int = 2) -> Goodput:
        goodput = Goodput()
        saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=6, save_top_k=-1)
        logger = CSVLogger(tmp_path / "logs")
        one = trainer(goodput, saver, *callbacks, logger=logger, max_epochs=epochs)
        one.fit(Slow(), loader(), ckpt_path=path)
        return goodput

    with pytest.raises(RuntimeError, match="the node is gone"):
        fit(Fails(11))
    (file,) = (tmp_path / "logs").rglob("goodput.json")
    before = json.loads(file.read_text())
    assert before["ended"] == "failed"
    time.sleep(0.5)
    (path,) = (tmp_path / "saved").glob("*step=6*")
    saved = torch.load(path, weights_only=True)["callbacks"]["Goodput"]["seconds"]
    down = time.time() - before["at"]
    goodput = fit(path=path)
    seconds = goodput.ledger.seconds
    # Steps 7 to 11 are trained again. Their first time does not count.
    lost = before["seconds"]["training"] - saved["training"]
    assert lost >= 4 * 0.02
    assert seconds["repeated"] == pytest.approx(lost)
    assert seconds["training"] >= saved["training"] + 4 * 0.02
    assert down <= seconds["down"] < down + 0.5
    assert seconds["starting"] > before["seconds"]["starting"]
    assert goodput.ledger.restarts == 1
    assert ", with 1 restart: " in goodput.ending
    assert "steps trained again after a restart" in goodput.ending
    assert json.loads(file.read_text())["ended"] == "finished"

    # A run that has ended is not down until its owner trains it further.
    time.sleep(0.3)
    (path,) = (tmp_path / "saved").glob("*step=12*")
    longer = fit(path=path, epochs=3)
    assert longer.ledger.seconds["down"] == pytest.approx(seconds["down"], abs=0.01)
    assert longer.ledger.restarts == 2


def test_goodput_continues_from_a_checkpoint_alone(tmp_path: Path) -> None:
    def fit(folder: str, path: Any = None, epochs: int = 1) -> Goodput:
        goodput = Goodput()
        saver = ModelCheckpoint(tmp_path / folder, save_last=True)
        trainer(goodput, saver, max_epochs=epochs).fit(Slow(), loader(), ckpt_path=path)
        return goodput

    first = fit("first")
    for file in tmp_path.rglob("goodput.json"):
        file.write_text("{")
    second = fit("second", tmp_path / "first" / "last.ckpt", 2)
    trained = torch.load(tmp_path / "first" / "last.ckpt", weights_only=True)["callbacks"]
    before = trained["Goodput"]["seconds"]
    assert first.ledger.seconds["training"] >= before["training"] >= 4 * 0.02
    assert second.ledger.seconds["training"] >= before["training"] + 4 * 0.02
    assert second.ledger.restarts == 1
    assert second.ledger.seconds["repeated"] == second.ledger.seconds["down"] == 0


def test_a_second_fit_begins_anew() -> None:
    goodput = Goodput()
    one = trainer(goodput, max_epochs=1)
    one.fit(Slow(), loader())
    time.sleep(0.3)
    began = time.perf_counter()
    one.fit(Slow(), loader())
    assert 6 * 0.02 <= goodput.ledger.whole <= time.perf_counter() - began
    assert goodput.ledger.restarts == 0


def test_the_end_line_and_the_report_show_goodput(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratagem import Trainer
    from stratagem_extras.report.command import report

    logger = CSVLogger(tmp_path)
    one = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=["goodput"],
        logger=logger,
        max_epochs=2,
        enable_checkpointing=False,
    )
    one.fit(Slow(), loader())
    printed = capsys.readouterr().err
    assert re.search(r"stratagem: goodput [\d.]+% of [\d.]+ s: training steps that", printed)
    assert report([str(logger.log_dir), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Goodput" in page
    assert "training steps that count" in page


def test_mfu_counts_the_operations_of_a_step_once(tmp_path: Path) -> None:
    class Wide(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.01)
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    goodput, logger = Goodput(peak_flops=1e9), CSVLogger(tmp_path)
    one = trainer(
        goodput, logger=logger, max_epochs=1, log_every_n_steps=5, accumulate_grad_batches=2
    )
    one.fit(Wide(), DataLoader(rows_of(240), 4))
    # Two micro-batches: forward, and the gradient of the weight.
    flops = 2 * 2 * (2 * 4 * 64 * 64)
    trained = goodput.ledger.seconds["training"] + goodput.ledger.seconds["data"]
    assert goodput.mfu == pytest.approx(28 * flops / trained / 1e9, rel=0.05)
    assert goodput.ending.endswith(f"; MFU {goodput.mfu:.1%}")
    logged = [float(row["goodput/mfu"]) for row in rows(logger) if row.get("goodput/mfu")]
    assert logged[-1] == pytest.approx(goodput.mfu, rel=0.01)
    unknown = Goodput()
    trainer(unknown, max_epochs=1).fit(Wide(), DataLoader(rows_of(40), 4))
    assert unknown.mfu is None
    assert "MFU" not in unknown.ending


def test_recomputed_operations_do_not_count_as_the_models() -> None:
    layer, inputs = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    with StepFlops() as plain:
        torch.autograd.backward([layer(torch.relu(layer(inputs))).sum()])
    with StepFlops() as again:
        hidden = checkpoint(lambda x: torch.relu(layer(x)), inputs, use_reentrant=False)
        layer(hidden).sum().backward()
    assert (plain.model, plain.recomputed) == (5 * 512, 0)
    assert (again.model, again.recomputed) == (5 * 512, 512)


def test_attention_counts_and_an_unknown_operation_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @torch.library.custom_op("goodput_test::product", mutates_args=())
    def product(one: torch.Tensor) -> torch.Tensor:
        return one @ one.mT

    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    with counting() as flops:
        attended = nn.functional.scaled_dot_product_attention(query, query, query)
        torch.autograd.backward([attended.sum()])
    products = 2 * (2 * 8 * 8 * 4)  # of two heads
    assert flops.model == (2 + 5) * products
    assert flops.missed == set()

    class Custom(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            product(batch[0])
            return super().training_step(batch, batch_idx)

    trainer(Goodput(peak_flops=1e9), max_steps=2).fit(Custom(), loader())
    said = capsys.readouterr().out
    assert "goodput/mfu is too low, since it leaves out operations whose number is not" in said
    assert "goodput_test.product" in said
    Custom.flops_per_batch = 1e6  # type: ignore[attr-defined]
    own = Goodput(peak_flops=1e9)
    trainer(own, max_steps=4).fit(Custom(), loader())
    assert "too low" not in capsys.readouterr().out
    assert own.mfu is not None


def test_checkpointing_in_a_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Checkpointed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = checkpoint(self.backbone, batch[0], use_reentrant=False)
            return (self.head(hidden) - batch[1]).square().mean()

    trainer(Goodput(peak_flops=1e9), max_steps=3).fit(Checkpointed(), loader())
    assert "again, which do not count in goodput/mfu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989),
        ("NVIDIA H100 80GB HBM3", "float8", 1978),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA GeForce RTX 4090", "bf16-true", 165),
        ("NVIDIA L4", "bf16-mixed", 121),
        ("NVIDIA L40S", "bf16-mixed", 362),
        ("NVIDIA L40", "bf16-mixed", None),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125),
        ("NVIDIA H200", "bf16-mixed", 989),
        ("AMD Instinct MI300X", "bf16-mixed", 1307),
        ("NVIDIA H100 80GB HBM3", "32-true", None),
        ("NVIDIA GeForce GTX 1080", "16-mixed", None),
    ],
)
def test_the_peak_of_a_gpu_follows_its_name_and_the_precision(
    device: str, precision: str, tflops: float | None
) -> None:
    peak = peak_by_name(device, precision)
    assert peak == (None if tflops is None else tflops * 1e12)


def test_single_precision_has_a_peak_if_tf32_is_allowed() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_by_name("NVIDIA A100-SXM4-80GB", "32-true") == 156e12
        assert peak_by_name("Tesla V100-SXM2-32GB", "32-true") is None
    finally:
        torch.set_float32_matmul_precision("highest")


def test_goodput_refuses_other_arguments() -> None:
    with pytest.raises(ConfigurationError, match="expected operations per second of a device"):
        Goodput(peak_flops=0)
    with pytest.raises(ConfigurationError, match="expected a number of steps, or 0, and a factor"):
        Goodput(slower=1.0)
    with pytest.raises(ConfigurationError, match="expected a number of steps, or 0, and a factor"):
        Goodput(compare_ranks_every=-1)


def test_a_ledger_adds_up() -> None:
    ledger = TimeLedger(10.0)
    assert ledger.enter("training", now=12.0) == "starting"
    ledger.enter("other", now=20.0)
    ledger.move(3.0, "training", "data")
    ledger.move(9.0, "data", "saving")
    assert {kind: s for kind, s in ledger.seconds.items() if s} == {
        "starting": 2.0,
        "training": 5.0,
        "saving": 3.0,
    }
    assert ledger.goodput() == 0.5


# -- several ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_slow_rank_is_named(strategy: str, tmp_path: Path) -> None:
    printed = run_file(SCRIPT, strategy, "2", "1", folder=tmp_path).stdout
    (found,) = re.findall(r"stratagem: rank (\d) \((.*?)\) takes ([\d.]+) times as long", printed)
    assert found[0] == "1"
    assert found[1].startswith("node 0 '")
    assert float(found[2]) > 1.25
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row.get("goodput/slowest_rank")][-1]
    assert float(last["goodput/slowest_rank"]) == 1
    assert float(last["goodput/slowest_rank_over_others"]) > 1.25


def test_ranks_of_equal_speed_are_not_named(tmp_path: Path) -> None:
    assert "times as long" not in run_file(SCRIPT, "ddp", "2", "all", folder=tmp_path).stdout


def test_a_slow_rank_of_a_mesh_is_named_with_its_place(tmp_path: Path) -> None:
    printed = run_file(SCRIPT, "mesh", "4", "3", folder=tmp_path).stdout
    (found,) = re.findall(r"stratagem: rank (\d) \((.*?)\) takes", printed)
    assert found[0] == "3"
    assert found[1].endswith(", shard 1, tensor 1")


def test_ranks_without_a_store_are_not_compared() -> None:
    from stratagem.strategies import Ranks

    with pytest.raises(ConfigurationError, match="has no store"):
        Stragglers(Ranks(), 50, 1.25)


# -- full memory


class Memory:
    """Stands in for `torch.cuda.memory`: there is no GPU here."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _record_memory_history(self, enabled: str | None = "all", **options: Any) -> None:
        self.calls.append(enabled)

    def _dump_snapshot(self, filename: str) -> None:
        Path(filename).write_text("snapshot")


def test_memory_is_written_after_an_out_of_memory_error(tmp_path: Path) -> None:
    strategy: Any = SimpleNamespace(
        device=torch.device("cuda", 0),
        accelerator=SimpleNamespace(
            is_out_of_memory=lambda error: isinstance(error, torch.OutOfMemoryError)
        ),
        ranks=SimpleNamespace(global_rank=3),
    )
    memory = Memory()
    history = MemoryHistory(strategy, memory)
    assert history.write_after(RuntimeError("another error"), tmp_path) is None
    path = history.write_after(torch.OutOfMemoryError("CUDA out of memory"), tmp_path)
    assert path == tmp_path / "memory-of-rank-3.pickle"
    assert path.read_text() == "snapshot"
    history.stop()
    history.stop()
    assert memory.calls == ["all", None]


def test_an_out_of_memory_error_of_a_fit_writes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratagem_extras.callbacks import goodput as module

    class OnGpu(MemoryHistory):
        def __init__(self, strategy: Any) -> None:
            pretended = SimpleNamespace(
                device=torch.device("cuda", 0),
                accelerator=SimpleNamespace(is_out_of_memory=lambda error: True),
                ranks=strategy.ranks,
            )
            super().__init__(pretended, Memory())  # type: ignore[arg-type]

    monkeypatch.setattr(module, "MemoryHistory", OnGpu)
    error = torch.OutOfMemoryError("CUDA out of memory")
    logger = CSVLogger(tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        trainer(Goodput(), Fails(3, error), logger=logger).fit(Net(), loader())
    (written,) = tmp_path.rglob("memory-of-rank-0.pickle")
    assert written.parent == Path(logger.log_dir)
    assert "what memory held is in" in capsys.readouterr().out


def test_memory_is_not_recorded_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer(
            Goodput(),
            Fails(3, RuntimeError("DefaultCPUAllocator: can't allocate memory")),
            logger=CSVLogger(tmp_path),
        ).fit(Net(), loader())
    assert not [*tmp_path.rglob("*.pickle")]
