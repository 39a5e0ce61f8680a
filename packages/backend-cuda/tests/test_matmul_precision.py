"""TF32: what is said, once, where a GPU has it and the user has not said whether to use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.launch.process import print_hint_once
from stratagem_cuda.accelerator import CUDAAccelerator

DEVICE = torch.device("cuda", 0)
HINT = (
    "matrix products in float32 do not use the TF32 cores of NVIDIA A100: "
    "torch.set_float32_matmul_precision('high') makes large ones several times as fast, with 10 "
    "bits of mantissa in place of 23; 'highest' keeps them exact, and this quiet"
)


@pytest.fixture(autouse=True)
def _played_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    print_hint_once.cache_clear()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "none"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


class Played(CPUAccelerator):
    """The processor, which says what a GPU would."""

    def hints(self, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        return tuple(CUDAAccelerator().hints(DEVICE, dtype))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(precision: str) -> None:
    trainer = Trainer(
        accelerator=Played(),
        precision=precision,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(torch.randn(8, 4), batch_size=4))  # type: ignore[arg-type]


def test_trainer_prints_the_tf32_hint_once(capfd: pytest.CaptureFixture[str]) -> None:
    fit("bf16-mixed")
    assert capfd.readouterr().err == ""
    fit("32-true")
    fit("32-true")
    assert capfd.readouterr().err == f"stratagem: {HINT}\n"


def test_tf32_hint_is_absent_after_a_choice_or_without_tensor_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = CUDAAccelerator()
    assert accelerator.hints(DEVICE, torch.float32) == (HINT,)
    assert accelerator.hints(DEVICE, torch.bfloat16) == ()
    for decided in ("tf32", "ieee"):  # what 'high' and 'highest' set
        torch.backends.cuda.matmul.fp32_precision = decided
        assert accelerator.hints(DEVICE, torch.float32) == ()
    torch.backends.cuda.matmul.fp32_precision = "none"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert accelerator.hints(DEVICE, torch.float32) == ()
