"""`stratagem new-backend`: what it writes trains, passes the kit, and stays small."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from program import Program

from stratagem import __version__
from stratagem_testing.author.new_backend import KINDS, run
from stratagem_testing.author.private_imports import private_imports_of

MOST_LINES = 60
"""Of the strategy, the plugin module and the tests together, docstrings included."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_new_backend_writes_a_complete_distribution(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ring_average"]) == 0
    folder = here / "stratagem-backend-ring-average"
    assert files_of(folder) == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/stratagem_ring_average/__init__.py",
        "src/stratagem_ring_average/plugin.py",
        "src/stratagem_ring_average/py.typed",
        "src/stratagem_ring_average/strategy.py",
        "tests/test_strategy.py",
    }
    said = capsys.readouterr().out
    assert "stratagem-backend-ring-average/pyproject.toml\n" in said
    assert "\n  python -m pip install -e '.[test]'\n  python -m pytest\n" in said
    written = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    # What is left of a `$` is GitHub's.
    assert set(re.findall(r"\$\S*", written)) == {"${{"}
    # Of the next minor release nothing is known yet.
    major, minor = __version__.split(".")[:2]
    assert f'"stratagem-core>={major}.{minor},<{major}.{int(minor) + 1}"' in written


def test_an_author_writes_few_lines(here: Path) -> None:
    run(["ring_average"])
    lines = [
        line
        for path in here.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.strip()
    ]
    assert len(lines) <= MOST_LINES


def test_the_distribution_may_have_a_name_of_its_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ring_average", "--distribution", "Acme.Rings", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["folder"], told["package"]) == ("Acme.Rings", "acme_rings")
    assert told["class_name"] == "RingAverageStrategy"
    assert "src/acme_rings/plugin.py" in told["files"]
    assert 'name = "Acme.Rings"' in (here / "Acme.Rings/pyproject.toml").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_new_backend_imports_public_names_only(here: Path, kind: str) -> None:
    run(["ring_average", "--kind", kind])
    files = list(here.rglob("*.py"))
    assert [text for path in files for text in private_imports_of(path)] == []
    imported = {
        node.module
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert {"stratagem.discovery", "stratagem_testing"} <= imported


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_module_of_its_own(
    here: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ring_average", "--kind", kind]) == 0
    folder, module = here / "stratagem-backend-ring-average", KINDS[kind].module
    assert f"src/stratagem_ring_average/{module}.py" in files_of(folder)
    assert f"tests/test_{module}.py" in files_of(folder)
    said = capsys.readouterr().out
    assert said.endswith(f"The {KINDS[kind].what} is in src/stratagem_ring_average/{module}.py.\n")
    assert KINDS[kind].what in (folder / "README.md").read_text()


def test_new_backend_readme_lists_variables_and_requirements(here: Path) -> None:
    run(["ring_average", "--kind", "environment"])
    run(["ring", "--kind", "launcher"])
    readme = (here / "stratagem-backend-ring-average/README.md").read_text()
    module = here / "stratagem-backend-ring-average/src/stratagem_ring_average/environment.py"
    for name in re.findall(r'_number\("(\w+)"\)|PREFIX}(\w+)', module.read_text()):
        assert f"`RING_AVERAGE_{''.join(name)}`" in readme
    assert "pip install cloudpickle" in (here / "stratagem-backend-ring/README.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a", "ring_average", "an_average_over_rings_of_four_neighbours"])
def test_new_backend_passes_its_ruff_rules(here: Path, name: str, kind: str) -> None:
    run([name, "--kind", kind])
    (folder,) = here.iterdir()
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout


# -- refusals

REFUSED = {
    "Ring-Average": "NAME='Ring-Average': expected the name of a strategy that is a Python "
    "identifier in lower case: letters, digits and single '_', beginning with a letter, such as "
    "'ring_average'",
    "RingSGD": "NAME='RingSGD': expected the name of a strategy that is a Python identifier in "
    "lower case: letters, digits and single '_', beginning with a letter, such as 'ring_sgd'",
    "4": "NAME='4': expected the name of a strategy that is a Python identifier in lower case: "
    "letters, digits and single '_', beginning with a letter",
    "ddp": "NAME='ddp' is what stratagem-backend-torch calls a strategy of its own: choose "
    "another one, such as 'my_ddp'",
    "auto": "NAME='auto' is how users leave the choice of a strategy to Stratagem: choose another "
    "one, such as 'my_auto'",
    "fork": "NAME='fork' is what stratagem-backend-torch calls a launcher of its own: choose "
    "another one, such as 'my_fork'",
    "cpu": "NAME='cpu' is what stratagem-core calls an accelerator of its own: choose another one, "
    "such as 'my_cpu'",
    "torch": "NAME='torch' is the library that all strategies stand on, and would be taken for it: "
    "choose another one, such as 'my_torch'",
    "core": "NAME='core' is Stratagem's core, and would be taken for it: choose another one, such "
    "as 'my_core'",
    "hpu_ipu": "the distribution stratagem-backend-hpu-ipu is one of Stratagem's own: choose "
    "another name by --distribution",
    # Of a distribution that need not be installed.
    "deepspeed_stage_9": "NAME='deepspeed_stage_9' is what stratagem-backend-deepspeed calls a "
    "strategy of its own: choose another one, such as 'my_deepspeed_stage_9'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_is_refused(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name]) == 2
    assert capsys.readouterr() == ("", f"{REFUSED[name]}\n")
    assert list(here.iterdir()) == []


DISTRIBUTION_REFUSED = {
    "Stratagem_Core": "the distribution Stratagem_Core is one of Stratagem's own: choose another "
    "name by --distribution",
    "../up": "--distribution='../up': expected letters, digits, '-', '_' and '.', beginning with "
    "a letter",
    "pytest": "is installed: choose another name by --distribution, or remove it first: pip "
    "uninstall pytest",
    "json": "there is a module 'json' already, which the distribution json would have too: choose "
    "another name by --distribution",
}


@pytest.mark.parametrize("name", DISTRIBUTION_REFUSED)
def test_a_distributions_name_is_refused(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ring_average", "--distribution", name]) == 2
    assert DISTRIBUTION_REFUSED[name] in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_new_backend_overwrites_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "stratagem-backend-ring-average"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert run(["ring_average"]) == 2
    assert capsys.readouterr().err == (
        "the folder 'stratagem-backend-ring-average' holds files, and none is overwritten: move it "
        "away, choose another name by --distribution, or call this in another folder\n"
    )
    assert files_of(here) == {"stratagem-backend-ring-average/notes.txt"}


def test_a_file_or_link_of_the_folders_name_is_left_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / "stratagem-backend-ring-average"
    folder.symlink_to(here / "elsewhere")
    assert run(["ring_average"]) == 2
    folder.unlink()
    folder.touch()
    assert run(["ring_average"]) == 2
    said = "'stratagem-backend-ring-average' is there and no folder: move it away\n"
    assert capsys.readouterr().err == said * 2
    assert files_of(here) == {"stratagem-backend-ring-average"}


def test_an_empty_folder_is_filled(here: Path) -> None:
    (here / "stratagem-backend-ring-average").mkdir()
    assert run(["ring_average"]) == 0
    assert "stratagem-backend-ring-average/README.md" in files_of(here)


def test_new_backend_without_write_access_fails(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a" * 300
    assert run([name]) == 1
    expected = f"cannot write stratagem-backend-{name}"
    assert capsys.readouterr().err.startswith(expected)


# -- it works


SOME = {
    "strategy": "unused or (accumulation and clip)",
    "launcher": "result or (failure and rank)",
    "checkpoint-io": "values or paths or safety",
}
"""The checks that are tried of those kinds of which all take long; `nox -s guide` runs them."""
LONG = set(KINDS) - {"precision", "checkpoint-io"}


@pytest.fixture(
    params=[pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS]
)
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Program, str]:
    """The program beside a distribution of each kind, which is where it was written."""
    program, kind = Program(tmp_path), request.param
    program("new-backend", "ring_average", "--kind", kind)
    written = tmp_path / "stratagem-backend-ring-average"
    info = program.install(
        "stratagem-backend-ring-average", "", requires="stratagem-core<0.2,>=0.1"
    )
    entries = "[stratagem.backends]\nring_average = stratagem_ring_average.plugin\n"
    (info / "entry_points.txt").write_text(entries)
    (tmp_path / "stratagem_ring_average").symlink_to(written / "src/stratagem_ring_average")
    return program, kind


def test_new_backend_is_found_and_passes_mypy_and_its_kit(
    installed: tuple[Program, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    program, kind = installed
    folder = program.folder / "stratagem-backend-ring-average"
    found = program.json("doctor", "stratagem-backend-ring-average")
    assert found["problems"] == []
    assert [one["name"] for one in found["components"]] == ["ring_average"]
    if kind == "strategy":
        rows = {row["name"]: row for row in program.json("strategies")}
        assert rows["ring_average"]["usable"] is True
    environment = {
        **program.environment(),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",
        "MYPYPATH": str(program.folder),
    }
    chosen = ("-k", SOME[kind]) if kind in SOME else ()
    for command in (
        ("mypy", "--cache-dir", str(tmp_path_factory.getbasetemp() / "mypy")),
        ("pytest", "-q", "-p", "no:cacheprovider", *chosen),
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout
