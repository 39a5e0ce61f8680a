"""`stratagem new-backend`: the files of a distribution that adds a strategy, to start from."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from stratagem import __version__
from stratagem.cli import parser_of
from stratagem.discovery import (
    CORE,
    PLUGIN_API_VERSION,
    Registry,
    core_range,
    distribution_of,
    get_registry,
    names_by_distribution,
    normalise,
    version_of,
)
from stratagem.errors import ConfigurationError

SUMMARY = "Write a new distribution with a strategy of your own, to start from."

_DESCRIPTION = f"""{SUMMARY}

A folder with a pyproject.toml, a plugin module, a strategy that trains, the conformance kit as its
test, a README and a CI file. It builds and passes as it stands. The folder is made here and has the
distribution's name; one that holds files is left alone. Nothing is installed or run.
"""

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    ".github/workflows/ci.yml": "ci.yml",
    "src/$package/__init__.py": None,
    "src/$package/py.typed": None,
    "src/$package/plugin.py": "plugin.py",
    "src/$package/strategy.py": "strategy.py",
    "tests/test_strategy.py": "test_strategy.py",
}
"""Where each file goes, and which one in the folder `template` it is made of; None: it is empty."""

_KINDS = (
    "strategy",
    "accelerator",
    "precision",
    "checkpoint_io",
    "cluster_environment",
    "launcher",
)
_NOT_OURS_TO_GIVE = {
    "core": "Stratagem's core",
    "native": "the plugin of Stratagem's core",
    "stratagem": "Stratagem itself",
    "torch": "the library that all strategies stand on",
}
"""Names that no component has, and what a user would take them for."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTION = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def run(arguments: Sequence[str]) -> int:
    """Write the files; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = parser_of("new-backend", _DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="of the strategy, such as local_sgd")
    parser.add_argument(
        "--distribution",
        metavar="NAME",
        help="of the distribution and the folder; stratagem-backend-NAME otherwise",
    )
    options = parser.parse_args(arguments)
    try:
        names = names_of(options.name, options.distribution, get_registry())
        folder = Path(names["distribution"])
        written = write_files(folder, rendered(names))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if options.json:
        import json

        print(json.dumps({**names, "folder": str(folder), "files": written}, indent=2))
        return 0
    print("\n".join(f"{folder}/{file}" for file in written))
    print(
        f"\nNext:\n  cd {folder}\n  python -m pip install -e '.[test]'\n  python -m pytest\n"
        f"  stratagem doctor {folder}\n"
        f"The strategy is in src/{names['package']}/strategy.py."
    )
    return 0


def names_of(name: str, distribution: str | None, registry: Registry) -> dict[str, str]:
    """Return what the placeholders of the template stand for.

    Args:
        name: of the strategy.
        distribution: its name; None: made of the strategy's.
        registry: what is installed, whose names are taken.

    Raises:
        ConfigurationError: a name is taken, or not of the form that names have.
    """
    _check_name(name, registry)
    distribution = distribution or f"stratagem-backend-{name.replace('_', '-')}"
    if normalise(distribution) in (CORE, *names_by_distribution()):
        raise ConfigurationError(
            f"the distribution {distribution} is one of Stratagem's own: choose another name by "
            "--distribution"
        )
    if not _DISTRIBUTION.fullmatch(distribution):
        raise ConfigurationError(
            f"--distribution={distribution!r}: expected letters, digits, '-', '_' and '.', "
            "beginning with a letter"
        )
    if version := version_of(distribution):
        raise ConfigurationError(
            f"the distribution {distribution} {version} is installed: choose another name by "
            f"--distribution, or remove it first: pip uninstall {distribution}"
        )
    package = re.sub(r"[._-]+", "_", distribution.casefold())
    package = package.replace("stratagem_backend_", "stratagem_", 1)
    if importlib.util.find_spec(package) is not None:
        raise ConfigurationError(
            f"there is a module {package!r} already, which the distribution {distribution} would "
            "have too: choose another name by --distribution"
        )
    return {
        "name": name,
        "distribution": distribution,
        "package": package,
        "class_name": "".join(map(str.capitalize, name.split("_"))) + "Strategy",
        "core_range": core_range(__version__),
        "api_version": str(PLUGIN_API_VERSION),
    }


def _check_name(name: str, registry: Registry) -> None:
    """Refuse a strategy's name that is taken, or not of the form that names have."""
    if not _NAME.fullmatch(name):
        nearest = re.sub(r"[^a-z0-9]+", "_", _words_of(name)).strip("_0123456789")
        raise ConfigurationError(
            f"NAME={name!r}: expected the name of a strategy that is a Python identifier in lower "
            "case: letters, digits and single '_', beginning with a letter"
            + (f", such as {nearest!r}" if nearest else "")
        )
    for kind in _KINDS:
        for candidate in registry.candidates(kind):
            names = (candidate.spec.name, *candidate.spec.aliases)
            if name in (known.casefold() for known in names):
                raise _taken(name, candidate.distribution, _called(kind))
    if name == "auto":
        raise ConfigurationError(
            "NAME='auto' is how users leave the choice of a strategy to Stratagem: choose another "
            "one, such as 'my_auto'"
        )
    for kind in _KINDS:
        if known := distribution_of(name, kind):
            raise _taken(name, known, _called(kind))
    if name in _NOT_OURS_TO_GIVE:
        raise ConfigurationError(
            f"NAME={name!r} is {_NOT_OURS_TO_GIVE[name]}, and would be taken for it: choose "
            f"another one, such as 'my_{name}'"
        )


def _taken(name: str, distribution: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"NAME={name!r} is what {distribution} calls {what} of its own: choose another one, "
        f"such as 'my_{name}'"
    )


def _called(kind: str) -> str:
    """Return a kind of component with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind.replace('_', ' ')}"


def _words_of(name: str) -> str:
    """Return `LocalSGD` as `local_sgd`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).casefold()


def rendered(names: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file, by its path in the folder."""
    folder = files("stratagem_testing.author") / "template"
    texts = {
        path: "" if source is None else (folder / f"{source}.txt").read_text(encoding="utf-8")
        for path, source in _FILES.items()
    }
    return {
        Template(path).substitute(names): Template(text).substitute(names)
        for path, text in texts.items()
    }


def write_files(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write files into a new folder, or into an empty one; return their paths in it.

    Raises:
        ConfigurationError: there is something of the folder's name, or in it.
        OSError: a file cannot be written.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigurationError(f"{str(folder)!r} is there and no folder: move it away")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(
            f"the folder {str(folder)!r} holds files, and none is overwritten: move it away, "
            "choose another name by --distribution, or call this in another folder"
        )
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    return list(texts)
