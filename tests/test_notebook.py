"""ddp in a real Jupyter kernel: the default there, what comes back, and a cell that fails."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.slow

SETUP = """
import os, time, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from stratagem import Lite, Module, Trainer

class Net(Module):
    def __init__(self, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.global_rank == 1:
            raise ValueError("the data of rank one are bad")
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def trainer(**options):
    return Trainer(
        accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_epochs=2,
        enable_checkpointing=False, **options,
    )

loader = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=4)
"""
AUTO = """
runner, model = trainer(), Net()
print("STRATEGY", runner.plan.strategy.name, "BY", runner.plan.launcher.name)
print("WHY", runner.plan.strategy.why)
before = model.net.weight.clone()
runner.fit(model, loader)
print("TRAINED", not torch.equal(before, model.net.weight), set(runner.callback_metrics))
"""
NAMED = """
runner = trainer(strategy="ddp_notebook")
runner.fit(model, loader)
print("AGAIN", runner.plan.strategy.name)
"""
SCRIPTS_ONLY = """
try:
    trainer(strategy="ddp")
except ValueError as error:
    print("REFUSED", error)
"""
FAILING = """
trainer().fit(Net(fails=True), loader)
"""
LITE = """
def work(lite):
    print("PRINTED by", lite.global_rank)
    return lite.all_reduce(torch.ones(1) + lite.global_rank, "sum").item()

print("LITE", Lite(accelerator="cpu", devices=2).launch(work))
"""
CHILDREN = """
import multiprocessing
print("CHILDREN", len(multiprocessing.active_children()))
"""
LONG = """
def wait(lite):
    open(f"{os.environ['FOLDER']}/rank{lite.global_rank}", "w").write(str(os.getpid()))
    time.sleep(60)

Lite(accelerator="cpu", devices=2).launch(wait)
"""


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client with a kernel of its own, and a function that runs one cell in it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    # What pytest-in-the-kernel would inherit is no business of a notebook.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    document = nbformat.v4.new_notebook()
    client = NotebookClient(
        document,
        timeout=90,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )

    def run(source: str) -> str:
        cell = nbformat.v4.new_code_cell(source)
        document.cells.append(cell)
        client.execute_cell(cell, len(document.cells) - 1)
        return "".join(o.get("text", "") for o in cell.outputs)

    with client.setup_kernel():
        run(SETUP)
        yield run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_kernel_trains_in_forked_ranks_and_shows_the_error_of_one(notebook: Any) -> None:
    output = notebook(AUTO)
    assert "STRATEGY ddp_notebook BY fork" in output
    assert "WHY 2 device(s) a node and no strategy named, in a notebook" in output
    assert "TRAINED True {'loss'}" in output
    assert "AGAIN ddp_notebook" in notebook(NAMED)
    refused = notebook(SCRIPTS_ONLY)
    assert "which needs a script and cannot work in a notebook" in refused
    assert "or strategy='ddp_notebook'" in refused
    began = time.monotonic()
    with pytest.raises(CellExecutionError) as failed:
        notebook(FAILING)
    assert time.monotonic() - began < 30
    shown = without_colours(str(failed.value))
    assert "RankFailedError: rank 1 of 2 failed" in shown
    assert "ValueError: the data of rank one are bad" in shown
    # The kernel is alive, and no rank is.
    output = notebook(LITE)
    assert "LITE 3.0" in output
    assert "CHILDREN 0" in notebook(CHILDREN)
    assert output.count("PRINTED by") == 2, "what each rank prints is shown, mixed perhaps"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_interrupting_the_kernel_ends_the_ranks_and_not_the_kernel(
    notebook: Any, tmp_path: Path
) -> None:
    kernel = int(notebook("print(os.getpid())"))
    files = [tmp_path / f"rank{rank}" for rank in range(2)]

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in files):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        os.kill(kernel, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        notebook(LONG)
    thread.join()
    assert "LITE 3.0" in notebook(LITE)
    assert "CHILDREN 0" in notebook(CHILDREN)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
