"""Lets a torch for CUDA be imported without CUDA's libraries: `python cuda_stand_ins.py`.

torch_xla needs torch 2.9, of which package indices have a build for CUDA alone; its libraries are
3 GB, and a processor uses none. This writes libraries of the same names into torch's folder, in the
place of those that are not installed: they have the symbols that torch is linked with, as functions
that fail. cudart, cupti and cufile, 50 MB, must be the real ones, since torch calls them on its way
in. Needs gcc, and readelf and nm of binutils.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

_CUDA = re.compile(r"lib(cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvshmem)")
_UNVERSIONED = re.compile(r"nccl|curand|cusparseLt")


def main() -> None:
    """Write what is missing for the torch of this interpreter."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("torch is not installed: pip install --no-deps torch==2.9.0")
    folder = Path(found.origin).parent / "lib"
    site = folder.parents[1]
    there = {path.name for path in site.glob("nvidia/*/lib/*")}
    missing: dict[str, dict[str, set[str]]] = {}
    for library in sorted(folder.glob("libtorch*.so")):
        for name, versions in needed(library).items():
            if name in there:
                continue
            of_name = missing.setdefault(name, defaultdict(set))
            for version, symbols in versions.items():
                of_name[version] |= symbols
    for name, versions in missing.items():
        write(folder / name, versions)
        print(f"{name}: {sum(map(len, versions.values()))} symbols")


def needed(library: Path) -> dict[str, dict[str, set[str]]]:
    """Return the symbols of CUDA's libraries that one is linked with, by library and version."""
    lines = said("readelf", "-dW", library)
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", lines)
    found: dict[str, dict[str, set[str]]] = {
        name: defaultdict(set) for name in names if _CUDA.match(name)
    }
    holder, holders = "", {}
    for line in said("readelf", "-VW", library).splitlines():
        if file := re.search(r"File: (\S+)", line):
            holder = file[1]
        elif version := re.search(r"Name: (\S+)\s+Flags", line):
            holders[version[1]] = holder
    undefined = said("nm", "-D", "--undefined-only", library)
    for symbol, number in re.findall(r" U (\w+)(?:@(\S+))?", undefined):
        if holders.get(number) in found:
            found[holders[number]][number].add(symbol)
        elif not number and _UNVERSIONED.match(symbol):
            # Whichever of them holds it: the loader looks into all.
            next(iter(found.values()))[""].add(symbol)
    return found


def write(path: Path, versions: dict[str, set[str]]) -> None:
    """Compile a library whose functions return 1, which is an error to all of CUDA's."""
    code = "".join(
        f"int {symbol}(void) {{ return 1; }}\n"
        for symbols in versions.values()
        for symbol in sorted(symbols)
    )
    script = "".join(
        f"{version} {{ global: {'; '.join(sorted(symbols))}; }};\n"
        for version, symbols in versions.items()
        if version
    )
    with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
        file.write(script)
        file.flush()
        command = ["gcc", "-shared", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{path.name}"]
        if script:
            command.append(f"-Wl,--version-script={file.name}")
        subprocess.run(command, input=code, text=True, check=True)


def said(*command: str | Path) -> str:
    """Return what a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
