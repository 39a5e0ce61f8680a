"""Errors of a device itself: what was held by whom, what would fit, and a device that is dead."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem import Lite, Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.callbacks import Callback
from stratagem.discovery import StrategySpec
from stratagem.errors import PluginError
from stratagem.interfaces.accelerator import DeviceMemory
from stratagem.launch.rank import this_rank
from stratagem.loggers import CSVLogger
from stratagem.runtime.device_errors import explain_device_error

MIB = 2**20


def spec(name: str, shards: tuple[str, ...] = (), offloads: tuple[str, ...] = ()) -> StrategySpec:
    return StrategySpec(name=name, target="m:C", api_version=1, shards=shards, offloads=offloads)


def test_spec_shards_refuses_unknown_words() -> None:
    with pytest.raises(PluginError, match="shards=\\('weights',\\); expected a tuple of some of"):
        spec("wrong", ("weights",))


# -- played errors, on the CPU


class Small(CPUAccelerator):
    """Has 20 MiB, of which another process holds some; fails as a device does."""

    def device_memory(self, device: torch.device) -> DeviceMemory:
        other = (("process 4711 (python)", 2 * MIB),)
        return DeviceMemory(20 * MIB, 9 * MIB, 17 * MIB, 18 * MIB, other)

    def explain_lost_device(self, error: BaseException) -> str | None:
        return "switch it off and on" if "lost" in str(error) else None


class Limited(CPUAccelerator):
    """Has 1000 MiB, of which this process may hold 17."""

    def device_memory(self, device: torch.device) -> DeviceMemory:
        return DeviceMemory(1000 * MIB, 9 * MIB, 17 * MIB, 18 * MIB, ())


class Net(Module):
    """A linear layer of 1 MiB that fails where it is told to."""

    def __init__(self, fails_in: str, error: RuntimeError) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)
        self.register_buffer("table", torch.zeros(512, 512))
        self.fails_in = fails_in
        self.error = error

    def fail(self, where: str) -> None:
        if where == self.fails_in:
            raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.fail("step")
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("evaluation")

    def configure_optimizers(self) -> Any:
        self.fail("set-up")
        return torch.optim.AdamW(self.parameters())


FULL = "Tried to allocate 3.00 MiB"


def fit(module: Module, folder: Path, **options: Any) -> None:
    batches = [torch.ones(2, 512) for _ in range(3)]
    trainer = Trainer(
        **{"accelerator": Small(), "max_epochs": 1, "logger": False, **options},
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, batches, batches)


@pytest.fixture(autouse=True)
def _alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_rank, "device_is_lost", False)


def test_out_of_memory_error_lists_memory_use_and_remedies(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError(FULL)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(Net("step", error), tmp_path)
    assert raised.value is error  # whoever catches torch's error goes on catching it
    lines = str(error).splitlines()
    raising = Net.fail.__code__.co_firstlineno + 2
    assert lines[0] == FULL
    assert lines[2] == (
        f"rank 0 of 1 (cpu), at {__file__}:{raising} in fail, is out of memory: the device has "
        "20.00 MiB. This process held 17.00 MiB at most, and a whole step takes about 21.00 MiB:"
    )
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[3:10]] == [
        ["1.00 MiB", "1.00 MiB", "parameters"],
        ["0.00 MiB", "1.00 MiB", "gradients"],
        ["2.00 MiB", "2.00 MiB", "optimizer state"],
        ["1.00 MiB", "1.00 MiB", "buffers"],
        ["13.00 MiB", "16.00 MiB", "the rest: activations, inputs and what kernels work with"],
        ["3.00 MiB", "more was asked for"],
        ["9.00 MiB", "of what torch has reserved is free, in pieces"],
    ]
    assert lines[10] == "process 4711 (python): 2.00 MiB"
    assert "  a batch of 1/2 the size with accumulate_grad_batches=2: about 13.00 MiB" in lines
    assert "activation_checkpointing=" in lines[-2]
    assert lines[-1] == "For an explanation: stratagem errors out-of-memory"


def test_out_of_memory_error_counts_with_the_memory_limit() -> None:
    last = nn.Linear(512, 512, bias=False)
    module = nn.Sequential(nn.Linear(512, 512, bias=False), last)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 512)).square().mean().backward()
    optimizer.step()
    del optimizer.state[last.weight]  # the first step ended at the second weight
    strategy = Lite(accelerator=Limited()).strategy
    strategy.setup_environment()
    error = torch.OutOfMemoryError(FULL)
    explain_device_error(error, strategy, module, [optimizer])
    strategy.teardown()
    assert re.search(r"2\.00 MiB +4\.00 MiB  optimizer state", str(error))
    # Of 1000 MiB the process got 17; what was held beside the state is 11.
    (fits,) = re.findall(r"a batch of 1/(\d+) the size .*: about ([\d.]+) MiB", str(error))
    assert float(fits[1]) <= 17


def test_an_error_of_memory_without_stratagem_extras_has_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stratagem_extras.memory_report", None)
    error = torch.OutOfMemoryError(FULL)
    with pytest.raises(torch.OutOfMemoryError):
        fit(Net("step", error), tmp_path)
    lines = str(error).splitlines()
    assert re.fullmatch(r"rank 0 of 1 \(cpu\), at .* in fail, is out of memory", lines[2])
    assert lines[3].startswith("Besides: precision='bf16-mixed' halves most activations")
    assert lines[4:] == ["For an explanation: stratagem errors out-of-memory"]


@pytest.mark.parametrize("where", ["set-up", "evaluation"])
def test_set_up_and_evaluation_are_explained_as_well(where: str, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"1\.00 MiB    1\.00 MiB  parameters"):
        fit(Net(where, torch.OutOfMemoryError(FULL)), tmp_path)


def test_the_hosts_own_memory_is_explained(tmp_path: Path) -> None:
    text = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 \(cpu\).* is out of memory: the device "):
        fit(Net("step", RuntimeError(text)), tmp_path, accelerator="cpu")


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(Net("step", RuntimeError("mine")), tmp_path)
    assert str(raised.value) == "mine"


def test_lite_explains_each_part_of_a_step() -> None:
    lite = Lite(accelerator=Small())
    lite.launch()

    class Full(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            raise torch.OutOfMemoryError(FULL)

    class FullStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError(FULL)

    net = Full(4, 4)
    model, optimizer = lite.setup(net, FullStep(net.parameters(), lr=0.1))
    for part in (lambda: model(torch.ones(4)), optimizer.step):
        expected = "is out of memory: the device has"
        with pytest.raises(torch.OutOfMemoryError, match=expected) as found:
            part()
        assert str(found.value).count("is out of memory") == 1


def test_a_lost_device_is_left_alone_and_no_later_error_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Reads(Callback):
        def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
            raise RuntimeError("a callback that reads the device")

    logger = CSVLogger(tmp_path)
    module = Net("step", torch.AcceleratorError("the device is lost"))
    with pytest.raises(torch.AcceleratorError, match=r"rank 0 of 1 .* in fail: switch it off"):
        fit(module, tmp_path, callbacks=Reads(), logger=logger, log_every_n_steps=1)
    assert this_rank.device_is_lost
    printed = capsys.readouterr().err
    assert "stratagem: RuntimeError: a callback that reads the device" in printed
    # At once, for the case that the process does not live to show its error.
    assert re.search(r"^stratagem: rank 0 of 1 .* in fail: switch it off and on$", printed, re.M)
    # What was in the host's memory already is logged.
    assert len((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) == 2


def test_cpu_device_stats_have_memory_and_time() -> None:
    stats = CPUAccelerator().device_stats(torch.device("cpu"))
    assert stats["peak_resident_bytes"] > MIB
    assert stats["resident_bytes"] > MIB
    assert stats["memory_total_bytes"] > stats["memory_available_bytes"] > 0
    assert stats["cpu_seconds"] > 0
