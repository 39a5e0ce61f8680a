"""Writes the generated pages of the reference: names, components, commands and errors.

The pages come from docstrings, specs and parsers, so that they cannot disagree with the code. They
are written to docs/generated, which is not committed, each time that the site is built.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import runpy
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hooks import fragments
from names import MODULES, Public
from remedies import REMEDIES

from stratagem import errors
from stratagem.cli import COMMANDS
from stratagem.cli.errors import explanations
from stratagem.cli.program import plugin_commands
from stratagem.discovery import Capabilities, StrategySpec
from stratagem.discovery.absent import remedies
from stratagem.discovery.registry import Candidate, get_registry
from stratagem.discovery.specs import load_target

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
FOLDER = "generated"

CONFIGURED = ("fit", "validate", "test", "predict")
"""Commands whose options are the arguments of the Trainer, the model and the data."""

RUN_ON = {
    "stratagem-core": "CPUs, by CI; some parts on one NVIDIA H200",
    "stratagem-backend-torch": "CPUs, by CI; some parts on one NVIDIA H200",
    "stratagem-mesh": "CPUs, by CI",
    "stratagem-extras": "CPUs, by CI",
    "stratagem-lightning": "CPUs, by CI",
    "stratagem-testing": "CPUs, by CI",
    "stratagem-backend-cuda": "one NVIDIA H200; CPUs and a simulated device, by CI",
    "stratagem-backend-mps": "a simulated device, never the GPU of a Mac",
    "stratagem-backend-xpu": "a simulated device, never a GPU",
    "stratagem-backend-deepspeed": "CPUs, by CI; stages 1 to 3 and offload on one NVIDIA H200",
    "stratagem-backend-xla": "PJRT's CPU client, by CI",
    "stratagem-backend-hpu-ipu": "stubs of the vendors' libraries, by CI",
}
"""Where the components of a distribution have run. docs/design/hardware.md has the whole truth."""

RUN_ON_OTHERS = {
    "dp": "one device, never several GPUs",
    "deepspeed_stage_3_offload_nvme": "CPUs, by `nox -s deepspeed_ops`; not by CI",
    "transformer-engine": "contract tests, never a GPU",
    "transformer-engine-float16": "contract tests, never a GPU",
    "TorchElastic": "real torchrun, also on two simulated hosts",
    "SLURM": "real SLURM on two simulated hosts",
    "MPI": "real mpirun on two simulated hosts",
    "LSF": "its documented variables, never a real cluster",
    "Kubeflow": "its documented variables, never a real cluster",
}
"""The components that have run elsewhere than the rest of their distribution."""

WITH_BASES = ("stratagem.trainer.Trainer", "stratagem.lite.Lite", "stratagem.strategies.Strategy")
"""The classes whose bases no page describes, so that theirs has all members."""

KINDS = {
    "strategy": (
        "strategies",
        "Strategies",
        'How the model trains on several devices: `Trainer(strategy="NAME")`.',
    ),
    "accelerator": (
        "accelerators",
        "Accelerators",
        'The devices that a run uses: `Trainer(accelerator="NAME")`.',
    ),
    "precision": (
        "precisions",
        "Precisions",
        'The number formats of parameters and computation: `Trainer(precision="NAME")`.',
    ),
    "cluster_environment": (
        "environments",
        "Cluster environments",
        "Where ranks and addresses come from. Stratagem detects them by their variables.",
    ),
    "launcher": (
        "launchers",
        "Launchers",
        "How the processes of a run start. A strategy chooses one.",
    ),
    "checkpoint_io": (
        "checkpoint-formats",
        "Checkpoint formats",
        'How a checkpoint is stored: `Trainer(plugins="NAME")`.',
    ),
    "logger": (
        "loggers",
        "Loggers",
        'Where values are written: `Trainer(logger="NAME")`.',
    ),
    "callback": (
        "callbacks",
        "Callbacks",
        'What a run does beside training: `Trainer(callbacks=["NAME"])`.',
    ),
    "profiler": (
        "profilers",
        "Profilers",
        'Where the time of a run goes: `Trainer(profiler="NAME")`.',
    ),
}
"""Each kind of component: the page, its title and its first line."""


def write_pages(names: Sequence[Public]) -> dict[str, tuple[str, str]]:
    """Write all pages.

    Returns:
        The page and the label of each component, command, error and environment variable, by the
        text that people write for it.
    """
    folder = DOCS / FOLDER
    folder.mkdir(exist_ok=True)
    pages: dict[str, str] = {}
    index: dict[str, tuple[str, str]] = {}
    for kind in KINDS:
        name, text, labels = component_page(kind)
        pages[name] = text
        for written, label in labels.items():
            index.setdefault(written, (f"{FOLDER}/{name}", label))
    pages["commands"], labels = commands_page()
    index.update({written: (f"{FOLDER}/commands", label) for written, label in labels.items()})
    pages["errors"] = errors_page()
    pages["lightning-names"] = lightning_names_page()
    for module in MODULES:
        pages[module] = module_page(module, [each for each in names if each.module == module])
    pages["names"] = names_page(names)
    pages["examples"] = examples_page()
    for name, title in (
        ("ARCHITECTURE", ""),
        ("BENCHMARKS", ""),
        ("SECURITY", ""),
        ("CONTRIBUTING", ""),
        ("CHANGELOG", ""),
    ):
        pages[name.lower()] = title + copied_page(ROOT / f"{name}.md")
    variables = variables_of_the_page()
    missing = variables_of_the_code() - variables.keys()
    assert not missing, f"docs/reference/environment-variables.md lacks {sorted(missing)}"
    index.update(
        {name: ("reference/environment-variables", label) for name, label in variables.items()}
    )
    for name, text in pages.items():
        path = folder / f"{name}.md"
        # A page that has not changed keeps its time, so that Sphinx does not read it again.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
    for name, text in fragments().items():
        (folder / f"{name}.inc").write_text(text)  # included by docs/guides/callbacks.md
    return index


# ---------------------------------------------------------------- names


def module_page(module: str, names: Sequence[Public]) -> str:
    """Return the page of a module: each name that it describes, and links to the others."""
    docstring = inspect.cleandoc(importlib.import_module(module).__doc__ or "")
    first = docstring.partition("\n\n")[0]
    lines = [f"# {module}\n", f"{' '.join(first.split())}\n"]
    own = [each for each in names if each.home == each.path]
    others = [each for each in names if each.home != each.path]
    for each in own:
        lines += [f"## {each.name}\n", "```{eval-rst}", *directive(each), "```\n"]
    if others:
        lines.append("## Names that other pages describe\n")
        lines += [f"- {{py:obj}}`{each.name} <{each.home}>`" for each in others]
    return "\n".join(lines) + "\n"


def directive(each: Public) -> list[str]:
    """Return the directive of autodoc that describes a name."""
    if isinstance(each.value, type):
        kind = "autoexception" if issubclass(each.value, BaseException) else "autoclass"
        options = ["members", "show-inheritance"]
        if each.path in WITH_BASES:
            options.append("inherited-members: object")
    elif inspect.isroutine(each.value):
        kind, options = "autofunction", []
    else:
        kind, options = "autodata", ["no-value"]
    return [f".. {kind}:: {each.path}", *(f"   :{option}:" for option in options)]


def names_page(names: Sequence[Public]) -> str:
    """Return the page that lists the modules and their names."""
    lines = [
        "# Names by module\n",
        "Every public name of every distribution. A module of core also has the names that the "
        "installed distributions add to it.\n",
        "| module | names |",
        "|---|---|",
    ]
    for module in MODULES:
        shown = ", ".join(
            f"{{py:obj}}`{each.name} <{each.home}>`" for each in names if each.module == module
        )
        lines.append(f"| [`{module}`]({module}.md) | {shown} |")
    toc = "\n".join(MODULES)
    return "\n".join(lines) + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n"


# ---------------------------------------------------------------- components


def component_page(kind: str) -> tuple[str, str, dict[str, str]]:
    """Return the page of a kind of component: its name, its text, and labels by written names."""
    name, title, about = KINDS[kind]
    candidates = list(get_registry().candidates(kind))
    labels: dict[str, str] = {}
    lines = [f"# {title}\n", f"{about} This page is generated from the specs.\n"]
    lines += ["| name | what it is | distribution |", "|---|---|---|"]
    for each in candidates:
        label = f"{kind}-{each.spec.name}".lower().replace("_", "-").replace(".", "-")
        summary = upper(each.spec.summary)
        names = ", ".join(f"`{alias}`" for alias in each.spec.aliases)
        shown = f"{summary}; also {names}" if names else summary
        lines.append(f"| [`{each.spec.name}`](#{label}) | {shown} | `{each.distribution}` |")
        for written in (each.spec.name, *each.spec.aliases):
            labels.setdefault(written, label)
            labels[f'"{written}"'] = label
            labels[f'{kind}="{written}"'] = label
    lines.append("")
    for each in candidates:
        label = labels[f'"{each.spec.name}"']
        lines += [f"({label})=", f"## {each.spec.name}\n", *about_component(each)]
    return name, "\n".join(lines) + "\n", labels


_WRITTEN_SMALL = re.compile(r"(ddp|fsdp|xla|srun|jsrun|torchrun)(_|\b)")
"""Names and programs that begin a summary, and are not written in another way."""


def upper(text: str) -> str:
    """Return a summary as a sentence begins."""
    return text if _WRITTEN_SMALL.match(text) else text[:1].upper() + text[1:]


def about_component(each: Candidate) -> Iterator[str]:
    """Yield the lines that describe one component."""
    spec = each.spec
    yield f"{upper(spec.summary).rstrip('.')}.\n" if spec.summary else ""
    yield f"- Distribution: `{each.distribution}`"
    run_on = RUN_ON_OTHERS.get(spec.name, RUN_ON[each.distribution])
    yield f"- Run on: {run_on} ([details](../design/hardware.md))"
    target = load(spec)
    yield f"- Class: `{spec.class_name}`"
    preset = ", ".join(f"`{name}={value!r}`" for name, value in spec.init_args.items())
    if preset:
        yield f"- Preset: {preset}"
    if options := options_of(target, spec.init_args):
        yield f"- Options: {', '.join(options)}"
    if isinstance(spec, StrategySpec):
        yield f"- Sharded over the ranks: {', '.join(spec.shards) or 'nothing'}"
        if spec.offloads:
            yield f"- In host memory: {', '.join(spec.offloads)}"
        yield f"- Capabilities: {', '.join(capabilities(spec.capabilities))}"
    else:
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            simple = isinstance(value, (str, int, tuple)) and not isinstance(value, bool)
            if field.name not in _SHOWN_ALREADY and simple and value != field.default:
                shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                yield f"- {upper(field.name.replace('_', ' '))}: `{shown}`"
            elif isinstance(value, bool) and value != field.default:
                yield f"- {upper(field.name.replace('_', ' '))}: {'yes' if value else 'no'}"
    yield ""


_SHOWN_ALREADY = (
    "name",
    "target",
    "api_version",
    "summary",
    "init_args",
    "aliases",
    "probe",
    "incompatible_because",
    "local_world_size",
)


def load(spec: Any) -> Any:
    """Return a component's class; None: it needs a vendor's library that is not installed."""
    try:
        return spec.load()
    except (errors.MissingPackageError, errors.PluginError):
        return None


def options_of(target: Any, preset: Iterable[str]) -> list[str]:
    """Return the arguments of a component with their defaults, without those that are preset."""
    if target is None:
        return []
    shown = []
    for name, each in inspect.signature(target).parameters.items():
        if name in preset or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        default = "" if each.default is each.empty else f"={default_text(each.default)}"
        shown.append(f"`{name}{default}`")
    return shown


def default_text(value: Any) -> str:
    """Return a default as a reader would write it."""
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__name__)
    text = repr(value)
    return "..." if " at 0x" in text or len(text) > 60 else text


def capabilities(can: Capabilities) -> Iterator[str]:
    """Yield what a strategy can do, in words."""
    yield "several devices" if can.many_devices else "one device"
    if can.multi_node:
        yield "several nodes"
    if can.manual_backward:
        yield "`Lite`"
    if can.manual_backward and can.backward_in_forward:
        yield "manual optimization"
    if can.gradient_clipping:
        yield "gradient clipping"
    if can.allows_uneven_eval or can.follows_evaluation:
        yield "evaluation of uneven lengths"
    if can.compiles:
        yield "`compile=`"
    devices = ", ".join(can.accelerators) if can.accelerators else "any"
    yield f"accelerators: {devices}"
    if can.precisions is not None:
        yield f"precisions: {', '.join(can.precisions)}"


# ---------------------------------------------------------------- commands


class _Captured(Exception):
    """Carries a command's parser out of it, before it reads any argument."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(target: str) -> argparse.ArgumentParser | None:
    """Return the parser with which a command reads its arguments; None: it has none of its own."""

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(parser)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", capture),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            load_target(target, what="a command")([])
        except _Captured as captured:
            return captured.parser
    raise AssertionError(f"{target} reads its arguments without argparse")


def commands_page() -> tuple[str, dict[str, str]]:
    """Return the page of the commands, and their labels by written names."""
    of_plugins, failures = plugin_commands(get_registry())
    assert not failures, failures
    rows = {
        name: (target, summary, "stratagem-core") for name, (target, summary) in COMMANDS.items()
    }
    for name, (plugin, command) in of_plugins.items():
        target = command.target
        assert isinstance(target, str)
        rows[name] = target, command.summary, plugin.partition(" ")[0].partition(":")[0]
    labels = {}
    lines = [
        "# Commands\n",
        "Each is a command of the program `stratagem`. This page is generated from the parsers.\n",
        "| command | what it does |",
        "|---|---|",
    ]
    for name, (_, summary, _) in rows.items():
        labels[f"stratagem {name}"] = label = f"command-{name.replace(' ', '-')}"
        lines.append(f"| [`stratagem {name}`](#{label}) | {summary} |")
    lines.append("")
    for name, (target, summary, distribution) in rows.items():
        lines += [f"({labels[f'stratagem {name}']})=", f"## stratagem {name}\n"]
        if name in CONFIGURED:
            lines += [
                f"{summary} Distribution: `{distribution}`.\n",
                "Its options are the arguments of the `Trainer`, of the model and of the data: "
                f"`stratagem {name} --trainer.help` and `stratagem {name} --model.help CLASS` "
                "list them.\n",
            ]
            continue
        parser = parser_of(target)
        assert parser is not None
        lines += [f"{summary} Distribution: `{distribution}`.\n", *about_parser(parser)]
    return "\n".join(lines) + "\n", labels


def about_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a command's usage, description and options."""
    with mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}):
        usage = textwrap.dedent(parser.format_usage().removeprefix("usage: ")).strip()
    description = "\n\n".join((parser.description or "").strip().split("\n\n")[1:])
    yield f"```text\n{usage}\n```\n"
    if description:
        yield f"{description}\n"
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if not actions:
            continue
        yield "| argument | meaning |\n|---|---|"
        for action in actions:
            yield f"| {argument_text(action)} | {cell(action.help or '')}{default_of(action)} |"
        yield ""


def argument_text(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    value = ""
    if action.nargs != 0:
        metavar = action.metavar or action.dest.upper()
        value = f" {metavar}" if isinstance(metavar, str) else f" {' '.join(metavar)}"
        if action.choices:
            value = f" {{{','.join(map(str, action.choices))}}}"
    if not action.option_strings:
        return f"`{value.strip()}`"
    return f"`{', '.join(action.option_strings)}{cell(value)}`"


def default_of(action: argparse.Action) -> str:
    """Return the default of an option, if it says anything."""
    unset = action.default in (None, False, argparse.SUPPRESS, [], ())
    if unset or "%(default)" in (action.help or "") or "default" in (action.help or ""):
        return ""
    return f" (default: `{action.default}`)"


def cell(text: str) -> str:
    """Return a text that can stand in a cell of a table."""
    return text.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;").strip("\n")


# ---------------------------------------------------------------- errors


def errors_page() -> str:
    """Return the page of the exceptions: what each means, and what to do."""
    docstring = inspect.cleandoc(errors.__doc__ or "")
    tree = textwrap.dedent(docstring.partition("::\n\n")[2].partition("\n\nEvery")[0])
    classes = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert set(classes) == REMEDIES.keys(), set(classes) ^ REMEDIES.keys()
    lines = [
        "# Errors\n",
        "Every message says what was expected, what was received, and what to do next. "
        "The table says what kind of mistake each class stands for.\n",
        "The messages of some errors end with a command that explains the error: "
        + ", ".join(f"`stratagem errors {name}`" for name in explanations())
        + ".\n",
        f"```text\n{tree}\n```\n",
        "| class | cause | remedy |",
        "|---|---|---|",
    ]
    for name in sorted(classes):
        cause, remedy = REMEDIES[name]
        lines.append(f"| `{name}` | {cause} | {remedy} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- others


def lightning_names_page() -> str:
    """Return the table of the names of Lightning that `stratagem_lightning` provides."""
    layout = runpy.run_path(
        str(ROOT / "packages/lightning/src/stratagem_lightning/layout.py"), run_name="layout"
    )
    modules = {f"lightning.{name}".rstrip("."): each for name, each in layout["LAYOUT"].items()}
    lines = [
        "# Names of Lightning\n",
        "What `stratagem-lightning` provides under the names of Lightning, by module. "
        "`import lightning` means these with `stratagem run --as-lightning`.\n",
        "| module | names |",
        "|---|---|",
    ]
    for module in sorted(modules):
        shown = ", ".join(f"`{name}`" for name in sorted(modules[module]))
        if shown:
            lines.append(f"| `{module}` | {shown} |")
    return "\n".join((*lines, *lightning_attributes())) + "\n"


def lightning_attributes() -> list[str]:
    """Return a section with the public attributes of Lightning's classes, and what to use here."""
    text = (ROOT / "packages/core/tests/files/lightning_attributes.txt").read_text()
    lines = [
        "\n## Attributes\n",
        "Public attributes of Lightning's classes, and what to use with Stratagem's own classes. "
        "If a name is absent, its AttributeError has the text of this table.\n",
        "| class | attribute | here |",
        "|---|---|---|",
    ]
    kinds = {
        "Trainer": "Trainer",
        "Fabric": "Lite",
        "Strategy": "Strategy",
        "LightningModule": "Module",
        "LightningDataModule": "DataModule",
    }
    for line in text.splitlines():
        kind, names = line.split(": ")
        own = kinds.get(kind, "")
        others = {name: remedies().get(f"{own}.{name}") for name in names.split()}
        same = ", ".join(f"`{name}`" for name, remedy in others.items() if remedy is None)
        lines.append(f"| `{kind}` | {same} | the same |")
        lines += [f"| `{kind}` | `{name}` | {what} |" for name, what in others.items() if what]
    return lines


def examples_page() -> str:
    """Return the page with the example programs: what each shows, and its code."""
    lines = [
        "# Example programs\n",
        "Each is a script to start from. CI runs all of them on small data, in one process and in "
        "two. The first lines say how to launch it.\n",
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text()
        docstring = inspect.cleandoc(ast.get_docstring(ast.parse(code)) or "")
        first = " ".join(docstring.partition("\n\n")[0].split())
        title = path.stem.replace("_", " ")
        lines += [
            f"## {upper(title)}\n",
            f"{first}\n",
            f"<details><summary>examples/{path.name}</summary>\n",
            f"```python\n{code}```\n",
            "</details>\n",
        ]
    return "\n".join(lines)


def copied_page(path: Path) -> str:
    """Return a page of the root, its links as they are from the folder of generated pages."""
    text = path.read_text()
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](../\1)", text)
    return re.sub(
        r"\]\((ARCHITECTURE|BENCHMARKS|SECURITY|CONTRIBUTING|CHANGELOG)\.md",
        lambda match: f"]({match[1].lower()}.md",
        text,
    )


def variables_of_the_code() -> set[str]:
    """Return the environment variables that our distributions name."""
    found: set[str] = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        found.update(re.findall(r"\"(STRATAGEM_[A-Z_]+[A-Z])\"", path.read_text()))
    return found


def variables_of_the_page() -> dict[str, str]:
    """Return the label of each environment variable that the page describes."""
    page = (DOCS / "reference/environment-variables.md").read_text()
    found = re.findall(r"^\(([\w-]+)\)=\n#+ ((?:`?STRATAGEM_\w+`?(?:, )?)+)$", page, re.MULTILINE)
    return {name.strip(" `"): label for label, names in found for name in names.split(",")}
