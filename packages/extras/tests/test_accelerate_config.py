"""`stratagem run --accelerate-config`: what a config file of Accelerate's asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratagem.errors import ConfigurationError
from stratagem_extras.cli.accelerate_config import read_config
from stratagem_torch.launch.run import parse

# As `accelerate config` writes it for two processes on one machine without a GPU.
WRITTEN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
dynamo_config: {}
enable_cpu_affinity: false
fsdp_config: {}
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def read(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(WRITTEN), **changes}))
    options, variables = read_config(path)
    return options, {**variables, "STRATAGEM_LITE": json.loads(variables["STRATAGEM_LITE"])}


def test_two_ranks_train_as_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(WRITTEN)
    (tmp_path / "script.py").write_text(
        "from stratagem import Lite\n"
        "lite = Lite()\n"
        "lite.launch()\n"
        "plan = lite.plan\n"
        "names = plan.strategy.name, plan.accelerator.name, plan.precision.name\n"
        "lite.print(lite.world_size, *names)"
    )
    command = [sys.executable, "-m", "stratagem", "run", "--accelerate-config", "config.yaml"]
    finished = subprocess.run(
        [*command, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "2 ddp cpu bf16-mixed"


def test_accelerate_config_sets_machines_and_ports(tmp_path: Path) -> None:
    options, variables = read(
        tmp_path,
        num_machines=2,
        num_processes=8,
        machine_rank=1,
        main_process_ip="10.0.0.1",
        main_process_port=29500,
        use_cpu=False,
        distributed_type="MULTI_GPU",
        gpu_ids="0,2",
        mixed_precision="no",
        gradient_accumulation_steps=4,
    )
    assert options == {
        "devices": 4,
        "num_nodes": 2,
        "node_rank": 1,
        "main_address": "10.0.0.1",
        "main_port": 29500,
    }
    assert variables == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "STRATAGEM_LITE": {
            "accelerator": "cuda",
            "precision": "32-true",
            "accumulate_grad_batches": 4,
        },
    }


def test_options_count_more_than_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_LITE", "")
    (tmp_path / "config.json").write_text(json.dumps(yaml.safe_load(WRITTEN)))
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    launch = parse(["--accelerate-config", "config.json", "--devices", "3", "script.py", "--lr=1"])
    assert (launch.devices, launch.num_nodes, launch.script_arguments) == (3, 1, ("--lr=1",))
    assert json.loads(os.environ["STRATAGEM_LITE"])["precision"] == "bf16-mixed"


def test_minimal_accelerate_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: 'NO'")
    assert read_config(path) == ({"devices": 1}, {"STRATAGEM_LITE": "{}"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"distributed_type": "FSDP"},
            "distributed_type: FSDP cannot be honoured; expected one of NO, MULTI_CPU, MULTI_GPU. "
            "A strategy or precision of your own choice is an argument of Lite: leave the key out",
        ),
        (
            {"mixed_precision": "fp8"},
            "mixed_precision: fp8 cannot be honoured; expected one of no, bf16, fp16. A strategy "
            "or precision of your own choice is an argument of Lite: leave the key out",
        ),
        (
            {"fsdp_config": {"fsdp_version": 2}},
            "fsdp_config: {'fsdp_version': 2} cannot be honoured: pass strategy=FSDPStrategy(...) "
            "to Lite, and remove the key",
        ),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            "dynamo_config: {'dynamo_backend': 'INDUCTOR'} cannot be honoured: pass compile=True "
            "to lite.setup, and remove the key",
        ),
        ({"debug": True}, "debug: True cannot be honoured"),
        ({"rdzv_backend": "c10d"}, "rdzv_backend: 'c10d' cannot be honoured"),
        ({"tpu_name": "v4"}, "tpu_name: 'v4' cannot be honoured"),
        ({"num_proceses": 2}, "num_proceses: 2 cannot be honoured"),
        (
            {"compute_environment": "AMAZON_SAGEMAKER"},
            "compute_environment: 'AMAZON_SAGEMAKER' cannot be honoured",
        ),
        (
            {"num_machines": 3},
            "num_processes: 2; expected a multiple of num_machines: 3, since every machine has as "
            "many ranks",
        ),
        ({"num_processes": 0}, "num_processes: 0; expected a whole number of at least 1"),
        (
            {"gradient_accumulation_steps": "4"},
            "gradient_accumulation_steps: '4'; expected a whole number of at least 1",
        ),
        (
            {"distributed_type": "NO"},
            "num_processes: 2 with distributed_type: NO, which starts one; expected MULTI_CPU or "
            "MULTI_GPU",
        ),
    ],
)
def test_unsupported_accelerate_options_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, **changes)
    assert str(caught.value) == f"{tmp_path / 'config.yaml'}: {message}"


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_config(path)
    path.write_text("[1, 2]")
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit) as caught:
        parse(["--accelerate-config", str(path), str(tmp_path / "script.py")])
    assert caught.value.code == 2
    assert (
        f"--accelerate-config cannot be used. {path}: expected keys and values, received [1, 2]"
        in (capsys.readouterr().err)
    )
