"""Every strategy of core by every way to start it: run and compared, or refused and why.

    python benchmarks/matrix.py [--only fsdp]

Each cell trains a small model for eight steps in two ranks and compares its weights with those of
one process on the same samples. mpirun is used where it is installed; SLURM is tried on two hosts
by `nox -s cluster`. LSF and Kubeflow cannot be had here: their cells start two ranks with the
variables that those clusters are documented to set.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

SCRIPT = """
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem.discovery.registry import get_registry


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return (self.net(inputs) - targets).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loader(batch_size):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.prod(1, keepdim=True)), batch_size=batch_size)


def main(name, launcher, devices):
    warnings.simplefilter("ignore")
    strategy = name
    if name != "auto":
        arguments = {"launcher": launcher} if launcher else {}
        if name == "model_parallel":
            arguments["tensor_parallel_size"] = 1
        if arguments:
            strategy = get_registry().find("strategy", name).spec.build(**arguments)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **options
    )
    model = Net()
    shards = 1 if trainer.plan.world_size == 1 else 2
    trainer.fit(model, loader(8 // shards))
    if trainer.plan.remote:
        state = model.state_dict()
    else:
        state = trainer.strategy.model_state(trainer.run.prepared)
    if trainer.is_global_zero:
        print("WEIGHTS", sum(float(value.double().abs().sum()) for value in state.values()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] or None, int(sys.argv[3]))
"""

STRATEGIES = (
    "single_device",
    "dp",
    "ddp",
    "ddp_sharded",
    "fsdp",
    "fsdp_shard_grad_op",
    "fsdp_no_shard",
    "fsdp_hybrid_shard",
    "fsdp_cpu_offload",
    "model_parallel",
)
WAYS = ("script", "spawn", "fork", "stratagem run", "torchrun", "mpirun", "LSF", "Kubeflow")

LSF = {
    "LSB_JOBID": "17",
    "LSB_HOSTS": "localhost localhost",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "JSM_NAMESPACE_RANK": "{rank}",
    "JSM_NAMESPACE_LOCAL_RANK": "{rank}",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
    "GLOO_SOCKET_IFNAME": "lo",
}
KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
    "WORLD_SIZE": "2",
    "RANK": "{rank}",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run(line: list[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a process of a cell."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    return subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def cell(strategy: str, way: str, script: Path) -> str:
    """Return the output of one cell."""
    python = sys.executable
    launcher = way if way in ("script", "spawn", "fork") else ""
    arguments = [str(script), strategy, launcher, "2"]
    if way == "stratagem run":
        line = [str(Path(python).with_name("stratagem")), "run", "--devices", "2", *arguments]
    elif way == "torchrun":
        line = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        line += arguments
    elif way == "mpirun":
        if shutil.which("mpirun") is None:
            return "mpirun is not installed"
        line = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", python, *arguments]
    elif way in ("LSF", "Kubeflow"):
        return by_hand(LSF if way == "LSF" else KUBEFLOW, way, arguments)
    else:
        line = [python, *arguments]
    return run(line).communicate(timeout=120)[0]


def by_hand(variables: Mapping[str, str], way: str, arguments: list[str]) -> str:
    """Start two ranks with a cluster's variables."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    if way == "Kubeflow":  # one rank a pod
        arguments = [*arguments[:-1], "1"]
    ranks = [
        run(
            [sys.executable, *arguments],
            {name: text.format(rank=rank, port=port) for name, text in variables.items()},
        )
        for rank in range(2)
    ]
    return "".join(rank.communicate(timeout=120)[0] for rank in ranks)


def verdict(output: str, reference: float) -> str:
    """Return what a cell's output means, in a few words."""
    for line in reversed(output.splitlines()):
        if "ConfigurationError: " in line:
            return "refused: " + line.partition("ConfigurationError: ")[2]
    for line in output.splitlines():
        if line.startswith("WEIGHTS"):
            apart = abs(float(line.split()[1]) - reference)
            return "runs" if apart < 1e-4 else f"DIFFERS by {apart:.2g}"
    return "FAILED: " + (output.strip().splitlines() or ["no output"])[-1]


def main() -> None:
    """Print the table, then each refusal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="strategies whose names begin with this")
    only = parser.parse_args().only or ""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{date.today()}, {machine}\n")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        alone = run([sys.executable, str(script), "single_device", "", "1"]).communicate()[0]
        reference = float(alone.split("WEIGHTS")[1])
        print("| strategy | " + " | ".join(WAYS) + " |\n" + "|---" * (len(WAYS) + 1) + "|")
        notes: list[str] = []
        for strategy in (name for name in STRATEGIES if name.startswith(only)):
            cells = []
            for way in WAYS:
                said = verdict(cell(strategy, way, script), reference)
                if said != "runs":
                    if said not in notes:
                        notes.append(said)
                    said = f"{said.partition(':')[0]} ({notes.index(said) + 1})"
                cells.append(said)
            print(f"| {strategy} | " + " | ".join(cells) + " |", flush=True)
        print()
        for number, note in enumerate(notes, 1):
            print(f"{number}. {note}")


if __name__ == "__main__":
    main()
