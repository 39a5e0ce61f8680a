"""Chooses tests of public behaviour from a checkout of PyTorch Lightning by a mechanical rule.

A test is left out where it, its decorators, or what it uses of the suite's helpers and fixtures

- names something private of the library: an attribute, import or string `_x` of its sources,
- patches the library, or patches by `monkeypatch` anything but environment and folder,
- asks for hardware or for a process of its own (`RunIf`).
"""

from __future__ import annotations

import ast
import collections
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

SUITES = ("tests_pytorch", "tests_fabric")
HARDWARE = {
    *("min_cuda_gpus", "bf16_cuda", "tpu", "mps", "standalone", "deepspeed", "horovod"),
    *("hpu", "ipu"),
}
DEVICE_MODULES = ("torch.cuda", "torch_xla", "deepspeed")
HARMLESS_PATCHES = {"setenv", "delenv", "chdir", "context", "undo", "syspath_prepend"}
LOAD = "__import__('peer_plugin').load"
PYTEST_INI = """[pytest]
xfail_strict = true
filterwarnings =
    error::FutureWarning
    ignore::FutureWarning:onnxscript
    ignore:You are using `torch.load` with `weights_only=False`.*:FutureWarning
    ignore::FutureWarning:torch.distributed.algorithms.ddp_comm_hooks
    ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated.*:FutureWarning
"""
RUN_IF = (
    "from peer_plugin import RunIf\n\n\ndef _xfail_gloo_windows(function):\n    return function\n"
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(sources: Path) -> set[str]:
    """Every private name that the library's sources define."""
    names: set[str] = set()
    for path in sources.rglob("*.py"):
        names.update(part for part in path.with_suffix("").parts if is_private(part))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if is_private(name)}


class TestFile:
    """One file of the suite: its definitions, and what it imports from library and suite."""

    def __init__(self, path: Path, module: str) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.defined: dict[str, ast.stmt] = {}
        self.library: dict[str, str] = {}  # local name -> what it is in the library
        self.helpers: dict[
            str, tuple[str, str]
        ] = {}  # local name -> (module of the suite, name there)
        for made in self.tree.body:
            if isinstance(made, ast.FunctionDef | ast.ClassDef):
                self.defined[made.name] = made
            elif isinstance(made, ast.Assign):
                self.defined.update({t.id: made for t in made.targets if isinstance(t, ast.Name)})
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    local = alias.asname or alias.name
                    if node.module.split(".")[0] == "lightning":
                        self.library[local] = f"{node.module}.{alias.name}"
                    elif node.module.split(".")[0] in SUITES:
                        self.helpers[local] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "lightning":
                        self.library[alias.asname or "lightning"] = alias.name


class Rule:
    """Says of each test why it is left out."""

    def __init__(self, checkout: Path) -> None:
        self.private = private_names(checkout / "src" / "lightning")
        self.files: dict[str, TestFile] = {}
        self._reasons: dict[tuple[str, str], str | None] = {}
        for suite in SUITES:
            for path in sorted((checkout / "tests" / suite).rglob("*.py")):
                parts = path.relative_to(checkout / "tests").with_suffix("").parts
                self.files[".".join(parts)] = TestFile(path, ".".join(parts))

    def tests(self) -> Iterator[tuple[str, str, str | None]]:
        """(module, qualified name, reason to leave it out) of each test function."""
        for module, file in self.files.items():
            if not module.rsplit(".", 1)[-1].startswith("test_"):
                continue
            for node in file.tree.body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield module, node.name, self._of(module, node)
                elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                    for inner in node.body:
                        if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test_"):
                            yield module, f"{node.name}::{inner.name}", self._of(module, inner)

    def _of(self, module: str, node: ast.AST) -> str | None:
        return self._own(self.files[module], node) or self._used(module, node)

    def _own(self, file: TestFile, root: ast.AST) -> str | None:
        for node in ast.walk(root):
            reason = self._of_node(file, node)
            if reason:
                return reason
        return None

    def _of_node(self, file: TestFile, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and node.attr in self.private:
            return f"private: {node.attr}"
        if isinstance(node, ast.Name) and is_private(
            file.library.get(node.id, "").rsplit(".", 1)[-1]
        ):
            return f"private: {node.id}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            return next((f"private: {name}" for name in names if is_private(name)), None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return f"private: {node.value}" if node.value in self.private else None
        if isinstance(node, ast.Call):
            return self._of_call(file, node)
        return None

    def _of_call(self, file: TestFile, call: ast.Call) -> str | None:
        name = ast.unparse(call.func)
        if name == "RunIf":
            asked = HARDWARE & {k.arg for k in call.keywords if k.arg and not _is_false(k.value)}
            return f"hardware: {sorted(asked)[0]}" if asked else None
        if name.startswith("monkeypatch."):
            return None if name.split(".")[1] in HARMLESS_PATCHES else "patches: monkeypatch"
        target = call.args[0] if call.args else None
        if re.fullmatch(r"(mock\.|unittest\.mock\.)?patch", name) and target is not None:
            if not isinstance(target, ast.Constant):
                return "patches: a name made at run time"
            patched = str(target.value)
            if patched.startswith(("lightning", *DEVICE_MODULES)):
                return f"patches: {patched}"
        if (
            re.fullmatch(r"(mock\.|unittest\.mock\.)?patch\.(object|multiple)", name)
            and target is not None
        ):
            text = ast.unparse(target)
            root = text.split(".")[0].split("(")[0]
            if root in file.library or root in ("trainer", "fabric", "lightning"):
                return f"patches: {text}"
        return None

    def _used(self, module: str, root: ast.AST) -> str | None:
        """Why what `root` uses of the suite's own definitions and fixtures is left out."""
        file = self.files[module]
        names = {node.id for node in ast.walk(root) if isinstance(node, ast.Name)}
        if isinstance(root, ast.FunctionDef):
            names |= {argument.arg for argument in root.args.args}
        for decorator in getattr(root, "decorator_list", []):
            if "usefixtures" in ast.unparse(decorator):
                names |= {str(n.value) for n in ast.walk(decorator) if isinstance(n, ast.Constant)}
        for name in sorted(names):
            for where, there in self._places(module, file, name):
                reason = self._definition(where, there)
                if reason:
                    return reason
        return None

    def _places(self, module: str, file: TestFile, name: str) -> Iterable[tuple[str, str]]:
        if name in file.helpers:
            return [file.helpers[name]]
        if name in file.defined:
            return [(module, name)]
        parts = module.split(".")
        folders = [".".join([*parts[:i], "conftest"]) for i in range(len(parts) - 1, 0, -1)]
        return [(f, name) for f in folders if f in self.files and name in self.files[f].defined][:1]

    def _definition(self, module: str, name: str) -> str | None:
        key = (module, name)
        if key not in self._reasons:
            self._reasons[key] = None  # definitions that use one another
            node = self.files[module].defined.get(name) if module in self.files else None
            if node is not None and "runif" not in module:
                self._reasons[key] = self._of(module, node)
        return self._reasons[key]


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def rewritten(source: str) -> str:
    """Return `source` so that a missing name fails the tests that use it, not the whole file."""
    lines = source.splitlines()
    for node in _top_level_imports(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or (
                module.split(".")[0] != "lightning" and not re.fullmatch(r"\w+\.conftest", module)
            ):
                continue
            loads = [
                f"{a.asname or a.name} = {LOAD}({node.module!r}, {a.name!r})" for a in node.names
            ]
        else:
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "lightning"]
            if not ours or len(ours) != len(node.names):
                continue
            loads = [
                f"{a.asname or 'lightning'} = {LOAD}({a.name!r}, '', {bool(a.asname)})"
                for a in ours
            ]
        indent = lines[node.lineno - 1][: node.col_offset]
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [
            indent + "; ".join(loads),
            *[""] * (node.end_lineno - node.lineno),
        ]
    return "\n".join(lines) + "\n"


def _top_level_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]
    return sorted(found, key=lambda node: node.lineno)


def select(checkout: Path, work: Path) -> None:
    """Write the chosen tests to `work/selected.json`, a copy of the suite to `work/tests`."""
    chosen: dict[str, list[str]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    for module, name, reason in Rule(checkout).tests():
        reasons[(reason or "chosen").split(":")[0]] += 1
        if reason is None:
            chosen.setdefault(module.replace(".", "/") + ".py", []).append(name)
    copy = work / "tests"
    shutil.rmtree(copy, ignore_errors=True)
    for suite in SUITES:
        shutil.copytree(checkout / "tests" / suite, copy / suite)
        (
            copy / suite / "conftest.py"
        ).unlink()  # its fixtures name private parts; peer_plugin.py has its own
        for path in (copy / suite).rglob("*.py"):
            path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
        (copy / suite / "helpers" / "runif.py").write_text(RUN_IF, encoding="utf-8")
    (copy / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    (work / "selected.json").write_text(json.dumps(chosen, indent=1), encoding="utf-8")
    print(", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))
