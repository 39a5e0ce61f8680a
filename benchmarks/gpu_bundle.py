"""Puts the packages and what they need into one folder, for a machine with a GPU.

    python benchmarks/gpu_bundle.py bundle

For one that has Python, torch with CUDA and this repository, and neither a network nor nox. There,
in the repository:

    export PYTHONPATH=$PWD/bundle
    python3 -m pytest -m gpu
    python3 benchmarks/gpu.py

Run it in an environment with the packages installed: versions are those found there. What is pure
Python is copied from there, with its dist-info folder, since plugins are found by their entry
points; of the rest, such as xxhash, pip fetches wheels for the other machine's Python. torch and
what it requires are left out: they are there already.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = (
    *("core", "backend-torch", "extras", "testing"),
    *(f"backend-{name}" for name in ("cuda", "deepspeed", "xla", "hpu-ipu", "mps", "xpu")),
)
PLATFORMS = tuple(f"manylinux{version}_x86_64" for version in ("_2_28", "_2_24", "_2_17", "2014"))


def closure(names: list[str], python: str, leave_out: set[str]) -> dict[str, Distribution]:
    """Return the distributions that these need, themselves included, by name."""
    found: dict[str, Distribution] = {}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in leave_out:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # for another Python or system than this one's
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate(environment):
                waiting.append(canonicalize_name(needed.name))
    return found


def is_pure(found: Distribution) -> bool:
    """Whether it was installed from a wheel for any Python and platform."""
    return "py3-none-any" in (found.read_text("WHEEL") or "")


def copy(found: Distribution, target: Path) -> None:
    """Copy an installed distribution."""
    for file in found.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            source, goal = Path(str(found.locate_file(file))), target / file
            if source.is_file():
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, goal)


def copy_ours(package: str, target: Path) -> None:
    """Copy the sources of one of our packages, and the dist-info folder of its installation."""
    (source,) = (ROOT / "packages" / package / "src").iterdir()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target / source.name, ignore=ignored)
    found = distribution(f"stratagem-{package}")
    info = Path(str(found.locate_file("."))) / (
        f"{found.metadata['Name'].replace('-', '_')}-{found.version}.dist-info"
    )
    goal = target / info.name
    goal.mkdir()
    for name in ("METADATA", "WHEEL", "entry_points.txt"):
        if (info / name).exists():
            shutil.copyfile(info / name, goal / name)


def fetch(needed: dict[str, Distribution], python: str, target: Path) -> None:
    """Let pip put wheels for another Python into the folder."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    wanted = [f"{name}=={found.version}" for name, found in sorted(needed.items())]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(target)]
    subprocess.run([*pip, *options, *wanted], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="made anew")
    parser.add_argument("--also", action="append", default=[], metavar="NAME", help="as torchao")
    parser.add_argument("--python", default="3.12", help="the other machine's (default: 3.12)")
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="it is there; numpy is large"
    )
    given = parser.parse_args()
    target: Path = given.folder
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    there = {*closure(["torch"], given.python, set()), *map(canonicalize_name, given.without)}
    ours = {canonicalize_name(f"stratagem-{package}") for package in OURS}
    needed = closure([*ours, "pytest", *given.also], given.python, there)
    others = {name: found for name, found in needed.items() if name not in ours}
    compiled = {name: found for name, found in others.items() if not is_pure(found)}
    if compiled:
        fetch(compiled, given.python, target)
    for name, found in others.items():
        if name not in compiled:
            copy(found, target)
    for package in OURS:
        copy_ours(package, target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{len(needed)} distributions, {size / 2**20:.0f} MB. On the machine with the GPU:")
    print(f"    export PYTHONPATH={target if target.is_absolute() else f'$PWD/{target}'}")
    print("    python3 -m pytest -m gpu")
    print("    python3 benchmarks/gpu.py")


if __name__ == "__main__":
    main()
