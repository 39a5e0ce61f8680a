"""BaseFinetuning and BackboneFinetuning: parts of a model are trained from a later epoch on."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError, UserCodeError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

Modules = nn.Module | Iterable[Any]


class BaseFinetuning(Callback):
    """Freezes parts of a model before training, and unfreezes them at the start of an epoch.

    Override `freeze_before_training` and `finetune_function`. Let `configure_optimizers` return an
    optimizer of the parameters that are trained from the first epoch on:
    `filter(lambda p: p.requires_grad, self.parameters())`.

    Parameter groups that were added are made again when a run resumes, and the epoch in which it
    was interrupted is not counted twice.

    Example:
        >>> from stratagem.callbacks import BaseFinetuning
        >>> class Unfreeze(BaseFinetuning):
        ...     def freeze_before_training(self, module):
        ...         self.freeze(module.backbone)
        ...     def finetune_function(self, module, epoch, optimizer):
        ...         if epoch == 3:
        ...             self.unfreeze_and_add_param_group(module.backbone, optimizer)

        >>> from torch import nn
        >>> backbone = nn.Linear(2, 2)
        >>> BaseFinetuning.freeze(backbone)
        >>> [parameter.requires_grad for parameter in backbone.parameters()]
        [False, False]
    """

    def __init__(self) -> None:
        self._last_epoch = -1

    # -- to be overridden

    @abstractmethod
    def freeze_before_training(self, module: Module) -> None:
        """Freeze the modules that do not train at first; called before `configure_optimizers`."""
        raise NotImplementedError(f"{type(self).__name__} has to define freeze_before_training()")

    @abstractmethod
    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the modules that train from this epoch on; called at the start of each epoch.

        Args:
            module: the model.
            epoch: counted from 0.
            optimizer: each of the model's in turn.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define finetune_function()")

    # -- parts of overrides

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return all submodules that have parameters of their own, or nothing inside."""
        if isinstance(modules, nn.ModuleDict):
            modules = list(modules.values())
        if not isinstance(modules, nn.Module):
            return [part for one in modules for part in BaseFinetuning.flatten_modules(one)]
        return [
            part
            for part in modules.modules()
            if not list(part.children()) or next(part.parameters(recurse=False), None) is not None
        ]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:
        """Yield the parameters that require a gradient, or the frozen ones.

        Args:
            modules: the modules to search.
            train_bn: include parameters of batch norm.
            requires_grad: True for parameters that require a gradient, False for frozen parameters.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm) and not train_bn:
                continue
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad is requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Let all parameters require a gradient, and batch norm take statistics."""
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm):
                part.track_running_stats = True
            part.requires_grad_(True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Let the parameters of one module require no gradient, and batch norm keep its statistics.

        Args:
            module: submodules keep theirs.
        """
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze modules with all that is in them; with `train_bn`, batch norm is still trained."""
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(part)
            else:
                BaseFinetuning.freeze_module(part)

    @staticmethod
    def filter_on_optimizer(
        optimizer: Optimizer, params: Iterable[nn.Parameter]
    ) -> list[nn.Parameter]:
        """Return the parameters that an optimizer does not have yet."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [parameter for parameter in params if id(parameter) not in held]

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add a group of their parameters that the optimizer lacks.

        Args:
            modules: the modules to unfreeze.
            optimizer: the optimizer that trains the modules.
            lr: the learning rate of the group; None: the rate of the optimizer's first group,
                divided by `initial_denom_lr`.
            initial_denom_lr: the divisor.
            train_bn: include the parameters of batch norm.

        A warning is raised if the optimizer already has some of the frozen parameters: they stay in
        their own group.
        """
        frozen = list(BaseFinetuning.filter_params(modules, requires_grad=False))
        if held := len(frozen) - len(BaseFinetuning.filter_on_optimizer(optimizer, frozen)):
            warnings.warn(
                f"{held} of the parameters that are unfrozen were in the optimizer while they were "
                "frozen, and are trained at the learning rate of their group there. Did you init "
                "your optimizer in configure_optimizers() with all parameters? For a learning rate "
                "of their own, give it only those that require a gradient",
                stacklevel=2,
            )
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else lr
        found = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        if parameters := BaseFinetuning.filter_on_optimizer(optimizer, found):
            # Batch norm had gradients while it was in no optimizer, so that nothing cleared them.
            for parameter in parameters:
                parameter.grad = None
            optimizer.add_param_group({"params": parameters, "lr": rate})

    # -- called by the Trainer

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Freeze, before optimizers are made."""
        if stage == "fit":
            self._last_epoch = -1
            self.freeze_before_training(module)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Unfreeze the modules of this epoch, except in an epoch that a resumed run continues."""
        if trainer.current_epoch <= self._last_epoch:
            return
        for optimizer in trainer.optimizers:
            groups = len(optimizer.param_groups)
            self.finetune_function(module, trainer.current_epoch, optimizer)
            _let_schedulers_know(trainer, optimizer, groups)
        self._last_epoch = trainer.current_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the last epoch for which `finetune_function` was called."""
        return {"last_epoch": self._last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._last_epoch = state["last_epoch"]

    def on_save_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Note which parameters each group has, and which are trained, by name."""
        if "progress" not in checkpoint:
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        checkpoint.setdefault("finetuning", {})[self.state_key] = {
            "trained": [name for name, p in module.named_parameters() if p.requires_grad],
            "frozen_statistics": [
                name
                for name, part in module.named_modules()
                if isinstance(part, _BatchNorm) and not part.track_running_stats
            ],
            "groups": [
                [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
                for groups in (optimizer.param_groups for optimizer in trainer.optimizers)
            ],
        }

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Make the groups that the checkpoint's optimizers had, before their state is loaded."""
        state = checkpoint.get("finetuning", {}).get(self.state_key)
        if state is None or trainer.run.stage != "fit":
            return
        parameters = dict(module.named_parameters())
        trained, without = set(state["trained"]), set(state["frozen_statistics"])
        if missing := trained - parameters.keys():
            raise UserCodeError(
                f"{type(self).__name__}: the checkpoint was saved while {sorted(missing)[0]!r} was "
                f"trained, which {type(module).__name__} does not have: resume with the model that "
                "it was saved with"
            )
        for name, parameter in parameters.items():
            parameter.requires_grad = name in trained
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm):
                part.track_running_stats = name not in without
        for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=False):
            for names in groups[len(optimizer.param_groups) :]:
                before = len(optimizer.param_groups)
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
                _let_schedulers_know(trainer, optimizer, before)


def _let_schedulers_know(trainer: Trainer, optimizer: Optimizer, groups: int) -> None:
    """Give torch's schedulers of an optimizer a base learning rate for groups after the first.

    In a cycle, the learning rate of such a group keeps its ratio to that of the first group.
    """
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups[groups:]:
        ratio = group["lr"] / first["lr"] if first["lr"] else 1.0
        if "max_lr" in first:  # of OneCycleLR
            rates = ("initial_lr", "max_lr", "min_lr")
            group.update({name: ratio * first[name] for name in rates})
        for name in ("base_momentum", "max_momentum"):
            if name in first:
                group[name] = first[name]
        group.setdefault("initial_lr", group["lr"])
        for config in trainer.lr_scheduler_configs:
            if getattr(config.scheduler, "optimizer", None) is optimizer:
                _add_group(config.scheduler, group, ratio)


def _add_group(scheduler: Any, group: Mapping[str, Any], ratio: float) -> None:
    """Add a parameter group to a scheduler and to the schedulers that it contains.

    Args:
        scheduler: a scheduler of torch.
        group: the further group.
        ratio: its learning rate divided by the rate of the first group.
    """
    added: dict[str, float | None] = {
        "base_lrs": group["initial_lr"],
        "_last_lr": group["lr"],
        **dict.fromkeys(("min_lrs", "base_momentums", "max_momentums")),
    }
    if isinstance(scheduler, CyclicLR):
        added |= {name: ratio * getattr(scheduler, name)[0] for name in ("base_lrs", "max_lrs")}
    for name, value in added.items():
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and values:
            # A list may be shared with another scheduler, which gets a list of its own.
            setattr(scheduler, name, [*values, values[-1] if value is None else value])
    functions = getattr(scheduler, "lr_lambdas", None)
    if functions:
        functions.append(functions[-1])
    for part in getattr(scheduler, "_schedulers", ()):
        _add_group(part, group, ratio)


def multiplicative(epoch: int) -> float:
    """Return the factor of the backbone's learning rate in each epoch: 2."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Trains `module.backbone` from an epoch on, at a learning rate that grows from there.

    Args:
        unfreeze_backbone_at_epoch: epoch, counted from 0.
        lambda_func: returns the factor of the backbone's learning rate in an epoch.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a fraction of the rate of
            the optimizer's first group.
        backbone_initial_lr: the backbone's first learning rate; None uses the fraction.
        should_align: limit the rate to the rate of the first group.
        initial_denom_lr: the divisor of the first group's rate if both other arguments are missing.
        train_bn: train batch norm from the first epoch on.
        verbose: print both learning rates in each epoch.
        rounding: the number of printed digits.

    Raises:
        ConfigurationError: when a fit begins, the model has no `backbone`.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import BackboneFinetuning
        >>> later = BackboneFinetuning(5, lambda epoch: 1.5)
        >>> later in Trainer(callbacks=later, logger=False).callbacks
        True
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Refuse a model without a backbone."""
        if not isinstance(getattr(module, "backbone", None), nn.Module):
            raise ConfigurationError(
                f"BackboneFinetuning unfreezes module.backbone, and {type(module).__name__} has no "
                "such submodule: name it so, or subclass BaseFinetuning"
            )

    def freeze_before_training(self, module: Module) -> None:
        """Freeze the backbone."""
        backbone = getattr(module, "backbone", None)
        if isinstance(backbone, nn.Module):
            self.freeze(backbone, train_bn=self.train_bn)

    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze it, or let its learning rate grow."""
        backbone: Any = module.backbone
        current = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            rate = self.backbone_initial_lr
            if rate is None:
                rate = current * self.backbone_initial_ratio_lr
            self.previous_backbone_lr = rate
            self.unfreeze_and_add_param_group(
                backbone, optimizer, rate, self.initial_denom_lr, train_bn=self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = min(rate, current) if self.should_align else rate
            last, own = optimizer.param_groups[-1], {id(p) for p in backbone.parameters()}
            if own.issuperset(id(parameter) for parameter in last["params"]):
                last["lr"] = rate
            self.previous_backbone_lr = rate
        if self.verbose:
            backbone_lr = self.previous_backbone_lr or 0.0
            module.print(
                f"Current lr: {round(current, self.rounding)}, "
                f"Backbone lr: {round(backbone_lr, self.rounding)}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the backbone's learning rate too."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        super().load_state_dict(state)
        self.previous_backbone_lr = state["previous_backbone_lr"]
