"""A device for tests, "sim": four of them, with memory, RNG and counters of their own."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any, NamedTuple

import torch
from torch.utils import backend_registration

from simulated.build import build

NAME = "sim"
COUNT = 4


class Counts(NamedTuple):
    """What was done on all devices since the start."""

    synchronizations: int
    host_to_device: int
    device_to_host: int
    blocking_host_to_device: int
    kernels: int
    recorded_streams: int


def counts() -> Counts:
    """Return how often the host has waited for a device, copied to and from one, and so on."""
    return Counts(*torch.ops.simulated.counts())


class Transfers(NamedTuple):
    """What became of copies since they are delayed (`torch.ops.simulated.delay_copies()`)."""

    pending: int
    """Copies that are queued now, and that nobody has waited for."""
    most_pending: int
    overlapping: int
    """Copies to a device that do not wait for all work that its default stream was given before."""
    unsafe_frees: int
    """Blocks of memory that might have been handed out again while another stream used them."""


def transfers() -> Transfers:
    """Return what became of copies since they are delayed."""
    return Transfers(*torch.ops.simulated.transfers())


@functools.cache
def load(name: str = NAME) -> types.ModuleType:
    """Register the device with torch; return its module, `torch.sim`."""
    torch.ops.load_library(build())  # type: ignore[no-untyped-call]
    backend_registration.rename_privateuse1_backend(name)
    module: types.ModuleType = _device_module(name)
    torch._register_device_module(name, module)  # type: ignore[no-untyped-call]
    sys.modules[f"torch.{name}"] = module
    # torch's storages know some names, such as "hpu", from the start.
    known = hasattr(torch.UntypedStorage, f"is_{name}")
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=not known)
    return module


def _device_module(name: str) -> Any:
    module: Any = types.ModuleType(f"torch.{name}")

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return int(torch.accelerator.current_device_index() if index is None else index)

    def manual_seed_all(seed: int) -> None:
        for index in range(COUNT):
            torch.ops.simulated.manual_seed(seed, index)

    def memory(device: Any = None) -> tuple[int, int]:
        return 0, torch.ops.simulated.memory_limit(index_of(device))

    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.is_available = lambda: True
    module.is_initialized = lambda: bool(torch.ops.simulated.is_initialized())
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None  # the first tensor takes a device
    module.device_count = lambda: COUNT
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    # Streams, as torch.cuda has them: what FSDP2 asks a device's module for.
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    module.Stream = lambda device=None, priority=0: torch.Stream(f"{name}:{index_of(device)}")
    module.Event = lambda **options: torch.Event(name)
    module.stream = lambda stream: stream or contextlib.nullcontext()
    module.get_rng_state = lambda device=None: torch.ops.simulated.rng_state(index_of(device))
    module.set_rng_state = lambda state, device=None: torch.ops.simulated.set_rng_state(
        state, index_of(device)
    )
    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: torch.ops.simulated.manual_seed(seed, index_of())
    module.mem_get_info = memory
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    return module
