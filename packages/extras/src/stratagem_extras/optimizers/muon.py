"""Muon for models on one device and on many: each rank orthogonalizes its share of the matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from stratagem.errors import ConfigurationError
from stratagem_extras.optimizers.exchange import Exchange
from stratagem_extras.optimizers.shards import gradient_of, local_of

ADAMW_NAMES = (
    "*embed*",
    "*wte.*",
    "*wpe.*",
    "*lm_head*",
    "*head.weight",
    "*classifier*",
    "*score.weight",
)
"""Patterns of the names that embeddings and heads have in many models."""

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Optimizer):
    """Muon for the matrices of hidden layers, and AdamW for all other parameters.

    One optimizer steps the whole model. Matrices have the numbers of `torch.optim.Muon`, and
    other parameters have the numbers of `torch.optim.AdamW`: biases, norms, embeddings and heads.

    On several ranks each matrix has one rank that orthogonalizes it. If parameters are sharded
    (fsdp, a mesh), the shards of a matrix go to this rank and the shards of its update come back.
    If each rank holds all parameters (ddp), only updates are sent. The momentum stays in shards.

    Matrices are parameters with two dimensions, unless a pattern in `adamw_names` matches a name. A
    group with `"muon": True` takes all of its parameters as matrices, and a parameter of shape
    (n, rows, columns) in it as n matrices, such as the weights of experts. A group with
    `"muon": False` leaves all of its parameters to AdamW.

    Args:
        params: a model, `model.named_parameters()`, or groups: dicts of "params" with "names" (see
            `parameter_groups`) or "muon".
        lr: the learning rate of matrices.
        weight_decay: the decoupled weight decay of matrices.
        momentum: the factor of the momentum.
        nesterov: whether to use Nesterov's momentum.
        ns_coefficients: the three coefficients of a Newton-Schulz step.
        eps: the smallest norm that a matrix is divided by.
        ns_steps: the number of Newton-Schulz steps.
        adjust_lr_fn: the factor of the learning rate by shape: "original" (also None), or
            "match_rms_adamw".
        ns_dtype: the dtype of the Newton-Schulz steps. In bfloat16, as in torch, a gradient that
            differs in its last bit can change an update by 0.4 percent. Runs on different numbers
            of ranks agree to 1e-6 with float32.
        adamw_names: patterns of the names of matrices that AdamW steps. Given a model, weights of
            `nn.Embedding` and of `get_output_embeddings()` are added, under any name.
        adamw_lr: the learning rate of AdamW; by default `lr`.
        adamw_weight_decay: the weight decay of AdamW; by default `weight_decay`.
        adamw_betas: the two coefficients of AdamW's averages.
        adamw_eps: the term that AdamW adds to the denominator.
        distributed: whether ranks share the work, if torch.distributed is initialized. With False,
            each rank steps all matrices, which must not be sharded.

    Raises:
        ConfigurationError: parameters have no names, an option is not accepted, or a parameter of
            another number of dimensions is in a group with `"muon": True`.

    Example:
        >>> import torch
        >>> from stratagem_extras.optimizers import Muon
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> optimizer = Muon(model, lr=0.02, adamw_lr=1e-3)
        >>> [(group["names"], group["lr"], group["muon"]) for group in optimizer.param_groups]
        [(['1.weight'], 0.02, True), (['0.weight', '1.bias'], 0.001, False)]
        >>> model(torch.arange(8)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        adamw_names: Sequence[str] = ADAMW_NAMES,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        distributed: bool = True,
    ) -> None:
        for name, value in {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}.items():
            if not value >= 0:
                raise ConfigurationError(f"Muon({name}={value!r}): expected a number from 0 on")
        if adjust_lr_fn not in _ADJUSTMENTS:
            raise ConfigurationError(
                f"Muon(adjust_lr_fn={adjust_lr_fn!r}): expected 'original' or 'match_rms_adamw'"
            )
        if not 0 <= ns_steps < 100:
            raise ConfigurationError(f"Muon(ns_steps={ns_steps!r}): expected 0 to 99 steps")
        given, self._names, self._embeddings = _groups(params)
        self._adamw_names = tuple(adamw_names)
        self._adamw_rates = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        self.distributed = distributed
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._steps_own = False
        """Whether ranks have different parameters (ddp_sharded), and never meet in a step."""
        super().__init__(
            given,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "ns_dtype": ns_dtype,
                "betas": adamw_betas,
                "adamw_eps": adamw_eps,
            },
        )

    def __getstate__(self) -> dict[str, Any]:
        # A process group is of this process only.
        return {
            **super().__getstate__(),
            "distributed": self.distributed,
            **{name: vars(self)[name] for name in ("_adamw_names", "_adamw_rates")},
            # Of the parameters of this process.
            "_names": {},
            "_embeddings": set(),
            "_exchanges": {},
            "_steps_own": False,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as one group for Muon and one for AdamW.

        Args:
            param_group: "params" with "names" or "muon", and options such as "lr". Names are known
                of parameters that belong to the model, or the named parameters, given at first.

        Raises:
            ConfigurationError: parameters have no names, or a shape that Muon does not step.
        """
        given = dict(param_group)
        for is_muon, chosen in self._divided(given).items():
            if chosen:
                options = {k: v for k, v in given.items() if k not in ("params", "names", "muon")}
                rates = {} if is_muon else self._adamw_rates
                names, members = [name for name, _ in chosen], [p for _, p in chosen]
                group = {"params": members, "names": names, "muon": is_muon, **rates, **options}
                super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the result of the closure.

        Raises:
            ConfigurationError: ranks hold different matrices, or different gradients of one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = []
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                matrices += [(p, group) for p in held]
            else:
                self._step_adamw(group, held)
        if matrices or any(group["muon"] for group in self.param_groups):
            self._step_matrices(matrices)
        return loss

    def _step_matrices(self, matrices: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        """Step the matrices, each on its owner."""
        gradients = [gradient_of(p, "Muon") for p, _ in matrices]
        exchange = self._exchange([p for p, _ in matrices], gradients)

        def momentum(index: int) -> Tensor:
            parameter, group = matrices[index]
            state, gradient = self.state[parameter], local_of(gradients[index])
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradients[index])
            buffer = local_of(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - group["momentum"])
            return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

        def update(index: int, whole: Tensor) -> Tensor:
            group = matrices[index][1]
            return orthogonalize(
                whole.to(group["ns_dtype"]),
                group["ns_coefficients"],
                group["ns_steps"],
                group["eps"],
            )

        def apply(index: int, updated: Tensor) -> None:
            parameter, group = matrices[index]
            lr = float(group["lr"])
            own = local_of(parameter)
            own.mul_(1 - lr * group["weight_decay"])
            own.add_(updated, alpha=-lr * _factor(group["adjust_lr_fn"], parameter.shape))

        if exchange is None:
            for index in range(len(matrices)):
                apply(index, update(index, momentum(index)))
            return
        exchange.check()
        dtypes = {group["ns_dtype"] for _, group in matrices}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        for chosen in exchange.rounds(dtype.itemsize):
            shards = {index: momentum(index) for index in chosen}
            for index, updated in exchange.run(chosen, shards, update, dtype).items():
                apply(index, updated)

    def _exchange(self, parameters: list[Tensor], gradients: list[Tensor]) -> Exchange | None:
        """Return the exchange of these parameters; None if this process steps alone.

        Raises:
            ConfigurationError: `distributed` is False, and parameters are sharded.
        """
        is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not is_group or not self.distributed or self._steps_own:
            if any(local_of(p).shape != p.shape for p in parameters):
                raise ConfigurationError(
                    "Muon(distributed=False): the parameters are sharded over ranks, and a matrix "
                    "is orthogonalized whole: leave distributed=False out"
                )
            return None
        key = tuple(id(p) for p in parameters)
        if key not in self._exchanges:
            assert dist.group.WORLD is not None
            self._exchanges[key] = Exchange(parameters, gradients, dist.group.WORLD)
        exchange = self._exchanges[key]
        self._steps_own = exchange.is_local
        return None if exchange.is_local else exchange

    def _divided(self, group: dict[str, Any]) -> dict[bool, list[tuple[str, Tensor]]]:
        """Return the named parameters of a group for Muon (True) and for AdamW (False)."""
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        if members and isinstance(members[0], tuple):
            named = members
        else:
            names = group.get("names") or group.get("param_names")
            if names is None and all(id(p) in self._names for p in members):
                names = [self._names[id(p)] for p in members]
            if names is None and "muon" not in group:
                raise ConfigurationError(
                    'Muon received a group without names: expected "names", as parameter_groups() '
                    'gives them, or "muon": True or False, which decides for the whole group'
                )
            named = list(zip(names or [""] * len(members), members, strict=True))
        divided: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
        for name, parameter in named:
            if not parameter.requires_grad:
                continue
            is_hidden = (
                parameter.ndim == 2
                and id(parameter) not in self._embeddings
                and not any(fnmatchcase(name, pattern) for pattern in self._adamw_names)
            )
            is_muon = group.get("muon", is_hidden)
            if is_muon and (parameter.ndim not in (2, 3) or parameter.is_complex()):
                raise ConfigurationError(
                    f"Muon received the parameter {name!r} of shape {tuple(parameter.shape)} and "
                    f'{parameter.dtype} in a group with "muon": True; expected a real matrix, or '
                    'a batch of matrices with three dimensions: put it into a group with "muon": '
                    "False"
                )
            divided[bool(is_muon)].append((name, parameter))
        return divided

    def _step_adamw(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Step parameters by AdamW, which treats each element of a shard by itself."""
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local_of(p) for p in parameters],
            [local_of(gradient_of(p, "Muon")) for p in parameters],
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def orthogonalize(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values near 1.

    Args:
        matrix: shape (..., rows, columns), in the dtype of the computation.
        coefficients: the three coefficients of a Newton-Schulz step.
        steps: the number of steps.
        eps: the smallest norm that the matrix is divided by.

    Example:
        >>> import torch
        >>> made = orthogonalize(torch.diag(torch.tensor([3.0, 1.0])), (3.4445, -4.775, 2.0315), 5,
        ...                      1e-7)
        >>> bool(((made.diagonal() > 0.6) & (made.diagonal() < 1.3)).all())
        True
    """
    a, b, c = coefficients
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    result = matrix.mT if is_tall else matrix
    if matrix.ndim == 2:
        result = result / result.norm().clamp(min=eps)
        for _ in range(steps):
            gram = result @ result.T
            result = torch.addmm(
                result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a
            )
    else:
        result = result / torch.linalg.matrix_norm(result, keepdim=True).clamp(min=eps)
        for _ in range(steps):
            gram = result @ result.mT
            result = torch.baddbmm(
                result, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), result, beta=a
            )
    return result.mT if is_tall else result


def _factor(adjustment: str | None, shape: Sequence[int]) -> float:
    """Return the factor of the learning rate of a matrix by its shape."""
    rows, columns = shape[-2:]
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _groups(params: Any) -> tuple[list[dict[str, Any]], dict[int, str], set[int]]:
    """Return groups, the names of parameters by id, and the ids of embeddings and heads.

    Raises:
        ConfigurationError: parameters have no names.
    """
    embeddings: set[int] = set()
    if isinstance(params, nn.Module):
        embeddings = _embeddings(params)
        params = params.named_parameters()
    given = list(params)
    known: dict[int, str] = {}
    if given and isinstance(given[0], tuple):
        known = {id(parameter): name for name, parameter in given}
        given = [{"params": [parameter for _, parameter in given]}]
    if not given or not all(isinstance(group, dict) for group in given):
        raise ConfigurationError(
            "Muon expected a model, its named_parameters(), or groups with names, received "
            f"{'no parameters' if not given else 'parameters without names'}: names tell "
            "embeddings and heads from hidden layers. Pass Muon(model, ...)"
        )
    return given, known, embeddings


def _embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings and of the output layer."""
    found = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    for module in model.modules():
        output = getattr(module, "get_output_embeddings", None)
        head = output() if callable(output) else None
        found.update(id(p) for p in head.parameters()) if isinstance(head, nn.Module) else None
    return found
