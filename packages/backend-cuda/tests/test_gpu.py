"""On a GPU: training, waits, memory and failed kernels (`nox -s gpu`)."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import DeviceStatsMonitor
from stratagem.loggers import CSVLogger
from stratagem_cuda.accelerator import CUDAAccelerator

pytestmark = pytest.mark.gpu


def train(precision: str, path: Path | None = None, *, load: bool = False) -> dict[str, Any]:
    """Take six steps with dropout, saved after the third, or the last three."""
    lite = Lite(accelerator=CUDAAccelerator(), devices=1, precision=precision)
    lite.launch()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 16))
    model, optimizer = lite.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    batches: Any = torch.split(inputs, 4)
    loader = lite.setup_dataloaders(DataLoader(batches, batch_size=None))
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if load and path is not None:
        torch.rand(5, device="cuda")
        lite.load(path, dict(state))
    for number, batch in enumerate(loader, 1):
        lite.backward(mse_loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
        if path is not None and not load and number == 3:
            lite.save(path, state)
    return {name: value.cpu() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_dropout_on_the_gpu_resumes_bit_for_bit(precision: str, tmp_path: Path) -> None:
    whole = train(precision, tmp_path / "half.ckpt")
    rest = train(precision, tmp_path / "half.ckpt", load=True)
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


def test_an_accelerator_in_use_must_not_be_forked() -> None:
    torch.ones(1, device="cuda")
    assert "has used cuda devices already" in str(CUDAAccelerator().fork_problem())


class Net(Module):
    """Regresses its input; takes more memory than there is, where it is told to."""

    def __init__(self, *, too_much: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 16))
        self.too_much = too_much

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.too_much and batch_idx == 2:
            torch.empty(2**50, device=self.device, dtype=torch.uint8)
        loss = mse_loss(self.net(batch).float(), batch.float())
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: Module, folder: Path, **options: Any) -> CSVLogger:
    logger = CSVLogger(folder)
    samples: Any = torch.randn(80, 16)
    Trainer(
        **{"strategy": "auto", "callbacks": DeviceStatsMonitor(), **options},
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=False,
    ).fit(module, DataLoader(samples, batch_size=4, pin_memory=True))
    return logger


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_no_step_waits_for_the_gpu(strategy: str, tmp_path: Path) -> None:
    class Count(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            # fsdp checks parameters in the backward passes 1, 2, 4, 8 and so on, and waits there.
            if arguments[-1] == 8:
                torch.cuda.set_sync_debug_mode("warn")

        def on_train_batch_end(self, *arguments: Any) -> None:
            if arguments[-1] == 14:
                torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(Net(), tmp_path, strategy=strategy, callbacks=[Count(), DeviceStatsMonitor()])
    assert [one for one in map(str, said) if "called a synchronizing" in one] == []


def test_a_gpus_figures_are_in_the_logs(tmp_path: Path) -> None:
    log = (Path(fit(Net(), tmp_path).log_dir) / "metrics.csv").read_text().splitlines()
    for name in ("allocated_bytes", "peak_reserved_bytes", "alloc_retries"):
        assert f"DeviceStatsMonitor.on_train_batch_end/{name}" in log[0]
    figures = CUDAAccelerator().device_stats(torch.device("cuda", 0))
    assert 0 <= figures.get("utilization_percent", 0) <= 100
    assert 0 < figures.get("temperature_celsius", 40) < 120


def test_out_of_memory_error_of_a_gpu_lists_memory_use(tmp_path: Path) -> None:
    expected = r"rank 0 of 1 \(cuda:0\), at .*, is out of memory"
    with pytest.raises(torch.OutOfMemoryError, match=expected) as found:
        fit(Net(too_much=True), tmp_path)
    for what in ("parameters", "optimizer state", "more was asked for"):
        assert f"iB  {what}" in str(found.value)


FAILING = """
import torch
from stratagem import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            torch.zeros(4, device=self.device)[batch.long() + 99].sum()  # out of range
        loss = self.net(batch).sum()
        self.log("loss", loss, on_step=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

Trainer(accelerator="gpu", devices=1, strategy={strategy!r}, max_epochs=1, log_every_n_steps=1,
        enable_checkpointing=False).fit(Net(), [torch.ones(4, 4) for _ in range(50)])
"""


@pytest.mark.parametrize("blocking", ["0", "1"])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_failed_kernel_ends_the_run_in_time_with_its_own_error(
    strategy: str, blocking: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING.replace("{strategy!r}", repr(strategy)))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": blocking},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "CUDA error: device-side assert triggered" in done.stderr
    assert "rank 0 of 1 (cuda:0), at " in done.stderr
    assert "index, label or token out of range" in done.stderr
    if blocking == "1":
        assert f"{script}:11 in training_step: each call has waited for its kernel" in done.stderr
    else:
        assert "run again with CUDA_LAUNCH_BLOCKING=1" in done.stderr
