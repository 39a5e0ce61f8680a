"""Pipeline: a model as the stages of this rank, its optimizer steps and evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stratagem.errors import UserCodeError
from stratagem.strategies import MicroBatch, PreparedModel, Strategy, TrainStep
from stratagem_mesh.context.call import Call, backward_of
from stratagem_mesh.context.regions import ContextRegions
from stratagem_mesh.pipeline.dry_run import is_metric
from stratagem_mesh.pipeline.randomness import UnitStreams, has_dropout
from stratagem_mesh.pipeline.ranks import PipelineRanks
from stratagem_mesh.pipeline.run import Transfers, added, run_schedule
from stratagem_mesh.pipeline.schedule import Action, actions
from stratagem_mesh.pipeline.staged_model import NO_LOSS, StagedModel, StageEnd
from stratagem_mesh.pipeline.values import Program, Stages
from stratagem_torch.parallel import ProcessGroupRanks
from stratagem_torch.sharding import average_gradients, find_replicated, keep_whole

if TYPE_CHECKING:
    from stratagem_mesh.pipeline.strategy import PipelineMesh


class Pipeline:
    """The stages of a model on this rank.

    Args:
        model: the user's model, whole.
        stages: which stage has which modules and parameters.
        ranks: the groups of the pipeline.
        schedule: the name of the schedule.
        virtual_stages: the number of stages on each rank.

    Attributes:
        stages: the argument.
        own: the indices of the stages of this rank.
        local_names: the first name of each parameter in the whole model that has another name on
            this rank; None if the rank does not have it.
        copies: the parameters with gradients that another stage counts in a norm.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        ranks: PipelineRanks,
        schedule: str,
        virtual_stages: int,
    ) -> None:
        self._model = ref(model)
        self.stages = stages
        self.own = [s for s in range(stages.count) if s % ranks.count == ranks.position]
        self.staged = StagedModel(model, stages)
        self.local_names: dict[str, str | None] = {}
        self.copies: list[nn.Parameter] = []
        self._ranks = ranks
        self._schedule = schedule
        self._virtual = virtual_stages
        self._transfers = Transfers(ranks.groups, ranks.column, ranks.position, ranks.device)
        self._of_counts: dict[int, list[list[Action]]] = {}
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)
        self._streams = UnitStreams(has_dropout(model))
        self._reductions: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        self._groups: dict[int, list[FSDPModule]] = {}
        self.regions: ContextRegions | None = None
        """The modules whose sequence is divided."""
        self._trained_by: Callable[[], PipelineMesh | None]
        self._report_step: Callable[[Callable[[], str]], None] = _nothing
        """Lets errors of communication name the stage and the micro-batch of this rank."""
        self._step: _StageSteps | None = None
        self._compared: WeakSet[Program] = WeakSet()

    @property
    def placeholders(self) -> set[int]:
        """The ids of the objects that stand for parameters of other stages."""
        return self.staged.placeholders

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def _strategy(self) -> PipelineMesh:
        strategy = self._trained_by()
        assert strategy is not None
        return strategy

    def drop_absent(self) -> None:
        """Free the other stages; keep parameters whole that several stages or units share."""
        self.staged.drop_absent(self.own)
        here = dict(self.model.named_parameters())
        positions = {
            names[0]: frozenset(
                s % self._ranks.count for name in names for s in self._holders(name)
            )
            for names in self._aliases.values()
        }
        self._ranks.make_shared(positions.values())
        held: dict[int, int] = {}
        for unit in self.roots():
            for parameter in unit.parameters():
                held[id(parameter)] = held.get(id(parameter), 0) + 1
        for first, *others in self._aliases.values():
            local = next((name for name in (first, *others) if name in here), None)
            if local != first:
                self.local_names[first] = local
            if local is None:
                continue
            parameter = here[local]
            if len(positions[first]) > 1 or held.get(id(parameter)) != 1:
                keep_whole(parameter)
        self._positions = positions

    def _holders(self, name: str) -> tuple[int, ...]:
        return self.stages.parameters[name]

    def units(self) -> list[nn.Module]:
        """Return the units of this rank's stages that have parameters."""
        units = dict.fromkeys(self.staged.units.values())
        return [unit for unit in units if next(unit.parameters(), None) is not None]

    def roots(self) -> list[nn.Module]:
        """Return the units to shard; none where a stage has one rank, which needs no gathering."""
        return self.units() if self._ranks.of_stage > 1 else []

    @contextmanager
    def listing_all(self) -> Iterator[None]:
        """Let the model list all parameters, and tied weights under the names of one process."""
        with self.staged.listed():
            for names in self._aliases.values():
                if len(names) > 1:
                    self._tie(names)
            yield

    def _tie(self, names: Sequence[str]) -> None:
        """Put one object in the place of each placeholder of a tied weight."""
        slots = []
        for name in names:
            part, _, key = name.rpartition(".")
            held = self.model.get_submodule(part)._parameters
            if held.get(key) is not None:
                slots.append((held, key))
        listed = [held[key] for held, key in slots]
        own = [one for one in listed if id(one) not in self.placeholders]
        for held, key in slots:
            if id(held[key]) in self.placeholders:
                held[key] = (own or listed)[0]

    def attach(self, prepared: PreparedModel, strategy: PipelineMesh) -> None:
        """Let the prepared model run as stages."""
        self._trained_by = ref(strategy)  # the model may outlive it
        if isinstance(strategy.ranks, ProcessGroupRanks):
            self._report_step = strategy.ranks.report_step
        # Units are wrapped one by one, so that the last layer returns logits, where FSDP2 expects a
        # loss. A change in place of them is exact: a root is not gathered again for backward.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        root = prepared.module
        run = type(root).forward.__get__(root)
        root.forward = lambda *args, **kwargs: self._forward(run, *args, **kwargs)
        if not self._groups:  # the model is new
            self._find_reductions()
            for name, unit in self.staged.units.items():
                inside = [part for part in unit.modules() if isinstance(part, FSDPModule)]
                self._groups.setdefault(self.stages.units[name], []).extend(inside)
                self._streams.watch(name, unit)

    def _find_reductions(self) -> None:
        """Find the parameters that stay whole, and the ranks that sum their gradients."""
        here = {id(p): name for name, p in self.model.named_parameters()}
        whole_names = {local: first for first, local in self.local_names.items() if local}
        by_positions: dict[frozenset[int], list[nn.Parameter]] = {}
        for parameter in find_replicated(self.model):
            name = here[id(parameter)]
            positions = self._positions[whole_names.get(name, name)]
            by_positions.setdefault(positions, []).append(parameter)
        # In the same order on each rank that shares a group.
        ordered = sorted(by_positions, key=sorted)
        of_groups = [(self._ranks.shared(p), by_positions[p]) for p in ordered]
        self._reductions = [each for each in of_groups if each[0].size() > 1]
        self.copies = [
            parameter
            for positions, parameters in by_positions.items()
            for parameter in parameters
            if self._ranks.position != min(positions)
        ]

    def _forward(self, run: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the user's model as a stage, or in an evaluation on all stages."""
        step = self._step
        if step is not None:
            try:
                outputs = run(method, *args, **kwargs)
            except StageEnd:
                if method != "training_step":
                    raise
                return step.placeholder()
            step.outputs = outputs
            return outputs
        if self.model.training and torch.is_grad_enabled():
            raise UserCodeError(
                f"{type(self.model).__name__}.{method}() was called outside of a step, in training "
                "mode, and the stages of a pipeline train together: call lite.step(model, "
                "micro_batches, loss) with the call in loss, or model.eval() under torch.no_grad()"
            )
        self._report_step(self._transfers.doing)
        with torch.no_grad(), self.staged.evaluating(self.own, self._transfers.share):
            return run(method, *args, **kwargs)

    # -- a training step

    def train(self, prepared: PreparedModel, step: TrainStep, micro_batches: Sequence[Any]) -> None:
        """Run forward and backward of all micro-batches, and reduce gradients once."""
        self._report_step(self._transfers.doing)
        self.staged.exchange = None
        opened = [step.open(each) for each in micro_batches]
        self._step = work = _StageSteps(self, prepared, step, opened)
        try:
            for each in opened:
                with step.without_logging():
                    program = self.staged.program(each.loss, each.batch, trains=True)
                self._compare(program)
                work.programs.append(program)
            ranks, programs = self._ranks, work.programs
            seeds = any(self._draws_unequally(program) for program in programs)
            self._streams.begin_step(ranks.device, seeds=seeds)
            self._reduce(False)
            run_schedule(self._orders(len(opened)), programs, work, self._transfers)
            self._reduce(True)
            for group, parameters in self._reductions:
                average_gradients(parameters, group, ranks.data_ranks)
            work.share_losses()
            self._share_state(programs)
            last = any(program.draws_after_cut for program in programs)
            self._streams.end_step(ranks if last else None)
        finally:
            self._step = None
        self.staged.exchange = self._transfers.share
        for each in opened:
            each.end()

    def _compare(self, program: Program) -> None:
        """Compare a new program between the ranks of the pipeline, before they exchange values.

        Raises:
            UserCodeError: user code computes other values on some ranks.
        """
        if program in self._compared:
            return
        self._compared.add(program)
        ranks = self._ranks
        own = torch.tensor([crc32(repr(program.values).encode())], device=ranks.device)
        every = [torch.zeros_like(own) for _ in range(ranks.count)]
        dist.all_gather(every, own, ranks.groups[0])
        in_group = zip(sorted(ranks.column), every, strict=True)
        others = [rank for rank, one in in_group if not one.equal(own)]
        if others:
            raise UserCodeError(
                f"the stages of a pipeline would exchange {len(program.values)} tensor(s) by the "
                f"training_step of rank {dist.get_rank()}, and others by that of rank "
                f"{', '.join(map(str, others))}: expected the same computations on each "
                "rank of a pipeline. Leave out branches on the rank, such as `if "
                "trainer.is_global_zero`, and hooks that some ranks have"
            )

    def _draws_unequally(self, program: Program) -> bool:
        """Whether runs of user code for one micro-batch would draw other random numbers."""
        before, after = program.draws_before_cut, program.draws_after_cut
        return (before and after) or (self._virtual > 1 and (before or after))

    def _share_state(self, programs: Sequence[Program]) -> None:
        """Give all stages the state that user code has set on the last one, such as a buffer."""
        ranks = self._ranks
        for state in dict.fromkeys(one for program in programs for one in program.state):
            if not state.is_shared:
                continue
            part = self.model.get_submodule(state.part)
            held = getattr(part, state.name).detach()
            last = ranks.count - 1
            shared = held.clone() if ranks.position == last else torch.empty_like(held)
            dist.broadcast(shared, ranks.column[last], ranks.groups[0])
            if ranks.position == last:
                continue
            if held.is_contiguous():
                held.copy_(shared)
            else:
                setattr(part, state.name, shared)

    def different_attributes(self) -> list[str]:
        """Return the attributes with plain values, outside of units, that differ between stages.

        Called on all ranks.
        """
        inside = {part for unit in self.staged.every_unit() for part in unit.modules()}
        own = {
            f"{path}.{name}" if path else name: repr(value)
            for path, part in self.model.named_modules()
            if part not in inside and not is_metric(part)
            for name, value in vars(part).items()
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_stratagem")
        }
        found = self._strategy.ranks.gather_objects(own)
        column = [found[rank] for rank in self._ranks.column]
        return [name for name in own if any(each.get(name) != own[name] for each in column)]

    def _orders(self, micro_batches: int) -> list[list[Action]]:
        if micro_batches not in self._of_counts:
            self._of_counts[micro_batches] = actions(
                self._schedule, self._ranks.count, self._virtual, micro_batches
            )
        return self._of_counts[micro_batches]

    def _reduce(self, reduces: bool, stages: Sequence[int] | None = None) -> None:
        for stage in self.own if stages is None else stages:
            for group in self._groups[stage]:
                group.set_requires_gradient_sync(reduces, recurse=False)


def _nothing(doing: Callable[[], str]) -> None:
    """Report to nobody: ranks that do not communicate by a process group."""


class _StageSteps:
    """The forward and backward passes of this rank's stages in one optimizer step."""

    def __init__(
        self,
        pipeline: Pipeline,
        prepared: PreparedModel,
        step: TrainStep,
        opened: list[MicroBatch],
    ) -> None:
        self.programs: list[Program] = []
        self.outputs: Any = None
        """The latest result of a method of the user's model."""
        self._pipeline = pipeline
        self._prepared = prepared
        self._step = step
        self._opened = opened
        self._last = pipeline.stages.count - 1
        self._kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor], Call | None]] = {}
        self._losses: dict[int, Tensor] = {}
        self._placeholders: dict[int, Tensor] = {}
        self._current = 0

    def placeholder(self, micro_batch: int | None = None) -> Tensor:
        """Return a loss that receives its value after the step; None: of the latest forward."""
        index = self._current if micro_batch is None else micro_batch
        made = self._placeholders.get(index)
        if made is None:
            device = self._pipeline._ranks.device
            # As a loss has it, by which errors of user code are explained.
            kind = torch.get_default_dtype()
            made = torch.zeros((), dtype=kind, device=device, requires_grad=True)
            self._placeholders[index] = made
        return made

    def forward(self, stage: int, micro_batch: int, received: list[Tensor]) -> list[Tensor]:
        """Run a stage; return the tensors that it sends."""
        pipeline, program = self._pipeline, self.programs[micro_batch]
        reads = program.reads(stage)
        self._current, self.outputs = micro_batch, None
        is_last = stage == self._last
        context: AbstractContextManager[Any]
        if is_last:  # collectives of user code, as for logging
            context = pipeline._strategy.ranks.among(pipeline._ranks.last_stage)
        else:
            context = self._step.without_logging()
        pipeline._streams.begin(micro_batch)
        with context:
            result, sent, _ = pipeline.staged.forward(
                program,
                stage,
                dict(zip(reads, received, strict=True)),
                self._opened[micro_batch].loss,
            )
        call = regions.end_interrupted() if (regions := pipeline.regions) is not None else None
        tensors = [sent[value] for value in program.sends(stage)]
        if is_last:
            self._keep_loss(micro_batch, result)
        self._kept[stage, micro_batch] = received, tensors, call
        return tensors

    def _keep_loss(self, micro_batch: int, loss: Tensor | None) -> None:
        if loss is None:
            raise UserCodeError(NO_LOSS)
        self._losses[micro_batch] = loss

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        """Run backward of a stage; return the gradients of what it received."""
        pipeline = self._pipeline
        strategy, prepared = pipeline._strategy, self._prepared
        received, tensors, call = self._kept.pop((stage, micro_batch))
        if micro_batch == len(self._opened) - 1:  # of each stage, the last
            pipeline._reduce(True, [stage])
        opened, own = self._opened[micro_batch], pipeline.own
        is_last = stage == self._last
        if stage == own[-1]:
            loss = self._losses[micro_batch] if is_last else self.placeholder(micro_batch)
            opened.before_backward(loss)
        if is_last:
            count = len(self._opened)
            with strategy.own_backward(prepared), backward_of(call):
                Strategy.backward(strategy, prepared, loss if count == 1 else loss / count)
            self._losses[micro_batch] = loss.detach()
        else:
            with backward_of(call):
                self._backward_from(stage, micro_batch, tensors, gradients)
        if stage == own[0]:
            opened.after_backward()
        return [tensor.grad if tensor.requires_grad else None for tensor in received]

    def _backward_from(
        self, stage: int, micro_batch: int, tensors: list[Tensor], gradients: list[list[Tensor]]
    ) -> None:
        sends = self.programs[micro_batch].sends(stage)
        differentiable = [t for v, t in zip(sends, tensors, strict=True) if v.differentiable]
        outputs, sums = [], []
        for tensor, of_readers in zip(differentiable, gradients, strict=True):
            if tensor.requires_grad and of_readers:
                outputs.append(tensor)
                sums.append(added(of_readers))
        if outputs:
            with self._pipeline._strategy.own_backward(self._prepared):
                torch.autograd.backward(outputs, sums)

    def share_losses(self) -> None:
        """Give every stage the losses of the last one."""
        ranks = self._pipeline._ranks
        last = ranks.count - 1
        wide = torch.float32 if ranks.device.type == "mps" else torch.float64
        losses = torch.zeros(len(self._opened), dtype=wide, device=ranks.device)
        if ranks.position == last:
            losses = torch.stack([self._losses[i].to(wide) for i in range(len(self._opened))])
        dist.broadcast(losses, ranks.column[last], ranks.groups[0])
        for index, placeholder in self._placeholders.items():
            placeholder.detach().copy_(losses[index])
