"""OneBitStrategy: SGD whose gradients travel as one bit an element, with error feedback.

Seide et al., *1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs*, Interspeech 2014. Each rank sends the signs of its gradient plus what it
has not sent so far (the residual), and the mean size of each parameter's elements.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem.strategies import PreparedModel, StepMemory, user_module
from stratagem_onebit.plugin import CAPABILITIES
from stratagem_torch.parallel import ParallelStrategy


class OneBitStrategy(ParallelStrategy):
    """Averages the signs of gradients over ranks, in one gather a step.

    Args:
        warmup_steps: so many first steps average whole gradients.
        **components: see `ParallelStrategy`.
    """

    capabilities = CAPABILITIES

    def __init__(self, *, warmup_steps: int = 0, **components: Any) -> None:
        super().__init__(**components)
        if warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps={warmup_steps}: expected 0 or more")
        self.warmup_steps = warmup_steps

    def wrap(self, module: nn.Module) -> nn.Module:
        """Give every rank the weights of rank 0.

        Raises:
            ConfigurationError: a parameter is complex, which has no sign.
        """
        for name, parameter in user_module(module).named_parameters():
            if parameter.is_complex():
                raise ConfigurationError(
                    f"the parameter {name!r} is {parameter.dtype}, and a gradient's sign is sent: "
                    "expected real parameters; use strategy='ddp'"
                )
        module.load_state_dict(self.ranks.broadcast(module.state_dict()))
        return module

    def estimate_memory(
        self, phases: Mapping[str, StepMemory], shards: Collection[str]
    ) -> dict[str, StepMemory]:
        """Return the same with the residual, and with what an exchange after backward works on."""
        residual = max(memory.parameters for memory in phases.values())
        gradients = max(memory.gradients for memory in phases.values())
        estimated = super().estimate_memory(phases, shards)
        for phase, memory in estimated.items():
            estimated[phase] = replace(memory, optimizer=memory.optimizer + residual)
        # An exchange works on 6.6 times the bytes of the parameters, as measured in a step.
        exchange = replace(estimated["step"], gradients=gradients, working=int(6.6 * residual))
        estimated["backward"] = max(estimated["backward"], exchange, key=lambda held: held.total)
        return estimated

    @contextmanager
    def no_sync(self, prepared: PreparedModel) -> Iterator[None]:
        """Let the gradients of several micro-batches add up."""
        own = prepared.strategy_data  # of this model; another one may communicate meanwhile
        before, own["adds_up"] = own.get("adds_up", False), True
        try:
            yield
        finally:
            own["adds_up"] = before

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, then exchange the gradients."""
        super().backward(prepared, loss, *args, **kwargs)
        if not prepared.strategy_data.get("adds_up"):
            self._exchange(prepared)

    def _exchange(self, prepared: PreparedModel) -> None:
        own = self._own(prepared)
        parameters = list(prepared.original.parameters())
        sizes = [p.numel() for p in parameters]
        counts = torch.tensor(sizes, device=self.device)
        gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
        # The scale of the loss changes; the residual is kept without it.
        scale = self.precision.scale_loss(torch.ones((), device=self.device)).item()
        flat = torch.cat([g.flatten() for g in gradients]) / scale + own["residual"]
        used = torch.tensor([p.grad is not None for p in parameters], device=self.device)
        own["steps"] += 1
        if own["steps"] <= self.warmup_steps:
            mean, used = self.ranks.all_reduce(flat), self.ranks.all_reduce(used.int(), "max") > 0
        else:
            lengths = torch.stack([part.abs().mean() for part in torch.split(flat, sizes)])
            message = [used.byte(), lengths.view(torch.uint8), _packed(flat >= 0)]
            mean, used = torch.zeros_like(flat), torch.zeros_like(used)
            for rank, sent in enumerate(self.ranks.all_gather(torch.cat(message))):
                their_use, means, bits = torch.split(sent, [part.numel() for part in message])
                value = torch.repeat_interleave(means.clone().view(flat.dtype), counts)
                value = torch.where(_unpacked(bits)[: flat.numel()], value, -value)
                if rank == self.ranks.global_rank:
                    decoded = value
                mean += value / self.ranks.world_size
                used |= their_use.bool()
            # NaN and infinity reach every rank, and are not kept for later steps.
            if bool(mean.isfinite().all()):
                kept = torch.repeat_interleave(used, counts)
                own["residual"] = torch.where(kept, flat - decoded, own["residual"])
        averages = torch.split(mean * scale, sizes)
        for p, part, is_used in zip(parameters, averages, used, strict=True):
            p.grad = part.view_as(p).to(p.dtype) if is_used else None

    def _own(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return the residual (n,) of a model on this rank, and the number of its steps."""
        if "residual" not in prepared.strategy_data:
            dtypes = [torch.float32, *(p.dtype for p in prepared.original.parameters())]
            dtype = torch.float64 if torch.float64 in dtypes else torch.float32
            size = sum(p.numel() for p in prepared.original.parameters())
            residual = torch.zeros(size, dtype=dtype, device=self.device)
            prepared.strategy_data.update(residual=residual, steps=0)
        return prepared.strategy_data

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Evaluate with the buffers of rank 0 everywhere: they are what is saved."""
        for buffer in prepared.original.buffers():
            buffer.copy_(self.ranks.broadcast(buffer))
        yield

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the residuals of all ranks, (world_size, n), and the number of steps."""
        own = self._own(prepared)
        return {"steps": own["steps"], "residuals": self.ranks.all_gather(own["residual"])}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Take this rank's residual; under another number of ranks, the mean of all."""
        own, residuals = self._own(prepared), state["residuals"].to(self.device)
        same = len(residuals) == self.ranks.world_size
        mine = residuals[self.ranks.global_rank] if same else residuals.mean(0)
        own.update(steps=state["steps"], residual=mine.to(own["residual"].dtype))


def _packed(bits: Tensor) -> Tensor:
    """Return booleans (n,) as bytes, eight in each."""
    padded = torch.nn.functional.pad(bits.byte(), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1).byte()


def _unpacked(data: Tensor) -> Tensor:
    """Return the booleans in bytes."""
    powers = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> powers) & 1).flatten().bool()
