"""Strategy classes: ours, every installed backend's, and the bases to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.compile import adopt_compiled as adopt_compiled, own_module as own_module
    from stratagem.discovery.capabilities import Capabilities as Capabilities
    from stratagem.discovery.registry import StrategyRegistry as StrategyRegistry
    from stratagem.interfaces.checkpoint_io import CheckpointIO as CheckpointIO
    from stratagem.interfaces.components import Components as Components
    from stratagem.interfaces.contract_checks import (
        check_capabilities as check_capabilities,
        check_overrides as check_overrides,
        context_of as context_of,
        misspelled_methods as misspelled_methods,
        uncalled_methods as uncalled_methods,
    )
    from stratagem.interfaces.micro_batch import MicroBatch as MicroBatch
    from stratagem.interfaces.prepared_model import (
        Optimizers as Optimizers,
        PreparedModel as PreparedModel,
        StepModule as StepModule,
        make_optimizers as make_optimizers,
        user_module as user_module,
    )
    from stratagem.interfaces.ranks import (
        Axis as Axis,
        DataSplit as DataSplit,
        Ranks as Ranks,
        ReduceOp as ReduceOp,
    )
    from stratagem.interfaces.stepping import TrainStep as TrainStep
    from stratagem.interfaces.strategy import Strategy as Strategy
    from stratagem.one_device.strategy import SingleDeviceStrategy as SingleDeviceStrategy
    from stratagem.plan.memory import StepMemory as StepMemory
    from stratagem.plan.step_options import (
        Compilation as Compilation,
        GradientClip as GradientClip,
        StepOptions as StepOptions,
        seconds as seconds,
    )
    from stratagem_torch.distributed.activation_checkpointing import (
        ActivationCheckpointing as ActivationCheckpointing,
        Recompute as Recompute,
        apply_activation_checkpointing as apply_activation_checkpointing,
        check_activation_checkpointing as check_activation_checkpointing,
    )
    from stratagem_torch.distributed.allocator import (
        return_freed_memory as return_freed_memory,
        use_huge_pages as use_huge_pages,
    )
    from stratagem_torch.distributed.divergence import DivergenceCheck as DivergenceCheck
    from stratagem_torch.distributed.parallel_strategy import ParallelStrategy as ParallelStrategy
    from stratagem_torch.distributed.process_group import ProcessGroupRanks as ProcessGroupRanks
    from stratagem_torch.distributed.turns import EvaluationTurns as EvaluationTurns
    from stratagem_torch.strategies.by_memory import plan_by_memory as plan_by_memory
    from stratagem_torch.strategies.communication_hooks import (
        CommHook as CommHook,
        CommWrapper as CommWrapper,
    )
    from stratagem_torch.strategies.data_parallel import (
        DataParallelStrategy as DataParallelStrategy,
    )
    from stratagem_torch.strategies.ddp import DDPStrategy as DDPStrategy
    from stratagem_torch.strategies.ddp_sharded import DDPShardedStrategy as DDPShardedStrategy
    from stratagem_torch.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from stratagem_torch.strategies.model_parallel import (
        ModelParallelStrategy as ModelParallelStrategy,
    )
else:
    __getattr__, __dir__ = exporter(__name__, "strategy")
