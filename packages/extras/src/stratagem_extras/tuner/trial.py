"""Trials: short runs of a Trainer that leave it, the model and all RNGs as they were."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from stratagem.trainer import (
    LatestValues,
    Progress,
    Run,
    RunState,
    open_evaluation_data,
    open_fit_data,
    source_of,
)

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Job, Trainer

_NOT_IN_A_TRIAL = {
    "min_epochs": 0,
    "min_steps": 0,
    "max_epochs": -1,
    "max_time": None,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 0,
    "detect_divergence": 0,
    "check_val_every_n_epoch": 1,
    "val_check_interval": 1.0,
    "_profiler": None,
}


def check_can_try(trainer: Trainer) -> None:
    """Refuse a Trainer whose trials could not be taken back.

    Raises:
        ConfigurationError: its runs are in processes of their own.
    """
    if trainer.plan.remote:
        raise ConfigurationError(
            f"a Tuner tries runs in this process, and the launcher {trainer.plan.launcher.name!r} "
            "starts processes of their own: tune with devices=1, or with strategy='ddp' in a script"
        )


@contextmanager
def trials(
    trainer: Trainer, model: Module, loaders: Sequence[Any], **options: Any
) -> Iterator[Snapshot]:
    """Let runs in this context be trials, and restore everything at its end, and after each.

    Args:
        trainer: whose options, loggers, callbacks, values and position are restored.
        model: its weights, buffers, modes, gradients and what requires them are restored.
        loaders: the user's loaders and datamodule, whose generators are restored.
        **options: attributes of the Trainer in the trials.
    """
    before = dict(vars(trainer))
    snapshot = Snapshot(trainer, model, loaders)
    vars(trainer).update(
        {
            **_NOT_IN_A_TRIAL,
            "callbacks": [snapshot],
            "loggers": [],
            "_progress": Progress(),
            "_latest": LatestValues(),
            "_run": None,
            "_state": RunState(),
            **options,
        }
    )
    attached = vars(model)["_trainer"]
    try:
        yield snapshot
    finally:
        try:
            snapshot.restore()
        finally:
            vars(trainer).clear()
            vars(trainer).update(before)
            vars(model)["_trainer"] = attached
            gc.collect()


def with_data(trainer: Trainer, job: Job, limits: Mapping[str, int | float]) -> Run:
    """Return a run that has its loaders open, and is not executed; within `trials`.

    Args:
        trainer: a launched one.
        job: what would run.
        limits: the Trainer's own.
    """
    trainer.limits, trainer.callbacks = limits, []
    run = Run(
        trainer,
        trainer.runtime,
        job,
        progress=Progress(),
        latest=LatestValues(),
        before=None,
    )
    if job.stage == "fit":
        open_fit_data(run)
    else:
        what = {"validate": "val"}.get(job.stage, job.stage)
        source = source_of(f"{what}_dataloader", job, None, needed=True)
        open_evaluation_data(run, source, "validation" if what == "val" else what)
    return run


class Snapshot(Callback):
    """What a model and the RNGs were before the first trial; taken when it has begun."""

    def __init__(self, trainer: Trainer, model: Module, loaders: Sequence[Any]) -> None:
        self._trainer = trainer
        self._model = model
        accelerator = trainer.strategy.accelerator
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
        self._weights: dict[str, Any] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._precision: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Note the weights as the strategy has them, before the first step."""
        if self._weights is None:
            self._weights = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in trainer.run.weights().state.items()
            }
            self._buffers = {
                name: buffer.detach().clone() for name, buffer in module.named_buffers()
            }
            self._precision = dict(trainer.strategy.precision.state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        """Make the model and the RNGs what they were."""
        model, trainer = self._model, self._trainer
        run = trainer._run
        if self._weights is not None and run is not None and run.prepared is not None:
            # A copy: some strategies take apart what they are given.
            state = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in self._weights.items()
            }
            trainer.strategy.load_model_state(run.prepared, state)
            trainer.strategy.precision.load_state_dict(dict(self._precision))
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
