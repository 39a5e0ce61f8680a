"""How DDP's gradients are communicated in place of a plain all_reduce, and post-local SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

CommHook = Callable[[Any, Any], Any]
"""Takes its state and a torch.distributed.GradBucket."""
CommWrapper = Callable[[CommHook], CommHook]

_BF16 = ("bf16_compress_hook", "bf16_compress_wrapper")
_BF16_BACKENDS = ("nccl", "xccl")


@dataclass(frozen=True)
class CommunicationHook:
    """A hook for `DistributedDataParallel.register_comm_hook`, with its state and wrapper.

    Attributes:
        hook: a function that returns a future of the communicated bucket. None: DDP's own
            all_reduce.
        state: the first argument of the hook, or a function without arguments that returns it.
        wrapper: a function that takes a hook and returns a hook, such as `fp16_compress_wrapper`.
        averaging_period: in post-local SGD, the number of steps between two averagings of the
            models.

    Raises:
        ConfigurationError: if the parts do not fit together.
    """

    hook: CommHook | None = None
    state: Any = None
    wrapper: CommWrapper | None = None
    averaging_period: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("ddp_comm_hook", self.hook), ("ddp_comm_wrapper", self.wrapper)):
            if value is not None and not callable(value):
                raise ConfigurationError(
                    f"{name}={value!r}: expected a function, as in "
                    "torch.distributed.algorithms.ddp_comm_hooks"
                )
        if self.hook is None and (self.state is not None or self.wrapper is not None):
            raise ConfigurationError(
                "ddp_comm_state and ddp_comm_wrapper belong to a hook, and there is none: pass "
                "ddp_comm_hook as well"
            )
        period = self.averaging_period
        if period is not None and (isinstance(period, bool) or period < 1):
            raise ConfigurationError(
                f"model_averaging_period={period!r}: expected a number of steps of at least 1"
            )
        if not callable(self.state):
            self._check_averaging(self.state)

    def _check_averaging(self, state: Any) -> None:
        is_post_local = hasattr(state, "start_localSGD_iter")
        if is_post_local and self.averaging_period is None:
            raise ConfigurationError(
                f"ddp_comm_state={type(state).__name__}(...) lets the models of the ranks drift "
                "apart, and nothing brings them together: pass model_averaging_period, the steps "
                "from one averaging to the next"
            )
        if self.averaging_period is not None and not is_post_local:
            raise ConfigurationError(
                f"model_averaging_period={self.averaging_period} belongs to post-local SGD: pass "
                "ddp_comm_hook=post_localSGD_hook and ddp_comm_state=PostLocalSGDState(...) as "
                "well, or leave it out"
            )

    @property
    def has_own_state(self) -> bool:
        """Whether the state is an object that stores data of one model."""
        stateless = self.state is None or isinstance(self.state, dist.ProcessGroup)
        return not stateless and not callable(self.state)

    def check_backend(self, backend: str) -> None:
        """Raise if the process group's backend cannot reduce the hook's dtype.

        Raises:
            ConfigurationError: if the hook is a bf16 hook of torch and the backend is not NCCL.
        """
        for given in (self.hook, self.wrapper):
            name = getattr(given, "__name__", "")
            if name in _BF16 and not any(one in backend for one in _BF16_BACKENDS):
                raise ConfigurationError(
                    f"ddp_comm_hook: torch's {name} needs the process group backend "
                    f"{' or '.join(map(repr, _BF16_BACKENDS))}, received {backend!r}: take "
                    f"{name.replace('bf16', 'fp16')}, or an accelerator with such a backend"
                )

    def needs_one_bucket(self, backend: str) -> bool:
        """Whether several buckets would wait for one another, for good.

        PowerSGD's callbacks run in gloo's threads and wait there for further collectives; with a
        second bucket under way there is no thread left to run those (torch 2.13).
        """
        return "gloo" in backend and "powersgd_hook" in getattr(self.hook, "__name__", "").lower()

    def register(self, ddp: DistributedDataParallel) -> Any:
        """Register the hook with one model; return its state.

        A hook's state may need process groups, and most hold what belongs to one model: a function
        that makes it is called here.
        """
        if self.hook is None:
            return None
        state = self.state
        if callable(state):
            state = state()
            self._check_averaging(state)
        hook = self.hook if self.wrapper is None else self.wrapper(self.hook)
        ddp.register_comm_hook(state, hook)
        return state

    def averager(self, state: Any) -> PeriodicModelAverager | None:
        """Return the averager of all ranks' models in post-local SGD; None without it."""
        if self.averaging_period is None or state is None:  # or the model has no gradients
            return None
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        return PeriodicModelAverager(
            period=self.averaging_period, warmup_steps=state.start_localSGD_iter
        )
