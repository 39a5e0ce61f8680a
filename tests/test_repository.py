"""What the repository promises: versions, licences, documented commands, no machine's paths."""

import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import nox.registry
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
# tomli is a dependency of hatchling on Python 3.10.
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
CORE = "stratagem-core"
GUESTS = [
    "stratagem-backend-torch",
    "stratagem-backend-cuda",
    "stratagem-backend-deepspeed",
    "stratagem-backend-hpu-ipu",
    "stratagem-backend-mps",
    "stratagem-backend-xpu",
    "stratagem-backend-xla",
    "stratagem-mesh",
    "stratagem-extras",
    "stratagem-lightning",
    "stratagem-testing",
    "stratagem",
]
# Extra of core: the distribution that it brings, and the extra of that one, if any.
EXTRAS_OF_CORE = {
    "testing": "stratagem-testing",
    "lightning": "stratagem-lightning",
    "cli": "stratagem-extras",
    **{
        name: f"stratagem-extras[{name}]"
        for name in (
            "onnx",
            "tensorboard",
            "mlflow",
            "wandb",
            "comet",
            "neptune",
            "safetensors",
            "evaluate",
        )
    },
}
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
_NOW = Version(version(CORE))
THIS_MINOR = str(SpecifierSet(f">={_NOW.major}.{_NOW.minor},<{_NOW.major}.{_NOW.minor + 1}"))

# Folders that only some machines have; as a pattern, so that this file does not hold them.
MACHINE_PATH = re.compile(r"(?<![\w.\-/])/(work|root|home/\w+|opt/(wheels|pypi)|tmp/venv)\b")
IGNORED_FOLDERS = {
    ".git",
    ".hypothesis",
    ".nox",
    ".venv",
    "venv",
    "_build",
    "build",
    "dist",
    "__pycache__",
}


def project_of(package: Path) -> dict[str, Any]:
    """Return the table [project] of a package."""
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


PROJECTS = {project["name"]: project for project in map(project_of, PACKAGES)}


def test_the_packages_are_the_thirteen_distributions() -> None:
    assert PROJECTS.keys() == {CORE, *GUESTS}
    assert len(PROJECTS) == 13


@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_has_the_version_of_core(name: str) -> None:
    assert PROJECTS[name]["version"] == PROJECTS[CORE]["version"] == version(CORE)


def test_the_library_says_the_version_of_its_distribution() -> None:
    import stratagem

    assert stratagem.__version__ == version(CORE)


@pytest.mark.parametrize("name", GUESTS)
def test_a_guest_requires_this_minor_version_of_core_and_pins_nothing(name: str) -> None:
    # Not its extras: one may name a pair that only works together (torch_xla and its torch).
    requirements = [Requirement(text) for text in PROJECTS[name]["dependencies"]]
    ours = [requirement for requirement in requirements if requirement.name in PROJECTS]
    assert CORE in {requirement.name for requirement in ours}
    assert {str(requirement.specifier) for requirement in ours} == {THIS_MINOR}
    operators = {part.operator for each in requirements for part in each.specifier}
    assert not operators & {"==", "==="}


def test_core_requires_no_distribution_of_ours() -> None:
    assert not {Requirement(text).name for text in PROJECTS[CORE]["dependencies"]} & {*GUESTS}


def test_the_extras_of_core_bring_the_distribution_and_its_library() -> None:
    stated = PROJECTS[CORE]["optional-dependencies"]
    assert stated.keys() == EXTRAS_OF_CORE.keys()
    for name, (text,) in stated.items():
        requirement = Requirement(text)
        (wanted,) = [Requirement(EXTRAS_OF_CORE[name])]
        assert (requirement.name, requirement.extras) == (wanted.name, wanted.extras)
        assert str(requirement.specifier) == THIS_MINOR
        for extra in requirement.extras:
            assert PROJECTS[requirement.name]["optional-dependencies"][extra]


def test_stratagem_brings_core_the_extras_and_the_gpus_of_each_system() -> None:
    brought = {Requirement(text).name for text in PROJECTS["stratagem"]["dependencies"]}
    backends = {f"stratagem-backend-{name}" for name in ("torch", "cuda", "mps", "xpu")}
    assert brought == {CORE, "stratagem-extras", "numpy", *backends}


def test_nox_session_installs_the_required_packages() -> None:
    """They are on no index: pip takes them from the folders that a session names."""
    found = re.findall(r'\(("core"(?:,\s*"[\w-]+")+),?\)', (ROOT / "noxfile.py").read_text())
    assert len(found) >= 4
    for text in found:
        installed = {f"stratagem-{name}" for name in re.findall(r'"([\w-]+)"', text)}
        required = {
            Requirement(each).name for name in installed for each in PROJECTS[name]["dependencies"]
        }
        assert required & {*GUESTS} <= installed, text


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_has_readme_licence_and_py_typed(package: Path) -> None:
    name = project_of(package)["name"]
    for source in package.glob("src/*"):
        assert (source / "py.typed").is_file()
        assert (source / "__init__.py").is_file()
    assert (package / "src").exists() == (name != "stratagem")  # which has no code
    assert (package / "README.md").read_text().startswith(f"# {name}\n")
    # Copies, because a wheel and an sdist hold only what lies in the package's own folder.
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_nox_installs_every_package(noxfile: dict[str, Any]) -> None:
    assert sorted(noxfile["PACKAGES"]) == [f"packages/{package.name}" for package in PACKAGES]


@pytest.fixture(scope="module")
def noxfile() -> dict[str, Any]:
    """Its names; once, since nox wants each session to be registered once."""
    return runpy.run_path(str(ROOT / "noxfile.py"))


@pytest.mark.usefixtures("noxfile")
def test_two_pages_list_every_nox_session_and_no_other() -> None:
    sessions = nox.registry.get()
    assert all(session.__doc__ for session in sessions.values())
    pages = ("CONTRIBUTING.md", "docs/design/sessions.md")
    text = "\n".join((ROOT / page).read_text() for page in pages)
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(sessions)


def test_core_takes_torch_from_the_oldest_that_is_tried_and_has_no_upper_bound(
    noxfile: dict[str, Any],
) -> None:
    stated = map(Requirement, distribution(CORE).requires or [])
    (torch,) = [requirement for requirement in stated if requirement.name == "torch"]
    versions = [Version(version) for version in noxfile["TORCH_VERSIONS"]]
    assert versions == sorted(versions)
    assert str(torch.specifier) == f">={versions[0].major}.{versions[0].minor}"
    assert noxfile["TORCH"] in {f"torch=={one}" for one in versions}
    # Where pip may have it, the session `newest` takes the last of them.
    assert versions[-1] in Requirement(noxfile["NEWEST"]).specifier
    assert Version(noxfile["XLA"][0].partition("==")[2]).release[:2] == versions[0].release[:2]


def brought_in_by(name: str, found: set[str]) -> set[str]:
    """The distributions that one brings in here, with itself, under their normalised names."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key not in found:
        found.add(key)
        for requirement in map(Requirement, distribution(name).requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                brought_in_by(requirement.name, found)
    return found


def test_licence_table_lists_the_dependencies_of_core() -> None:
    text = (ROOT / "docs" / "reference" / "licences.md").read_text()
    listed = re.findall(r"^\| ([a-z][a-z0-9, -]+) \| (?!licence)", text, re.MULTILINE)
    names = {name for names in listed for name in names.split(", ")}
    # Those of torch's builds for CUDA have a sentence of their own.
    brought = brought_in_by(CORE, set())
    vendors = {name for name in brought if name.startswith(("nvidia", "cuda"))}
    # torch 2.9 needs setuptools from Python 3.12 on only.
    assert names == (brought | {"setuptools"}) - vendors - {CORE, "triton"}


def text_files() -> Iterator[tuple[Path, str]]:
    """The repository's text files, without asking git, so that a downloaded archive serves too."""
    tops = [path for path in ROOT.iterdir() if path.name not in IGNORED_FOLDERS]
    for top in tops:
        if top.is_dir() and top.name.endswith("_cache"):
            continue
        for path in [top, *top.rglob("*")]:
            if path.is_file() and not IGNORED_FOLDERS & set(path.relative_to(ROOT).parts):
                try:
                    yield path, path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue  # not text


def test_files_contain_no_machine_paths() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
