"""LightningModule: a Module by Lightning's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import CheckpointMismatchError, ConfigurationError, StratagemError
from stratagem.launch import rank_zero_warn
from stratagem.module import Module
from stratagem.trainer import is_users
from stratagem_lightning.api.core.hparams import HyperparametersMixin
from stratagem_lightning.api.core.saving import of_file
from stratagem_lightning.api.utilities.data import first_of_one
from stratagem_lightning.api.utilities.exceptions import StateDictError
from stratagem_lightning.api.utilities.phrases import in_lightnings_words, with_phrase
from stratagem_lightning.api.utilities.warnings import rank_zero_deprecation

if TYPE_CHECKING:
    import stratagem
    from stratagem_lightning.api.trainer import Trainer

ModuleType = TypeVar("ModuleType", bound="LightningModule")


class LightningModule(HyperparametersMixin, Module):
    """A Module, under the name that Lightning has for it."""

    needs_optimizer = False
    __jit_unused_properties__ = [*Module.__jit_unused_properties__, "fabric"]  # noqa: RUF012 - torch.jit reads a list

    if TYPE_CHECKING:

        @property
        def trainer(self) -> Trainer:
            """The Trainer."""

        @trainer.setter
        def trainer(self, trainer: stratagem.Trainer) -> None: ...

    # -- with Fabric in the place of a Trainer

    @property
    def fabric(self) -> Any:
        """The Fabric that has set this model up.

        None: no Fabric has.
        """
        return self.__dict__.get("_fabric")

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        self.__dict__["_fabric"] = fabric

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers, or Fabric's."""
        return super().loggers if self.fabric is None else list(self.fabric.loggers)

    def log_outside_of_a_run(self, name: str, value: Any) -> None:
        """Let Fabric log; without it say that nothing does."""
        if self.__dict__["_trainer"] is not None:
            super().log_outside_of_a_run(name, value)
        if self.fabric is None:
            rank_zero_warn(
                f"You are trying to `self.log()` {name!r} but the `self.trainer` reference is not "
                f"registered on {type(self).__name__} yet, nor a Fabric: nothing is logged"
            )
            return
        self.fabric.log(name, value)

    def log(  # type: ignore[override]  # in Lightning's order
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value; as `Module.log`, with Lightning's arguments in its order.

        Args:
            name, value, prog_bar, on_step, on_epoch, reduce_fx, sync_dist: as there.
            add_dataloader_idx, batch_size, rank_zero_only: as there.
            logger: as there; None: True.
            enable_graph, metric_attribute: not needed here: no value keeps its graph.
            sync_dist_group: not needed here: a value is reduced over all ranks.
        """
        if logger is False and self.fabric is not None:
            return
        if getattr(self.__dict__["_trainer"], "barebones", False):
            rank_zero_warn(
                "You are trying to `self.log()` but `Trainer(barebones=True)` is configured: it "
                "drops logged values, as they cost time"
            )
            return
        if logger and self.__dict__["_metrics"] is not None and not self.loggers:
            rank_zero_warn(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured: "
                "pass one, as in Trainer(logger=CSVLogger(...))"
            )
        try:
            super().log(
                name,
                value,
                prog_bar,
                logger is not False,
                on_step,
                on_epoch,
                reduce_fx,
                sync_dist,
                batch_size,
                add_dataloader_idx,
                rank_zero_only,
            )
        except StratagemError as error:
            raise with_phrase(error, "log") from error.__cause__
        if on_epoch and on_step is not False:
            self._show_step_value(name)

    def log_dict(  # type: ignore[override]  # in Lightning's order
        self,
        dictionary: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        *more: Any,
        **options: Any,
    ) -> None:
        """Log several values; as `log`, or by one call of Fabric's loggers.

        Args:
            dictionary: values by name.
            prog_bar, logger, *more, **options: as for `log`.
        """
        if self.fabric is None:
            for name, value in dictionary.items():
                self.log(name, value, prog_bar, logger, *more, **options)
        elif logger is not False:
            self.fabric.log_dict(dictionary)

    def _show_step_value(self, name: str) -> None:
        """Let the name of a value of both kinds stand for the step's until the epoch ends.

        Lightning's `callback_metrics` do so in training, and schedulers and callbacks read them.
        """
        metrics = self.__dict__["_metrics"]
        if metrics is None or metrics is not self.trainer.run.metrics:
            return
        entry, latest = metrics.entries[name], self.trainer.run.latest.values
        if entry.on_step and entry.step_name in latest:
            latest[name] = latest[entry.step_name]

    def _refuse_options(self, message: str) -> None:
        """Warn, as Lightning does: the options are left out."""
        found = re.search(r"with \[(.*?)\]", message)
        keys = f"{{{found[1]}}}" if found else "names that are not known"
        said = (
            f"Found unsupported keys in the lr scheduler dict: {keys}. They are ignored. {message}"
        )
        rank_zero_warn(said, RuntimeWarning)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of them, of the Trainer or of Fabric.

        Args:
            use_pl_optimizer: not needed here: a step always goes through the strategy.
        """
        if self.fabric is None:
            return super().optimizers()
        found = self.__dict__["_fabric_optimizers"]
        return found[0] if len(found) == 1 else list(found)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward` for a batch."""
        return self(kwargs["batch"] if "batch" in kwargs else args[0])

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward through the strategy, of the Trainer or of Fabric.

        Raises:
            UserCodeError: the Trainer itself runs backward, with automatic optimization.
        """
        if self.fabric is None:
            super().manual_backward(loss, *args, **kwargs)
        else:
            self.fabric.backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters; as there, or through Fabric."""
        if self.fabric is None:
            passed = self.trainer._arguments.get("gradient_clip_algorithm")
            if None not in (passed, gradient_clip_algorithm) and passed != gradient_clip_algorithm:
                raise ConfigurationError(
                    f"You have set `Trainer(gradient_clip_algorithm={passed!r})` and have passed "
                    f"`clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm!r})`: "
                    "leave one of the two out"
                )
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None:
            by_value = gradient_clip_algorithm == "value"
            self.fabric.clip_gradients(
                self,
                optimizer,
                clip_val=gradient_clip_val if by_value else None,
                max_norm=None if by_value else gradient_clip_val,
            )

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every rank's tensors, each of shape (world_size, *shape); unchanged for one rank.

        Args:
            data: tensors, or numbers.
            group: ignored.
            sync_grads: whether gradients flow through the operation.
        """
        if self.fabric is not None:
            return self.fabric.all_gather(data, group, sync_grads)
        gathered = super().all_gather(data, sync_grads=sync_grads)
        return first_of_one(gathered, self.trainer.world_size)

    @in_lightnings_words
    def to_torchscript(self, *args: Any, **options: Any) -> Any:
        """Return the model as TorchScript; as `Module.to_torchscript`, with Lightning's warning."""
        rank_zero_deprecation(
            "`LightningModule.to_torchscript` has been deprecated in v2.7 and will be removed in "
            "v2.8 of Lightning, as PyTorch has deprecated TorchScript: use torch.export"
        )
        return super().to_torchscript(*args, **options)

    # -- from a checkpoint

    @classmethod
    def load_from_checkpoint(
        cls: type[ModuleType],
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> ModuleType:
        """Create a model from a checkpoint; see `Module.load_from_checkpoint`.

        Args:
            checkpoint_path, **kwargs: see `Module.load_from_checkpoint`.
            map_location: a device, or another `map_location` of `torch.load` (a dict of devices, a
                function), which is queried for the target of CPU tensors; None: the CPU.
            hparams_file: a YAML file with values that override the values of the checkpoint.
            strict: see `Module.load_from_checkpoint`.
            weights_only: ignored: loading never executes code from a checkpoint.

        Raises:
            StateDictError: the weights belong to another model; also a RuntimeError.
        """
        try:
            model = super().load_from_checkpoint(
                checkpoint_path,
                map_location=map_location,
                strict=strict,
                **of_file(hparams_file),
                **kwargs,
            )
        except CheckpointMismatchError as error:
            raise StateDictError.of(error) from error
        own = model.strict_loading
        # Set by the user, not the default.
        if strict not in (None, own) and own is not None and is_users(model, "strict_loading"):
            raise ConfigurationError(
                f"load_from_checkpoint(strict={strict}) is in conflict with "
                f"`{cls.__name__}.strict_loading={own}`: pass the same value, or leave one out"
            )
        return model
