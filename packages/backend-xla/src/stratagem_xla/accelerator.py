"""XLAAccelerator: TPUs and PJRT's CPU client, through PyTorch/XLA."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stratagem.accelerators import Accelerator
from stratagem.data import map_tensors
from stratagem.discovery import Availability
from stratagem.errors import ConfigurationError
from stratagem.rng import seed_devices_by
from stratagem_xla.installation import availability
from stratagem_xla.library import import_torch_xla
from stratagem_xla.sharding import divided


class XLAAccelerator(Accelerator):
    """XLA devices of this process.

    Their RNG, which torch's seeds do not reach, is seeded at the launch from the state of torch's
    own, and by `seed_everything`; `torch_xla.manual_seed` works from the launch on.

    Example:
        >>> from stratagem_xla.accelerator import XLAAccelerator
        >>> XLAAccelerator().device(1)
        device(type='xla', index=1)
    """

    name = "tpu"
    process_group_backend = "gloo"
    requires_dedicated_strategies = True  # operations wait until a strategy has them compiled
    inference_mode = False
    compiles_steps = True

    def availability(self) -> Availability:
        """Return the devices, and why these; torch_xla is not imported."""
        return availability()

    def device(self, index: int) -> torch.device:
        return torch.device("xla", index)

    def setup_device(self, device: torch.device) -> None:
        """Set PyTorch/XLA's current device, and seed it.

        Raises:
            ConfigurationError: the device has another type; or autograd started in this process
                before it could register XLA devices.
        """
        if device.type != "xla":
            raise ConfigurationError(f"XLAAccelerator expected a device xla, received {device}")
        torch_xla = import_torch_xla()
        torch_xla.device(device.index)
        # Starts the runtime, which under SPMD the line above leaves; autograd asks it then.
        torch_xla.runtime.global_runtime_device_count()
        _check_autograd(device)
        torch_xla.manual_seed(_seed_of_host())
        seed_devices_by("xla", torch_xla.manual_seed)

    def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
        """Return a function that moves a batch, and divides it if all devices act as one."""
        move = super().batch_mover(device)
        if not import_torch_xla().runtime.is_spmd():
            return move
        return lambda batch: map_tensors(divided, move(batch))

    def synchronize(self, device: torch.device) -> None:
        """Compile and run the recorded operations, and wait for them."""
        import_torch_xla().sync(wait=True)

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the device's memory and its use in bytes; {} on PJRT's CPU client."""
        xla_model = import_torch_xla().core.xla_model
        try:
            found = xla_model.get_memory_info(str(device))
        except RuntimeError:
            return {}
        names = {"used_bytes": "bytes_used", "peak_used_bytes": "peak_bytes_used"}
        names["limit_bytes"] = "bytes_limit"
        return {name: found[key] for name, key in names.items() if key in found}

    def start_reading(self, tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
        """Return a function that reads the tensors without a program, which would be compiled."""
        library, values = import_torch_xla()._XLAC, list(tensors)
        return lambda: [float(one) for one in library._xla_get_cpu_tensors(values)]

    def rng_state(self, device: torch.device) -> Tensor:
        """Return the device's RNG state, one int64."""
        xla_model = import_torch_xla().core.xla_model
        state: int = xla_model.get_rng_state(str(device))
        # Count the numbers drawn since the last sync: the next sync would forget them.
        xla_model.set_rng_state(state, str(device))
        return torch.tensor([state - 2**64 if state >= 2**63 else state])

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        import_torch_xla().core.xla_model.set_rng_state(int(state) % 2**64, str(device))

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any] | None:
        """Return an autocast context; XLA's knows bfloat16."""
        return torch.autocast("xla", dtype=dtype) if dtype is torch.bfloat16 else None


def _seed_of_host() -> int:
    """Return a seed that follows from the state of torch's RNG, without drawing from it."""
    state = torch.get_rng_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest(), "big")


def _check_autograd(device: torch.device) -> None:
    """Run a backward pass on the device, which no later one can do if this one cannot.

    Raises:
        ConfigurationError: a backward pass on the CPU came first, and autograd has made its threads
            for the devices that it knew then.
    """
    try:
        torch.ones((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigurationError(
            "autograd cannot work on XLA devices in this process, since a backward pass ran on the "
            "CPU before the launch: launch before it (Lite.launch(), Trainer.fit()), or call "
            "torch_xla.device() at the top of the script"
        ) from error
