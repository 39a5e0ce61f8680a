"""Imports DeepSpeed when it is first used, and undoes its side effects on the process.

Importing it sets an environment variable and adds a logger that writes to stdout; making an engine
reads ranks from the environment, builds a library of its own for communication on the CPU, and
prints. Each of these is restored or prevented here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stratagem.discovery import version_of
from stratagem.errors import ConfigurationError

OLDEST = (0, 19, 8)
TOO_NEW = (0, 20)
"""The range of versions that pyproject.toml requires; a test compares the two.

Earlier ones do not wait for all of stage 3's all-gathers over gloo, so that about one run in twenty
on the CPU computes with weights that have not arrived.
"""

_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_ACCELERATOR = "DS_ACCELERATOR"
_QUIET = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


def installed_version() -> str:
    """Return the version of DeepSpeed, without importing it.

    Raises:
        ConfigurationError: DeepSpeed is not installed, or has an untested version.
    """
    wanted = f"deepspeed>={_dotted(OLDEST)},<{_dotted(TOO_NEW)}"
    version = version_of("deepspeed")
    if version is None:
        raise ConfigurationError(
            f"DeepSpeed is not installed, which this strategy needs: pip install '{wanted}'"
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        raise ConfigurationError(
            f"DeepSpeed {version} is installed; this strategy was made for {wanted}: "
            f"pip install '{wanted}'"
        )
    return version


def import_deepspeed(device_type: str) -> Any:
    """Return the module `deepspeed`, set to a type of device.

    Args:
        device_type: "cpu", "cuda", ...

    Raises:
        ConfigurationError: it was imported for another type of device before.
    """
    first = "deepspeed" not in sys.modules
    # Else it probes for GPU drivers, and takes a CPU with Intel's extension for another device.
    chosen = {_ACCELERATOR: device_type} if device_type == "cpu" else {}
    with variables(chosen), warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        nvml = os.environ.get(_NVML)
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import numa, nvtx

        kind = get_accelerator().device_name()
        if nvml is None:
            os.environ.pop(_NVML, None)
    if kind != device_type:
        raise ConfigurationError(
            f"DeepSpeed was imported for {kind!r} in this process, and the accelerator's devices "
            f"are {device_type!r}: do not import deepspeed before the strategy does, or set "
            f"{_ACCELERATOR}={device_type} before"
        )
    if first:
        _quieten()
        # Its own communication through shared memory takes two minutes to build and is not used
        # for training.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # An engine on the CPU asks a dozen times, and starts a program each time.
        numa.get_numa_cores = functools.cache(numa.get_numa_cores)
        # Ranges for NVIDIA's profiler, which it opens around each of its functions.
        nvtx.enable_nvtx = device_type != "cpu"
        _import_muon()
    return deepspeed


def _import_muon() -> None:
    """Import DeepSpeed's Muon, which each engine does, without `torch.compile`.

    The decorator would import all of torch's compiler, which takes a second. The optimizer's
    functions are compiled when they are first called.
    """
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(functools.partial(compile_now, function))
        return functools.wraps(function)(lambda *given, **named: compiled()(*given, **named))

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compile_now


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a block, and restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def quiet_rank(rank: int, local_rank: int, world_size: int) -> Iterator[None]:
    """Set the variables that DeepSpeed reads its rank from, and send its output to stderr.

    It joins the process group that exists; address and port only have to be set.
    """
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
    }
    with variables(found), warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        # It imports parts of torch that call other parts deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _quieten() -> None:
    """Let its logger propagate warnings and worse to the root logger, as others do."""
    import logging

    from deepspeed.utils import logger

    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = True
    # Deprecated functions of torch that it calls, which users cannot change.
    warnings.filterwarnings("ignore", message=_QUIET, category=FutureWarning)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def is_simulated() -> bool:
    """Whether this process plays one rank of a group that does not exist, on fake tensors."""
    import torch.distributed as dist  # here, since `stratagem doctor` does without torch

    return dist.is_initialized() and dist.get_backend() == "fake"


def release_groups() -> None:
    """Let DeepSpeed forget its groups, of a process group that ends before this process."""
    from deepspeed.utils import groups

    groups._release_process_group_references()


@contextlib.contextmanager
def simulated_kernels() -> Iterator[None]:
    """Let optimizers get kernels that do nothing: fake tensors have no memory to read.

    The processor is not asked for its name either, which takes a second each time.
    """
    import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder

    load, processor = CPUAdamBuilder.load, cpuinfo.get_cpu_info
    CPUAdamBuilder.load, cpuinfo.get_cpu_info = _NoKernel, dict
    try:
        yield
    finally:
        CPUAdamBuilder.load, cpuinfo.get_cpu_info = load, processor


@contextlib.contextmanager
def simulated_sharding(*, from_host: bool) -> Iterator[None]:
    """Make stage 3 find its parameters, and compare numbers between ranks, in less time.

    Tensors and communication stay the same. Both operations take nearly half of the time of a
    simulated step at stage 3.

    Args:
        from_host: a single rank copies each parameter from the host to its device at its use. A
            simulation is on the host, where DeepSpeed would not copy.
    """
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from deepspeed.runtime.zero import (
        partition_parameters as gathering,
        partitioned_param_coordinator as coordinator,
        utils,
    )

    all_parameters = coordinator.iter_params

    def parameters(module: Any, recurse: bool = False) -> Any:
        if recurse:
            return all_parameters(module, recurse)
        own = [p for p in module._parameters.values() if p is not None]
        return dict.fromkeys((*own, *module._external_params.values()))

    def numbers_of_rank_0(numbers: list[int]) -> list[int]:
        dist.broadcast(torch.empty(len(numbers), dtype=torch.long), src=0)
        return numbers

    def copying(handle: Any) -> Any:
        make = handle.__init__

        def make_and_copy(self: Any, given: Any) -> None:
            make(self, given)
            for parameter in given if isinstance(given, list) else [given]:
                parameter.data = parameter.data.clone()

        return patch.object(handle, "__init__", make_and_copy if from_host else make)

    with (
        copying(gathering.NoGatherHandle),
        copying(gathering.NoGatherCoalescedHandle),
        patch.object(coordinator, "iter_params", parameters),
        patch.object(utils, "get_lst_from_rank0", numbers_of_rank_0),
        # Each look at a module asks for it, and to miss an attribute takes a module long.
        patch.object(torch.nn.Module, "_z3_leaf", False, create=True),
    ):
        yield


class _NoKernel:
    """Stands in for a compiled extension, and for what its functions return."""

    def __init__(self, *arguments: Any) -> None: ...

    def __getattr__(self, name: str) -> type[_NoKernel]:
        return _NoKernel
