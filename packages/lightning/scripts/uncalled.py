"""Writes src/stratagem_lightning/api/core/uncalled.txt, from Lightning as it is installed here.

    pip install lightning==2.6.6
    python packages/lightning/scripts/uncalled.py

The file names, for each class that users subclass, the methods that Lightning calls and that the
class of this name does not have in Stratagem. A line is `Class: method method`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[1] / "src/stratagem_lightning/api/core/uncalled.txt"
MODULES = (
    "lightning.pytorch.callbacks",
    "lightning.pytorch.core.datamodule",
    "lightning.pytorch.core.module",
    "lightning.pytorch.loggers",
    "lightning.pytorch.loops.evaluation_loop",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.trainer.trainer",
)
HARMLESS = ("root_dir", "to_tensorrt")
"""Methods that change no run: only a user calls them, or Lightning's own loggers."""


def methods_of_lightning() -> dict[str, list[str]]:
    """Return the methods that Lightning calls of each class, by the class's place."""
    import lightning.pytorch

    root = Path(str(lightning.pytorch.__file__)).parent
    source = "\n".join(path.read_text() for path in root.rglob("*.py"))
    return {
        f"{kind.__module__}:{kind.__name__}": sorted(
            name for name in methods(kind) if re.search(rf"""[."']{name}\b""", source)
        )
        for module in modules()
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
    }


def modules() -> list[ModuleType]:
    """Return the modules of Lightning with classes that users subclass."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        found.append(module)
        for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            found.append(importlib.import_module(info.name))
    return found


def methods(kind: type) -> set[str]:
    """Return the names of methods and properties that a class of Lightning has."""
    return {
        name
        for base in kind.__mro__
        if base.__module__.startswith("lightning")
        for name, value in vars(base).items()
        if not name.startswith("__")
        and (inspect.isfunction(value) or isinstance(value, (property, staticmethod, classmethod)))
    } - {*HARMLESS}


def lines(of_lightning: dict[str, list[str]]) -> list[str]:
    """Return the lines of the file, in a process where Lightning's names are Stratagem."""
    import stratagem_lightning  # noqa: F401 - from here on, `lightning` is Stratagem
    from stratagem_lightning.api.core.overrides import is_called
    from stratagem_lightning.api.placeholders import Placeholder

    written = {}
    for place, names in of_lightning.items():
        module, name = place.split(":")
        try:
            own = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        if type(own) is Placeholder:
            continue
        if missing := [each for each in names if not is_called(own, each)]:
            name = own.__name__ if name.startswith("_") else name
            written[name] = f"{name}: {' '.join(missing)}"
    return [written[name] for name in sorted(written)]


if __name__ == "__main__":
    if sys.argv[1:] == ["lightning"]:
        print(json.dumps(methods_of_lightning()))
    else:
        command = [sys.executable, "-W", "ignore", __file__, "lightning"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        FILE.write_text("\n".join(lines(json.loads(printed.splitlines()[-1]))) + "\n")
