"""Core without the calls that only Linux or only POSIX has: it works, or refuses by name.

`shared/elsewhere` takes them away from a process and its children: os.fork, flock, prctl, /proc,
sched_getaffinity, O_TMPFILE, memfd_create, SIGURG and others. Nothing here ran on macOS or Windows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import RunScript

from stratagem import system
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import ConfigurationError
from stratagem.storage import local
from stratagem.storage.owner import Owner
from stratagem_torch.launch import network
from stratagem_torch.launch.supervisor import Output, RankProcesses

ELSEWHERE = Path(__file__).parents[1] / "shared/elsewhere"

TRAIN = """
import os, sys
import torch
from stratagem import Module, Trainer

assert not hasattr(os, "fork") and not os.path.exists("/proc"), "nothing was taken away"

class Line(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def main(**options):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.ones(8, 2), 2)
    trainer = Trainer(accelerator="cpu", max_epochs=2, enable_progress_bar=False, **options)
    trainer.fit(Line(), loader)
    if trainer.is_global_zero:
        print("trained", trainer.world_size, trainer.global_step)
    return trainer
"""


@pytest.fixture
def elsewhere(run_script: RunScript) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a process, and in children of it, without the calls."""

    def run(text: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(ELSEWHERE), os.environ.get("PYTHONPATH", "")))
        return run_script(text, *arguments, env={"PYTHONPATH": path}, fresh=True, **options)

    return run


def test_one_device_trains_saves_and_resumes(elsewhere: Any) -> None:
    done = elsewhere(
        TRAIN
        + """
trainer = main()
trainer.save_checkpoint("a.ckpt")
trainer = Trainer(accelerator="cpu", max_epochs=3, enable_progress_bar=False)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 2), 2), ckpt_path="a.ckpt")
print("resumed", trainer.global_step)
stats = trainer.strategy.accelerator.device_stats(torch.device("cpu"))
print("stats", *sorted(stats))
"""
    )
    assert "trained 1 8" in done.stdout
    assert "resumed 12" in done.stdout
    assert "stats cpu_seconds\n" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_ranks_train_over_gloo(elsewhere: Any, strategy: str) -> None:
    done = elsewhere(
        f"{TRAIN}\nif __name__ == '__main__':\n    main(strategy={strategy!r}, devices=2)\n"
    )
    assert "trained 2 4" in done.stdout if strategy == "ddp" else "trained 2" in done.stdout


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(elsewhere: Any) -> None:
    failing = TRAIN.replace(
        "        loss = self",
        "        if self.global_rank == 1: raise ValueError('gives up')\n        loss = self",
    )
    done = elsewhere(f"{failing}\nmain(strategy='ddp', devices=2)\n", expect=1)
    assert "ValueError: gives up" in done.stderr


@pytest.mark.slow
def test_stratagem_run_starts_ranks(elsewhere: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{TRAIN}\nmain(strategy='ddp', devices=2)\n")
    done = elsewhere(
        "import sys\nfrom stratagem.cli import main\n"
        "sys.argv[1:] = ['run', '--devices', '2', 'train.py']\nraise SystemExit(main())\n",
        name="run.py",
    )
    assert "trained 2 4" in done.stdout


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_a_fork_is_refused_by_name(elsewhere: Any, strategy: str) -> None:
    done = elsewhere(f"{TRAIN}\nmain(strategy={strategy!r}, devices=2)\n", expect=1)
    assert (
        f"ConfigurationError: strategy={strategy!r} is started by the launcher 'fork', which "
        "copies this process, and this system cannot do so: use strategy='ddp' in a script, "
        "'ddp_spawn', or in a notebook devices=1"
    ) in done.stderr


def test_other_things_are_refused_by_name(elsewhere: Any) -> None:
    done = elsewhere(
        """
        import torch
        from stratagem import Lite

        def refused(format, path):
            lite = Lite(accelerator="cpu", plugins=format)
            lite.launch()
            module = lite.setup(torch.nn.Linear(2, 2))
            for action in (lite.save, lite.load, lite.save):
                try:
                    action(path, {"model": module})
                except Exception as error:
                    print(type(error).__name__, error)

        refused("directory", "folder")
        refused("single_file", "memory://a/b.ckpt")
        """
    )
    assert "cannot put a directory in the place of another in one step" in done.stdout
    assert "ConfigurationError 'memory://a/b.ckpt' cannot be read: on this system" in done.stdout


def test_doctor_describes_the_machine(elsewhere: Any) -> None:
    done = elsewhere(
        "import sys\nfrom stratagem.cli import main\nsys.argv[1:] = ['doctor']\nmain()\n"
    )
    assert "memory    unknown" in done.stdout
    assert "GPUs      none found" in done.stdout


# What needs a call that was taken away: one measures memory by `resource`, one sees the sync of a
# directory, one pickles a worker of a DataLoader, which a fork does not need.
LEFT_OUT = (
    "test_saving_makes_no_second_copy_in_memory",
    "test_a_checkpoint_is_written_beside_its_target_synced_then_renamed",
    "test_workers_of_loaders_draw_numbers_of_their_own",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["trainer/test_checkpoint", "callbacks/test_callbacks", "lite/test_lite", "trainer/test_fit"],
)
def test_cores_own_tests_pass(name: str) -> None:
    file = Path(__file__).parents[1] / f"{name}.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)),
            *("-k", " and ".join(f"not {name}" for name in LEFT_OUT)),
        ],
        cwd=file.parents[4],
        env={**os.environ, "PYTHONPATH": str(ELSEWHERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


# -- each fallback, with its call taken away


def test_without_affinity_the_machines_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert system.available_cores() == 12


def test_without_locks_an_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError, match="this system has no flock"):
            system.lock(file.fileno())
        system.unlock(file.fileno())
    with local.DurableFile(tmp_path / "saved") as saved:
        saved.write(memoryview(b"text"))
        saved.commit()
    assert (tmp_path / "saved").read_bytes() == b"text"


def test_without_paths_of_descriptors_a_checkpoint_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = SingleFileCheckpointIO()
    weights = torch.arange(1000.0)
    io.save_checkpoint({"weights": weights}, tmp_path / "a.ckpt")
    monkeypatch.setattr("stratagem.one_device.archive_io.descriptor_path", lambda descriptor: None)
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")["weights"]
    assert loaded.equal(weights)
    loaded.zero_()  # a private copy
    assert io.load_checkpoint(tmp_path / "a.ckpt")["weights"].equal(weights)


def test_without_process_groups_the_process_alone_gets_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []
    monkeypatch.delattr(os, "killpg")
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    system.send_signal(7, signal.SIGTERM, group=True)
    assert sent == [(7, signal.SIGTERM)]


def test_a_process_that_has_ended_gets_no_signal() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(ended.pid, signal.SIGTERM)
    system.send_signal(ended.pid, signal.SIGTERM, group=False)


def test_without_thread_signals_the_main_thread_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(signal, "pthread_kill")
    called = []
    before = signal.signal(system.PEER_FAILED, lambda number, frame: called.append(number))
    try:
        threading.Thread(target=system.interrupt_main_thread).start()
        deadline = time.monotonic() + 10
        while not called and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(system.PEER_FAILED, before)
    assert called == [system.PEER_FAILED]


def test_launch_works_without_libc_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "c_library", lambda: None)
    assert system.parent_death_signal() is None
    assert system.swap_paths("a", "b") != 0


def test_without_named_pipes_a_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "mkfifo")
    with pytest.raises(ConfigurationError, match=r"needs named pipes, .*--log-dir"):
        RankProcesses(
            lambda *_: pytest.fail("a rank was started"),
            {0: {}},
            on_failure=lambda failure: None,
            output=Output(prefix=True),
        )


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


def test_durable_file_is_closed_before_its_rename(
    windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local.DurableFile(tmp_path / "saved") as saved:
        saved.write(memoryview(b"text"))
        real = Path.replace

        def replace(path: Path, target: Any) -> Any:
            with pytest.raises(ValueError, match="closed file"):
                saved.write(memoryview(b"more"))
            return real(path, target)

        monkeypatch.setattr(Path, "replace", replace)
        saved.commit()
    assert (tmp_path / "saved").read_bytes() == b"text"


def test_owner_runs_sends_no_signal_on_windows(
    windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, os.kill(pid, 0) is Ctrl-C."""
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    assert Owner.this().runs() is None


def test_on_windows_the_store_does_without_libuv(windows: None) -> None:
    assert network.make_store(lambda **options: options)() == {"use_libuv": False}


def test_elsewhere_the_store_is_torchs_own() -> None:
    kind = SimpleNamespace
    assert network.make_store(kind) is kind
