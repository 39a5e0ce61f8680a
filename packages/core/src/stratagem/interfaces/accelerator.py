"""Accelerator: a kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from stratagem.data.pytree import move_to_device, widest_float
from stratagem.discovery.former import with_former_names
from stratagem.discovery.specs import Availability


@final
@dataclass(frozen=True)
class DeviceMemory:
    """The use of a device's memory, in bytes.

    Attributes:
        total: the size of the memory; None if unknown.
        allocated: the memory that tensors of this process occupy now.
        peak: the largest value of `allocated` so far.
        reserved: the memory that this process's torch allocator holds.
        others: the memory of other processes, as pairs (description of the process, bytes).

    Example:
        >>> from stratagem.accelerators import DeviceMemory
        >>> DeviceMemory(total=16, allocated=3, peak=4, reserved=8).others
        ()
    """

    total: int | None
    allocated: int
    peak: int
    reserved: int
    others: tuple[tuple[str, int], ...] = ()


@with_former_names
class Accelerator(ABC):
    """A type of device, with its number of devices and its capabilities.

    Call sequence:
        1. Resolution of a request calls `availability()` of an accelerator object. For a discovered
           accelerator it calls the spec's probe instead, which does not import this class.
        2. `Strategy.bind` calls `autocast(dtype)` and reads `pins_memory`, in the process that the
           user started. A launcher that forks calls `fork_problem()` in the same process.
        3. `Strategy.setup_environment` calls `device(index)`, `setup()` and then
           `setup_device(device)`, on every rank.
        4. Saving a checkpoint calls `rng_state(device)` on every rank. Resuming calls
           `set_rng_state(device, state)`. `start_reading` runs when logged values are sent to the
           loggers. A DeviceStatsMonitor calls `device_stats(device)` between steps. Users call
           `synchronize(device)` for timing.
        5. The front ends call `batch_mover(device)` on every rank, once for each loop. The Trainer
           calls `configure_kernels` before each stage on every rank, and the returned function
           after it. It calls `hints` on rank 0 at the start of a fit.
        6. A rank that fails calls `is_out_of_memory(error)`. If the memory is full, it calls
           `device_memory(device)`, otherwise `explain_lost_device(error)`.
        7. `teardown()` runs on every rank, at the end.

    Only `availability` and `device` must be implemented. The other defaults suit every device whose
    `torch.get_device_module` follows torch's conventions. `DeviceAccelerator` implements these two
    as well, with `torch.accelerator`.

    Example:
        >>> from stratagem.accelerators import CPUAccelerator
        >>> accelerator = CPUAccelerator()
        >>> accelerator.device(0), accelerator.is_host
        (device(type='cpu'), True)
    """

    name: str
    """The name that strategies list in their capabilities."""
    process_group_backend: str
    """The torch.distributed backend for the accelerator's tensors, such as "gloo"."""
    pins_memory: ClassVar[bool] = False
    """Whether the devices copy to and from page-locked host memory asynchronously. If True, torch
    must have an allocator of page-locked memory for these devices."""
    sync_batchnorm_kernels: ClassVar[bool] = False
    """Whether `torch.nn.SyncBatchNorm` has kernels for the accelerator's tensors. Otherwise
    `sync_batchnorm=True` computes batch statistics from operations that every device has."""
    requires_dedicated_strategies: ClassVar[bool] = False
    """Whether a strategy must name this accelerator in its capabilities to use it; the same value
    as in the accelerator's spec."""
    data_parallel_kernels: ClassVar[bool] = False
    """Whether `torch.nn.DataParallel` can scatter to and gather from several of the devices."""
    inference_mode: ClassVar[bool] = True
    """Whether the accelerator's tensors work under `torch.inference_mode`. Otherwise evaluation
    runs under `torch.no_grad`."""
    compiles_steps: ClassVar[bool] = False
    """Whether the operations of a step are recorded and compiled as one program (XLA). The front
    ends then run the same operations of their own in every step, since each difference would
    recompile the whole step."""

    memory_advice: ClassVar[str] = ""
    """Advice for users whose device memory is full. The report of that error ends with it."""

    @abstractmethod
    def availability(self) -> Availability:
        """Return the number of usable devices on this machine, and the reason."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """Return the device with this index on this node, without using any device."""

    @property
    def is_host(self) -> bool:
        """Whether the tensors lie in host memory, so that batches need no copy."""
        return self.device(0).type == "cpu"

    def fork_problem(self) -> str | None:
        """Return the reason why this process can no longer be forked, if any.

        The reason completes the sentence "the launcher 'fork' copies this process, which ...".
        None means that the process can be forked.
        """
        return None

    def setup(self) -> None:
        """Prepare this process; called once on each rank, before `setup_device`."""

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current device of this process."""

    def teardown(self) -> None:
        """Release the resources that `setup` and `setup_device` acquired."""

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        """Return a function that moves a batch to the device.

        Copies from pinned memory are asynchronous: the function does not wait for the device.
        Operations on the device's current stream see the copied data.
        """
        return partial(move_to_device, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all queued work; used for timing."""

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return statistics of the device by name, such as its memory use.

        `DeviceStatsMonitor` calls this between steps, so it does not wait for the device. Names
        end in their unit, such as `_bytes`. The dict is empty if the device has no statistics.
        """
        return {}

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error reports that a device's memory is full."""
        return isinstance(error, torch.OutOfMemoryError)

    def device_memory(self, device: torch.device) -> DeviceMemory | None:
        """Return the use of the device's memory, if known; called after failures only.

        None: the accelerator does not count it.
        """
        return None

    def explain_lost_device(self, error: BaseException) -> str | None:
        """Return advice about an error that makes the device unusable for this process.

        Return None for any other error. After advice was returned, nothing uses the device again,
        since a wait for it might never end.
        """
        return None

    def start_reading(self, tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
        """Start one asynchronous copy of one-element tensors to the host.

        Returns:
            A function that waits for the copy and returns the numbers.
        """
        widest = widest_float(tensors[0].device)
        values = torch.stack([one.reshape(()).to(widest) for one in tensors])
        # torch allocates the result of a non-blocking copy in pinned memory.
        on_host = values.to("cpu", non_blocking=self.pins_memory)
        event = torch.Event(values.device)
        event.record(torch.accelerator.current_stream(values.device))

        def read() -> list[float]:
            if not event.query():
                event.synchronize()
            numbers: list[float] = on_host.tolist()
            return numbers

        return read

    def rng_state(self, device: torch.device) -> Tensor | None:
        """Return the state of the device's RNG, in host memory.

        Return None if the device uses the host's RNG.

        Raises:
            AttributeError: torch's module for the device has no `get_rng_state`. An accelerator
                for such a device overrides this method.
        """
        if self.is_host:
            return None
        state: Tensor = torch.get_device_module(device).get_rng_state(device)
        return state

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        """Restore a state that `rng_state` returned for a device of the same type."""
        torch.get_device_module(device).set_rng_state(state, device)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any] | None:
        """Return a new autocast context that can be entered many times.

        Return None if operations on these devices cannot be autocast to `dtype`. Mixed precision
        then raises an error.
        """
        kind = self.device(0).type
        if not torch.amp.is_autocast_available(kind):
            return None
        module = torch.get_device_module(kind)
        supported = getattr(module, "get_amp_supported_dtype", lambda: [dtype])
        return torch.autocast(kind, dtype=dtype) if dtype in supported() else None

    def hints(self, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        """Return hints for the user before training, one sentence each; each is shown once.

        Args:
            device: the device of this rank.
            dtype: the dtype of large matrix products; see `Precision.dtype`.
        """
        return ()

    def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
        """Configure the kernel selection of the devices' libraries; return a function to undo it.

        The caller sets torch's own `use_deterministic_algorithms`.

        Args:
            benchmark: select kernels by measuring them, for inputs of constant shape.
            deterministic: select only kernels with reproducible results.
        """
        return lambda: None
