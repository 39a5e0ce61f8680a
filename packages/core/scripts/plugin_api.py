"""The plugin API as text: its contents, how two versions differ, and docs/extend/plugin-api.md.

    python packages/core/scripts/plugin_api.py    # writes the snapshot and the generated tables

The snapshot, packages/core/tests/files/plugin_api_2.txt, is what an author of a plugin may rely on;
a test compares it with what is there.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parents[3]
SNAPSHOT = ROOT / "packages/core/tests/files/plugin_api_2.txt"
GUIDE = ROOT / "docs/extend/plugin-api.md"

PUBLIC = {
    "stratagem.discovery": (
        "PLUGIN_API_VERSION hookimpl Capabilities ComponentSpec StrategySpec AcceleratorSpec "
        "PrecisionSpec CheckpointIOSpec ClusterEnvironmentSpec LauncherSpec LoggerSpec "
        "CallbackSpec ProfilerSpec NameSpec Availability Check Command TorchBuild torch_build "
        "version_of read_text require_package START_METHODS get_registry nearest_of "
        "with_former_names"
    ),
    "stratagem.strategies": (
        "Strategy ParallelStrategy SingleDeviceStrategy DDPStrategy TrainStep MicroBatch "
        "PreparedModel Optimizers Axis Ranks ProcessGroupRanks Components StepOptions GradientClip "
        "StepMemory Compilation StepModule user_module make_optimizers ActivationCheckpointing "
        "apply_activation_checkpointing check_activation_checkpointing use_huge_pages "
        "return_freed_memory DataSplit ReduceOp context_of"
    ),
    "stratagem.accelerators": "Accelerator CPUAccelerator DeviceAccelerator DeviceMemory",
    "stratagem.precision": "Precision EnginePrecision TruePrecision MixedPrecision default_dtype",
    "stratagem.checkpoint": (
        "CheckpointIO Shards LazyTensor SingleFileCheckpointIO DirectoryCheckpointIO read_whole "
        "first_whole Checksum Description Manifest MappedFile Refused Sink StoredCheckpointIO "
        "checksum_of_file has_shards load_json manifest_of open_archive parse_manifest "
        "write_archive"
    ),
    "stratagem.environments": "ClusterEnvironment",
    "stratagem.launch": (
        "Launcher RunPlan RunRequest Selection rank_environment free_port pack run_packed "
        "pack_result unpack_result rank_failure run_as_rank ERROR_FILE_VARIABLE "
        "LAUNCH_VARIABLE IN_CALLS LISTEN_FD_VARIABLE LOOPBACK_INTERFACE OWNER_VARIABLE "
        "PARENT_VARIABLE STARTED_IN STORE_VARIABLE at_end_of_rank crash_file die_with_parent "
        "end_rank "
        "exit_with_error explained forget_foreign_variables forget_parent has_parent "
        "line_in_traceback open_standard_streams operation own_variables owns_variables "
        "record_failure this_rank threads_per_rank users_line"
    ),
    "stratagem.data": "map_items map_tensors",
    "stratagem.state": (
        "named_state load_named_state matching_groups check_weights check_optimizer_state "
        "per_parameter_state state_without_wrapper check_safe_data find_offending_value to_bytes "
        "from_bytes SafeUnpickler bytes_of check_dims decode encode why_refused"
    ),
    "stratagem.storage": (
        "absolute check_is_new durable_replace exists join read write DurableDirectory "
        "StreamedFile is_name open_regular to_location"
    ),
    "stratagem.rng": "seed_devices_by",
    "stratagem.loggers": "Logger",
    "stratagem.callbacks": "Callback",
    "stratagem.profilers": "Profiler",
    "stratagem.lazy": "lazy_names",
    "stratagem.plan": "probe_accelerator resolve",
    "stratagem.system": "*",
    "stratagem.cli": "HelpFormatter at_least",
    "stratagem_torch.parallel": "join_process_group synchronize_batch_norm",
    "stratagem_torch.sharding": "*",
    "stratagem_torch.launch": "Command Failure Output RankProcesses StartRank Watch",
    "stratagem.errors": "*",
}
"""What the plugin API holds, by the module that authors import it from."""

NAMED_IN_SIGNATURES = ("stratagem",)
"""Further modules whose names signatures may name."""


def public_names() -> dict[str, Any]:
    """Return what authors may import of core, by its plain name."""
    registries = importlib.import_module("stratagem.discovery.registry")
    registry, first = registries.get_registry(), registries.FIRST
    of_others = {
        candidate.spec.class_name
        for kind in ("strategy", "accelerator", "precision", "checkpoint_io", "cluster_environment")
        for candidate in registry.candidates(kind)
        if candidate.distribution not in first
    }
    found: dict[str, Any] = {}
    for name in (*PUBLIC, *NAMED_IN_SIGNATURES):
        module = importlib.import_module(name)
        listed = vars(module).get("__all__") or dir(module)
        found.update({each: getattr(module, each) for each in listed if each not in of_others})
    return found


def classes() -> dict[str, type]:
    """Return the classes of the plugin API by their public path, in the order of PUBLIC."""
    return {path: found for path, found in _objects().items() if isinstance(found, type)}


def functions() -> dict[str, FunctionType]:
    """Return its functions and hooks by their public path."""
    hooks = importlib.import_module("stratagem.discovery.hookspecs")
    found = {path: each for path, each in _objects().items() if isinstance(each, FunctionType)}
    return found | {
        f"hook {name}": getattr(hooks, name)
        for name in sorted(vars(hooks))
        if name.startswith("stratagem_")
    }


def promised() -> set[str]:
    """Return the public paths of all that it holds."""
    return set(_objects())


def aliases() -> list[str]:
    """Return the public paths of its type aliases and constants."""
    return [path for path, each in _objects().items() if not isinstance(each, (type, FunctionType))]


@functools.cache
def _objects() -> dict[str, Any]:
    found = {}
    for module_name, names in PUBLIC.items():
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__) if names == "*" else names.split():
            found[f"{module_name}.{name}"] = getattr(module, name)
    return found


# ---------------------------------------------------------------- a class's members


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of a class of the API.

    Attributes:
        name: as it is called.
        kind: "method", "property", "attribute", "field" or "static method".
        role: "abstract" (has to be overridden), "final" (must not be), "" (may be).
        text: the snapshot's line.
        returns: the annotation of what it is or returns.
        about: the first sentence of its docstring; "": it has none.
    """

    name: str
    kind: str
    role: str
    text: str
    returns: str = ""
    about: str = ""


def members(kind: type) -> list[Member]:
    """Return the public members that a class adds to its public bases."""
    inherited = [base for base in kind.__mro__[1:] if base in set(classes().values())]
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    found: dict[str, Member] = {}
    for base in kind.__mro__:
        # Of a base that is no part of the API, the members are the class's own.
        is_ours = base.__module__.startswith("stratagem")
        if not is_ours or any(issubclass(public, base) for public in inherited):
            continue
        documented = _attribute_docs(base)
        for each in _fields(base) if dataclasses.is_dataclass(base) else _annotated(base):
            about = documented.get(each.name, "")
            found.setdefault(each.name, dataclasses.replace(each, about=about))
        for name, value in vars(base).items():
            of_protocol = name == "__init__" and getattr(value, "__module__", "") == "typing"
            if of_protocol or _is_added_later(value):
                continue
            if not name.startswith("_") or name == "__init__":
                member = _member(name, value, name in abstract)
                if member is not None and not (
                    name == "__init__" and dataclasses.is_dataclass(base)
                ):
                    found.setdefault(name, member)
        for name, about in documented.items():
            text = f"attribute {name}"
            found.setdefault(name, Member(name, "attribute", "", text, about=about))
    return list(found.values())


def _is_added_later(value: object) -> bool:
    """Return whether another distribution has set it, as stratagem_lightning does."""
    function = value.fget if isinstance(value, property) else value
    home = getattr(function, "__module__", None) or "stratagem"
    return callable(function) and home.startswith("stratagem_lightning.")


def _fields(kind: type) -> Iterator[Member]:
    for field in dataclasses.fields(kind):
        if field.name not in vars(kind).get("__annotations__", {}):
            continue
        text = f"field {field.name}: {field.type}"
        if field.default is not dataclasses.MISSING:
            text += f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING or not field.init:
            text += " = ..."
        yield Member(field.name, "field", "", text, str(field.type))


def _annotated(kind: type) -> Iterator[Member]:
    for name, annotation in vars(kind).get("__annotations__", {}).items():
        if not name.startswith("_"):
            text = f"attribute {name}: {annotation}"
            if name in vars(kind):
                text += f" = {vars(kind)[name]!r}"
            yield Member(name, "attribute", "", text, str(annotation))


def _member(name: str, value: Any, is_abstract: bool) -> Member | None:
    kind = "method"
    if isinstance(value, property):
        kind, value = "property", value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        kind = "static method" if isinstance(value, staticmethod) else "class method"
        value = value.__func__
    elif name != "__init__" and not isinstance(value, FunctionType):
        return None
    if not isinstance(value, FunctionType):
        return None
    role = "abstract" if is_abstract else "final" if getattr(value, "__final__", False) else ""
    returns = str(value.__annotations__.get("return", ""))
    shown = f"{name}: {returns}" if kind == "property" else f"{name}{signature_of(value)}"
    text = f"{role} {kind} {shown}".strip()
    return Member(name, kind, role, text, returns, first_sentence(value.__doc__))


def signature_of(function: Callable[..., Any]) -> str:
    """Return a signature with annotations as they are written."""
    signature = inspect.signature(function)

    class Written(str):
        """Shown without quotes."""

        __repr__ = str.__str__

    parameters = [
        parameter.replace(annotation=Written(parameter.annotation))
        if parameter.annotation is not inspect.Parameter.empty
        else parameter
        for parameter in signature.parameters.values()
    ]
    returns = signature.return_annotation
    if returns is not inspect.Signature.empty:
        returns = Written(returns)
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def first_sentence(docstring: str | None) -> str:
    """Return what a docstring says first, in one line."""
    paragraph = inspect.cleandoc(docstring or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _attribute_docs(kind: type) -> dict[str, str]:
    """Return what a class says of its attributes, in its docstring or in strings below them."""
    documented: dict[str, str] = {}
    head = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"^Attributes:\n((?:    .*\n|\n)+)", head + "\n", re.MULTILINE)
    if section is not None:
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(section[1]).strip()):
            names, _, about = entry.partition(":")
            for name in names.split(","):
                documented[name.strip()] = " ".join(about.split())
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        return documented
    assert isinstance(tree, ast.ClassDef)
    for one, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            documented[one.target.id] = " ".join(str(after.value.value).split())
    return documented


# ---------------------------------------------------------------- the snapshot


def snapshot() -> str:
    """Return the plugin API as text, a line for each class, member, function and hook."""
    discovery = importlib.import_module("stratagem.discovery")
    lines = [f"plugin API {discovery.PLUGIN_API_VERSION}"]
    by_object = {kind: path for path, kind in reversed(classes().items())}
    for path, kind in classes().items():
        bases = [by_object.get(base, base.__name__) for base in kind.__mro__[1:-1]]
        shown = [base for base in bases if base.startswith("stratagem.") or base == "Module"]
        if issubclass(kind, BaseException):
            shown = [by_object.get(base, base.__name__) for base in kind.__bases__]
        what = "final class" if getattr(kind, "__final__", False) else "class"
        lines.append(f"\n{what} {path}" + (f"({shown[0]})" if shown else ""))
        found = members(kind)
        fields = [member.text for member in found if member.kind == "field"]
        lines += [f"    {text}" for text in fields]
        lines += sorted(f"    {member.text}" for member in found if member.kind != "field")
    lines.append("")
    lines += [f"{_of_function(path)}{signature_of(each)}" for path, each in functions().items()]
    lines += [f"alias {path}" for path in aliases()]
    return "\n".join(lines) + "\n"


def _of_function(path: str) -> str:
    return path if path.startswith("hook ") else f"function {path}"


def differences(before: str, after: str) -> tuple[list[str], list[str]]:
    """Return what a change of the API takes away or alters, and what it only adds."""
    old, new = _by_member(before), _by_member(after)
    broken = [f"removed: {key}" for key in old if key not in new]
    added: list[str] = []
    for key, text in new.items():
        if key not in old:
            is_demand = text.startswith("abstract ") or (
                text.startswith("field ") and " = " not in text and key.rpartition(".")[0] in old
            )
            (broken if is_demand else added).append(f"added: {key}: {text}")
        elif text != old[key]:
            broken.append(f"changed: {key}: {old[key]}  ->  {text}")
    return broken, added


def _by_member(text: str) -> dict[str, str]:
    found, path = {}, ""
    for line in text.splitlines():
        words = re.match(
            r"(?: {4})?(?:abstract |final )?(?:(?:class |static )?method|class|property|attribute|"
            r"field|function|hook|plugin|alias) ([\w.]+)",
            line,
        )
        if words is None:
            continue
        if line.startswith(" "):
            found[f"{path}.{words[1]}"] = line.strip()
        else:
            path = words[1]
            found[path] = line
    return found


# ---------------------------------------------------------------- the guide

INTERFACES = (
    "Strategy",
    "ParallelStrategy",
    "TrainStep",
    "MicroBatch",
    "Ranks",
    "Accelerator",
    "Precision",
    "CheckpointIO",
    "ClusterEnvironment",
    "Launcher",
    "Logger",
    "Profiler",
)
"""The classes that authors subclass or call, in the order of the guide."""

HANDED = (
    "PreparedModel",
    "StepModule",
    "GradientClip",
    "StepMemory",
    "StepOptions",
    "Components",
    "Shards",
    "LazyTensor",
)
"""The classes of objects that authors are handed or return."""


def tables() -> str:
    """Return the part of the guide that says of each member when it is called and what it is."""
    of_name = {path.rpartition(".")[2]: (path, kind) for path, kind in classes().items()}
    parts = [_about_hooks(), _about_specs(of_name)]
    for name in (*INTERFACES, *HANDED):
        path, kind = of_name[name]
        head = inspect.cleandoc(kind.__doc__ or "")
        parts.append(f"### `{path}`\n\n{first_sentence(head)}\n")
        parts += [
            f"Made by `{name}{_shown(each)[len('`__init__') :]}.\n"
            for each in members(kind)
            if each.name == "__init__"
        ]
        if calls := call_sequence(kind):
            parts.append(f"{_said_before_calls(head)}\n\n{calls}\n")
        parts.append(_about_members(kind))
    return "\n".join([*parts, _about_functions(), _about_former_names()])


def _about_former_names() -> str:
    former = importlib.import_module("stratagem.discovery.former").FORMER
    rows = [
        (f"`{kind}.{name}`", f"`{change.now}`", change.how, change.ends or "ended")
        for kind, changes in former.items()
        for name, change in changes.items()
    ]
    return "### Former names\n\n" + _table(
        ("former name", "use", "what else changes", "works until release"), rows
    )


def _about_functions() -> str:
    rows = [
        (f"`{path}{signature_of(each).partition(' -> ')[0]}`", first_sentence(each.__doc__))
        for path, each in functions().items()
        if not path.startswith("hook ")
    ]
    return "### Functions\n\n" + _table(("function", "what it does"), rows)


def call_sequence(kind: type) -> str:
    """Return the numbered calls in a class's docstring, as they stand there; "": it has none."""
    head = inspect.cleandoc(kind.__doc__ or "")
    found = re.search(r"^ +\d+\. (?:.+\n|\n(?= ))+", head, re.MULTILINE)
    return textwrap.dedent(found[0]).strip() if found else ""


def _said_before_calls(head: str) -> str:
    before = head.partition(" 0. ")[0] if " 0. " in head else head.partition(" 1. ")[0]
    return before.rstrip().rpartition("\n\n")[2].rstrip(" \n")


def _steps(calls: str, name: str) -> str:
    """Return the numbers of the calls that name a member."""
    steps = re.split(r"^(?= ?\d+\. )", calls, flags=re.MULTILINE)
    numbers = [
        step.strip().partition(".")[0] for step in steps if re.search(rf"`[\w.]*\b{name}\b", step)
    ]
    return ", ".join(numbers)


def _about_members(kind: type) -> str:
    calls, rows = call_sequence(kind), []
    for member in members(kind):
        if member.name != "__init__":
            role = "to override" if member.role == "abstract" else member.role
            if kind.__name__ in ("TrainStep", "MicroBatch", "Shards", "LazyTensor"):
                role = "to call" if member.kind.endswith("method") else "to read"
            elif not role:
                role = "to set or read" if member.kind in ("attribute", "field") else "may be"
            rows.append(
                (_shown(member), role, _steps(calls, member.name), member.returns, member.about)
            )
    return _table(("member", "overridden", "call", "is or returns", "what it is"), rows)


def _shown(member: Member) -> str:
    """Return a member with its parameters, without `self` and without what it returns."""
    call = re.search(rf"\b{member.name}(\(.*\))(?: -> .*)?$", member.text)
    if call is None:
        return f"`{member.name}`"
    parameters = call[1].replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "(")
    return f"`{member.name}{parameters}`"


def _about_specs(of_name: Mapping[str, tuple[str, type]]) -> str:
    rows = []
    for name in PUBLIC["stratagem.discovery"].split():
        if name not in of_name:
            continue
        _, kind = of_name[name]
        for member in members(kind):
            if member.kind == "field":
                _, _, default = member.text.partition(" = ")
                shown = f"`{default}`" if default and default != "..." else default
                rows.append(
                    (f"`{name}.{member.name}`", member.returns, shown or "required", member.about)
                )
    return "### Specs, and what they are made of\n\n" + _table(
        ("field", "type", "default", "what it is"), rows
    )


def _about_hooks() -> str:
    rows = []
    for path, hook in functions().items():
        if path.startswith("hook "):
            text = " ".join(inspect.cleandoc(hook.__doc__ or "").split())
            shown = f"{path.removeprefix('hook ')}{signature_of(hook)}"
            rows.append((f"`{shown.partition(' -> ')[0]}`", shown.partition(" -> ")[2], text))
    return "### Hooks\n\n" + _table(("hook", "returns", "when, and what it may do"), rows)


def _table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [headers, tuple("---" for _ in headers)]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(tuple(cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


BEGIN, END = "<!-- generated by packages/core/scripts/plugin_api.py -->", "<!-- end -->"


def with_tables(guide: str) -> str:
    """Return the guide with its generated part as the classes now are."""
    before, _, rest = guide.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


# ---------------------------------------------------------------- types in signatures


def unreachable_types() -> dict[str, list[str]]:
    """Return, by place, the types and aliases in signatures that authors cannot import."""
    names = public_names()
    known = {id(value) for value in names.values()}
    found: dict[str, list[str]] = {}
    for place, annotated in _annotated_objects():
        found_here = [
            f"{each.__module__}.{each.__qualname__}"
            for hint in typing.get_type_hints(annotated, localns=_names_of_checkers(names)).values()
            for each in _types_in(hint)
            if each.__module__.split(".")[0] == "stratagem" and id(each) not in known
        ]
        found_here += [
            f"{annotated.__module__}.{alias}" for alias in _aliases(annotated) if alias not in names
        ]
        if found_here:
            found[place] = found_here
    return found


def _names_of_checkers(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what modules import for type checkers only."""
    torch = importlib.import_module("torch")
    optimizer = torch.optim.Optimizer
    theirs = {"torch": torch, "Tensor": torch.Tensor, "Optimizer": optimizer, "Path": Path}
    return {**names, **theirs}


def _annotated_objects() -> Iterator[tuple[str, Any]]:
    yield from functions().items()
    seen = set()
    for path, kind in classes().items():
        if issubclass(kind, BaseException):
            continue
        yield path, kind
        for name in dir(kind):
            value = inspect.getattr_static(kind, name)
            function = getattr(value, "fget", getattr(value, "__func__", value))
            is_ours = (getattr(function, "__module__", None) or "").startswith("stratagem")
            is_public = not name.startswith("_") or name == "__init__"
            if isinstance(function, FunctionType) and is_ours and is_public:
                if function in seen:  # inherited
                    continue
                seen.add(function)
                yield f"{path}.{name}", inspect.unwrap(function)


def _aliases(annotated: Any) -> set[str]:
    """Return the names in annotations that stand for a type which core has put together."""
    texts = vars(annotated).get("__annotations__") or getattr(annotated, "__annotations__", {})
    words = {word for text in texts.values() for word in re.findall(r"\b[A-Z]\w+", str(text))}
    return words & _made_names(annotated.__module__)


@functools.cache
def _made_names(module: str) -> frozenset[str]:
    """Return the names that a module assigns at its top, or imports from another one of ours."""
    text = inspect.getsource(importlib.import_module(module))
    made = re.findall(r"^(\w+)(?:: \w+)? = (?!TypeVar)", text, re.MULTILINE)
    of_ours = re.findall(r"^ *from stratagem\S* import (\([^)]*\)|.*)$", text, re.MULTILINE)
    return frozenset(made) | {word for line in of_ours for word in re.findall(r"\w+", line)}


def _types_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for argument in typing.get_args(hint):
        if isinstance(argument, list):
            for each in argument:
                yield from _types_in(each)
        elif typing.get_origin(hint) is not typing.Literal:
            yield from _types_in(argument)


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    GUIDE.write_text(with_tables(GUIDE.read_text()))
