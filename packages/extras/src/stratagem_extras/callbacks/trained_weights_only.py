"""TrainedWeightsOnly: checkpoints without the weights that stay frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.callbacks import Callback
from stratagem.checkpoint import Shards
from stratagem.errors import CheckpointMismatchError, ConfigurationError, format_names
from stratagem.strategies import Strategy
from stratagem_extras.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from stratagem_extras.callbacks.weight_averaging import WeightAveraging
from stratagem_extras.pretrained.save import in_shards

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

_ENTRY = "frozen_weights"
_BLOCK = 1 << 22
_OF_PLACES, _OF_BITS = -7046029254386353131, -4417276706812531889
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TrainedWeightsOnly(Callback):
    """Leaves frozen weights out of all checkpoints, such as the base model under adapters.

    Left out is a parameter that was frozen when training began, is in no optimizer, and has not
    changed. A checkpoint has a fingerprint of each. A run that resumes takes these parameters from
    its own model, and is refused if their values are others. With `Trainer(weights=...)` it reads
    them from there.

    Evaluation and a resumed run need this callback, too.

    Raises:
        ConfigurationError: before a run, if weights are averaged.
        CheckpointMismatchError: a checkpoint was saved over another base model.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from stratagem import Module, Trainer
        >>> from stratagem.callbacks import TrainedWeightsOnly
        >>> class Net(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.base = torch.nn.Linear(2, 2).requires_grad_(False)
        ...         self.head = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.head(self.base(batch)).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.head.parameters(), lr=0.1)
        >>> options = {"logger": False, "enable_checkpointing": False, "max_steps": 1}
        >>> trainer = Trainer(accelerator="cpu", callbacks=TrainedWeightsOnly(), **options)
        >>> trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 2), 2))
        >>> path = tempfile.mkdtemp() + "/trained.ckpt"
        >>> trainer.save_checkpoint(path)
        >>> list(torch.load(path)["state_dict"])
        ['head.weight', 'head.bias']
    """

    def __init__(self) -> None:
        self._base: dict[str, str] | None = None
        self._kept: set[str] = set()
        self._was_strict: bool | None = None
        self._is_lenient = False

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Check the strategy and the other callbacks."""
        self._base, self._kept = None, set()
        for callback in trainer.callbacks:
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                raise ConfigurationError(
                    f"TrainedWeightsOnly and {type(callback).__name__} both change the weights of "
                    "a checkpoint: leave one out"
                )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Take the fingerprints of the base model, unless a checkpoint was loaded."""
        self._be_strict(module)
        if self._base is None:
            self._base = _own_fingerprints(trainer, _frozen(trainer))

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Let later checkpoints be compared with the model again."""
        self._be_strict(module)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Let later checkpoints be compared with the model again."""
        self._be_strict(module)

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Let later checkpoints be compared with the model again."""
        self._be_strict(module)

    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Leave the frozen weights out."""
        state = checkpoint["state_dict"]
        frozen = [name for name in _frozen(trainer) if name not in self._kept]
        if self._base is None:
            self._base = _own_fingerprints(trainer, frozen)
        now = fingerprints(trainer.strategy, {n: state[n] for n in frozen if n in state})
        same = {name: text for name, text in now.items() if self._base.get(name) == text}
        checkpoint["state_dict"] = {n: value for n, value in state.items() if n not in same}
        checkpoint[_ENTRY] = same

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Compare the frozen weights of the model with those of the checkpoint's."""
        saved: dict[str, str] | None = checkpoint.get(_ENTRY)
        prepared = trainer.run.require_prepared()
        if saved is not None and trainer.options.weights is not None:
            trainer.options.weights.load(trainer.strategy, prepared)
        names = set(_frozen(trainer)) | (saved or {}).keys()
        self._base = _own_fingerprints(trainer, names)
        if saved is None:
            return
        state = checkpoint["state_dict"]
        if module.strict_loading is not False:
            _compare_names(_of_all_ranks(trainer, prepared.original.state_dict()), state, saved)
        if differing := [
            f"{name} is {self._base[name]} (expected {text})"
            for name, text in saved.items()
            if name in self._base and self._base[name] != text
        ]:
            raise CheckpointMismatchError(
                f"the checkpoint was saved over another base model: of {len(saved)} frozen weights "
                f"{len(differing)} differ, each with its fingerprint: "
                f"{format_names(differing, 3)}. Load the base model that the run began with, in "
                "the same precision"
            )
        self._kept |= {name for name in names if name in state}
        self._was_strict, module.strict_loading = module.strict_loading, False
        self._is_lenient = True

    def _be_strict(self, module: Module) -> None:
        if self._is_lenient:
            module.strict_loading, self._is_lenient = self._was_strict, False


def _of_all_ranks(trainer: Trainer, names: Iterable[str]) -> list[str]:
    """Return the names of all ranks, each once: stages of a pipeline have different ones."""
    found = trainer.strategy.ranks.gather_objects(list(names))
    return list(dict.fromkeys(name for of_rank in found for name in of_rank))


def _compare_names(own: Collection[str], *saved: Collection[str]) -> None:
    missing = [name for name in own if not any(name in names for names in saved)]
    unexpected = [name for names in saved for name in names if name not in own]
    if missing or unexpected:
        raise CheckpointMismatchError(
            "the checkpoint was saved with another model: it lacks "
            f"{format_names(missing) or 'nothing'}, and has {format_names(unexpected) or 'nothing'}"
            ", which the model lacks. Resume with the model that the run began with",
            missing,
            unexpected,
        )


def _frozen(trainer: Trainer) -> list[str]:
    """Return the names of the parameters that no optimizer has and that need no gradient."""
    prepared = trainer.run.require_prepared()
    groups = [group for optimizer in prepared.optimizers for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    own = [
        name
        for name, value in prepared.original.state_dict(keep_vars=True).items()
        if isinstance(value, nn.Parameter) and not value.requires_grad and id(value) not in trained
    ]
    return _of_all_ranks(trainer, own)


def _own_fingerprints(trainer: Trainer, names: Iterable[str]) -> dict[str, str]:
    """Return the fingerprints of weights of the model."""
    with in_shards(trainer.strategy):
        state = trainer.strategy.model_state(trainer.run.require_prepared())
        return fingerprints(trainer.strategy, {n: state[n] for n in names if n in state})


def fingerprints(strategy: Strategy, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each tensor that tells its dtype, shape and values; on every rank.

    The text does not depend on the division into shards: a sum over the elements is in it.

    Args:
        strategy: its ranks make the call together.
        tensors: whole tensors, which count on rank 0, or shards.

    Example:
        >>> import torch
        >>> from stratagem import Lite
        >>> strategy = Lite(accelerator="cpu").strategy
        >>> one = fingerprints(strategy, {"a": torch.tensor([1.0, 2.0])})
        >>> one == fingerprints(strategy, {"a": torch.tensor([2.0, 1.0])})
        False
    """
    own = {
        name: [
            [str(chunk.dtype), list(value.shape), list(offsets), list(chunk.shape), _sum(*piece)]
            for offsets, chunk in _chunks(strategy, value)
            for piece in [(chunk, offsets, tuple(value.shape))]
        ]
        for name, value in tensors.items()
    }
    found: dict[str, dict[tuple[Any, ...], int]] = {}
    about: dict[str, str] = {}
    for of_rank in strategy.ranks.gather_objects(own):
        for name, chunks in of_rank.items():
            for dtype, shape, offsets, sizes, value in chunks:
                about.setdefault(name, f"{dtype.removeprefix('torch.')} {tuple(shape)}")
                # A chunk that several ranks have counts once.
                found.setdefault(name, {}).setdefault((*offsets, *sizes), value)
    return {
        name: f"{about[name]} {sum(values.values()) % 2**64:016x}" for name, values in found.items()
    }


def _chunks(strategy: Strategy, value: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, Shards):
        yield from value.chunks
    elif strategy.ranks.is_global_zero:
        yield (0,) * value.ndim, value


def _sum(chunk: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return a sum over the elements of a part of a tensor, of their bits and places."""
    chunk = chunk.detach()
    if not shape:
        chunk, offsets, shape = chunk.reshape(1), (0,), (1,)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    rows = max(1, _BLOCK * len(chunk) // max(1, chunk.numel()))
    total = 0
    for begin in range(0, len(chunk), rows):
        part = chunk[begin : begin + rows].contiguous()
        if part.is_complex():
            part = torch.view_as_real(part)
        bits = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
        places = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape[: len(shape)]):
            first = offsets[dim] + (begin if dim == 0 else 0)
            along = torch.arange(first, first + size, device=part.device) * strides[dim]
            places = places[..., None] + along
        if bits.ndim > places.ndim:  # of complex numbers
            places = places[..., None] * 2 + torch.arange(2, device=part.device)
        places = (places + 1) * _OF_PLACES
        bits = (bits + 1) * _OF_BITS
        mixed = (bits ^ (bits >> 31)) * ((places ^ (places >> 29)) | 1)
        total += int(mixed.sum())
    return total % 2**64
