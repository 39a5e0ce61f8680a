"""`benchmarks/sessions.py` runs sessions to the last one and keeps a page of results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

NOX = """
import json, sys, time
from pathlib import Path

asked = sys.argv[-1]
if "--list" in sys.argv:
    if asked == "unknown":
        sys.exit("no such session")
    two = [f"{asked}(part='{part}')" for part in "ab"]
    print(json.dumps([{"session": name} for name in (two if asked == "several" else [asked])]))
    sys.exit()
with Path(__file__).with_name("ran").open("a") as stream:
    stream.write(asked + "\\n")
print("nox > Creating virtual environment (virtualenv) using python in .nox/no-such-environment")
if asked == "good":
    print("===== 3 passed, 1 skipped, 9 deselected in 1.50s =====")
    print("===== 40 passed, 2 warnings in 75.00s (0:01:15) =====")
elif asked == "bad":
    print("===== 2 failed, 7 passed, 1 error in 0.10s =====")
    sys.exit(1)
elif asked == "endless":
    time.sleep(600)
"""


@pytest.fixture
def sessions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sessions", ROOT / "benchmarks/sessions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runner:
    """The script, with a program in place of nox that notes what it ran."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.module, self.folder = module, folder
        (folder / "nox.py").write_text(NOX)

    def __call__(self, *arguments: str) -> int:
        nox = (sys.executable, str(self.folder / "nox.py"))
        status = self.module.main(["--to", str(self.folder / "results"), *arguments], nox)
        assert isinstance(status, int)
        return status

    def ran(self) -> list[str]:
        names = (self.folder / "ran").read_text().split()
        (self.folder / "ran").unlink()
        return names

    def table(self) -> list[str]:
        """The rows, without the minutes and the version of torch."""
        lines = (self.folder / "results/results.md").read_text().splitlines()
        return [line.rsplit("|", 3)[0].rstrip() for line in lines if line.startswith("| ")][1:]


@pytest.fixture
def run(sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(sessions, "commit", lambda: "abcdef")
    monkeypatch.setattr(sessions, "SESSIONS", ("good", "bad", "quiet"))
    return Runner(sessions, tmp_path)


def test_a_failure_does_not_end_the_run(run: Runner) -> None:
    assert run("--only", "bad", "good", "several") == 1
    assert run.ran() == ["bad", "good", "several(part='a')", "several(part='b')"]
    assert run.table() == [
        "| bad | failed | 7 | 3 | 0",
        "| good | passed | 43 | 0 | 1",
        "| several(part='a') | passed |  |  |",
        "| several(part='b') | passed |  |  |",
    ]
    assert "Commit abcdef, 20" in (run.folder / "results/results.md").read_text()
    assert "2 failed" in (run.folder / "results/bad.log").read_text()


def test_continue_runs_remaining_and_named_sessions(run: Runner) -> None:
    run("--only", "bad")
    assert run("--continue") == 1
    assert run.ran() == ["bad", "good", "quiet"]
    assert run("--continue", "--only", "good") == 1
    assert run.ran() == ["good"]
    assert [row.split()[1] for row in run.table()] == ["bad", "good", "quiet"]


def test_rows_of_another_commit_are_dropped(
    run: Runner, sessions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--only", "good")
    monkeypatch.setattr(sessions, "commit", lambda: "123456")
    assert run("--continue", "--only", "quiet") == 0
    assert [row.split()[1] for row in run.table()] == ["quiet"]


def test_a_session_without_end_is_ended(run: Runner) -> None:
    assert run("--only", "endless", "good", "--limit", "0.05") == 1
    assert run.table()[0] == "| endless | no end in 0.05 minutes |  |  |"
    assert run.ran() == ["endless", "good"]


def test_an_unknown_session_is_refused_before_anything_runs(run: Runner) -> None:
    with pytest.raises(SystemExit, match="nox has no session 'unknown'"):
        run("--only", "good", "unknown")
    assert not (run.folder / "ran").exists()


def test_the_environment_of_a_session_tells_its_torch(
    sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ROOT", tmp_path)
    packages = tmp_path / ".nox/xla/lib/python3.11/site-packages"
    for name in ("torch-2.9.0+cpu", "torchmetrics-1.9.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    found = sessions.environment_of("nox > Re-using existing virtual environment at .nox/xla.\n")
    assert sessions.torch_in(found) == "2.9.0+cpu"
    assert sessions.torch_in(None) == ""


def test_noxfile_and_sessions_table_have_each_session(sessions: ModuleType) -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    guide = (ROOT / "docs/design/sessions.md").read_text()
    for name in sessions.SESSIONS:
        assert f"def {name}(session: nox.Session" in noxfile
        assert f"| `{name}` |" in guide
