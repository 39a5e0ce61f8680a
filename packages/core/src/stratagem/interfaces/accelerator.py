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

from stratagem.data.pytree import move_to_device
from stratagem.discovery.specs import Availability


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Who holds a device's memory, in bytes.

    Attributes:
        total: all that there is; None: not known.
        allocated: in tensors of this process, now.
        peak: the same, the most there was.
        reserved: what torch's allocator of this process has taken from the device.
        others: what other processes hold, by a text that names each.

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


class Accelerator(ABC):
    """A kind of device: how many there are, how to address one, and what one can do.

    Call sequence:
        1. `availability()`, where a request is resolved (for an object; for a discovered one the
           spec's probe is asked instead, without importing this class).
        2. `autocast(dtype)` and `pins_memory`, by `Strategy.bind`, in the process that the user
           started; `fork_problem()` there too, by a launcher that forks.
        3. On every rank, by `Strategy.setup_environment`: `device(index)`, `setup()`, then
           `setup_device(device)`.
        4. On every rank, with each checkpoint: `rng_state(device)`; upon resuming
           `set_rng_state(device, state)`. Where logged values go to the loggers: `start_reading`.
           Between steps, where a DeviceStatsMonitor asks: `device_stats(device)`. By users who
           measure: `synchronize(device)`.
        5. On every rank, by the front ends: `batch_mover(device)`, once for each loop; by the
           Trainer around each stage: `configure_kernels`. By the Trainer on rank 0 at the start of
           a fit: `hints`.
        6. On a rank that fails, with its error: `is_out_of_memory(error)`, then
           `device_memory(device)`; else `explain_lost_device(error)`.
        7. On every rank, at the end: `teardown()`.

    Only `availability` and `device` have to be implemented; the other defaults are right for any
    device whose `torch.get_device_module` follows torch's conventions. `DeviceAccelerator`
    implements these two as well, over `torch.accelerator`.

    Example:
        >>> from stratagem.accelerators import CPUAccelerator
        >>> accelerator = CPUAccelerator()
        >>> accelerator.device(0), accelerator.is_host
        (device(type='cpu'), True)
    """

    name: str
    """The name that strategies list in their capabilities."""
    process_group_backend: str
    """The torch.distributed backend for its tensors, such as "gloo"."""
    pins_memory: ClassVar[bool] = False
    """Whether its devices copy to and from page-locked host memory while the host goes on; torch
    then has to have an allocator of such memory for them."""
    sync_batchnorm_kernels: ClassVar[bool] = False
    """Whether `torch.nn.SyncBatchNorm` has kernels for its tensors. Otherwise
    `sync_batchnorm=True` computes batch statistics from operations that every device has."""
    requires_dedicated_strategies: ClassVar[bool] = False
    """Whether only strategies that name it in their capabilities can use it; as in its spec."""
    data_parallel_kernels: ClassVar[bool] = False
    """Whether `torch.nn.DataParallel` can scatter to and gather from several of its devices."""
    inference_mode: ClassVar[bool] = True
    """Whether its tensors work under `torch.inference_mode`; otherwise evaluation runs under
    `torch.no_grad` in its place."""
    compiles_steps: ClassVar[bool] = False
    """Whether operations are recorded and compiled as one program for each step (XLA). What a front
    end computes for itself is then the same in every step, or each difference would be compiled
    again with the whole step."""

    @abstractmethod
    def availability(self) -> Availability:
        """Return how many devices can be used here, and why."""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """Return the device with this index on this node; touches no device."""

    @property
    def is_host(self) -> bool:
        """Whether its tensors lie in the host's memory, so that batches stay where they are."""
        return self.device(0).type == "cpu"

    def fork_problem(self) -> str | None:
        """Return why this process must not be forked any more, or None: it may be.

        The text completes "the launcher 'fork' copies this process, which ...".
        """
        return None

    def setup(self) -> None:
        """Prepare this process; once a rank, before `setup_device`."""

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""

    def teardown(self) -> None:
        """Release what `setup` and `setup_device` took."""

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        """Return what moves a batch to the device, for the steps of one rank.

        The copy of what lies in pinned memory does not wait for the device; whoever uses the batch
        on the device's current stream finds it there.
        """
        return partial(move_to_device, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all queued work; for timing."""

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return memory figures and the like, by name; empty if there are none.

        Asked for between steps (`DeviceStatsMonitor`), so it does not wait for the device. Names
        end in their unit, such as `_bytes`.
        """
        return {}

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the memory of a device is full."""
        return isinstance(error, torch.OutOfMemoryError)

    def device_memory(self, device: torch.device) -> DeviceMemory | None:
        """Return who holds the device's memory; None: nobody counts. After a failure only."""
        return None

    def explain_lost_device(self, error: BaseException) -> str | None:
        """Return what to do about an error after which this process cannot use the device any more.

        None: it is another error. Nothing touches the device from then on, since whoever waited
        for it might wait forever.
        """
        return None

    def start_reading(self, tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
        """Begin to copy tensors of one element to the host, all in one.

        Returns:
            A function that waits until they are there, and returns the numbers.
        """
        values = torch.stack([one.reshape(()).double() for one in tensors])
        # torch puts what it copies without waiting into pinned memory.
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
        """Return the state of the device's RNG, in host memory; None: it is the host's own.

        Raises:
            AttributeError: torch's module for the device has no `get_rng_state`; an accelerator
                for it overrides this.
        """
        if self.is_host:
            return None
        state: Tensor = torch.get_device_module(device).get_rng_state(device)
        return state

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        """Restore what `rng_state` returned, for a device of the same type."""
        torch.get_device_module(device).set_rng_state(state, device)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any] | None:
        """Return an autocast context that can be entered again and again.

        None: operations on these devices cannot be autocast to `dtype`; mixed precision is then
        refused.
        """
        kind = self.device(0).type
        if not torch.amp.is_autocast_available(kind):
            return None
        module = torch.get_device_module(kind)
        supported = getattr(module, "get_amp_supported_dtype", lambda: [dtype])
        return torch.autocast(kind, dtype=dtype) if dtype in supported() else None

    def hints(self, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        """Return what a user may want to know before training: a sentence each, said once.

        Args:
            device: this rank's.
            dtype: what large matrix products are computed in; see `Precision.dtype`.
        """
        return ()

    def configure_kernels(self, *, benchmark: bool, deterministic: bool) -> Callable[[], None]:
        """Set how the devices' libraries choose kernels; return what restores it.

        torch's own `use_deterministic_algorithms` is set by the caller.

        Args:
            benchmark: choose by trying them out, where shapes stay the same.
            deterministic: choose only those that compute the same each time.
        """
        return lambda: None
