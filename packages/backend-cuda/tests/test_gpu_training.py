"""On a GPU: numbers of a plain loop, batches copied ahead, memory, compilers, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigurationError
from stratagem_extras.profilers.pytorch import PyTorchProfiler
from stratagem_extras.tuner import BatchSizeFinder

pytestmark = pytest.mark.gpu


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


def batches(number: int = 12) -> list[Tensor]:
    inputs = torch.randn(16 * number, 64, generator=torch.Generator().manual_seed(2))
    return [*torch.split(inputs, 16)]


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = mse_loss(self.net(batch), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(folder: Path, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    return Trainer(
        **{"accelerator": "cuda", "devices": 1, "default_root_dir": folder, **quiet, **options}
    )


def losses_of_a_plain_loop(precision: str) -> list[float]:
    net = network().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scaler: Any = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
    losses = []
    for batch in batches():
        inputs = batch.cuda()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = mse_loss(net(inputs), inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_losses_on_a_gpu_equal_a_plain_loop(strategy: str, precision: str, tmp_path: Path) -> None:
    net = Net()
    trainer(tmp_path, strategy=strategy, precision=precision).fit(net, batches())
    assert net.losses == losses_of_a_plain_loop(precision)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp_sharded", "fsdp_cpu_offload"])
def test_sharding_losses_on_one_gpu_are_near_a_plain_loop(strategy: str, tmp_path: Path) -> None:
    net = Net()
    trainer(tmp_path, strategy=strategy).fit(net, batches())
    assert net.losses == pytest.approx(losses_of_a_plain_loop("32-true"), rel=1e-5)


def test_without_a_word_the_trainer_takes_the_gpu(tmp_path: Path) -> None:
    net = Net()
    trainer(tmp_path, accelerator="auto").fit(net, batches(2))
    assert net.net[0].weight.is_cuda


def test_trainer_refuses_more_gpus_than_exist(tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    with pytest.raises(ConfigurationError, match=f"devices={there + 1}.*{there}"):
        trainer(tmp_path, devices=there + 1)


class Numbered(Dataset[Tensor]):
    """Samples of a megabyte, all elements of which are the sample's number."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2**18,), float(index))


class Reads(Module):
    """Computes for some time, then reads the batch on the computing stream."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        busy = torch.ones(2048, 2048, device=self.device)
        for _ in range(5):
            busy = busy @ busy * 0
        self.seen.append(torch.stack([(batch + busy[0, 0]).amin(1), batch.amax(1)]))
        loss: Tensor = self.net(batch[:, :1]).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_complete(workers: int, tmp_path: Path) -> None:
    net = Reads()
    loader = DataLoader(Numbered(), batch_size=8, pin_memory=True, num_workers=workers)
    trainer(tmp_path).fit(net, loader)
    least, most = torch.cat(net.seen, 1).cpu()
    assert torch.equal(least, torch.arange(400.0))
    assert torch.equal(most, torch.arange(400.0))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_run_resumes_from_gpu_to_cpu_and_back(
    first: str, second: str, precision: str, tmp_path: Path
) -> None:
    on_cpu = "bf16-mixed" if precision == "16-mixed" else precision
    precisions = {"cuda": precision, "cpu": on_cpu}
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": saved}
    whole, rest = Net(), Net()
    trainer(tmp_path, accelerator=first, precision=precisions[first], **options).fit(
        whole, batches()
    )
    trainer(tmp_path, accelerator=second, precision=precisions[second]).fit(
        rest, batches(), ckpt_path=tmp_path / "step=6.ckpt"
    )
    assert len(rest.losses) == 6
    near = 1e-4 if precision == "32-true" else 0.02
    assert rest.losses == pytest.approx(whole.losses[6:], rel=near)


def test_a_checkpoint_that_is_written_beside_training_has_its_steps_weights(
    tmp_path: Path,
) -> None:
    class Notes(Callback):
        def __init__(self) -> None:
            self.weights: list[Tensor] = []

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            self.weights.append(module.net[0].weight.detach().cpu().clone())
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    notes = Notes()
    trainer(tmp_path, plugins="async", callbacks=[notes]).fit(Net(), batches())
    for step, weights in enumerate(notes.weights, 1):
        state = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(state["net.0.weight"], weights), step


@pytest.fixture
def _little_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("_little_memory")
def test_the_largest_batch_is_found_with_a_full_gpu_on_the_way(tmp_path: Path) -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 1024
            self.net = nn.Sequential(nn.Linear(64, 16384), nn.ReLU(), nn.Linear(16384, 64))

        def train_dataloader(self) -> Any:
            samples: Any = torch.zeros(2**19, 64)
            return DataLoader(samples, batch_size=self.batch_size)

    net = Wide()
    finder = BatchSizeFinder(steps_per_trial=2)
    trainer(tmp_path, callbacks=[finder], max_steps=2).fit(net)
    # A sample has 64 KiB of results of the first layer, and as much of ReLU's.
    assert 1024 <= net.batch_size < 8192


class Pure(Module):
    """Reads no value in a step, which can be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("options", [True, {"mode": "reduce-overhead"}, "step"])
def test_inductor_has_the_losses_of_eager(options: Any, tmp_path: Path) -> None:
    eager, compiled = Pure(), Pure()
    trainer(tmp_path).fit(eager, batches())
    trainer(tmp_path, compile=options).fit(compiled, batches())
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_profile_has_the_kernels_of_the_gpu(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path)
    trainer(tmp_path, profiler=profiler, max_steps=8).fit(Net(), batches())
    texts = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert any('"cat": "kernel"' in text for text in texts)


def test_a_deterministic_run_repeats_itself(tmp_path: Path) -> None:
    losses = []
    for _ in range(2):
        net = Net()
        trainer(tmp_path, deterministic=True).fit(net, batches())
        losses.append(net.losses)
    torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1]
