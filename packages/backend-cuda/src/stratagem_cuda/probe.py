"""Which GPUs of NVIDIA or AMD this process can use, or why none: by NVML or the kernel.

torch is not imported, since a probe runs wherever a request is resolved: whether it was built for
CUDA or for ROCm is read from the text of its `version.py`. What CUDA_VISIBLE_DEVICES means follows
the CUDA C++ Programming Guide, "CUDA Environment Variables", and for AMD's GPUs ROCm's "GPU
isolation techniques". torch calls both kinds "cuda".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from stratagem.discovery import Availability, TorchBuild, torch_build
from stratagem_cuda.gpu import GPU, visible_gpus
from stratagem_cuda.rocm import NODES, find_gpus, visible_by

_BUILDS = "https://pytorch.org/get-started/locally"
_HIDE_ALL = ("", "-1", "NoDevFiles")


@dataclass(frozen=True)
class Driver:
    """NVML's answers.

    Attributes:
        version: of the driver, such as "580.65".
        cuda: the newest version of CUDA that it serves, as (major, minor).
        gpus: all of them, in NVML's order; the instances of one stand in its place.
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[GPU, ...]


def cuda_availability() -> Availability:
    """Return the GPUs of NVIDIA or AMD that this process can use, or the reason why not."""
    return availability(os.environ, torch_build, driver)


def availability(
    environ: Mapping[str, str],
    build: Callable[[], TorchBuild | None],
    ask_driver: Callable[[], Driver | str],
    ask_kernel: Callable[[], list[GPU]] = find_gpus,
) -> Availability:
    """Return the availability that follows from these facts; cheap facts are read first.

    Args:
        environ: environment variables.
        build: returns the build of torch; None if torch is not installed.
        ask_driver: returns the answer of NVML, or the reason for a missing answer.
        ask_kernel: returns the AMD GPUs.

    Example:
        >>> from stratagem.discovery import TorchBuild
        >>> from stratagem_cuda.gpu import GPU
        >>> from stratagem_cuda.probe import Driver, availability
        >>> two = tuple(GPU(i, f"GPU-{i}", "NVIDIA H100") for i in range(2))
        >>> facts = TorchBuild("2.13.0", "13.0"), Driver("580.65", (13, 0), two)
        >>> found = availability({"CUDA_VISIBLE_DEVICES": "1"}, *(lambda f=f: f for f in facts))
        >>> found.count, found.reason
        (1, '1 of 2 GPUs by CUDA_VISIBLE_DEVICES: NVIDIA H100')
    """
    torch = build()
    if torch is not None and torch.hip is not None:
        return _with_rocm(environ, torch, ask_driver, ask_kernel())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _HIDE_ALL:
        return Availability(0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")
    if torch is None:
        return Availability(0, "torch is not installed")
    if torch.cuda is None:
        if sys.platform == "darwin":
            return Availability(
                0, "there is no CUDA on macOS: use accelerator='mps' on Apple silicon, or 'cpu'"
            )
        other = _names(ask_kernel())
        lacks = f"ROCm, and this machine has {other}" if other else "CUDA and ROCm"
        return Availability(
            0,
            f"torch {torch.version} was built without {lacks}: install the build for "
            f"{'them' if other else 'your GPU'} ({_BUILDS})",
        )
    found = ask_driver()
    if isinstance(found, str):
        if other := _names(ask_kernel()):
            return Availability(
                0,
                f"torch {torch.version} was built for CUDA {torch.cuda}, and this machine has "
                f"{other}: install a build for ROCm ({_BUILDS})",
            )
        return Availability(0, found)
    # Within a major version of CUDA newer libraries run on older drivers ("minor version
    # compatibility" in the CUDA Compatibility guide).
    if found.cuda[0] < int(torch.cuda.partition(".")[0]):
        serves = ".".join(map(str, found.cuda))
        return Availability(
            0,
            f"the driver {found.version} serves CUDA up to {serves}, and torch {torch.version} was "
            f"built for {torch.cuda}: update the driver, or install a build of torch for "
            f"CUDA {found.cuda[0]}",
        )
    return _of(
        found.gpus,
        visible_gpus(found.gpus, visible),
        f"the driver {found.version}",
        "CUDA_VISIBLE_DEVICES" if visible is not None else "",
        visible,
    )


def _with_rocm(
    environ: Mapping[str, str],
    torch: TorchBuild,
    ask_driver: Callable[[], Driver | str],
    gpus: list[GPU],
) -> Availability:
    first, second, name = visible_by(environ)
    for variable, value in (("ROCR_VISIBLE_DEVICES", first), (name, second)):
        if value is not None and value.strip() in _HIDE_ALL:
            return Availability(0, f"{variable}={value!r} hides every GPU")
    if not gpus:
        nvidia = ask_driver()
        if not isinstance(nvidia, str) and nvidia.gpus:
            return Availability(
                0,
                f"torch {torch.version} was built for ROCm {torch.hip}, and this machine has "
                f"{_names(nvidia.gpus)}: install a build for CUDA ({_BUILDS})",
            )
        return Availability(
            0, f"there is no AMD GPU with a driver (amdgpu lists none in {NODES}, with simd_count)"
        )
    left = visible_gpus(gpus, first)
    # HIP counts the GPUs that are left from 0 on.
    numbered = [replace(gpu, index=index) for index, gpu in enumerate(left)]
    seen = visible_gpus(numbered, second)
    by = " and ".join(
        variable
        for variable, value in (("ROCR_VISIBLE_DEVICES", first), (name, second))
        if value is not None
    )
    return _of(gpus, seen, "the driver amdgpu", by, second if second is not None else first)


def _names(gpus: Sequence[GPU]) -> str:
    """Return the names of GPUs, each once; "" without any."""
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus))


def _of(
    gpus: Sequence[GPU], seen: list[GPU], driver: str, variables: str, visible: str | None
) -> Availability:
    """Return the GPUs that a process sees, or the reason why it sees no GPU.

    Args:
        gpus: all GPUs of the machine.
        seen: the GPUs that the process sees, in its order.
        driver: the name of their driver in texts.
        variables: the variables that select GPUs; "" if no variable is set.
        visible: the value of the last variable.
    """
    usable = [gpu for gpu in seen if not gpu.problem]
    if not usable:
        return Availability(0, _why_none(gpus, seen, driver, variables, visible))
    # A process counts the ones that it sees from 0 on, in use or not.
    count = len(seen)
    which = f"{count} of {len(gpus)} GPUs by {variables}" if variables else f"{count} GPU(s)"
    problems = tuple((i, gpu.problem) for i, gpu in enumerate(seen) if gpu.problem)
    said = "".join(f"; device {index} {problem}" for index, problem in problems)
    memory = min((gpu.memory for gpu in usable if gpu.memory is not None), default=None)
    return Availability(count, f"{which}: {_names(usable)}{said}", problems=problems, memory=memory)


def _why_none(
    gpus: Sequence[GPU], seen: list[GPU], driver: str, variables: str, visible: str | None
) -> str:
    if not gpus:
        return f"{driver} lists no GPU"
    if not seen:
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
        return f"{variables}={visible!r} names no GPU that is here: {known}"
    return "; ".join(f"GPU {gpu.index} ({gpu.name}) {gpu.problem}" for gpu in seen)


# -- queries of the machine

LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = f"there is no NVIDIA driver ({LIBRARY} was not found)"


def driver_is_missing() -> bool:
    """Whether Linux's loader finds no driver: a tenth of the time that `import pynvml` takes.

    pip gives every Linux machine a torch for CUDA, so that most without a GPU come here.
    """
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return True
    return False


def driver() -> Driver | str:
    """Return NVML's answers about this machine, or the reason for having no answer."""
    if driver_is_missing():
        return NO_DRIVER
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return NO_DRIVER
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer: {error}"
    try:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Driver(
            version=str(nvml.nvmlSystemGetDriverVersion()),
            cuda=(number // 1000, number % 1000 // 10),
            gpus=tuple(_gpus(nvml)),
        )
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer: {error}"
    finally:
        nvml.nvmlShutdown()


def _gpus(nvml: Any) -> Iterator[GPU]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            # NVML lists the GPU and cannot open it: it has fallen off the bus, or belongs to
            # another user.
            yield GPU(index, "", "a GPU", f"cannot be used: {error}")
            continue
        instances = list(_instances(nvml, handle))
        for instance, memory in instances:
            yield GPU(index, instance, f"{name} (MIG)", memory=memory)
        if not instances:
            yield GPU(index, uuid, name, _problem(nvml, handle), _memory(nvml, handle))


def _memory(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None  # the GPU can be used all the same


def _instances(nvml: Any, handle: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the UUIDs and the memory of the instances that a GPU is divided into."""
    with _unsupported_is_nothing(nvml):
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
        if mode != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with _unsupported_is_nothing(nvml):
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                yield nvml.nvmlDeviceGetUUID(instance), _memory(nvml, instance)


def _problem(nvml: Any, handle: Any) -> str:
    """Return why a GPU lets no process of ours in, or ""."""
    with _unsupported_is_nothing(nvml):
        mode = nvml.nvmlDeviceGetComputeMode(handle)
        if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
            return "lets no process compute (compute mode PROHIBITED; nvidia-smi -c 0 allows it)"
        if mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
            running = {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            if others := running - {os.getpid()}:
                who = ", ".join(map(str, sorted(others)))
                return f"is in exclusive use by the process {who} (compute mode EXCLUSIVE_PROCESS)"
    return ""


@contextmanager
def _unsupported_is_nothing(nvml: Any) -> Iterator[None]:
    """Pass over what a GPU or its driver does not know."""
    try:
        yield
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
        pass
