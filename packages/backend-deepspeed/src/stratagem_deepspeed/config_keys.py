"""The keys that DeepSpeed's config has, so that a misspelt one is refused before a process starts.

DeepSpeed ignores what it does not know at the top level. A test compares these tables with the
models of the DeepSpeed that is installed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from stratagem.errors import ConfigurationError


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _keys(
    "activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger "
    "communication_data_type compile compression_training csv_monitor curriculum_learning comet "
    "data_efficiency data_parallel_size data_types dataloader_drop_last disable_allgather "
    "disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler fp16 "
    "fp32_allreduce gradient_accumulation_steps gradient_allreduce_op gradient_clipping "
    "gradient_predivide_factor graph_harvesting hybrid_engine log_level "
    "managed_gradient_accumulation memory_breakdown nebula "
    "optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler "
    "seq_parallel_communication_data_type sequence_parallel_size sparse_attention "
    "sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast "
    "train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism "
    "use_node_local_storage wall_clock_breakdown wandb weight_quantization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"
)

SECTIONS: dict[tuple[str, ...], frozenset[str]] = {
    ("zero_optimization",): _keys(
        "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm "
        "contiguous_gradients cpu_offload cpu_offload_param cpu_offload_use_pin_memory "
        "elastic_checkpoint enable_sanity_checks gather_16bit_weights_on_model_save "
        "ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights "
        "log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear "
        "mics_hierarchical_params_gather mics_shard_size model_persistence_threshold "
        "module_granularity_threshold offload_optimizer offload_param overlap_comm "
        "override_module_apply param_persistence_threshold parameter_alignment "
        "pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size reduce_scatter "
        "round_robin_gradients save_muon_momentum_buffer_in_memory stage "
        "stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_param_persistence_threshold "
        "stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size "
        "use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow "
        "zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights "
        "zero_quantized_weights zeropp_loco_param"
    ),
    ("zero_optimization", "offload_param"): _keys(
        "buffer_count buffer_size device max_in_cpu nvme_path pin_memory"
    ),
    ("zero_optimization", "offload_optimizer"): _keys(
        "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read "
        "pipeline_write ratio super_offload"
    ),
    ("fp16",): _keys(
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis "
        "initial_scale_power loss_scale loss_scale_window min_loss_scale"
    ),
    ("bf16",): _keys(
        "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled "
        "immediate_grad_update"
    ),
    ("activation_checkpointing",): _keys(
        "contiguous_memory_optimization cpu_checkpointing number_checkpoints "
        "partition_activations profile synchronize_checkpoint_boundary"
    ),
    ("aio",): _keys(
        "block_size intra_op_parallelism overlap_events queue_depth single_submit thread_count "
        "use_gds"
    ),
    ("optimizer",): _keys("legacy_fusion params type"),
    ("scheduler",): _keys("params type"),
}
"""The sections whose keys are checked; the others are DeepSpeed's to check."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse keys that DeepSpeed's config does not have.

    Raises:
        ConfigurationError: names the key, and the one that it resembles.
    """
    _check(config, TOP_LEVEL, ())
    for path, known in SECTIONS.items():
        section: Any = config
        for key in path:
            section = section.get(key) if isinstance(section, Mapping) else None
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ConfigurationError(
                f"config: {'.'.join(path)}={section!r}: expected a section (a dict) with keys of "
                f"{', '.join(sorted(known))}"
            )
        _check(section, known, path)


def _check(section: Mapping[str, Any], known: frozenset[str], path: tuple[str, ...]) -> None:
    for key in section:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = (
            f"did you mean {'.'.join((*path, near[0]))!r}?"
            if near
            else f"expected one of {', '.join(sorted(known))}"
        )
        raise ConfigurationError(
            f"config: {'.'.join((*path, str(key)))!r} is not a key of DeepSpeed's config; {hint}"
        )
