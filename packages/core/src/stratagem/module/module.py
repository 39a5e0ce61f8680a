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
    from stratagem.interfaces.ranks import Ranks
    from stratagem.trainer import Trainer
    from stratagem.trainer.metrics.metrics import Metrics

ModuleType = TypeVar("ModuleType", bound="Module")


class LogOptions(NamedTuple):
    """The options of one call of `Module.log`; see its arguments."""

    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[[Tensor], Tensor]
    sync_dist: bool | None
    add_dataloader_idx: bool


class Module(StepHooks, HyperParametersMixin, ModuleHooks):
    """Base class of models: a `torch.nn.Module` with its training step and optimizers.

    Override `training_step` and `configure_optimizers`, and other methods as needed. A subclass may
    also override the hooks of `Callback`, without their first two arguments.

    A subclass may define `loss_weight(batch)`, which returns the number of elements that the loss
    of a batch is a mean of, such as its valid tokens. The Trainer calls it before each step with
    the batches as the loader yields them. A step then follows the gradient of the mean over all
    elements of all micro-batches and ranks, however they are distributed. Logged values are not
    weighted: pass `batch_size` to `log`.

    Copies and pickles of a Module are not attached to a Trainer.

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
    """If True, the Trainer runs backward and steps the optimizer. If False, `training_step` has to
    do both."""
    needs_optimizer: bool = True
    """If True, None from `configure_optimizers` is an error, since its `return` may be missing. If
    False, None is accepted: fit then calls `training_step` without a backward pass and takes no
    optimizer steps, so that nothing is logged or saved by steps."""
    # No annotations, which torch.jit.script would read.
    strict_loading = True  # type: bool | None
    """If True, the keys of a checkpoint must be exactly the keys of this model. If False, missing
    and unexpected keys are ignored, as for a model whose `state_dict` omits its frozen layers."""
    example_input_array = None  # type: Any
    """Example inputs of `forward`, a tensor, a tuple or a dict, for ModelSummary and exports."""
    allow_zero_length_dataloader_with_multiple_devices = False
    """Lightning's name; not needed here, since a rank without batches does not end a run."""
    __jit_unused_properties__ = []  # type: list[str]  # noqa: RUF012  # torch reads a list

    def __init__(self) -> None:
        super().__init__()
        # In __dict__: reads are 20 times faster than through nn.Module's __getattr__, and the
        # Trainer does not become a part of the model.
        self.__dict__["_trainer"] = None
        self.__dict__["_metrics"] = None

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_trainer": None, "_metrics": None}
        state.pop("_untoggled", None)
        return state

    # -- methods to override

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute and return the training loss of a batch.

        Returns:
            A scalar tensor, or a dict with the key "loss". None skips the batch, and is an error
            with several processes, because the other ranks would wait for this one.
        """
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning rate schedulers.

        Returns:
            An optimizer; a list of optimizers (several need `automatic_optimization = False`); a
            tuple `(optimizers, schedulers)`; or a dict with the keys "optimizer" and
            "lr_scheduler". A scheduler may also be a dict with the keys "scheduler", "interval"
            ("epoch" or "step"), "frequency" and "monitor".
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a validation batch, and log its metrics with `log`."""
        raise NotImplementedError

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a test batch, and log its metrics with `log`."""
        raise NotImplementedError

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the predictions for a batch; by default, call `forward`."""
        return self(batch)

    def configure_model(self) -> None:
        """Create the layers; called on every rank. Sharding strategies shard them immediately."""

    def configure_callbacks(self) -> Any:
        """Return the callbacks of this model; each replaces the Trainer's callbacks of its type."""
        return []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is saved; may add entries that are weights-only-safe."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint is read, before the model's weights are loaded from it."""

    def defines(self, method: str) -> bool:
        """Return whether a subclass or this object overrides a method of Module.

        A method that is set to None counts as not overridden.
        """
        own = getattr(self, method)
        return own is not None and getattr(own, "__func__", own) is not getattr(Module, method)

    # -- the Trainer and the device

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this model.

        Raises:
            UserCodeError: no Trainer runs it.
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
        """The device of the first parameter; the CPU for a model without parameters."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter; torch's default for a model without parameters."""
        parameter = next(self.parameters(), None)
        return torch.get_default_dtype() if parameter is None else parameter.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether the first parameter is on an accelerator."""
        return self.device.type != "cpu"

    @property
    def device_mesh(self) -> Any:
        """The mesh of devices of a sharding strategy; None under another strategy."""
        return getattr(self.trainer.strategy, "device_mesh", None)

    @property
    def fabric(self) -> None:
        """None: under `Lite`, a model is a plain module, and the loop calls `lite.backward`."""

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "current_epoch", 0))

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken so far; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "global_step", 0))

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "global_rank", 0))

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node; 0 without a Trainer."""
        return int(getattr(self.__dict__.get("_trainer"), "local_rank", 0))

    @property
    def logger(self) -> Any:
        """The Trainer's first logger; None without a logger or a Trainer."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers; an empty list without a Trainer."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        return [] if trainer is None else list(trainer.loggers)

    def freeze(self: ModuleType) -> ModuleType:
        """Turn gradients off for all parameters, and set evaluation mode; return the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self: ModuleType) -> ModuleType:
        """Turn gradients on for all parameters, and set training mode; return the module."""
        return self.requires_grad_(True).train()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar."""
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, *, sync_grads: bool = False) -> Any:
        """Gather tensors from all ranks; each has the shape (world_size, *shape).

        In a step of an evaluation, the ranks that still have a batch take part: the last batches
        may be missing on some ranks, and the first dimension is then smaller than `world_size`.

        Args:
            data: a tensor, a number, or nested collections of them; on each rank of one shape.
            sync_grads: make the operation differentiable.

        Raises:
            UserCodeError: in an evaluation, the tensors of the ranks differ in shape or dtype.
        """
        trainer = self.trainer
        data = torch.tensor(data) if isinstance(data, (int, float)) else data
        if trainer.run.evaluation.what and trainer.ranks.world_size > 1:
            _check_alike(trainer.ranks, data)
        return map_tensors(partial(trainer.ranks.all_gather, sync_grads=sync_grads), data)

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
            name: the name of the value, the same on every rank. A value named "step" replaces the
                step number that the loggers receive.
            value: a number, a tensor with one element, or a torchmetrics Metric.
            prog_bar: if True, show the value in the progress bar.
            logger: if True, send the value to the loggers.
            on_step: if True, log the value of this step. Default: True in `training_step`.
            on_epoch: if True, reduce the value over the epoch. Default: True outside of
                `training_step`.
            reduce_fx: the reduction over the epoch: "mean" (weighted by batch size), "sum", "max",
                "min", or a function that takes a tensor of this rank's values. The results of a
                function are averaged over ranks, but torch.min, torch.max, torch.sum and
                torch.mean count as the names.
            sync_dist: the reduction over ranks. None reduces values of an epoch, once at its end.
                True also reduces values of steps, with a collective in each step. False disables
                both reductions.
            batch_size: the number of samples in the batch, the weight in the mean of an epoch.
                Default: the length of a list of samples, or the first dimension of the first
                tensor that has one, with a warning if other tensors have another.
            add_dataloader_idx: if True, append the loader's index to the name when several
                evaluation loaders run.
            rank_zero_only: if True, the value is not reduced over ranks: loggers receive the value
                of rank 0, and callbacks see the value of their own rank.

        Raises:
            UserCodeError: if called outside of a run, if the value is not a single number, or if
                `on_step` and `on_epoch` are both False.
        """
        metrics: Metrics | None = self.__dict__["_metrics"]
        if metrics is None:
            self.log_outside_of_a_run(name, value)
            return
        if rank_zero_only:
            sync_dist = False
        # This runs for each value in each step, and LogOptions(...) takes 0.5 us longer.
        options = tuple.__new__(
            LogOptions,
            (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx),
        )
        metrics.log(name, value, options, batch_size)

    def log_outside_of_a_run(self, name: str, value: Any) -> None:
        """Called by `log` if no Trainer collects values now; a subclass may send them elsewhere."""
        raise UserCodeError(
            f"self.log({name!r}, ...) works while a Trainer runs this model, in its steps and "
            "in hooks up to the end of an epoch (on_train_epoch_end, on_validation_epoch_end, "
            "on_test_epoch_end); later, use self.logger.log_metrics({...})"
        )

    def _refuse_options(self, message: str) -> None:
        """Called for unknown options that `configure_optimizers` returned."""
        raise UserCodeError(message)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log a dict of values; `options` are the keyword arguments of `log`."""
        for name, value in values.items():
            self.log(name, value, **options)

    @contextmanager
    def logging_to(self, metrics: Metrics | None) -> Iterator[None]:
        """Make `log` write to `metrics` in this context; the Trainer enters it."""
        before, self.__dict__["_metrics"] = self.__dict__["_metrics"], metrics
        try:
            yield
        finally:
            self.__dict__["_metrics"] = before

    # -- export

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **options: Any,
    ) -> Any:
        """Return the model in evaluation mode as TorchScript.

        Args:
            file_path: if given, also save the model to this path.
            method: "script" compiles the code of `forward`; "trace" runs `forward` and records it.
            example_inputs: inputs of `forward` for tracing. Default: `example_input_array`.
            **options: options of `torch.jit.script` or `torch.jit.trace`.

        Raises:
            UserCodeError: if tracing has no inputs, or if `method` is unknown.
        """
        from stratagem.module import to_torchscript

        return to_torchscript(self, file_path, method, self._example(example_inputs), options)

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **options: Any) -> Any:
        """Export the model in evaluation mode to ONNX; this needs the extra `onnx`.

        Args:
            file_path: a path or a file. None: only return the exported program.
            input_sample: inputs of `forward`. Default: `example_input_array`.
            **options: options of `torch.onnx.export`.

        Raises:
            ConfigurationError: if onnx is not installed.
            UserCodeError: if `input_sample` and `example_input_array` are both None.
        """
        from stratagem.module import to_onnx

        return to_onnx(self, file_path, self._example(input_sample), options)

    def to_tensorrt(self, *args: Any, **options: Any) -> Any:
        """Lightning's name; raises an error that says what to use."""
        raise UserCodeError(
            "to_tensorrt: pass the model to torch_tensorrt.compile, or export it by "
            "model.to_onnx(path) and build an engine from the file with trtexec"
        )

    def configure_sharded_model(self) -> None:
        """Lightning's former name of `configure_model`; overriding it is an error."""
        raise UserCodeError("configure_sharded_model is called configure_model")

    def _example(self, inputs: Any) -> Any:
        """Return inputs of `forward` on the model's device, or None without any."""
        inputs = self.example_input_array if inputs is None else inputs
        return map_tensors(lambda tensor: tensor.to(self.device), inputs)

    # -- manual optimization

    def optimizers(self) -> Any:
        """Return the optimizer, or a list of several; their `step` goes through the strategy."""
        optimizers = self.trainer.run.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, or a list of several; None without a scheduler."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward through the strategy; for `automatic_optimization = False`.

        Raises:
            UserCodeError: if `automatic_optimization` is True.
        """
        trainer = self.trainer
        if self.automatic_optimization:
            raise UserCodeError(
                "manual_backward() expected automatic_optimization=False, received True, with "
                "which the Trainer itself runs backward: set self.automatic_optimization = False "
                f"in {type(self).__name__}.__init__, or return the loss without the call"
            )
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
        """Create a model from a checkpoint, with its hyperparameters and weights.

        Args:
            checkpoint_path: a Trainer's checkpoint, as a local path or a URL.
            map_location: the device of the model. Or a dict or a function, as for `torch.load`,
                that returns the device for tensors of the CPU. Default: the CPU.
            strict: if True, the keys of the checkpoint must be the keys of the model. Default: the
                model's `strict_loading`.
            **kwargs: arguments of `__init__`; these replace saved hyperparameters.

        Raises:
            CheckpointNotFoundError: if the path does not exist.
            CheckpointCorruptError: if the file is damaged.
            CheckpointMismatchError: if the checkpoint does not fit the class.
            UserCodeError: if `map_location` is of another kind.
        """
        from stratagem.compile import adopt_compiled
        from stratagem.errors import naming
        from stratagem.launch.rank_zero import rank_zero_warn
        from stratagem.state.state_dict import load_weights

        device = _device_for(map_location)
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
                f"{str(checkpoint_path)!r} contains no parameters: the model keeps those that "
                "__init__ has given it"
            )
        return model if device is None else model.to(device)


def _device_for(map_location: Any) -> torch.device | None:
    """Return the device that `map_location` chooses for tensors of the CPU.

    None: it chooses no device.

    Raises:
        UserCodeError: if `map_location` is no device, dict or function, or if torch does not know
            the device.
    """
    chosen = map_location
    if isinstance(map_location, Mapping):
        chosen = map_location.get("cpu", "cpu")
    elif callable(map_location) and not isinstance(map_location, type):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        chosen = getattr(moved, "device", None)
    if chosen is None or isinstance(chosen, torch.device):
        return chosen
    try:
        return torch.device(chosen)
    except (TypeError, RuntimeError) as error:
        raise UserCodeError(
            f"map_location={map_location!r}: expected a device such as 'cpu' or 'cuda:0', a dict "
            f"of devices, or a function of a storage and its device ({error})"
        ) from error


class _OfClass(classmethod):  # type: ignore[type-arg]
    """A class method that raises if called on an instance, whose weights it would not load."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return (
            super().__get__(instance, owner) if instance is None else partial(self._refuse, owner)
        )

    def _refuse(self, owner: type, *args: Any, **kwargs: Any) -> None:
        raise UserCodeError(
            f"load_from_checkpoint returns a new model, and was called on an instance: call "
            f"model = {owner.__name__}.load_from_checkpoint(path)"
        )


# Assigned below the class, so that type checkers see a class method.
Module.load_from_checkpoint = _OfClass(  # type: ignore[method-assign, assignment]
    Module.load_from_checkpoint.__func__  # type: ignore[attr-defined]
)

# torch.jit.script compiles all properties of a class except the ones in this list.
Module.__jit_unused_properties__ = [
    name for base in Module.__mro__ for name, own in vars(base).items() if isinstance(own, property)
]


def _check_alike(ranks: Ranks, data: Any) -> None:
    """Check that the tensors to gather have one shape and dtype on all ranks.

    Raises:
        UserCodeError: they differ, for example because the last batches differ in size.
    """
    own: list[str] = []
    map_tensors(lambda tensor: own.append(f"{tuple(tensor.shape)} {tensor.dtype}"), data)
    of_ranks = ranks.gather_objects(own)
    if any(one != of_ranks[0] for one in of_ranks):
        listed = "; ".join(
            f"{', '.join(one) or 'no tensor'} on rank {rank}"
            for rank, one in zip(ranks.members, of_ranks, strict=True)
        )
        raise UserCodeError(
            f"self.all_gather() received {listed}; expected tensors of one shape and dtype. Ranks "
            "have different numbers of samples in the last batches of an evaluation, and in its "
            "epoch: self.trainer.ranks.gather_objects(tensor) returns a list of the ranks' tensors"
        )
