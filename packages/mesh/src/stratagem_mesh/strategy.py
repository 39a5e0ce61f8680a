"""MeshStrategy: pipeline, data, context, tensor and expert parallelism, each by its size."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError, StratagemError, UserCodeError
from stratagem.precision import TruePrecision
from stratagem.strategies import Axis, ModelParallelStrategy, PreparedModel, user_module
from stratagem_mesh.check.before_training import LAYERS, check_model
from stratagem_mesh.context.regions import ContextRegions
from stratagem_mesh.expert.parallel import AXES as EXPERT_AXES, ExpertParallel
from stratagem_mesh.plugin import MESH
from stratagem_mesh.tensor.heads import STYLE as VOCABULARY
from stratagem_mesh.tensor.layers import (
    LossOptions,
    SequenceOptions,
    TensorPlan,
    check_plan,
    divide_layers,
)
from stratagem_torch.sharding import ShardedPrepared

if TYPE_CHECKING:
    from stratagem_mesh.planning.choice import Job, Proposal

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes of the mesh; consecutive ranks lie along the last one."""

Size = int | Literal["auto"]

_FORMER_NAMES = {
    "data_parallel_size": "shard=, the number of ranks that read different batches",
    "tensor_parallel_size": "tensor=, the number of ranks that share a layer",
    "parallelize_fn": "tensor_plan=, which is called as tensor_plan(model, mesh) with the mesh of "
    "the tensor axis alone",
}
_MOST_CANDIDATES = 12
_SIZES = re.compile("size|shape|elements|dimension")
_NUMBER = re.compile(r"(^|\.)\d+(\.|$)")


class MeshStrategy(ModelParallelStrategy):
    """Arranges ranks in a mesh of pipeline, data, context, tensor and expert parallelism.

    The model does not change. The sizes but `expert` multiply to the number of ranks. Losses,
    gradients and logged values equal the ones in one process:

    - `pipeline`: the model is divided into stages, one or several on each rank, which work on the
      micro-batches of a step at the same time, as `accumulate_grad_batches` or `lite.step` give
      them. Ranks of a pipeline read the same batches. See `PipelineMesh`.
    - `replicate` and `shard`: ranks read batches of their own. Parameters, gradients and optimizer
      state are sharded over `shard`, and over `context`; each of the `replicate` groups holds them
      all, as HYBRID_SHARD of fsdp.
    - `context`: ranks read the same batches. In the modules that read a sequence, each rank
      computes a part; attention exchanges heads for positions (Ulysses). Before and after
      these modules each rank has the whole sequence, so user code runs unchanged.
    - `tensor`: ranks read the same batches. Linear layers are divided between them.
    - `expert`: adds no ranks. Consecutive ranks of `shard` times `context` divide the experts of a
      model, and exchange tokens; the parameters of an expert are sharded over the others. Experts
      are whole along `tensor`. Losses of a router that balance its load are computed from the
      tokens of a rank, as under data parallelism.

    Args:
        pipeline: the number of ranks that have different layers.
        pipeline_cuts: the names of the first modules of all stages but the first. Default: cuts
            that balance the costs of the stages.
        virtual_stages: the number of stages on each rank of a pipeline.
        schedule: the order of the micro-batches: "1f1b", "gpipe", or "interleaved", which has
            several virtual stages.
        replicate: the number of copies of the parameters.
        shard: the number of ranks that read different batches and share a copy of the parameters.
            "auto": the number of ranks divided by the other sizes.
        context: the number of ranks that share a sequence.
        tensor: the number of ranks that share a layer; at most the ranks of a node, since
            they communicate in each layer.
        tensor_plan: which layers are divided, by patterns of names in which `*` stands for a
            number; the beginning of a name may be left out:
            `{"layers.*.up": "colwise", "layers.*.down": "rowwise"}`, or styles of
            `torch.distributed.tensor.parallel`. A function `(model, mesh)` divides the model
            itself. Default: the plan of the model (`_tp_plan`, of transformers); a model
            without one is searched for pairs of layers.
        sequence_parallel: divide the sequence too, between the divided layers of the blocks of
            an `nn.ModuleList` or `nn.Sequential`, so that norms, dropout and residuals hold
            1/`tensor` of their activations in training.
        loss_parallel: compute losses in training from the parts of the logits that ranks have,
            for models of transformers that compute their loss by `loss_function`. Other models
            name their last layer in `tensor_plan` ("colwise_vocabulary") and call
            `stratagem_mesh.cross_entropy`.
        example_input: an input of `forward` (a tensor, a tuple or a dict of arguments) for the
            search, a run on tensors without values. Default: `example_input_array` of the model,
            or `dummy_inputs` of transformers.
        context_modules: names of the modules that compute parts of a sequence, from tensors of
            (batch, sequence, ...); `*` stands for a number. Default: models of transformers, and
            modules of the class `nn.TransformerEncoder`.
        check_context: compare the first forward pass of these modules, and of blocks under
            `sequence_parallel`, with one over the whole sequence, which each rank computes once,
            and raise if they differ.
        check: compare a copy of the model with one process before training: outputs of modules,
            loss and gradients, in float64, without dropout. The copy keeps two layers of each kind,
            and each rank holds it whole for a moment. It reads `example_input`, or the model's own
            example. An error names the module or the parameter that differs. `check_context`
            compares less, the outputs of regions, but for the first batch.
        gather_logits: give each rank all logits of a model of transformers in training, although
            the model has computed its loss from them.
        expert: the number of ranks that divide the experts of a layer; it divides the ranks of
            `shard` times `context`, and the number of experts.
        expert_modules: names of the modules of experts, in which `*` stands for a number; the
            beginning may be left out. Their parameters have the shape (expert, ...). They read
            `forward(tokens, experts, weights)`: tokens of (tokens, features), and the chosen
            experts and their weights of (tokens, experts of a token). They return the sum over the
            experts of each token. Default: the experts of transformers.
        auto_wrap_policy, activation_checkpointing, reshard_after_forward: see `FSDPStrategy`.
        **components: see `ShardedStrategy` and `ParallelStrategy`.

    Attributes:
        tensor_layers: the style of each divided module, by its name, once the model is divided.

    Raises:
        ConfigurationError: a size is not a number of ranks, or their product not the world size.

    Example:
        >>> from stratagem_mesh import MeshStrategy
        >>> strategy = MeshStrategy(tensor=2, tensor_plan={"up": "colwise", "down": "rowwise"})
        >>> strategy.tensor, strategy.shard_size
        (2, 'auto')
    """

    capabilities = MESH

    def __new__(cls, **options: Any) -> MeshStrategy:
        """Return a `PipelineMesh` for a pipeline."""
        if cls is MeshStrategy and options.get("pipeline", 1) != 1:
            from stratagem_mesh.pipeline.strategy import PipelineMesh

            return super().__new__(PipelineMesh)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        pipeline: int = 1,
        pipeline_cuts: Sequence[str] | None = None,
        virtual_stages: int = 1,
        schedule: str | None = None,
        replicate: int = 1,
        shard: Size = "auto",
        context: int = 1,
        tensor: int = 1,
        tensor_plan: TensorPlan | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        example_input: Any = None,
        context_modules: Sequence[str] | None = None,
        check_context: bool = True,
        check: bool = False,
        gather_logits: bool = False,
        expert: int = 1,
        expert_modules: Sequence[str] | None = None,
        **components: Any,
    ) -> None:
        _refuse_former_names(components)
        super().__init__(**components)
        self.pipeline = _checked("pipeline", pipeline)
        self.virtual_stages = _checked("virtual_stages", virtual_stages)
        self.pipeline_cuts = _checked_names(pipeline_cuts, "pipeline_cuts", "['layers.6']")
        self.schedule = schedule or ("1f1b" if virtual_stages == 1 else "interleaved")
        if pipeline == 1 and (pipeline_cuts or virtual_stages > 1 or schedule):
            raise ConfigurationError(
                "pipeline_cuts, virtual_stages and schedule belong to a pipeline, and pipeline=1: "
                "pass pipeline=2 or more, or leave them out"
            )
        self.replicate = _checked("replicate", replicate)
        self.shard_size: Size = shard if shard == "auto" else _checked("shard", shard)
        self.context = _checked("context", context)
        self.tensor = _checked("tensor", tensor)
        check_plan(tensor_plan)
        self.tensor_plan = tensor_plan
        self.sequence_parallel = _checked_flag("sequence_parallel", sequence_parallel)
        self.loss_parallel = _checked_flag("loss_parallel", loss_parallel)
        self.example_input = _checked_input(example_input)
        self.tensor_layers: dict[str, str] = {}
        self.context_modules = _checked_names(
            context_modules, "context_modules", "['encoder.layers.*']"
        )
        self.check_context = _checked_flag("check_context", check_context)
        self.check = _checked_flag("check", check)
        self.gather_logits = _checked_flag("gather_logits", gather_logits)
        self._regions: ContextRegions | None = None
        self.expert = _checked("expert", expert)
        self.expert_modules = _checked_names(
            expert_modules, "expert_modules", "['layers.*.experts']"
        )
        self._experts: ExpertParallel | None = None
        self._check_experts()

    @classmethod
    def candidates(cls, devices: int, num_nodes: int) -> Sequence[Mapping[str, Any]]:
        """Return sizes of the axes that fit into a node; `shard` takes the other ranks.

        The fewest axes come first. With several nodes, parameters are also replicated, one copy on
        each node.

        Args:
            devices: the number of devices on each node.
            num_nodes: the number of nodes.

        Returns:
            At most 12 mappings of arguments, without defaults.

        Example:
            >>> MeshStrategy.candidates(2, 1)
            [{}, {'tensor': 2}, {'context': 2}]
        """
        sizes = [size for size in range(1, devices + 1) if devices % size == 0]
        copies = sorted({1, num_nodes})
        found = [
            {"tensor": tensor, "context": context, "replicate": replicate}
            for tensor, context, replicate in product(sizes, sizes, copies)
            if devices % (tensor * context) == 0
        ]
        found = [{axis: size for axis, size in each.items() if size > 1} for each in found]
        found.sort(key=lambda axes: (len(axes), prod(axes.values()), -axes.get("tensor", 1)))
        return found[:_MOST_CANDIDATES]

    @classmethod
    def propose(cls, job: Job) -> Sequence[Proposal]:
        """Return the sizes that are worth comparing for a model, the best first, with reasons.

        `stratagem plan` calls this if it can simulate steps of the model; otherwise it takes
        `candidates`.

        Args:
            job: the model and the machines; simulates steps.
        """
        from stratagem_mesh.planning.choice import propose

        return propose(job)

    @classmethod
    def arguments_by_state(
        cls, model: nn.Module, devices: int, fits: Callable[[float], bool]
    ) -> tuple[dict[str, int], str] | None:
        """Return arguments by which a rank can gather a layer of the model, and why.

        `strategy="auto"` calls this if a layer does not fit under fsdp.

        Args:
            model: the model.
            devices: the number of devices on each node.
            fits: whether a rank can hold this share of the layers that FSDP gathers.

        Returns:
            None if no arguments are known to fit.
        """
        from stratagem_mesh.planning.by_state import arguments_by_state

        return arguments_by_state(model, devices, fits)

    # -- the mesh

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of `AXES`; after `bind`."""
        count = self.components.device_count
        others = self.pipeline, self.replicate, self.context, self.tensor
        shard = self.shard_size
        known = max(1, count // prod(others)) if shard == "auto" else shard
        sizes = self.pipeline, self.replicate, known, self.context, self.tensor
        if prod(sizes) != count:
            shown = sizes if self.pipeline > 1 else sizes[1:]
            raise ConfigurationError(
                f"MeshStrategy({self._given(shard)}) is for {' x '.join(map(str, shown))} = "
                f"{prod(sizes)} rank(s), received {count} "
                f"({len(self.components.devices)} device(s), {self.components.num_nodes} node(s)): "
                "expected sizes whose product is the number of ranks"
            )
        of_node = len(self.components.devices)
        if of_node % self.tensor:
            raise ConfigurationError(
                f"tensor={self.tensor}: ranks that share a layer communicate in each layer, so "
                f"they belong on one node, received {of_node} device(s) on each: expected a size "
                "that divides them"
            )
        self._check_expert_ranks(sizes)
        return sizes

    def mesh_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (replicate, shard x context, tensor): ranks of a sequence share parameters too."""
        _, replicate, shard, context, tensor = self.sizes
        return (replicate, shard * context, tensor), ("replicate", "shard", "tensor_parallel")

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        """Return the axes; along "context" and "tensor" ranks read the same batches."""
        batches: tuple[Literal["own", "same"], ...] = "own", "own", "same", "same"
        return [Axis(*axis) for axis in zip(AXES[1:], self.sizes[1:], batches, strict=True)]

    def _given(self, shard: Size) -> str:
        sizes = {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": shard,
            "context": self.context,
            "tensor": self.tensor,
        }
        shown = (axis for axis in sizes if axis != "pipeline" or self.pipeline > 1)
        return ", ".join(f"{axis}={sizes[axis]!r}" for axis in shown)

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded; with 2 dimensions: replicas, shards."""
        names = ("replicate", "shard") if self.replicate > 1 else ("shard",)
        return self.device_mesh[names]

    def setup_environment(self) -> None:
        """Join the process group, then arrange the ranks; ranks of a sequence form a group."""
        super().setup_environment()
        if self.context > 1:
            mesh = init_device_mesh(self.device.type, self.sizes, mesh_dim_names=AXES)
            self._regions = ContextRegions(
                mesh.get_group("context"),
                # A stage has not all layers, to run the whole sequence.
                check=self.check_context and self.pipeline == 1 and _has_values(),
                gather_logits=self.gather_logits,
            )
        if self.expert > 1:
            names = "pipeline", *EXPERT_AXES
            sizes = self.pipeline, *self.expert_sizes
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)[EXPERT_AXES]
            self._experts = ExpertParallel(mesh, has_values=_has_values())

    # -- the model

    def shard(self, module: nn.Module) -> None:
        """Divide layers and sequences, checkpoint activations, then shard parameters.

        Raises:
            UserCodeError: with `check=True`, a copy of the model computes something else.
        """
        if self.check and _has_values():
            self._check(user_module(module))
        super().shard(module)
        if self._regions is not None:
            self._regions.watch_repeated()

    def _check(self, model: nn.Module) -> None:
        """Let a twin of this strategy divide a copy of the model."""
        twin = copy(self)
        twin.__dict__.update(
            _set_up=None, _replicated=[], _held=set(), _backwards=0, tensor_layers={}
        )
        twin.check = twin.check_context = False
        twin.precision = twin.precision_plugin = TruePrecision("64-true")
        if self._regions is not None:
            twin._regions = self._regions.like(check=False)
        if self._experts is not None:
            twin._experts = self._experts.like()
        sizes = zip(AXES, self.sizes, strict=True)
        place = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"
        has_numbers = any(map(_NUMBER.search, (*self._patterns(),)))
        check_model(model, twin, place, layers=None if has_numbers else LAYERS)

    def _patterns(self) -> Iterator[str]:
        """Yield the names of modules that the user gave."""
        yield from self.context_modules or ()
        yield from self.expert_modules or ()
        if isinstance(self.tensor_plan, Mapping):
            yield from self.tensor_plan

    def divide(self, model: nn.Module) -> None:
        """Divide layers over the tensor axis, and sequences over the context axis."""
        if self.tensor > 1:
            mesh = self.device_mesh["tensor_parallel"]
            options = SequenceOptions(self.check_context, self.context_modules, self._units)
            self.tensor_layers = divide_layers(
                model,
                mesh,
                self.tensor_plan,
                self.example_input,
                sequence=options if self.sequence_parallel else None,
                loss=LossOptions(self.gather_logits) if self.loss_parallel else None,
            )
        if self._regions is not None:
            self._regions.divide(model, self.context_modules)
        if self._experts is not None:
            self._experts.divide(model, self.expert_modules)

    @property
    def _units(self) -> Mapping[str, int] | None:
        """The stages of a pipeline, by the names of the modules that they have."""
        return None

    # -- experts

    @property
    def expert_sizes(self) -> tuple[int, int, int, int]:
        """The sizes of the mesh of experts: replicas, shards of an expert, `expert`, `tensor`."""
        _, replicate, shard, context, tensor = self.sizes
        return replicate, shard * context // self.expert, self.expert, tensor

    @property
    def expert_load(self) -> dict[str, Tensor]:
        """How many of this rank's tokens each expert received in the last step, by module.

        The tensors are on the device of the rank, and a token counts once for each of its experts.
        `ExpertLoad` logs the load over all ranks.
        """
        return {} if self._experts is None else self._experts.load

    def _check_experts(self) -> None:
        """Raise for options that experts do not go with.

        Raises:
            ConfigurationError: names the option.
        """
        if self.expert > 1 and self.sequence_parallel:
            raise ConfigurationError(
                f"expert={self.expert} with sequence_parallel=True: ranks of the tensor axis would "
                "send parts of a sequence to the same experts: expected sequence_parallel=False"
            )
        if self.expert == 1 and self.expert_modules is not None:
            raise ConfigurationError(
                f"expert_modules={self.expert_modules!r} with expert=1: expected expert= the "
                "number of ranks that divide the experts"
            )

    def _check_expert_ranks(self, sizes: tuple[int, ...]) -> None:
        """Raise if experts do not divide the ranks that they borrow.

        Raises:
            ConfigurationError: names the sizes.
        """
        _, _, shard, context, _ = sizes
        if shard * context % self.expert:
            raise ConfigurationError(
                f"expert={self.expert}: experts are divided between ranks of shard x context, "
                f"received shard {shard} x context {context} = {shard * context}: expected a size "
                "of expert that divides it"
            )

    def shard_groups(
        self, module: nn.Module, groups: Collection[nn.Module], shard: Callable[..., object]
    ) -> None:
        """Shard the groups; experts over the ranks that have the same ones."""
        if self._experts is not None:
            groups = [*groups, *self._experts.groups()]
            shard = self._experts.sharding(shard, self.reshard_after_forward)
        super().shard_groups(module, groups, shard)

    @contextmanager
    def lead_evaluation_step(
        self, prepared: PreparedModel, announce: Callable[[int], None]
    ) -> Iterator[None]:
        """Return a context that announces all-gathers, and calls of experts."""
        assert isinstance(prepared, ShardedPrepared)
        with ExitStack() as stack:
            stack.enter_context(super().lead_evaluation_step(prepared, announce))
            if self._experts is not None:
                stack.enter_context(self._experts.announcing(prepared.groups, announce))
            yield

    def follow_evaluation_step(self, prepared: PreparedModel, announced: Iterator[int]) -> None:
        """Take part in the all-gathers, and compute this rank's experts, as another rank says."""
        assert isinstance(prepared, ShardedPrepared)
        with ExitStack() as stack:
            if self._experts is not None:
                announced = self._experts.take_part(prepared.groups, announced)
                stack.enter_context(self.precision.forward_context() or nullcontext())
            super().follow_evaluation_step(prepared, announced)

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step the shards; a step ends the count of `expert_load`."""
        result = super().optimizer_step(prepared, optimizer, closure)
        if self._experts is not None:
            self._experts.end_step()
        return result

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> StratagemError | None:
        """Return a clearer error for shards, parts of logits, and gradients of gradients."""
        if self.context > 1 and "once_differentiable" in str(error):
            return UserCodeError(
                f"context={self.context}: a loss has gradients of gradients through a module whose "
                "sequence is divided, and its exchanges between ranks are differentiable once: "
                "leave the module out of context_modules, leave create_graph=True out, or pass "
                "context=1"
            )
        if self.expert > 1 and "once_differentiable" in str(error):
            return UserCodeError(
                f"expert={self.expert}: a loss has gradients of gradients through experts, and "
                "their exchanges between ranks are differentiable once: leave create_graph=True "
                "out, or pass expert=1"
            )
        found = super().explain(prepared, error)
        if found is None and isinstance(self.tensor_plan, Mapping) and _SIZES.search(str(error)):
            return UserCodeError(
                f"{error}. The tensor_plan divides {', '.join(map(repr, self.tensor_layers))}: "
                f"between a colwise layer and its rowwise one a rank has 1/{self.tensor} of the "
                "features, and something there expects all of them. Leave both layers out of the "
                "plan, or divide what lies between them too"
            )
        heads = [name for name, style in self.tensor_layers.items() if style == VOCABULARY]
        if found is None or not heads or self.loss_parallel:
            return found
        return UserCodeError(
            f"a DTensor was used where a whole tensor is needed. In training the outputs of "
            f"{heads[0]!r} are parts of logits ({VOCABULARY}): compute their loss by "
            "stratagem_mesh.cross_entropy(logits, target), or gather them by logits.full_tensor()."
            f" Otherwise {found}"
        )


def _has_values() -> bool:
    """Whether ranks exchange values; those of a plan do not."""
    return dist.get_backend() != "fake"


def _refuse_former_names(given: Mapping[str, Any]) -> None:
    """Refuse arguments of `ModelParallelStrategy` that have another name here."""
    for name in given:
        if name in _FORMER_NAMES:
            raise ConfigurationError(
                f"MeshStrategy({name}={given[name]!r}) is an argument of ModelParallelStrategy: "
                f"write {_FORMER_NAMES[name]}"
            )


def _checked_flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{option}={value!r}: expected True or False")
    return value


def _checked_input(value: Any) -> Any:
    if value is not None and not isinstance(value, (Tensor, tuple, Mapping)):
        raise ConfigurationError(
            f"example_input={value!r}: expected a tensor, a tuple of arguments of forward, or a "
            "dict of them"
        )
    return value


def _checked_names(value: Any, option: str, example: str) -> Sequence[str] | None:
    names = list(value) if isinstance(value, (list, tuple)) else None
    if value is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ConfigurationError(
            f"{option}={value!r}: expected a list of names of modules, such as {example}"
        )
    return names


def _checked(option: str, size: Any) -> int:
    if type(size) is not int or size < 1:
        more = ", or 'auto'" if option == "shard" else ""
        raise ConfigurationError(
            f"{option}={size!r}: expected a number of ranks of at least 1{more}"
        )
    return size
