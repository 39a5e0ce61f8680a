"""`stratagem new-backend`: the files of a distribution that adds a component, to start from."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

SUMMARY = "Write a new distribution with a strategy or another component of your own."

_DESCRIPTION = f"""{SUMMARY}

A folder with a pyproject.toml, a plugin module, a component that works, the conformance kit as its
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
    "src/$package/$module.py": "$module.py",
    "tests/test_$module.py": "test.py",
}
"""Where each file goes, and which one in the folder `template` it is made of; None: it is empty."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The differences between the distributions of two kinds of component.

    The texts may hold the placeholders of `names_of`.

    Attributes:
        what: a kind of component, in the words of users.
        module: the name of the component's module, and of its template.
        suffix: the end of the class name.
        about: the purpose of the component, for the README.
        usage: arguments of a Trainer that uses it.
        notes: further notes for users, for the README.
        spec: the class of its spec, of `stratagem.discovery`.
        conformance: the class of the kit.
        attribute: the attribute of the kit's class that names the component.
        head: the code before the hook in the plugin module.
        fields: further fields of the spec.
        imports: further names of `stratagem.discovery` in the plugin module.
        test_imports: imports of the test besides the kits.
        test_head, test_body: the code before the test's class, and the code in the class.
    """

    what: str
    module: str
    suffix: str
    about: str
    usage: str
    spec: str
    conformance: str
    attribute: str
    notes: str = ""
    head: str = "\n"
    fields: str = ""
    imports: tuple[str, ...] = ()
    test_imports: str = ""
    test_head: str = ""
    test_body: str = ""


KINDS = {
    "strategy": Kind(
        what="strategy",
        module="strategy",
        suffix="Strategy",
        about="a replica on every rank; gradients are averaged after each backward",
        usage='strategy="$name", devices=2',
        spec="StrategySpec",
        conformance="StrategyConformance",
        attribute="strategy",
        imports=("Capabilities",),
        head="CAPABILITIES = Capabilities.parallel()\n\n\n",
        fields="        capabilities=CAPABILITIES,\n",
    ),
    "accelerator": Kind(
        what="accelerator",
        module="accelerator",
        suffix="Accelerator",
        about="a stand-in that computes on the CPU",
        usage='accelerator="$name"',
        spec="AcceleratorSpec",
        conformance="AcceleratorConformance",
        attribute="accelerator",
        imports=("Availability",),
        head="\ndef probe() -> Availability:\n"
        '    """Return how many devices can be used here; it must be quick."""\n'
        '    return Availability(1, "the host, as a stand-in", auto_count=1, indexed=False)\n\n\n',
        fields="        probe=probe,\n",
    ),
    "precision": Kind(
        what="precision",
        module="precision",
        suffix="Precision",
        about="parameters in float32, and bfloat16 where autocast finds it safe",
        usage='precision="$name"',
        spec="PrecisionSpec",
        conformance="PrecisionConformance",
        attribute="precision",
    ),
    "checkpoint-io": Kind(
        what="checkpoint format",
        module="checkpoint_io",
        suffix="CheckpointIO",
        about="a file with a checksum, replaced durably",
        usage='plugins="$name"',
        spec="CheckpointIOSpec",
        conformance="CheckpointIOConformance",
        attribute="checkpoint_io",
    ),
    "environment": Kind(
        what="cluster environment",
        module="environment",
        suffix="Environment",
        about="ranks by the variables that the cluster sets for each process",
        usage='strategy="ddp", devices=2',
        spec="ClusterEnvironmentSpec",
        conformance="ClusterEnvironmentConformance",
        attribute="cluster_environment",
        notes="It is used where `${prefix}_JOB_ID` and `${prefix}_RANK` are set. The cluster sets "
        "in each process:\n\n"
        "| variable | what it is |\n|---|---|\n"
        "| `${prefix}_JOB_ID` | any text |\n"
        "| `${prefix}_RANK`, `${prefix}_WORLD_SIZE` | of all processes |\n"
        "| `${prefix}_LOCAL_RANK`, `${prefix}_LOCAL_WORLD_SIZE` | of the node's processes |\n"
        "| `${prefix}_MAIN_ADDRESS` | the host of rank 0; 127.0.0.1 if it is not set |\n"
        "| `${prefix}_MAIN_PORT` | a free port on it, the same for all |\n\n",
        head='PREFIX = "${prefix}_"\n\n\n',
        fields='        variables=(f"{PREFIX}JOB_ID", f"{PREFIX}RANK"),\n'
        '        world_size_variable=f"{PREFIX}WORLD_SIZE",\n'
        '        local_world_size_variable=f"{PREFIX}LOCAL_WORLD_SIZE",\n'
        '        rank_variable=f"{PREFIX}RANK",\n'
        '        local_rank_variable=f"{PREFIX}LOCAL_RANK",\n',
        test_head="\ndef variables(rank: int) -> dict[str, str]:\n"
        '    """Return what the cluster sets for one of two ranks on this host."""\n'
        '    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}\n'
        '    numbers = {"JOB_ID": 7, "MAIN_PORT": 29517, **ranks}\n'
        '    prefix = "${prefix}"\n'
        '    return {f"{prefix}_{name}": str(number) for name, number in numbers.items()}\n\n',
        test_body="\n    ranks = (variables(0), variables(1))",
    ),
    "launcher": Kind(
        what="launcher",
        module="launcher",
        suffix="Launcher",
        about="a new process of this machine for each rank",
        usage='strategy="ddp", devices=2, plugins="$name"',
        spec="LauncherSpec",
        conformance="LauncherConformance",
        attribute="launcher",
        notes="Functions and classes that a script defines itself, such as its Module, reach the "
        "ranks only if\ncloudpickle is installed (`pip install cloudpickle`); those of modules do "
        "without it.\n\n",
        fields="        new_processes=True,\n",
    ),
    "logger": Kind(
        what="logger",
        module="logger",
        suffix="Logger",
        about="a line of JSON for each step",
        usage='logger="$name"',
        spec="LoggerSpec",
        conformance="LoggerConformance",
        attribute="logger",
        test_imports="import json\nfrom collections.abc import Mapping\nfrom typing import Any\n\n",
        test_head="\ndef rows(logger: Any) -> list[tuple[int, Mapping[str, float]]]:\n"
        '    """Return what a logger has written, as pairs of a step and its values."""\n'
        "    lines = map(json.loads, logger.file.read_text().splitlines())\n"
        "    return [(step, values) for step, values in lines]\n\n",
        test_body="\n    read = rows",
    ),
    "callback": Kind(
        what="callback",
        module="callback",
        suffix="Callback",
        about="counts the batches of all fits",
        usage='callbacks="$name"',
        spec="CallbackSpec",
        conformance="CallbackConformance",
        attribute="callback",
    ),
}
"""What `--kind` may be."""

_TAKEN = (
    "strategy",
    "accelerator",
    "precision",
    "checkpoint_io",
    "cluster_environment",
    "launcher",
    "logger",
    "callback",
)
_NOT_OURS_TO_GIVE = {
    "core": "Stratagem's core",
    "one_device": "the plugin of Stratagem's core",
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
    parser.add_argument("name", metavar="NAME", help="of the component, such as local_sgd")
    parser.add_argument("--kind", choices=KINDS, default="strategy", help="of component; strategy")
    parser.add_argument(
        "--distribution",
        metavar="NAME",
        help="of the distribution and the folder; stratagem-backend-NAME otherwise",
    )
    options = parser.parse_args(arguments)
    try:
        names = names_of(options.name, options.distribution, get_registry(), KINDS[options.kind])
        folder = Path(names["distribution"])
        written = write_files(folder, rendered(names, KINDS[options.kind]))
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
        f"The {names['what']} is in src/{names['package']}/{names['module']}.py."
    )
    return 0


def names_of(name: str, distribution: str | None, registry: Registry, kind: Kind) -> dict[str, str]:
    """Return the values of the template's placeholders.

    Args:
        name: the name of the component.
        distribution: the name of the distribution; None derives it from the name of the component.
        registry: the installed components, which reserve their names.
        kind: the kind of component.

    Raises:
        ConfigurationError: a name is taken, or does not have the form of a name.
    """
    _check_name(name, registry, kind.what)
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
        "what": kind.what,
        "module": kind.module,
        "class_name": "".join(map(str.capitalize, name.split("_"))) + kind.suffix,
    }


def _placeholders(kind: Kind, names: Mapping[str, str]) -> dict[str, str]:
    """Return what the templates need beside `names`."""
    known = {**names, "prefix": names["name"].upper()}
    own = {
        field: Template(text).substitute(known)
        for field, text in vars(kind).items()
        if isinstance(text, str)
    }
    kits = ", ".join(sorted((kind.conformance, "PluginConformance")))
    return {
        **known,
        **own,
        "summary": own["about"][0].upper() + own["about"][1:],
        "imports": ", ".join([*sorted((*kind.imports, kind.spec)), "hookimpl"]),
        "kits": kits,
        "core_range": core_range(__version__),
        "api_version": str(PLUGIN_API_VERSION),
    }


def _check_name(name: str, registry: Registry, what: str) -> None:
    """Refuse a name that is taken, or not of the form that names have."""
    if not _NAME.fullmatch(name):
        nearest = re.sub(r"[^a-z0-9]+", "_", _words_of(name)).strip("_0123456789")
        raise ConfigurationError(
            f"NAME={name!r}: expected the name of {_called(what)} that is a Python identifier in "
            "lower case: letters, digits and single '_', beginning with a letter"
            + (f", such as {nearest!r}" if nearest else "")
        )
    for kind in _TAKEN:
        for candidate in registry.candidates(kind):
            names = (candidate.spec.name, *candidate.spec.aliases)
            if name in (known.casefold() for known in names):
                raise _taken(name, candidate.distribution, _called(kind))
    if name == "auto":
        raise ConfigurationError(
            f"NAME='auto' is how users leave the choice of {_called(what)} to Stratagem: choose "
            "another one, such as 'my_auto'"
        )
    for kind in _TAKEN:
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


def rendered(names: Mapping[str, str], kind: Kind) -> dict[str, str]:
    """Return the text of each file, by its path in the folder."""
    placeholders = _placeholders(kind, names)
    folder = files("stratagem_testing.author") / "template"
    texts = {
        path: ""
        if source is None
        else (folder / f"{Template(source).substitute(names)}.txt").read_text(encoding="utf-8")
        for path, source in _FILES.items()
    }
    return {
        Template(path).substitute(names): Template(text).substitute(placeholders)
        for path, text in texts.items()
    }


def write_files(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write files into a new folder, or into an empty one; return their paths in it.

    Raises:
        ConfigurationError: the folder is a file or a link, or is not empty.
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
