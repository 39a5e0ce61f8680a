"""Which NVIDIA GPUs this process can use, or why none: by NVML, without torch.

torch is not imported, since a probe runs wherever a request is resolved: which CUDA it was built
for is read from the text of its `version.py`. What CUDA_VISIBLE_DEVICES means follows the CUDA C++
Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stratagem.discovery import Availability, TorchBuild, torch_build


@dataclass(frozen=True)
class GPU:
    """A GPU as the driver lists it, or an instance of one (MIG).

    Attributes:
        index: of the GPU on this machine; an instance has that of its GPU.
        uuid: "GPU-..." or "MIG-...".
        name: the product's.
        problem: why no process of ours can use it; "" if one can.
        memory: in bytes; None: the driver does not say it.
    """

    index: int
    uuid: str
    name: str
    problem: str = ""
    memory: int | None = None


@dataclass(frozen=True)
class Driver:
    """What NVML says.

    Attributes:
        version: of the driver, such as "580.65".
        cuda: the newest version of CUDA that it serves, as (major, minor).
        gpus: all of them, in NVML's order; the instances of one stand in its place.
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[GPU, ...]


def cuda_availability() -> Availability:
    """Return the GPUs that this process can use, and if there are none, why."""
    return availability(os.environ, torch_build, driver)


def availability(
    environ: Mapping[str, str],
    build: Callable[[], TorchBuild | None],
    ask_driver: Callable[[], Driver | str],
) -> Availability:
    """Return what these facts come to; the cheap ones are asked first.

    Args:
        environ: environment variables.
        build: returns what torch was built for; None: it is not installed.
        ask_driver: returns what NVML says, or why it says nothing.

    Example:
        >>> from stratagem.discovery import TorchBuild
        >>> from stratagem_cuda.probe import Driver, GPU, availability
        >>> two = tuple(GPU(i, f"GPU-{i}", "NVIDIA H100") for i in range(2))
        >>> facts = TorchBuild("2.13.0", "13.0"), Driver("580.65", (13, 0), two)
        >>> found = availability({"CUDA_VISIBLE_DEVICES": "1"}, *(lambda f=f: f for f in facts))
        >>> found.count, found.reason
        (1, '1 of 2 GPUs by CUDA_VISIBLE_DEVICES: NVIDIA H100')
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return Availability(0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")
    torch = build()
    if torch is None:
        return Availability(0, "torch is not installed")
    if torch.cuda is None:
        return Availability(
            0,
            f"torch {torch.version} was built without CUDA: install a build with it "
            "(https://pytorch.org/get-started/locally)",
        )
    found = ask_driver()
    if isinstance(found, str):
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
    seen = visible_gpus(found.gpus, visible)
    usable = [gpu for gpu in seen if not gpu.problem]
    if not usable:
        return Availability(0, _why_none(found, seen, visible))
    # A process counts the ones that it sees from 0 on, in use or not.
    count = len(seen)
    which = f"{count} GPU(s)" if visible is None else _chosen(count, len(found.gpus))
    names = ", ".join(dict.fromkeys(gpu.name for gpu in usable))
    problems = tuple((i, gpu.problem) for i, gpu in enumerate(seen) if gpu.problem)
    said = "".join(f"; device {index} {problem}" for index, problem in problems)
    memory = min((gpu.memory for gpu in usable if gpu.memory is not None), default=None)
    return Availability(count, f"{which}: {names}{said}", problems=problems, memory=memory)


def _chosen(count: int, of: int) -> str:
    return f"{count} of {of} GPUs by CUDA_VISIBLE_DEVICES"


def _why_none(found: Driver, seen: list[GPU], visible: str | None) -> str:
    if not found.gpus:
        return f"the driver {found.version} lists no GPU"
    if not seen:
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in found.gpus)
        return f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU that is here: {known}"
    return "; ".join(f"GPU {gpu.index} ({gpu.name}) {gpu.problem}" for gpu in seen)


def visible_gpus(gpus: tuple[GPU, ...], visible: str | None) -> list[GPU]:
    """Return the GPUs that CUDA shows to a process, in the process's order.

    Args:
        gpus: all of them.
        visible: CUDA_VISIBLE_DEVICES: indices, UUIDs or beginnings of them, with commas between;
            the first that is none of these ends the list, as it does for CUDA. None: it is not set.

    Example:
        >>> from stratagem_cuda.probe import GPU, visible_gpus
        >>> gpus = (GPU(0, "GPU-aa", "H100"), GPU(1, "GPU-bb", "H100"))
        >>> [gpu.index for gpu in visible_gpus(gpus, "GPU-b,0,7,1")]
        [1, 0]
    """
    if visible is None:
        return _one_instance(list(gpus))
    seen: list[GPU] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            matching = [gpu for gpu in gpus if gpu.index == int(name)][:1]
        elif name.startswith(("GPU-", "MIG-")):
            matching = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        else:
            matching = []
        # An ambiguous beginning names none, and a GPU that is named twice ends the list as well.
        if len(matching) != 1 or matching[0] in seen:
            break
        seen += matching
    return _one_instance(seen)


def _one_instance(seen: list[GPU]) -> list[GPU]:
    """Return what is left where a GPU is divided: CUDA shows a process one instance of all."""
    instances = [gpu for gpu in seen if gpu.uuid.startswith("MIG-")]
    return instances[:1] or seen


# -- what is asked of the machine

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
    """Return what NVML says of this machine, or why it says nothing."""
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
            # It is listed and cannot be opened: fallen off the bus, or not this user's.
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
