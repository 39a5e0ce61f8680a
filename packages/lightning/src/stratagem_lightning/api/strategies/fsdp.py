"""FSDPStrategy by Lightning's arguments."""

# Annotations are objects here, since jsonargparse is handed them one by one.

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from stratagem import strategies
from stratagem.errors import ConfigurationError
from stratagem_lightning.api.instance_check import InstanceCheck, of_class

# Methods of a strategy on checkpoints.
from stratagem_lightning.api.strategies import single_device as single_device


class FSDPStrategy(strategies.FSDPStrategy, metaclass=InstanceCheck):
    """Shards parameters, gradients and optimizer state; as `stratagem.strategies.FSDPStrategy`.

    Args:
        mixed_precision: as in the base class; also FSDP1's `MixedPrecision`, where `buffer_dtype`
            is ignored with a warning.
        cpu_offload: as in the base class; also FSDP1's `CPUOffload`.
        device_mesh, activation_checkpointing: see the base class.
        activation_checkpointing_policy: the later name of `activation_checkpointing`; also a policy
            of `torch.distributed.fsdp.wrap`, or a function of a module, a flag whether to visit its
            submodules, and a number of parameters.
        use_orig_params, sync_module_states: True, the only mode of FSDP2.
        precision, precision_plugin: both names of one argument.
        **options: see `stratagem.strategies.FSDPStrategy`.

    Attributes:
        mixed_precision_config: the argument `mixed_precision`.

    Raises:
        ConfigurationError: an option has an invalid value, or two options conflict.

    Example:
        >>> strategy = FSDPStrategy(activation_checkpointing_policy={nn.TransformerEncoderLayer})
        >>> strategy.mixed_precision_config is None
        True
    """

    is_instance = of_class(strategies.FSDPStrategy)

    def __init__(
        self,
        *,
        mixed_precision: Any = None,
        cpu_offload: Any = None,
        device_mesh: tuple[int, int] | None = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        use_orig_params: bool = True,
        sync_module_states: bool = True,
        precision: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        flags = {"use_orig_params": use_orig_params, "sync_module_states": sync_module_states}
        for name, value in flags.items():
            if value is not True:
                raise ConfigurationError(
                    f"FSDPStrategy({name}={value!r}): expected True, which is how FSDP2 works: "
                    "leave it out"
                )
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise ConfigurationError(
                "FSDPStrategy: you cannot set both `activation_checkpointing` and "
                "`activation_checkpointing_policy`, which are two names of one argument"
            )
        super().__init__(
            mixed_precision=_as_policy(mixed_precision),
            cpu_offload=cpu_offload.offload_params
            if isinstance(cpu_offload, CPUOffload)
            else cpu_offload,
            device_mesh=device_mesh,
            activation_checkpointing=_of_policy(activation_checkpointing_policy)
            if activation_checkpointing is None
            else _as_set(activation_checkpointing),
            precision_plugin=precision if precision_plugin is None else precision_plugin,
            **options,
        )
        self.mixed_precision_config: MixedPrecision | None = mixed_precision
        self.sharding_strategy = _Choice(self.sharding_strategy)
        if not isinstance(self.cpu_offload, OffloadPolicy):
            self.cpu_offload: Any = _Offload(bool(self.cpu_offload))


class _Choice(str):
    """A name that equals the member of torch's `ShardingStrategy` with that name."""

    __slots__ = ()
    __hash__ = str.__hash__

    @property
    def name(self) -> str:
        """The name."""
        return str(self)

    def __eq__(self, other: object) -> bool:
        return (
            str.__eq__(self, other.name if isinstance(other, ShardingStrategy) else other) is True
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Offload(CPUOffload):
    """FSDP1's `CPUOffload`, true if parameters are kept in host memory."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self.offload_params

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CPUOffload) and other.offload_params == self.offload_params


def _as_policy(given: Any) -> Any:
    """Return FSDP2's policy for FSDP1's, and anything else as it is."""
    if not isinstance(given, MixedPrecision):
        return given
    if given.buffer_dtype is not None:
        warnings.warn(
            f"mixed_precision has buffer_dtype={given.buffer_dtype}, which is left out: FSDP2 "
            "leaves buffers as they are; convert them in the model",
            stacklevel=3,
        )
    return MixedPrecisionPolicy(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype,
        cast_forward_inputs=given.cast_forward_inputs or given.cast_root_forward_inputs,
    )


def _as_set(choice: Any) -> Any:
    return set(choice) if isinstance(choice, list) else choice


def _of_policy(policy: Any) -> Any:
    """Return a choice of modules as ours are made: a function takes a module."""
    if isinstance(policy, type) or not callable(policy):
        return _as_set(policy)
    asked: Callable[..., bool] = policy

    def chosen(module: nn.Module) -> bool:
        return bool(asked(module=module, recurse=False, nonwrapped_numel=0))

    return chosen
