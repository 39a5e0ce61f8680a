"""The pytest plugin of `peer_tests.py`'s processes: which cases run, and what came of them."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CASES = 4
LABEL = os.environ.get("PEER_TESTS_LABEL", "peer")
_running = False

if LABEL != "peer":
    importlib.import_module("stratagem_lightning")


class MissingNameError(AttributeError):
    """A test used a name of the library that is missing."""


class _MissingType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance)


class Missing:
    """Stands for a missing name: harmless while files are read, an error once a test uses it."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _use(self) -> Missing:
        if _running:
            raise MissingNameError(f"missing name {self._name}")
        return self

    def __call__(self, *args: object, **kwargs: object) -> Missing:
        return self._use()

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._use()

    def __instancecheck__(self, instance: object) -> bool:
        raise MissingNameError(f"missing name {self._name}")

    __subclasscheck__ = __instancecheck__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        self._use()
        return iter(())  # the cases of a parametrization that names it

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        missing = self._name

        class MissingBase:
            def __init__(self, *args: object, **kwargs: object) -> None:
                raise MissingNameError(f"missing name {missing}")

        return (MissingBase,)


def load(module: str, name: str, aliased: bool = False) -> Any:
    """Return `name` of `module` (the module itself if empty), or what stands for a missing one."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return Missing(f"{module}.{name}")
    if not name:
        return found if aliased else sys.modules["lightning"]
    try:
        return getattr(found, name)
    except AttributeError:
        pass
    try:
        return importlib.import_module(f"{module}.{name}")
    except ImportError:
        return Missing(f"{module}.{name}")


def RunIf(**asked: Any) -> pytest.MarkDecorator:
    """Skips what asks for hardware, or for a library that is not installed."""
    import torch
    from packaging.version import Version

    version = Version(Version(torch.__version__).base_version)
    hardware = {"min_cuda_gpus", "bf16_cuda", "tpu", "mps", "standalone", "deepspeed"}
    reasons = [name for name, value in asked.items() if name in hardware and value]
    reasons += [
        name
        for name in ("sklearn", "onnx", "onnxscript", "psutil", "rich", "tensorrt")
        if asked.get(name) and importlib.util.find_spec(name) is None
    ]
    if asked.get("min_torch") and version < Version(asked["min_torch"]):
        reasons.append("min_torch")
    if asked.get("max_torch") and version >= Version(asked["max_torch"]):
        reasons.append("max_torch")
    return pytest.mark.skipif(bool(reasons), reason=", ".join(reasons))


def _skipped(item: pytest.Item) -> bool:
    return any(
        mark.name == "skip"
        or (mark.name == "skipif" and mark.args and mark.args[0] is True)
        or (mark.name == "skipif" and mark.kwargs.get("condition") is True)
        for mark in item.iter_markers()
    )


def _spread(items: list[Any], number: int) -> list[Any]:
    if len(items) <= number:
        return items
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    request = json.loads(Path(os.environ["PEER_TESTS_REQUEST"]).read_text(encoding="utf-8"))
    by_function: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        by_function[re.sub(r"\[.*", "", item.nodeid, flags=re.DOTALL).split("::", 1)[1]].append(
            item
        )
    kept: list[pytest.Item] = []
    if "functions" in request:
        for function in request["functions"]:
            cases = [
                (i, item) for i, item in enumerate(by_function[function]) if not _skipped(item)
            ]
            for index, item in _spread(cases, CASES):
                item.stash[_KEY] = {"case": item.nodeid, "function": function, "index": index}
                kept.append(item)
    else:
        for case, (function, index) in request["cases"].items():
            same = [item for item in by_function[function] if item.nodeid == case]
            same = same or by_function[function][index : index + 1]
            if same and _KEY not in same[0].stash:
                same[0].stash[_KEY] = {"case": case, "function": function, "index": index}
                kept.append(same[0])
    settled = set(request["settled"])
    items[:] = [item for item in kept if item.stash[_KEY]["case"] not in settled]


_KEY = pytest.StashKey[dict[str, Any]]()


def _write(record: dict[str, Any]) -> None:
    with Path(os.environ["PEER_TESTS_RESULTS"]).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def first_cause(error: BaseException) -> tuple[str, str]:
    """(kind, what is missing or differs, in a line)."""
    text = str(error)
    line = " ".join(text.split())[:300]
    named = f"{type(error).__name__}: {line}"
    private = re.search(r"(?:attribute|name) '?(?:\w+\.)*(_[a-z]\w*)'?", text)
    if isinstance(error, MissingNameError):
        return ("private" if private else "name"), line
    if isinstance(error, TypeError) and re.search(
        r"unexpected keyword|positional argument|required argument", text
    ):
        return "argument", line
    if isinstance(error, ImportError):
        return "name", line
    if isinstance(error, AttributeError) or "has no attribute" in text:
        return ("private" if private else "name"), line
    if "Timeout" in type(error).__name__ or "Timeout >" in text:
        return "time", line
    if "DID NOT RAISE" in text:
        return "accepted", line
    if "DID NOT WARN" in text:
        return "no warning", line
    if "Regex pattern did not match" in text or "pattern did not match" in text:
        return "words", line
    if type(error).__module__.startswith("stratagem"):
        return "refused", named
    return "behaviour", named


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    global _running
    _running = True
    record: dict[str, Any] = item.stash[_KEY]
    _write({**record, "outcome": "started", "begun": time.time()})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    record: dict[str, Any] = item.stash[_KEY]
    record.setdefault("begun", time.time())
    if report.failed and "cause" not in record:
        cause, message = ("xpass", "") if call.excinfo is None else first_cause(call.excinfo.value)
        failure = {"outcome": "failed", "cause": cause, "message": message, "place": _place(call)}
        record.update(failure)
    elif report.skipped:
        record.setdefault("outcome", "skipped")
        record.setdefault("cause", "skipped")
        record.setdefault("message", str(report.longrepr)[-200:])
    if report.when == "teardown":
        record.setdefault("outcome", "passed")
        _write(record)


def _place(call: pytest.CallInfo[None]) -> str:
    assert call.excinfo is not None
    entries = [e for e in call.excinfo.traceback if "site-packages" not in str(e.path)]
    return " < ".join(
        f"{e.path.name if hasattr(e.path, 'name') else e.path}:{e.lineno + 1}"
        for e in reversed(entries[-4:])
    )


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Put environment, folder, signals, process group and determinism back after a test."""
    import torch

    environment, folder = dict(os.environ), Path.cwd()
    signals = {
        number: signal.getsignal(number)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    }
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, handler in signals.items():
        if handler is not None and number != signal.SIGALRM:
            signal.signal(number, handler)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    for module in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        rank_zero_only = load(module, "rank_zero_only")
        if hasattr(rank_zero_only, "rank"):
            rank_zero_only.rank = 0


@pytest.fixture
def datadir() -> Path:
    return Path("Datasets")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The library's loggers do not propagate: here they do."""
    names = [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith(("lightning", "stratagem"))
    ]
    before = {name: logging.getLogger(name).propagate for name in names}
    for name in names:
        logging.getLogger(name).propagate = True
    yield caplog
    for name, propagate in before.items():
        logging.getLogger(name).propagate = propagate


@pytest.fixture
def tmpdir_server(tmp_path: Path) -> Iterator[Any]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address
        server.shutdown()


@pytest.fixture
def single_process_pg() -> Iterator[None]:
    import torch

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()
