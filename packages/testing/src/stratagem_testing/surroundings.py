"""What a process has besides its models, and what of it has changed: variables, threads, code."""

from __future__ import annotations

import builtins
import contextlib
import gc
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stratagem_testing.processes import is_of_a_launch

PATCHABLE: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.Linear,
    torch.nn.functional,
    torch.nn.init,
    torch.nn.utils,
    torch.autograd,
    torch.optim.Optimizer,
    torch.optim.SGD,
    torch.optim.Adam,
    torch.distributed,
    torch.utils.data.DataLoader,
    builtins,
    os,
    threading.Thread,
)
"""Where a function that is replaced would change what everybody else's code does."""

_OF_TORCH = ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_")
"""What torch reads: when it computes, allocates, makes a group, and where it compiles to."""
_TORCH = str(Path(torch.__file__).parent)
_OURS = "stratagem-"
"""What names of the launch's own threads begin with."""


@dataclass(frozen=True)
class Surroundings:
    """The resources of a process at a moment.

    Attributes:
        variables: environment variables, except launch variables.
        threads: threads of Python, by name and identity.
        functions: functions of torch and the standard library, by their place.
        modes: torch's settings of the process, by their names.
        groups: the number of torch.distributed's process groups.
        children: names of processes of multiprocessing.
    """

    variables: Mapping[str, str]
    threads: Mapping[int, str]
    functions: Mapping[str, Any]
    modes: Mapping[str, Any]
    groups: int
    children: tuple[str, ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Look around."""
        gc.collect()
        return cls(
            variables={k: v for k, v in os.environ.items() if not _is_set_by_others(k)},
            threads={
                thread.ident or 0: f"{thread.name} ({type(thread).__name__})"
                for thread in threading.enumerate()
                # Python's name for a thread of C++ that has called Python once.
                if not isinstance(thread, threading._DummyThread)
            },
            functions={
                f"{_name(owner)}.{name}": value
                for owner in PATCHABLE
                for name, value in vars(owner).items()
                if callable(value) and not inspect.isclass(value)
            },
            modes={
                "the default dtype": torch.get_default_dtype(),
                "the default device": torch.get_default_device(),
                "gradients enabled": torch.is_grad_enabled(),
                "inference mode": torch.is_inference_mode_enabled(),
                "anomaly detection": torch.is_anomaly_enabled(),
                "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
                "the precision of float32 products": torch.get_float32_matmul_precision(),
                **{
                    f"{backend.__name__}.{name}": getattr(backend, name, None)
                    for backend in (torch.backends.cudnn, torch.backends.mkldnn)
                    for name in ("enabled", "benchmark", "deterministic")
                },
                "the working folder": str(Path.cwd()),
                "sys.excepthook": sys.excepthook,
                "logging of the root logger": (logging.root.level, len(logging.root.handlers)),
                "what logging leaves out": logging.root.manager.disable,
                **{
                    f"the handler of {one.name}": signal.getsignal(one)
                    for one in sorted(signal.valid_signals())
                    if isinstance(one, signal.Signals)
                },
            },
            groups=_groups(),
            children=tuple(child.name for child in multiprocessing.active_children()),
        )

    def changes(self, *, groups: bool = True) -> list[str]:
        """Return the present differences, in words.

        Args:
            groups: look at process groups, too.
        """
        now = Surroundings.now()
        changed = [
            f"the environment variable {name} ({_was(self.variables.get(name))} "
            f"{_was(now.variables.get(name), is_now=True)})"
            for name in sorted(self.variables.keys() | now.variables.keys())
            if self.variables.get(name) != now.variables.get(name)
        ]
        changed += [
            f"the thread {name}"
            for key, name in now.threads.items()
            if key not in self.threads and not name.startswith(_OURS)
        ]
        changed += [
            f"{place} was replaced by {now.functions.get(place)!r}"
            for place, function in self.functions.items()
            if now.functions.get(place) is not function and not _is_of_torch(now, place)
        ]
        changed += [
            f"{what}: {value} before, now {now.modes[what]}"
            for what, value in self.modes.items()
            if now.modes[what] != value and not _is_of_a_library(now.modes[what])
        ]
        if groups and now.groups > self.groups:
            changed.append(f"{now.groups - self.groups} process group(s) of torch.distributed")
        changed += [f"the process {c}" for c in now.children if c not in self.children]
        return changed


def open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    gc.collect()
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the file went with its folder
            found.append(str(each.readlink()))
    return [path for path in found if path.startswith("/") and not path.startswith("/proc")]


def _is_set_by_others(variable: str) -> bool:
    return is_of_a_launch(variable) or variable.startswith(_OF_TORCH)


def _is_of_torch(now: Surroundings, place: str) -> bool:
    """Whether what stands there is torch's own code: it wraps some functions when first used."""
    code = getattr(now.functions.get(place), "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)


def _is_of_a_library(handler: Any) -> bool:
    """Whether it is a function of torch's or of the launch's, as of its watch over signals."""
    return str(getattr(handler, "__module__", "")).startswith(
        ("torch.", "stratagem.launch.", "stratagem_torch.launch.")
    )


def _name(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}" if module else str(owner.__name__)


def _was(value: str | None, *, is_now: bool = False) -> str:
    said = "not set" if value is None else repr(value)
    return f"now {said}" if is_now else f"{said} before,"


def _groups() -> int:
    if not dist.is_available() or not dist.is_initialized():
        return 0
    world: Any = dist.distributed_c10d._world
    return len(world.pg_map)
