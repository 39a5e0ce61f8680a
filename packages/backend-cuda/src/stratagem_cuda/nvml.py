"""What NVML says of one GPU while it works: utilisation, temperature, power, and who is on it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.discovery import torch_build
from stratagem_cuda.gpu import visible_gpus
from stratagem_cuda.probe import Driver, driver


@functools.cache
def handle_of(index: int) -> Any:
    """Return NVML's handle of a GPU by this process's index, or None without an answer.

    NVML stays open from here on: opening it for each question takes milliseconds.
    """
    import pynvml as nvml

    build = torch_build()
    if build is not None and build.hip is not None:
        return None  # torch computes on AMD's GPUs; NVIDIA's may be beside them
    found = driver()
    if not isinstance(found, Driver):
        return None
    seen = visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        nvml.nvmlInit()
        return nvml.nvmlDeviceGetHandleByUUID(seen[index].uuid)
    except (nvml.NVMLError, IndexError):
        return None


def stats(index: int) -> dict[str, float]:
    """Return a GPU's present statistics by name with unit; unknown ones are left out.

    - `utilization_percent`: of the last moment (up to a second), the part in which a kernel ran.
    - `memory_utilization_percent`: of that, the part in which memory was read or written.
    - `temperature_celsius`, `power_watts`.
    """
    import pynvml as nvml

    handle = handle_of(index)
    if handle is None:
        return {}
    rates = functools.cache(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    sensor = nvml.NVML_TEMPERATURE_GPU
    questions: dict[str, Callable[[], float]] = {
        "utilization_percent": lambda: rates().gpu,
        "memory_utilization_percent": lambda: rates().memory,
        "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, sensor),
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    answers = {}
    for name, ask in questions.items():
        try:
            answers[name] = float(ask())
        except nvml.NVMLError:
            continue  # an instance of a divided GPU has no sensors of its own
    return answers


def other_processes(index: int) -> list[tuple[str, int]]:
    """Return the processes on a GPU beside this one, and the bytes of its memory that each has."""
    import pynvml as nvml

    handle = handle_of(index)
    if handle is None:
        return []
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return []
    return [
        (f"process {one.pid} ({name})", one.usedGpuMemory)
        for one in running
        # In a container, NVML says the numbers that processes have outside.
        if one.pid != os.getpid() and one.usedGpuMemory and (name := _name(one.pid))
    ]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
