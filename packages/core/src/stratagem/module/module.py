"""Module: a model with its training step and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from stratagem.data.pytree import map_tensors
from stratagem.errors import UserCodeError
from stratagem.module.hooks import ModuleHooks
from stratagem.module.hyperparameters import HyperParametersMixin, arguments_from, read_checkpoint
from stratagem.module.step_hooks import StepHooks

if TYPE_CHECKING:
    from stratagem.trainer import Trainer
    from stratagem.trainer.metrics.metrics import Metrics

ModuleType = TypeVar("ModuleType", bound="Module")


class LogOptions(NamedTuple):
    """The options of one call of `Module.log`, which describes them."""

    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[[Tensor], Tensor]
    sync_dist: bool | None
    add_dataloader_idx: bool


class Module(StepHooks, HyperParametersMixin, ModuleHooks):
    """A model with its training step and optimizers: what a Trainer trains.

    Override `training_step` and `configure_optimizers`, and what else is needed. The hooks of
    `Callback` may be overridden here too, without their first two arguments.

    A copy, and what is pickled, belongs to no Trainer.

    Example:
        >>> import torch
        >>> from stratagem import Module, Trainer
        >>> class Line(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(1, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         loss = (self.layer(batch) - 2 * batch).square().mean()
        ...         self.log("train_loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.linspace(-1, 1, 64).reshape(-1, 1), 8)
        >>> trainer = Trainer(max_epochs=20, logger=False, enable_checkpointing=False)
        >>> trainer.fit(Line(), loader)
        >>> trainer.callback_metrics["train_loss"] < 1e-2
        tensor(True)
    """

    automatic_optimization: bool = True
    """The Trainer runs backward and steps the optimizer; False: `training_step` does."""
    needs_optimizer: bool = True
    """Refuse None from `configure_optimizers`, where a `return` may be forgotten; False: fit calls
    `training_step` without a backward then, and takes no steps: nothing is logged or saved by
    them."""
    # No annotations, which torch.jit.script would read.
    strict_loading = True  # type: bool | None
    """Refuse a checkpoint that lacks names of this model's, or has others; False: leave those out,
    as for a model whose `state_dict` keeps back a frozen part."""
    example_input_array = None  # type: Any
    """Inputs of `forward`, for a ModelSummary and for exports: a tensor, a tuple or a dict."""
    __jit_unused_properties__ = []  # type: list[str]  # noqa: RUF012  # torch reads a list

    def __init__(self) -> None:
        super().__init__()
        # In __dict__: a plain attribute is found 20 times faster than through nn.Module, and the
        # Trainer must not become part of the model.
        self.__dict__["_trainer"] = None
        self.__dict__["_metrics"] = None

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_trainer": None, "_metrics": None}
        state.pop("_untoggled", None)
        return state

    # -- to be overridden

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch: a scalar tensor, a dict with the key "loss", or None.

        None skips the batch; only where there is one process, since others would wait.
        """
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its schedulers if there are any.

        One of: an optimizer; a list of them (several need `automatic_optimization = False`);
        `(optimizers, schedulers)`; a dict with "optimizer" and "lr_scheduler". A scheduler may be
        given as a dict with "scheduler", "interval" ("epoch" or "step"), "frequency" and "monitor".
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a validation batch; log what is of interest."""
        raise NotImplementedError

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a test batch; log what is of interest."""
        raise NotImplementedError

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the predictions for a batch; by default what `forward` returns."""
        return self(batch)

    def prepare_data(self) -> None:
        """Download and write to disk; on rank 0 of each node, before the others go on."""

    def configure_model(self) -> None:
        """Make the layers; called on every rank, where sharding strategies shard them at once."""

    def configure_callbacks(self) -> Any:
        """Return callbacks that this model needs; one of a type replaces the Trainer's."""
        return []

    def train_dataloader(self) -> Any:
        """Return the loader for training."""
        return None

    def val_dataloader(self) -> Any:
        """Return the loader, or a list of loaders, for validation."""
        return None

    def test_dataloader(self) -> Any:
        """Return the loader, or a list of loaders, for testing."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the loader, or a list of loaders, for predicting."""
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is saved; may add weights-only-safe data to it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint was read, before the model is filled from it."""

    def defines(self, method: str) -> bool:
        """Whether a subclass, or this object, defines a method that has no use here.

        None in a method's place means that there is none.
        """
        own = getattr(self, method)
        return own is not None and getattr(own, "__func__", own) is not getattr(Module, method)

    # -- where it runs

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this model.

        Raises:
            UserCodeError: none does.
        """
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise UserCodeError(
                f"{type(self).__name__} is not attached to a Trainer: this works within "
                "trainer.fit, validate, test and predict only"
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or the CPU if there is none."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter, or the default one if there is none."""
        parameter = next(self.parameters(), None)
        return torch.get_default_dtype() if parameter is None else parameter.dtype

    @property
    def current_epoch(self) -> int:
        """The epoch, counted from 0; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "current_epoch", 0))

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "global_step", 0))

    @property
    def global_rank(self) -> int:
        """This process's rank among all; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "global_rank", 0))

    @property
    def local_rank(self) -> int:
        """This process's rank on its node; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "local_rank", 0))

    @property
    def logger(self) -> Any:
        """The Trainer's first logger, or None; None without a Trainer."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers; none without a Trainer."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        return [] if trainer is None else list(trainer.loggers)

    def freeze(self: ModuleType) -> ModuleType:
        """Let no parameter require a gradient, and set evaluation mode; return the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self: ModuleType) -> ModuleType:
        """Let every parameter require a gradient, and set training mode; return the module."""
        return self.requires_grad_(True).train()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar."""
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, *, sync_grads: bool = False) -> Any:
        """Return every rank's tensors: each of shape (world_size, *shape)."""
        ranks = self.trainer.ranks
        return map_tensors(
            lambda tensor: ranks.all_gather(tensor, sync_grads=sync_grads),
            torch.tensor(data) if isinstance(data, (int, float)) else data,
        )

    # -- logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Tensor], Tensor] = "mean",
        sync_dist: bool | None = None,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value.

        Args:
            name: what it is called, the same on every rank; "step" takes the place of the step
                that loggers are given.
            value: a number, a tensor with one element, or a torchmetrics Metric.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers.
            on_step: as it is at this step; the default in `training_step`.
            on_epoch: reduced over the epoch; the default elsewhere.
            reduce_fx: how over the epoch: "mean" (weighted by batch size), "sum", "max", "min",
                or a function of a tensor of all values.
            sync_dist: reduce over ranks: None: values of an epoch, once at its end; True: values
                of a step too, with a collective at each; False: neither.
            batch_size: samples in the batch; None: the first dim of its first tensor.
            add_dataloader_idx: with several evaluation loaders, tell them apart in the name.
            rank_zero_only: this rank logs it and no other does; it is not reduced over ranks.

        Raises:
            UserCodeError: called outside of a run, the value is not a single number, or it goes
                nowhere, being neither of a step nor of an epoch.
        """
        metrics: Metrics | None = self.__dict__["_metrics"]
        if metrics is None:
            self._log_outside_of_a_run(name, value)
            return
        if rank_zero_only:
            sync_dist = False
        # Once for each value of each step: LogOptions(...) itself takes 0.5 us more.
        options = tuple.__new__(
            LogOptions,
            (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx),
        )
        metrics.log(name, value, options, batch_size)

    def _log_outside_of_a_run(self, name: str, value: Any) -> None:
        raise UserCodeError(
            f"self.log({name!r}, ...) works while a Trainer runs this model, in its steps and "
            "in hooks up to the end of an epoch (on_train_epoch_end, on_validation_epoch_end, "
            "on_test_epoch_end); later, use self.logger.log_metrics({...})"
        )

    def _refuse_options(self, message: str) -> None:
        """Called for unknown options that `configure_optimizers` returned."""
        raise UserCodeError(message)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values, with the options of `log`."""
        for name, value in values.items():
            self.log(name, value, **options)

    @contextmanager
    def logging_to(self, metrics: Metrics | None) -> Iterator[None]:
        """Let `log` write to `metrics` in this context; entered by the Trainer."""
        before, self.__dict__["_metrics"] = self.__dict__["_metrics"], metrics
        try:
            yield
        finally:
            self.__dict__["_metrics"] = before

    # -- other programs

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **options: Any,
    ) -> Any:
        """Return the model in evaluation mode as TorchScript.

        Args:
            file_path: where to save it too.
            method: "script" compiles the code of `forward`, "trace" runs it.
            example_inputs: of `forward`, to trace with; None: `example_input_array`.
            **options: those of `torch.jit.script` or `torch.jit.trace`.

        Raises:
            UserCodeError: there is nothing to trace with, or no such method.
        """
        from stratagem.module import to_torchscript

        return to_torchscript(self, file_path, method, self._example(example_inputs), options)

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **options: Any) -> Any:
        """Write the model in evaluation mode as ONNX, for which the extra `onnx` is needed.

        Args:
            file_path: a path or a file; None: it is returned only.
            input_sample: of `forward`; None: `example_input_array`.
            **options: those of `torch.onnx.export`.

        Raises:
            ConfigurationError: onnx is not installed.
            UserCodeError: there are no inputs.
        """
        from stratagem.module import to_onnx

        return to_onnx(self, file_path, self._example(input_sample), options)

    def _example(self, inputs: Any) -> Any:
        """Return inputs of `forward` on the model's device; None: there are none."""
        inputs = self.example_input_array if inputs is None else inputs
        return map_tensors(lambda tensor: tensor.to(self.device), inputs)

    # -- manual optimization

    def optimizers(self) -> Any:
        """Return the optimizer, or a list of them; their `step` goes through the strategy."""
        optimizers = self.trainer.run.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward through the strategy, where `automatic_optimization = False`."""
        trainer = self.trainer
        trainer.strategy.backward(trainer.run.require_prepared(), loss, *args, **kwargs)

    # -- from a checkpoint

    @classmethod
    def load_from_checkpoint(
        cls: type[ModuleType],
        checkpoint_path: str | Path,
        *,
        map_location: Any = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> ModuleType:
        """Make a model from a checkpoint, with its hyperparameters and weights.

        Args:
            checkpoint_path: what a Trainer saved, a local path or a URL.
            map_location: the model's device; None: the CPU.
            strict: refuse names that do not match; None: as the model's `strict_loading` says.
            **kwargs: arguments of `__init__`, in place of those in the checkpoint.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointMismatchError: says why.
        """
        from stratagem.compile import adopt_compiled
        from stratagem.errors import naming
        from stratagem.launch.rank_zero import rank_zero_warn
        from stratagem.state.state_dict import load_weights

        checkpoint = read_checkpoint(checkpoint_path)
        with naming(checkpoint_path):
            model = cls(**arguments_from(cls, checkpoint, "", kwargs))
        model.configure_model()
        adopt_compiled(model)
        model.on_load_checkpoint(checkpoint)
        with naming(checkpoint_path):
            strict = model.strict_loading is not False if strict is None else strict
            load_weights(model, checkpoint["state_dict"], strict=strict)
        if not checkpoint["state_dict"] and any(True for _ in model.parameters()):
            rank_zero_warn(
                f"{str(checkpoint_path)!r} holds no weights: the model keeps those that "
                "__init__ has given it"
            )
        return model if map_location is None else model.to(map_location)


class _OfClass(classmethod):  # type: ignore[type-arg]
    """A class method that refuses to be called on an instance, whose weights it would not set."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return (
            super().__get__(instance, owner) if instance is None else partial(self._refuse, owner)
        )

    def _refuse(self, owner: type, *args: Any, **kwargs: Any) -> None:
        raise UserCodeError(
            f"load_from_checkpoint returns a new model, and was called on an instance: call "
            f"model = {owner.__name__}.load_from_checkpoint(path)"
        )


# A type checker sees a class method.
Module.load_from_checkpoint = _OfClass(  # type: ignore[method-assign, assignment]
    Module.load_from_checkpoint.__func__  # type: ignore[attr-defined]
)

# torch.jit.script compiles the properties of a class, but for those that it names.
Module.__jit_unused_properties__ = [
    name for base in Module.__mro__ for name, own in vars(base).items() if isinstance(own, property)
]
