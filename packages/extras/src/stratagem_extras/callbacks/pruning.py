"""ModelPruning: sets the weights that matter least to zero, and keeps them there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_info

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.module import Module
    from stratagem.trainer import Trainer

_METHODS = {
    "l1_unstructured": prune.L1Unstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}


class ModelPruning(Callback):
    """Prunes weights at the end of epochs, by the methods of `torch.nn.utils.prune`.

    Masks are kept in the callback, not in the model: weights and gradients are masked around each
    optimizer step. Parameters and checkpoints therefore keep their names, and a resumed run has the
    masks of the previous run. The `amount` of an epoch applies to weights that are not pruned yet.
    An epoch that `max_steps` or a stop ends early does not prune.

    Args:
        pruning_fn: "l1_unstructured", "ln_structured", "random_structured", "random_unstructured",
            or a subclass of `torch.nn.utils.prune.BasePruningMethod`.
        parameters_to_prune: pairs of a module and the name of its parameter; None: all parameters
            with a name in `parameter_names`.
        parameter_names: None: "weight" and "bias".
        use_global_unstructured: compare the weights of all parameters with one another.
        amount: fraction of the weights (float from 0 to 1) or number (int), or a function of the
            epoch.
        apply_pruning: whether to prune in an epoch, or a function of the epoch.
        make_pruning_permanent: False: after training, weights are replaced by a parameter
            `weight_orig` and a buffer `weight_mask`, as in torch's utilities.
        use_lottery_ticket_hypothesis: reset the remaining weights to their first values; a bool, or
            a function of the epoch that returns a bool.
        resample_parameters: reset them to new initial values instead.
        pruning_dim, pruning_norm: options of structured methods.
        verbose: 1: print the pruned fraction of all weights; 2: of each parameter too.
        prune_on_train_epoch_end: False: prune after validation.

    Raises:
        ConfigurationError: the method is unknown; arguments do not fit the method; when a fit
            begins, the model has no parameter to prune, or parameters are sharded.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ModelPruning
        >>> pruning = ModelPruning("l1_unstructured", amount=0.2)
        >>> pruning in Trainer(callbacks=pruning, logger=False).callbacks
        True
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: str | type[prune.BasePruningMethod],
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = None,
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        method = _METHODS.get(pruning_fn) if isinstance(pruning_fn, str) else pruning_fn
        if not (isinstance(method, type) and issubclass(method, prune.BasePruningMethod)):
            raise ConfigurationError(
                f"ModelPruning(pruning_fn={pruning_fn!r}): expected one of "
                f"{', '.join(sorted(_METHODS))}, or a subclass of BasePruningMethod"
            )
        structured = issubclass(method, (prune.LnStructured, prune.RandomStructured))
        if structured and (use_global_unstructured or pruning_dim is None):
            raise ConfigurationError(
                f"ModelPruning(pruning_fn={pruning_fn!r}) prunes along a dim: expected "
                "use_global_unstructured=False and a pruning_dim, received "
                f"use_global_unstructured={use_global_unstructured!r}, pruning_dim={pruning_dim!r}"
            )
        if method is prune.LnStructured and pruning_norm is None:
            raise ConfigurationError(
                "ModelPruning(pruning_fn='ln_structured') compares by a norm: expected "
                "pruning_norm, such as 1 or 2"
            )
        self._method = method
        self._arguments: dict[str, Any] = {"dim": pruning_dim} if structured else {}
        if method is prune.LnStructured:
            self._arguments["n"] = pruning_norm
        self._given = list(parameters_to_prune or ())
        self._names = tuple(parameter_names or self.PARAMETER_NAMES)
        self._is_global = use_global_unstructured
        self._amount = amount
        self._apply = apply_pruning
        self._permanent = make_pruning_permanent
        self._lottery = use_lottery_ticket_hypothesis
        self._resample = resample_parameters
        self._verbose = verbose
        self._after_training = prune_on_train_epoch_end
        self._pruned: dict[str, tuple[nn.Module, str]] = {}
        self._masks: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}
        self._restored: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        """Names the method: a run may prune by several."""
        return f"ModelPruning({self._method.__name__})"

    @property
    def masks(self) -> dict[str, Tensor]:
        """The mask of each parameter: 1.0 for a kept element, 0.0 for a pruned one."""
        return dict(self._masks)

    # -- called by the Trainer

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Find the parameters; go on with the masks of the run that is resumed."""
        if trainer.plan.capabilities.sharded_state:
            raise ConfigurationError(
                f"ModelPruning compares whole weights, and {trainer.plan.strategy.name!r} shards "
                "them: use a strategy with a whole model on each rank"
            )
        self._pruned = self._find(module)
        if not self._pruned:
            raise ConfigurationError(
                f"ModelPruning found nothing to prune in {type(module).__name__}: expected "
                f"parameters named {' or '.join(self._names)}, or pass parameters_to_prune"
            )
        restored, self._restored = self._restored, {}
        device = trainer.strategy.device
        self._masks = {name: m.to(device) for name, m in restored.get("masks", {}).items()}
        first = restored.get("first", {})
        if self._lottery and not first:
            first = {name: p.detach().clone() for name, p in self._parameters().items()}
        self._first = {name: value.to(device) for name, value in first.items()}

    def on_before_optimizer_step(
        self, trainer: Trainer, module: Module, optimizer: Optimizer
    ) -> None:
        """Set the gradients of pruned elements to zero."""
        for name, parameter in self._parameters().items() if self._masks else ():
            if parameter.grad is not None:
                parameter.grad.mul_(self._masks[name])

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep pruned elements at zero, whatever the optimizer did."""
        if self._masks and not trainer.is_within_step:
            self._mask()

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Prune; a run that resumes in a cut epoch does so at its end."""
        if self._after_training and trainer.run.state.epoch_is_done:
            self._prune(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Prune."""
        if not self._after_training and trainer.state.fn == "fit" and not (trainer.sanity_checking):
            self._prune(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Leave masks in the model unless pruning is permanent."""
        if not self._permanent:
            for name, (owner, attribute) in self._pruned.items():
                if name in self._masks:
                    if self._lottery:
                        self._fill_with_first(name, getattr(owner, attribute))
                    prune.custom_from_mask(owner, attribute, self._masks[name])  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _fill_with_first(self, name: str, parameter: nn.Parameter) -> None:
        """Give pruned elements their first values, which `weight_orig` keeps behind the mask."""
        if name in self._first:
            parameter.copy_(torch.where(self._masks[name] == 0, self._first[name], parameter))

    def state_dict(self) -> dict[str, Any]:
        """Return masks and first values."""
        return {"masks": dict(self._masks), "first": dict(self._first)} if self._pruned else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them when the fit begins."""
        self._restored = dict(state)

    # -- pruning

    def _find(self, module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        prefixes = {id(part): name for name, part in module.named_modules()}
        pairs = self.sanitize_parameters_to_prune(module, self._given, self._names)
        return {f"{prefixes[id(part)]}.{name}".lstrip("."): (part, name) for part, name in pairs}

    @classmethod
    def sanitize_parameters_to_prune(
        cls,
        pl_module: nn.Module,
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = None,
        parameter_names: Sequence[str] | None = None,
    ) -> list[tuple[nn.Module, str]]:
        """Return the parameters of a model that would be pruned, each once.

        Args:
            pl_module: the model.
            parameters_to_prune, parameter_names: as the class takes them.

        Raises:
            ConfigurationError: a pair is no submodule with the name of its own parameter.
        """
        names, parts = parameter_names or cls.PARAMETER_NAMES, list(pl_module.modules())
        wanted = parameters_to_prune or [(part, name) for part in parts for name in names]
        own = {id(part) for part in parts}
        found: dict[int, tuple[nn.Module, str]] = {}
        for part, name in wanted:
            parameter = part._parameters.get(name)
            if parameter is None and not parameters_to_prune:
                continue
            if parameter is None or id(part) not in own:
                raise ConfigurationError(
                    f"ModelPruning(parameters_to_prune=...): {type(part).__name__} with {name!r}; "
                    "expected submodules of the model, each with the name of its own parameter"
                )
            found.setdefault(id(parameter), (part, name))
        return list(found.values())

    def _parameters(self) -> dict[str, nn.Parameter]:
        found: dict[str, Any] = {
            name: getattr(owner, attribute) for name, (owner, attribute) in self._pruned.items()
        }
        return found

    @torch.no_grad()
    def _mask(self) -> None:
        for name, parameter in self._parameters().items():
            parameter.mul_(self._masks[name])

    def _prune(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        if not (self._apply(epoch) if callable(self._apply) else self._apply):
            return
        amount = self._amount(epoch) if callable(self._amount) else self._amount
        if not amount:
            return
        # All ranks have the same weights; if torch draws the mask at random, rank 0's counts.
        masks, before = self._draw_masks(amount), self._gone()
        self._masks = {
            name: trainer.ranks.broadcast(mask) if trainer.world_size > 1 else mask
            for name, mask in masks.items()
        }
        self._mask()
        if self._lottery(epoch) if callable(self._lottery) else self._lottery:
            self._begin_again(trainer)
        if self._verbose and trainer.is_global_zero:
            self._say(amount, before)

    def _draw_masks(self, amount: int | float) -> dict[str, Tensor]:
        """Let torch prune copies of the parameters, which have the masks by now."""
        copies: dict[str, nn.Module] = {}
        for name, parameter in self._parameters().items():
            holder = copies[name] = nn.Module()
            holder.register_parameter("weight", nn.Parameter(parameter.detach().clone()))
            if name in self._masks:
                prune.custom_from_mask(holder, "weight", self._masks[name])  # type: ignore[no-untyped-call]
        if self._is_global:
            pairs = [(holder, "weight") for holder in copies.values()]
            prune.global_unstructured(
                pairs, pruning_method=self._method, amount=amount, **self._arguments
            )
        else:
            for holder in copies.values():
                self._method.apply(holder, "weight", amount, **self._arguments)  # type: ignore[no-untyped-call]
        return {name: _mask_of(holder) for name, holder in copies.items()}

    @torch.no_grad()
    def _begin_again(self, trainer: Trainer) -> None:
        """Give what is left its first values, or new ones of the same kind."""
        first = dict(self._first)
        if self._resample:
            for name, (owner, attribute) in self._pruned.items():
                new = copy.deepcopy(owner)
                reset: Any = getattr(new, "reset_parameters", None)
                if reset is not None:
                    reset()
                    value = getattr(new, attribute).detach()
                    first[name] = (
                        trainer.ranks.broadcast(value) if trainer.world_size > 1 else value
                    )
        for name, parameter in self._parameters().items():
            if name in first:
                parameter.copy_(first[name] * self._masks[name])

    def _gone(self) -> dict[str, int]:
        """Return how many weights of each parameter are pruned."""
        return {name: int((mask == 0).sum()) for name, mask in self._masks.items()}

    def _say(self, amount: int | float, before: Mapping[str, int]) -> None:
        sizes = {name: mask.numel() for name, mask in self._masks.items()}
        gone, total, kind = self._gone(), sum(sizes.values()), self._method.__name__
        then, now = (_part(sum(pruned.values()), total, f"/{total}") for pruned in (before, gone))
        rank_zero_info(f"Applied `{kind}`. Pruned: {then} -> {now}")
        for name, size in sizes.items() if self._verbose > 1 else ():
            then, now = (_part(pruned.get(name, 0), size) for pruned in (before, gone))
            rank_zero_info(
                f"Applied `{kind}` to `{self._title(name)}` with amount={amount}. Pruned: {then} "
                f"-> {now}"
            )

    def _title(self, name: str) -> str:
        """Return the text by which a message names a parameter."""
        return name


def _part(pruned: int, total: int, of: str = "") -> str:
    return f"{pruned}{of} ({pruned / total:.2%})"


def _mask_of(holder: nn.Module) -> Tensor:
    mask: Any = getattr(holder, "weight_mask", None)
    return torch.ones_like(holder.get_parameter("weight")) if mask is None else mask.detach()
