"""Lightning's accelerators: ours, with the questions that its classes answer without an object."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from stratagem import accelerators
from stratagem.discovery import PLUGIN_API_VERSION, AcceleratorSpec, Availability, get_registry
from stratagem.errors import ConfigurationError
from stratagem_lightning.api.instance_check import InstanceCheck, of_class

_ANSWERS: dict[str, Callable[[accelerators.Accelerator], Callable[..., Any]]] = {
    "is_available": lambda one: lambda: bool(one.availability().free),
    "auto_device_count": lambda one: lambda: len(one.availability().free),
    "get_device_stats": lambda one: lambda device: one.device_stats(torch.device(device)),
}


def _find_lightning_name(accelerator: accelerators.Accelerator, name: str) -> Any:
    """Return what Lightning's users ask any accelerator for."""
    if name in _ANSWERS:
        return _ANSWERS[name](accelerator)
    raise AttributeError(f"{type(accelerator).__name__!r} object has no attribute {name!r}")


# For the accelerators of every distribution, once Lightning's names are in use.
accelerators.Accelerator.__getattr__ = _find_lightning_name  # type: ignore[attr-defined]


class Accelerator(accelerators.Accelerator, metaclass=InstanceCheck):
    """An accelerator for Lightning that also has the methods of Stratagem's accelerators.

    Example:
        >>> class Own(Accelerator):
        ...     name = "own"
        ...     def setup_device(self, device): ...
        ...     def teardown(self): ...
        ...     @staticmethod
        ...     def parse_devices(devices): return devices
        ...     @staticmethod
        ...     def get_parallel_devices(devices): return [torch.device("cpu") for _ in devices]
        ...     @staticmethod
        ...     def auto_device_count(): return 1
        ...     @staticmethod
        ...     def is_available(): return True
        >>> Own().availability()
        Availability(count=1, reason='Own', auto_count=None, indexed=True, problems=(), memory=None)
        >>> Own().device(0)
        device(type='cpu')
    """

    is_instance = of_class(accelerators.Accelerator)

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a method `name` be the attribute that Stratagem reads."""
        super().__init_subclass__(**options)
        given = vars(cls).get("name")
        if isinstance(given, staticmethod):
            cls.name = given()
        elif callable(given):
            cls.name = property(given)  # type: ignore[assignment]

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Return which devices are meant, in the form that `get_parallel_devices` takes."""

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the devices of these indices."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """Return how many devices "auto" takes."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Whether such a device exists."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return statistics of the device."""
        return {}

    @property
    def process_group_backend(self) -> str:  # type: ignore[override]  # which torch knows
        """The backend that torch has for these devices."""
        return str(torch.distributed.get_default_backend_for_device(self.device(0)))

    def availability(self) -> Availability:
        """Return how many devices it counts."""
        count = self.auto_device_count() if self.is_available() else 0
        return Availability(count, type(self).__name__)

    def device(self, index: int) -> torch.device:
        """Return the device with this index."""
        try:
            return self.get_parallel_devices(self.parse_devices([index]))[0]
        except TypeError:  # counts, like the processor's
            return self.get_parallel_devices(self.parse_devices(index + 1))[index]

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return statistics of the device."""
        return self.get_device_stats(device)


def check_device_type(device: torch.device, kind: str) -> None:
    """Check the type of a device that an accelerator is given.

    Args:
        device: the device.
        kind: the type that is expected.

    Raises:
        ConfigurationError: the device is of another type.
    """
    if device.type != kind:
        raise ConfigurationError(f"Device should be {kind.upper()}, received {device}")


class _AcceleratorRegistry:
    """Accelerators by name, for code that registers Lightning's kind of them at run time."""

    def register(
        self,
        name: str,
        accelerator: type[Accelerator],
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> None:
        """Make `Trainer(accelerator=name)` mean `accelerator(**init_params)`, in this process.

        Args:
            name: the name to select it by; "auto" does not choose it before the processor.
            accelerator: an Accelerator class.
            description: one line for listings.
            override: replace one that has this name.
            **init_params: keyword arguments of the class.

        Raises:
            ConfigurationError: the name is taken and `override` is False.
        """
        spec = AcceleratorSpec(
            name=name,
            target=accelerator,
            api_version=PLUGIN_API_VERSION,
            summary=description,
            init_args=init_params,
            probe=lambda: accelerator(**init_params).availability(),
            priority=-1,
        )
        get_registry().add(spec, override=override)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return the registration of an accelerator as a dict.

        Raises:
            UnknownNameError: no accelerator has that name.
        """
        spec = get_registry().find("accelerator", name).spec
        return {
            "accelerator": spec.target,
            "accelerator_name": name,
            "description": spec.summary,
            "init_params": dict(spec.init_args),
        }

    def get(self, name: str) -> Any:
        """Return a new accelerator.

        Raises:
            UnknownNameError: no accelerator has that name.
        """
        return get_registry().find("accelerator", name).spec.build()

    def remove(self, name: str) -> None:
        """Take back a registration made in this process."""
        get_registry().remove("accelerator", name)

    def available_accelerators(self) -> list[str]:
        """Return the names of all accelerators, sorted."""
        return get_registry().names("accelerator")

    def __contains__(self, name: object) -> bool:
        return name in self.available_accelerators()


AcceleratorRegistry = _AcceleratorRegistry()
"""Accelerators by name; see `register`, `get`, `remove` and `available_accelerators`."""


class CPUAccelerator(accelerators.CPUAccelerator, metaclass=InstanceCheck):
    """The processor."""

    is_instance = of_class(accelerators.CPUAccelerator)

    def setup_device(self, device: torch.device) -> None:
        """Select the device, which must be of this type."""
        check_device_type(device, "cpu")
        super().setup_device(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """Return a number of processes.

        Raises:
            ConfigurationError: the value is not a number of processes.
        """
        if isinstance(devices, str) and devices.strip().isdigit():
            devices = int(devices)
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ConfigurationError(
                f"devices={devices!r} with accelerator='cpu': expected a number above 0"
            )
        return devices

    @staticmethod
    def get_parallel_devices(devices: int | str | list[int]) -> list[torch.device]:
        """Return the devices of a number of processes."""
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return how many devices "auto" takes."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether such a device exists."""
        return True

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return statistics of the device."""
        return self.device_stats(torch.device(device))


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of GPUs on which memory can be allocated.

    Args:
        num_devices: the number of GPUs; -1: all.

    Raises:
        ConfigurationError: fewer GPUs are usable.
    """
    usable: list[int] = []
    for index in range(torch.cuda.device_count()):
        if num_devices not in (-1, 0) and len(usable) == num_devices:
            break
        try:
            torch.tensor(0.0, device=torch.device("cuda", index))
        except RuntimeError:  # exclusive, and another process has it
            continue
        usable.append(index)
    if num_devices > len(usable):
        raise ConfigurationError(
            f"num_devices={num_devices}: expected at most the {len(usable)} GPUs that are usable "
            f"of {torch.cuda.device_count()}"
        )
    return usable
