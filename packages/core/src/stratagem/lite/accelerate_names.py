"""What to use in place of a public name of Accelerate's `Accelerator` that Lite does not have."""

from __future__ import annotations

_PLAN = "lite.plan has what was chosen: lite.plan."
_STRATEGY = "A strategy's options are arguments of its class: Lite(strategy="
_FIRST = "with lite.ranks.rank_zero_first("
_ONLY = "if lite."

COUNTERPARTS = {
    "check_trigger": "Reduce a flag over the ranks: lite.all_reduce(flag, 'max')",
    "clear": "Delete the variables: Lite keeps its models until it is deleted itself",
    "clip_grad_norm_": "Use lite.clip_gradients(model, optimizer, max_norm=...)",
    "clip_grad_value_": "Use lite.clip_gradients(model, optimizer, clip_val=...)",
    "context_parallel_rank": "Lite has no context parallelism",
    "data_parallel_rank": "Use lite.ranks.data_split[0]",
    "data_parallel_shard_rank": "Use lite.ranks.data_split[0]",
    "deepspeed_plugin": f"{_STRATEGY}DeepSpeedStrategy(...))",
    "deepspeed_ulysses_dl_adapter": "Lite has no sequence parallelism of DeepSpeed's",
    "dispatch_batches": "Every rank reads its own part of the data",
    "distributed_type": f"{_PLAN}strategy.name",
    "end_training": "Remove the line, or call finalize('success') of a logger that needs it",
    "even_batches": "lite.setup_dataloaders repeats samples so that all ranks have as many, and "
    "lite.gather_for_metrics leaves those out",
    "fp8_backend": "FP8 is a precision: Lite(precision='transformer-engine')",
    "free_memory": "Delete the variables: Lite keeps its models until it is deleted itself",
    "gather": "Use lite.gather_for_metrics(data); lite.all_gather(data) stacks the ranks' tensors "
    "along a new first dimension",
    "get_state_dict": "Use model.state_dict() of the model that lite.setup returned",
    "get_tracker": "Keep the logger that you pass to Lite(loggers=...): logger.experiment is the "
    "library's object",
    "gradient_accumulation_steps": "Pass it when you create Lite: Lite(accumulate_grad_batches=4)",
    "gradient_state": "Use lite.accumulate(model), which yields whether it ends a window",
    "init_trackers": "Pass Lite(loggers=...), such as 'tensorboard' or a WandbLogger(project=...), "
    "and call lite.log_hyperparams(config)",
    "is_composable_parallelism_enabled": f"{_PLAN}strategy.name",
    "is_fsdp2": f"{_PLAN}strategy.name is 'fsdp' for FSDP2",
    "is_last_process": f"Use {_ONLY}global_rank == lite.world_size - 1",
    "is_local_main_process": f"Use {_ONLY}local_rank == 0",
    "is_main_process": "Use lite.is_global_zero",
    "local_main_process_first": f"Use {_FIRST}local=True):",
    "local_process_index": "Use lite.local_rank",
    "log": "Use lite.log_dict(values, step)",
    "logging_dir": "Use logger.log_dir of the logger that you pass to Lite(loggers=...)",
    "lomo_backward": "Lite has no LOMO optimizers",
    "main_process_first": f"Use {_FIRST}):",
    "maybe_context_parallel": "Lite has no context parallelism",
    "mixed_precision": f"{_PLAN}precision.name",
    "multi_device": "Use lite.world_size > 1",
    "no_sync": "Use lite.no_backward_sync(model), or lite.accumulate(model)",
    "non_blocking": "Batches are copied without blocking if their memory is pinned",
    "num_processes": "Use lite.world_size",
    "on_last_process": f"Write {_ONLY}global_rank == lite.world_size - 1 in the function",
    "on_local_main_process": f"Write {_ONLY}local_rank == 0 in the function",
    "on_local_process": f"Write {_ONLY}local_rank == n in the function",
    "on_main_process": f"Write {_ONLY}is_global_zero in the function, or decorate it with "
    "stratagem.launch.rank_zero_only",
    "on_process": f"Write {_ONLY}global_rank == n in the function",
    "optimizer_step_was_skipped": "A scheduler that is set up follows its optimizer; the precision "
    "leaves out steps with gradients that are not finite",
    "parallelism_config": f"{_STRATEGY}ModelParallelStrategy(...))",
    "pipeline_parallel_rank": "Lite has no pipeline parallelism",
    "prepare": "Use lite.setup, which takes the same objects in any order",
    "prepare_data_loader": "Use lite.setup_dataloaders(loader)",
    "prepare_model": "Use lite.setup(model)",
    "prepare_optimizer": "Use lite.setup_optimizers(optimizer)",
    "prepare_scheduler": "Use lite.setup(scheduler)",
    "process_index": "Use lite.global_rank",
    "profile": "Use torch.profiler.profile",
    "project_configuration": "Pass a folder to lite.save_state and to each logger",
    "project_dir": "Pass a folder to lite.save_state and to each logger",
    "reduce": "Use lite.all_reduce(data, 'sum')",
    "register_for_checkpointing": "Use lite.setup(object), after which lite.save_state saves it",
    "register_load_state_pre_hook": "Run the code before lite.load_state(folder)",
    "register_save_state_pre_hook": "Run the code before lite.save_state(folder)",
    "save_iteration": "Pass another folder to each lite.save_state(folder)",
    "save_model": "Use lite.save(path, {'model': model})",
    "scaler": "Use lite.strategy.precision, which scales the loss",
    "set_trigger": "Reduce a flag over the ranks: lite.all_reduce(flag, 'max')",
    "should_save_model": "Call lite.save on every rank: rank 0 writes, or each its shards",
    "skip_first_batches": "Use the loader itself: after lite.load_state(folder) its next iteration "
    "goes on with the batch that would have come next",
    "split_batches": "The batch size of a loader is that of each rank",
    "state": "Lite has the ranks and the device itself: lite.ranks, lite.device",
    "sync_gradients": "lite.accumulate yields it: with lite.accumulate(model) as is_last:",
    "tensor_parallel_rank": "Use lite.strategy of ModelParallelStrategy, whose mesh has it",
    "torch_device_mesh": f"{_STRATEGY}ModelParallelStrategy(...)), whose device_mesh it is",
    "trackers": "Keep the loggers that you pass to Lite(loggers=...)",
    "trigger_sync_in_backward": "Use lite.no_backward_sync(model, enabled=...) for each batch",
    "unscale_gradients": "lite.clip_gradients unscales them",
    "unwrap_model": "Use model.module of the model that lite.setup returned",
    "use_distributed": "Use lite.world_size > 1",
    "use_seedable_sampler": "The order of samples follows from stratagem.seed_everything and the "
    "epoch",
    "use_stateful_dataloader": "Every loader that is set up is saved with its position",
    "verify_device_map": "Lite trains no model with a device_map",
    "wait_for_everyone": "Use lite.barrier()",
}
