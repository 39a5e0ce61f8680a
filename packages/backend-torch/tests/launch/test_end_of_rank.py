"""How a rank's interpreter ends: quickly, and with nothing to say."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable

import pytest

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

ENDS = """
import atexit, gc, os, sys

from stratagem.launch.rank import prepare_this_rank

# First in, last out: this is asked when everything else at the end is done.
atexit.register(lambda: os.write(1, f"{gc.get_freeze_count() > 0}".encode()))
if sys.argv[1] == "nanobind":
    nb_type = type("nb_type", (type,), {"__module__": "nanobind"})
prepare_this_rank()
"""


@pytest.mark.parametrize(("extension", "is_spared"), [("none", "True"), ("nanobind", "False")])
def test_last_garbage_collection_is_skipped_unless_extensions_need_it(
    extension: str, is_spared: str, run_script: RunScript
) -> None:
    assert run_script(ENDS, extension, fresh=True).stdout == is_spared


TRAINS = """
import sys

import torch
import torch._dynamo
import triton

from stratagem import Lite, Module, Trainer


class Line(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    front_end, strategy = sys.argv[1:]
    request = {"strategy": strategy, "accelerator": "cpu", "devices": 2}
    if front_end == "lite":
        lite = Lite(**request)
        lite.launch()
        module = Line()
        model, optimizer = lite.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        data = torch.utils.data.DataLoader(torch.ones(16, 1), 4)
        for batch in lite.setup_dataloaders(data):
            lite.backward(model(batch).sum())
            optimizer.step()
    else:
        trainer = Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            **request,
        )
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(16, 1), 4))
    print("trained")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed; the sessions `oldest` and `newest` have it",
)
@pytest.mark.parametrize(
    ("front_end", "strategy"),
    [("trainer", "ddp"), ("trainer", "fsdp"), ("lite", "ddp")],
)
def test_a_run_beside_triton_ends_without_a_word(
    front_end: str, strategy: str, run_script: RunScript
) -> None:
    finished = run_script(TRAINS, front_end, strategy, fresh=True)
    assert "trained" in finished.stdout
    assert finished.stderr == ""
