"""PipelineMesh: a mesh with the stages of a model along its first axis."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigurationError
from stratagem.state import named_state, per_parameter_state
from stratagem.strategies import Axis, Optimizers, PreparedModel, TrainStep, user_module
from stratagem_mesh.pipeline.cuts import check_stages, divided_copies, find_stages
from stratagem_mesh.pipeline.ranks import PipelineRanks, pipeline_ranks
from stratagem_mesh.pipeline.schedule import bubble, check_schedule
from stratagem_mesh.pipeline.training import Pipeline
from stratagem_mesh.plugin import MESH
from stratagem_mesh.strategy import AXES, MeshStrategy
from stratagem_torch.parallel import owned_optimizer_state
from stratagem_torch.sharding import ShardedPrepared, clip_by_norm

PIPELINE = replace(
    MESH,
    parameters="divided",
    follows_evaluation=False,
    manual_backward=False,
    lite_step=True,
)
"""The capabilities of a mesh with a pipeline."""

_PIPELINES: WeakKeyDictionary[nn.Module, Pipeline] = WeakKeyDictionary()
"""The models of this process that were divided into stages, for each strategy that trains them."""


@dataclass(eq=False)
class StagedPrepared(ShardedPrepared):
    """The prepared stages of a rank.

    Attributes:
        units: the modules to compile one by one, in a stage that is not sharded.
    """

    units: list[nn.Module]

    def groups_to_compile(self) -> list[nn.Module]:
        """Return the sharded modules, or the units; see `ShardedPrepared`."""
        return super().groups_to_compile() or self.units


class PipelineMesh(MeshStrategy):
    """A `MeshStrategy` with `pipeline=2` or more; `MeshStrategy(pipeline=2)` returns one.

    The model is cut into stages, and the ranks along the pipeline axis have different ones. A step
    sends its micro-batches through the stages; while a stage works on one micro-batch, the next
    stage works on the one before. With `accumulate_grad_batches=1` a step has one micro-batch, and
    the stages wait for each other.

    The user's `training_step` runs on each stage. Layers of other stages are stand-ins there that
    compute nothing, and the step ends where the last layer of the stage has run. On the last stage
    it runs to its end, and computes the loss. Hooks run on each rank, and receive the loss. The
    last stage, which the first ranks have, logs the values of `training_step`. Evaluation
    and prediction run unchanged on each rank: the output of each model that they call is sent to
    all stages.

    Manual optimization, LBFGS, and `lite.backward` are refused: a loss alone does not say which
    micro-batches are to overlap. `lite.step` trains under Lite. A model that was divided before
    keeps its stages.

    Args:
        **options: see `MeshStrategy`.

    Example:
        >>> from stratagem_mesh import MeshStrategy
        >>> type(MeshStrategy(pipeline=2)).__name__
        'PipelineMesh'
    """

    capabilities = PIPELINE
    opens_micro_batches = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        check_schedule(self.schedule, self.virtual_stages)
        if self.check:
            raise ConfigurationError(
                f"check=True with pipeline={self.pipeline}: a stage has not all layers, to compare "
                "a copy of the model with one process: expected check=False. `stratagem mesh check "
                f"--pipeline {self.pipeline}` compares a whole step"
            )
        count, cuts = self.pipeline * self.virtual_stages, self.pipeline_cuts
        if cuts is not None and not len(cuts) == len(set(cuts)) == count - 1:
            raise ConfigurationError(
                f"pipeline_cuts={cuts!r}: expected {count - 1} different name(s), those of the "
                f"first modules of all of {count} stages (pipeline={self.pipeline} x "
                f"virtual_stages={self.virtual_stages}) but the first"
            )
        self._pipeline_ranks: PipelineRanks | None = None
        self._building: Pipeline | None = None
        self._steps = 0

    # -- the mesh

    def mesh_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return (pipeline, replicate, shard x context, tensor)."""
        sizes, names = super().mesh_shape()
        return (self.pipeline, *sizes), ("pipeline", *names)

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        """Return the axes; rank 0 has the last stage, so that it logs the loss."""
        pipeline = Axis(AXES[0], self.pipeline, "same", "divided", descends=True)
        return [pipeline, *super().rank_axes(world_size)]

    def setup_environment(self) -> None:
        """Join the process group, and make the groups of the stages."""
        super().setup_environment()
        self._pipeline_ranks = ranks = pipeline_ranks(
            self.pipeline, self.sizes[-1], self.device, self.timeout, dist.group.WORLD
        )
        self.replicas = ranks.stage_group
        self.ranks.connect(ranks.last_stage)

    @property
    def unequal_ranks(self) -> Sequence[int]:
        """One rank of each position of the pipeline: they hold different stages."""
        return range(0, self.ranks.world_size, self.ranks.world_size // self.pipeline)

    def waiting_share(self, micro_batches: int) -> float:
        """Return the time in which a rank waits for other stages, over the time of its own work.

        The stages are taken as equal.

        Args:
            micro_batches: the number of micro-batches of an optimizer step.

        Example:
            >>> PipelineMesh(pipeline=4).waiting_share(6)
            0.5
        """
        return bubble(self.pipeline, micro_batches, self.virtual_stages)

    # -- the model

    def check_model(self, model: nn.Module) -> None:
        """Refuse cuts that the model does not have, and other stages than it has."""
        self._check_count(model)
        is_whole = model not in _PIPELINES and "configure_model" not in vars(type(model))
        if is_whole:
            check_stages(model, self.pipeline * self.virtual_stages, self.pipeline_cuts)

    def _check_count(self, model: nn.Module) -> None:
        before, count = _PIPELINES.get(model), self.pipeline * self.virtual_stages
        if before is not None and before.stages.count != count:
            raise ConfigurationError(
                f"{type(before.model).__name__} was divided into {before.stages.count} stages "
                f"before, and pipeline={self.pipeline} x virtual_stages={self.virtual_stages} is "
                f"{count}: expected the same sizes, or a new model"
            )

    def divide(self, model: nn.Module) -> None:
        """Find the stages, divide layers over the other axes, and drop the other stages."""
        assert self._pipeline_ranks is not None
        stages = find_stages(
            model, self.pipeline * self.virtual_stages, self.pipeline_cuts, self.example_input
        )
        for name, copy in divided_copies(model, stages) if self.ranks.is_global_zero else ():
            warnings.warn(
                f"{copy!r} of {type(model).__name__} is a frozen copy of {name!r}, and the stages "
                "of a pipeline have other parameters of the two. Code that goes through both in "
                "pairs, as a moving average does, would pair others: use EMAWeightAveraging, or "
                "average by names",
                stacklevel=2,
            )
        pipeline = Pipeline(model, stages, self._pipeline_ranks, self.schedule, self.virtual_stages)
        _PIPELINES[model] = self._building = pipeline
        super().divide(model)
        self._building = None
        pipeline.regions = self._regions
        pipeline.drop_absent()

    @property
    def _units(self) -> Mapping[str, int] | None:
        return None if self._building is None else self._building.stages.units

    def units(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules of the stages of this rank that have parameters."""
        return self._of(module).units()

    def roots(self, module: nn.Module) -> list[nn.Module]:
        """Return the units of the stages of this rank, each of which is sharded by itself."""
        return self._of(module).roots()

    def local_names(self, module: nn.Module) -> Mapping[str, str | None]:
        """Return the parameters of other stages, and tied weights under the name of this stage."""
        return self._of(module).local_names

    def is_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter stands for one of another stage."""
        return any(id(parameter) in each.placeholders for each in _PIPELINES.values())

    def listing_all(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Let the model list what all ranks have; optimizers then have equal groups on each."""
        return self._of(module).listing_all()

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model of the stages of this rank; see `ShardedStrategy.prepare`.

        Raises:
            ConfigurationError: the model was divided into another number of stages before.
        """
        self._check_count(user_module(module))
        prepared = super().prepare(module, optimizers, move_to_device=move_to_device)
        self._replicated = []  # a pipeline averages their gradients itself
        pipeline, root = self._of(prepared.original), prepared.module
        pipeline.attach(prepared, self)
        return StagedPrepared(
            root, root, prepared.optimizers, evaluation_module=root, units=pipeline.units()
        )

    def _of(self, module: nn.Module) -> Pipeline:
        return _PIPELINES[user_module(module)]

    def _check_divided(self, module: nn.Module) -> None:
        """A stage may have no layer that is divided; see `ModelParallelStrategy`."""
        if self.tensor > 1 and not self.tensor_layers and self.tensor_plan is None:
            super()._check_divided(module)

    def _compare_inputs(self, module: nn.Module) -> None:
        """Do nothing: `accumulate_all` compares the micro-batches before the stages begin."""

    # -- a training step

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        """Send the micro-batches through the stages, forward and backward."""
        batches = list(micro_batches)
        self._steps += 1
        compares = self._steps & (self._steps - 1) == 0
        if compares and self.ranks.world_size > len(self.ranks.data_groups):
            self._compare(batches)
        pipeline = self._of(prepared.original)
        pipeline.train(prepared, step, batches)
        names = pipeline.different_attributes() if compares else ()
        if names and self.ranks.is_global_zero:
            warnings.warn(
                f"{', '.join(names)} of {type(pipeline.model).__name__}: attributes that differ "
                "between the stages of a pipeline, since training_step sets them after the last "
                "module of some stages, or from values that these lack. A stage that reads such an "
                "attribute computes with another value. Set it in on_train_batch_end, which every "
                "stage runs with the loss",
                stacklevel=2,
            )
        return True

    def clip_grad_norm(
        self, parameters: Sequence[Tensor], max_norm: float, **options: Any
    ) -> Tensor:
        """See Strategy; the norm is that over all stages, and counts a tied weight once."""
        assert self._pipeline_ranks is not None
        copies = [p for each in _PIPELINES.values() for p in each.copies]
        return clip_by_norm(
            parameters,
            max_norm,
            stages=(self._pipeline_ranks.groups[0], self.device),
            copies=copies,
            **options,
        )

    @property
    def follows_evaluation(self) -> bool:
        """False: a rank without a batch could not follow the transfers between stages."""
        return False

    # -- state

    def _optimizer_by_owner(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return super()._optimizer_by_owner(optimizer, _renamed(state, self._whole_names(optimizer)))

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a state; each rank takes the entries of its own parameters."""
        whole = self._whole_names(optimizer)
        groups = named_state(optimizer, prepared.original)["param_groups"]
        own = {whole.get(name, name) for group in groups for name in group["params"]}
        state = owned_optimizer_state(self.ranks, own, per_parameter_state(optimizer, state))
        here = {whole_name: name for name, whole_name in whole.items()}
        super().load_optimizer_state(prepared, optimizer, _renamed(state, here))

    def _whole_names(self, optimizer: Optimizer) -> dict[str, str]:
        """Return the names in the whole model of the parameters that are named otherwise here."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model, pipeline in _PIPELINES.items():
            if held & {id(p) for p in model.parameters()}:
                return {here: name for name, here in pipeline.local_names.items() if here}
        return {}


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an optimizer's state with other names of parameters."""
    if not names:
        return dict(state)
    return {
        **state,
        "state": {names.get(name, name): entry for name, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [names.get(name, name) for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
