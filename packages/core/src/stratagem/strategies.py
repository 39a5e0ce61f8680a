"""Strategy classes: ours, every installed backend's, and the bases to subclass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery.exports import exporter

if TYPE_CHECKING:
    from stratagem.discovery.registry import StrategyRegistry as StrategyRegistry
    from stratagem.distributed.activation_checkpointing import (
        apply_activation_checkpointing as apply_activation_checkpointing,
    )
    from stratagem.distributed.parallel_strategy import ParallelStrategy as ParallelStrategy
    from stratagem.interfaces.checkpoint_io import CheckpointIO as CheckpointIO
    from stratagem.interfaces.strategy import Optimizers as Optimizers
    from stratagem.interfaces.strategy import PreparedModel as PreparedModel
    from stratagem.interfaces.strategy import ReduceOp as ReduceOp
    from stratagem.interfaces.strategy import Strategy as Strategy
    from stratagem.interfaces.strategy import make_optimizers as make_optimizers
    from stratagem.interfaces.train_step import TrainStep as TrainStep
    from stratagem.native.strategies.ddp import DDPStrategy as DDPStrategy
    from stratagem.native.strategies.ddp_sharded import DDPShardedStrategy as DDPShardedStrategy
    from stratagem.native.strategies.dp import DataParallelStrategy as DataParallelStrategy
    from stratagem.native.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from stratagem.native.strategies.model_parallel import (
        ModelParallelStrategy as ModelParallelStrategy,
    )
    from stratagem.native.strategies.single_device import (
        SingleDeviceStrategy as SingleDeviceStrategy,
    )
else:
    __getattr__, __dir__ = exporter(
        __name__,
        "strategy",
        {
            "CheckpointIO": "stratagem.interfaces.checkpoint_io",
            "Optimizers": "stratagem.interfaces.strategy",
            "ParallelStrategy": "stratagem.distributed.parallel_strategy",
            "PreparedModel": "stratagem.interfaces.strategy",
            "ReduceOp": "stratagem.interfaces.strategy",
            "SingleDeviceStrategy": "stratagem.native.strategies.single_device",
            "Strategy": "stratagem.interfaces.strategy",
            "StrategyRegistry": "stratagem.discovery.registry",
            "TrainStep": "stratagem.interfaces.train_step",
            "apply_activation_checkpointing": "stratagem.distributed.activation_checkpointing",
            "make_optimizers": "stratagem.interfaces.strategy",
        },
    )
