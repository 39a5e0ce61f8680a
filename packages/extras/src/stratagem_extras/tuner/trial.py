"""Trials: short runs of Trainers made from a user's, which leave the model and all RNGs alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem.callbacks import Callback
from stratagem.data import generators_of_loader
from stratagem.errors import ConfigurationError
from stratagem.rng import (
    generator_states,
    generators_of,
    rng_state,
    set_generator_states,
    set_rng_state,
)

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.strategies import PreparedModel
    from stratagem.trainer import Trainer, TrainerOptions


def check_can_try(trainer: Trainer) -> None:
    """Raise for a Trainer with trials that could not be undone.

    Raises:
        ConfigurationError: its runs are in separate processes.
    """
    if trainer.plan.remote:
        raise ConfigurationError(
            f"a Tuner tries runs in this process, and the launcher {trainer.plan.launcher.name!r} "
            "starts processes of their own: tune with devices=1, or with strategy='ddp' in a script"
        )


@contextmanager
def trials(trainer: Trainer, model: Module, loaders: Any, **changes: Any) -> Iterator[Trials]:
    """Try runs in this context; at its end, restore the model and all RNGs.

    Args:
        trainer: the Trainer of the user.
        model: its weights, buffers, modes, gradients and `requires_grad` are restored.
        loaders: the loaders and datamodule of the user; their generators are restored.
        **changes: options in which trials differ from the Trainer's.
    """
    options = replace(
        trainer.options,
        min_epochs=0,
        min_steps=0,
        max_epochs=-1,
        max_time=None,
        num_sanity_val_steps=0,
        log_every_n_steps=0,
        detect_divergence=0,
        check_val_every_n_epoch=1,
        val_check_interval=1.0,
    )
    tried = Trials(trainer, replace(options, **changes), Snapshot(trainer, model, loaders))
    attached = vars(model)["_trainer"]
    try:
        yield tried
    finally:
        try:
            tried.snapshot.restore()
        finally:
            vars(model)["_trainer"] = attached
            tried.free_memory()


class Trials:
    """Creates the Trainers of trials.

    Args:
        trainer: the Trainer of the user; the trials share its plan and processes.
        options: the options of the trials.
        snapshot: the model before the first trial.
    """

    def __init__(self, trainer: Trainer, options: TrainerOptions, snapshot: Snapshot) -> None:
        self._trainer = trainer
        self._options = options
        self.snapshot = snapshot

    def make_trainer(self, *callbacks: Callback) -> Trainer:
        """Return a Trainer for one trial, which has run nothing yet."""
        return self._trainer.with_options(self._options, [self.snapshot, *callbacks])

    def free_memory(self) -> None:
        """Give back the device's memory of trials that have ended, which torch keeps in pieces."""
        gc.collect()
        kind = self._trainer.strategy.accelerator.device(0).type
        empty_cache = getattr(getattr(torch, kind, None), "empty_cache", None)
        if empty_cache is not None:  # of torch.cuda and torch.xpu, for example
            empty_cache()


class Snapshot(Callback):
    """A model and the RNGs before the first trial; the weights are copied when it begins."""

    def __init__(self, trainer: Trainer, model: Module, loaders: Sequence[Any]) -> None:
        self._model = model
        self._strategy = trainer.strategy
        accelerator = self._strategy.accelerator
        if trainer.runtime.is_launched:
            self._rng_of = (accelerator, trainer.strategy.device)
        else:
            self._rng_of = (accelerator, accelerator.device(trainer.plan.devices[0]))
        self._random = rng_state(*self._rng_of)
        self._generators = [
            *(g for loader in _flat(loaders) for g in generators_of_loader(loader)),
            *generators_of(model, *loaders),
        ]
        self._generator_states = generator_states(self._generators)
        self._gradients = {name: p.grad for name, p in model.named_parameters()}
        self._required = {name: p.requires_grad for name, p in model.named_parameters()}
        self._modes = {name: part.training for name, part in model.named_modules()}
        model.zero_grad(set_to_none=True)
        self._prepared: PreparedModel | None = None
        """The model of the present trial, once its weights may change."""
        self._weights: dict[str, Any] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._precision: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Copy the weights as the strategy has them, before the first step."""
        self._prepared = trainer.run.require_prepared()
        if self._weights is None:
            self._weights = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in trainer.run.saves.weights().state.items()
            }
            self._buffers = {
                name: buffer.detach().clone() for name, buffer in module.named_buffers()
            }
            self._precision = dict(self._strategy.precision.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the model and the RNGs."""
        model, strategy = self._model, self._strategy
        prepared, self._prepared = self._prepared, None
        if self._weights is not None and prepared is not None:
            # A copy: some strategies take their input apart.
            state = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in self._weights.items()
            }
            strategy.load_model_state(prepared, state)
            strategy.precision.load_state_dict(dict(self._precision))
        for name, buffer in model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        for name, parameter in model.named_parameters():
            parameter.grad = self._gradients.get(name)
            parameter.requires_grad = self._required.get(name, parameter.requires_grad)
        for name, part in model.named_modules():
            part.training = self._modes.get(name, part.training)
        set_generator_states(self._generators, self._generator_states)
        set_rng_state(self._random, *self._rng_of)


def _flat(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for one in loaders:
            yield from _flat(one)
    elif loaders is not None:
        yield loaders
