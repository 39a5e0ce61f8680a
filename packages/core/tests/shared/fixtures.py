"""Fixtures: scripts in processes of their own, and a clean global state."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch_output import without_torchs_own
from zygote import Zygote, can_fork

# Unbuffered, a line is written in two pieces, between which another rank may write.
os.environ.pop("PYTHONUNBUFFERED", None)

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

# What a launcher, torchrun or a cluster sets for a rank; no process of a test may inherit it.
RANK_VARIABLES = (
    *(name for name in os.environ if name.startswith(("JSM_", "LSB_", "OMPI_", "PMI", "SLURM_"))),
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "STRATAGEM_CLUSTER",
    "STRATAGEM_LAUNCH_ORDINAL",
    "STRATAGEM_LISTEN_FD",
    "STRATAGEM_PARENT_PID",
    "STRATAGEM_RANK_PID",
    "STRATAGEM_SEED",
    "STRATAGEM_SEED_WORKERS",
    "STRATAGEM_STORE",
    *(name for name in os.environ if name.startswith("TORCHELASTIC_")),
    "WORLD_SIZE",
)


@pytest.fixture(autouse=True)
def _global_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the seed, the dtype, the process group or the variables that another one set."""
    for variable in RANK_VARIABLES:
        # Set first, so that monkeypatch also removes what the test sets itself.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() is torch.float32, "a test changed the default dtype"
    assert torch.is_grad_enabled(), "a test left gradients off"
    assert not torch.is_inference_mode_enabled(), "a test left inference mode on"
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a test left its process group")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models that are small wait for their threads most of the time, on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def script_environment() -> dict[str, str]:
    """The environment of a script: one thread a process, and no variable of a rank."""
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return {**environment, "OMP_NUM_THREADS": "1"}


@functools.cache
def zygote() -> Zygote:
    """Return the process that scripts are forked from."""
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return Zygote({**environment, "OMP_NUM_THREADS": "1"})


def load_script(path: Path) -> ModuleType:
    """Import a script by its path, under the name of its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_python(
    options: tuple[str, ...],
    script: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: Path,
    timeout: float,
    *,
    fresh: bool,
) -> subprocess.CompletedProcess[str]:
    """Run `python OPTIONS SCRIPT ARGUMENTS` in a new interpreter, or in a fork."""
    if fresh:
        return subprocess.run(
            [sys.executable, *options, str(script), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    process = zygote().start(
        script, *arguments, environment=environment, folder=folder, options=options
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def run_file(
    script: Path,
    *arguments: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
    expect: int = 0,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python -W error SCRIPT ARGUMENTS`, in one thread a process.

    Args:
        script: where it lies.
        *arguments: those of the script.
        folder: the working directory.
        env: further variables.
        timeout: seconds.
        expect: the exit code.
        fresh: start a new interpreter, not a fork of one that has imported torch.
    """
    dropped = ("RANK", "WORLD", "MASTER", "NODE", "STRATAGEM", "TORCHELASTIC", "THP_", "MALLOC")
    kept = {k: v for k, v in os.environ.items() if not any(part in k for part in dropped)}
    environment = {**kept, "OMP_NUM_THREADS": "1", **(env or {})}
    fresh = fresh or not can_fork(env or ())
    finished = run_python(
        ("-W", "error"), script, arguments, environment, folder, timeout, fresh=fresh
    )
    assert finished.returncode == expect, finished.stdout + finished.stderr
    return finished


@pytest.fixture
def run_script(tmp_path: Path, script_environment: dict[str, str]) -> RunScript:
    """Write a script into tmp_path and run it in a process of its own, in tmp_path.

    Arguments: the text, arguments of the script, `env` (more variables), `expect` (the exit code;
    None: any), `timeout` (seconds), `before` (options of the interpreter), `fresh` (True: a new
    interpreter, not a fork of one that has imported torch).
    """

    def run(
        text: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        expect: int | None = 0,
        timeout: float = 90.0,
        before: tuple[str, ...] = (),
        name: str = "script.py",
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / name
        script.write_text(textwrap.dedent(text))
        environment = {**script_environment, **(env or {})}
        fresh = bool(fresh or before or not can_fork(env or ()))
        finished = run_python(before, script, args, environment, tmp_path, timeout, fresh=fresh)
        finished.stdout = without_torchs_own(finished.stdout)
        if expect is not None:
            assert finished.returncode == expect, (
                f"exit code {finished.returncode}, expected {expect}\n"
                f"--- stdout\n{finished.stdout}\n--- stderr\n{finished.stderr}"
            )
        return finished

    return run
