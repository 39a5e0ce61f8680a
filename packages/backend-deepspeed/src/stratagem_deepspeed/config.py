"""The engine's config: a pure function of the strategy's options, the user's config and the run.

Nothing is imported from DeepSpeed here, so that what contradicts itself is refused before a process
starts. `engine_config` is called as soon as a fact is known, and once more, with all of them, when
an engine is made.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem_deepspeed.config_file import check_finite
from stratagem_deepspeed.options import ZERO, Options

AUTO = "auto"
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("cpu", "nvme")
OFFLOADS = ("offload_optimizer", "offload_param")
_BUFFER_SIZE, _SUB_GROUP_SIZE, _MAX_LIVE = 100_000_000, 1_000_000_000, 1_000_000_000
"""DeepSpeed's defaults, in numbers."""
BUCKET_SIZE = 200_000_000
"""Elements; DeepSpeed's own default, 5e8, takes 2.5 times the memory."""
CPU_BUCKET_SIZE = 10_000_000
"""Elements, where ranks compute on the CPU: 40 MB in float32.

Each bucket is memory of a rank: several of 2e8, at stage 3 with all parameters that forward has
gathered, are more than what sharding saves. The price is that backward gathers parameters again.
BENCHMARKS.md has the memory ("How much memory does a rank need?"). The time was not measured.
"""

_STAGE = 2
"""Where nothing is said."""
_NEVER = 2**31 - 1

_ENGINE_FORMATS = {
    "32-true": None,
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}
"""The section of DeepSpeed's config that a precision enables."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of the run, as far as known.

    None: not known yet.

    Attributes:
        precision: its name.
        clip: the Trainer's largest norm of gradients; None: it does not clip.
        accumulation: the most micro-batches of a step; None: a hand-written loop decides.
        loop: "Trainer" or "Lite", once known.
        batch_size: the number of samples in a micro-batch of a rank; 0: unknown.
        world_size: the number of ranks.
        device_type: of the ranks' devices, "cpu" for one.
    """

    precision: str | None = None
    clip: float | None = None
    accumulation: int | None = None
    loop: str | None = None
    batch_size: int | None = None
    world_size: int | None = None
    device_type: str | None = None


def engine_config(options: Options, user: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Return the config of an engine.

    Values of the user's config stay unless an argument or a fact contradicts them; `auto` values
    are filled.

    Args:
        options: the strategy's arguments.
        user: the return value of `config_file.read_config`.
        facts: the facts of the run.

    Raises:
        ConfigurationError: an argument or a fact contradicts the config (the message has the key
            and both values), or a combination cannot work.

    Example:
        >>> from stratagem_deepspeed.config import Facts, engine_config
        >>> from stratagem_deepspeed.options import Options
        >>> made = engine_config(Options(stage=3), {}, Facts(precision="bf16-mixed", clip=0.5))
        >>> made["zero_optimization"]["stage"], made["bf16"], made["gradient_clipping"]
        (3, {'enabled': True}, 0.5)
    """
    config = _Config(user)
    for name, path, value in options.placed():
        config.put(path, value, f"{name}={value!r}")
    _offload(options, config)
    config.fill((ZERO, "stage"), _STAGE)
    config.fill((ZERO, "contiguous_gradients"), True)
    _buckets(config, facts)
    # Below stage 2, DeepSpeed reduces gradients in the step, without a backward to overlap with.
    config.fill((ZERO, "overlap_comm"), config.get((ZERO, "stage")) in (2, 3))
    config.put(("managed_gradient_accumulation",), False, "the loop says when to step")
    _precision(config, facts)
    _steps(config, facts)
    config.fill(("steps_per_print",), _NEVER)
    _check_zero(config, facts)
    made = config.made
    _leave_to_deepspeed(made)
    _check_auto(made)
    return made


def without_needless_offload(options: Options, user: Mapping[str, Any]) -> Options:
    """Return options without an offload of parameters that no rank has a part of; says so.

    DeepSpeed, and Lightning with it, passes over that option below stage 3 without a word.
    """
    stage = user.get(ZERO, {}).get("stage", _STAGE) if options.stage is None else options.stage
    if not options.offload_parameters or stage == 3:
        return options
    warnings.warn(
        f"offload_parameters=True with stage={stage!r}: parameters are whole on each rank below "
        "stage 3, so they stay on the device. Pass stage=3 to offload them, or leave it out",
        stacklevel=3,
    )
    return replace(options, offload_parameters=False, offload_params_device=None)


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage of an engine's config."""
    return int(config[ZERO]["stage"])


def offload_device(config: Mapping[str, Any], what: str) -> str | None:
    """Return the device of "offload_optimizer" or "offload_param", or None without offload."""
    section = config[ZERO].get(what) or {}
    device = section.get("device", "none")
    return None if device == "none" else str(device)


def why_not_followed(config: Mapping[str, Any]) -> str | None:
    """Return the option with which a rank cannot follow other ranks' forward passes; None: it can.

    Below stage 3 a forward without gradients does not communicate.
    """
    if stage_of(config) < 3:
        return None
    section = config[ZERO]
    if offload_device(config, "offload_param") == "nvme":
        return "offload_params_device='nvme'"
    partition = section.get("zero_hpz_partition_size", 1)
    wanted = [key for key in _NOT_FOLLOWED if section.get(key)]
    return wanted[0] if wanted else "zero_hpz_partition_size" if partition > 1 else None


_NOT_FOLLOWED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "stage3_use_all_reduce_for_fetch_params",
    "use_all_reduce_for_fetch_params",
    "zenflow",
)
"""Options of stage 3 whose other ways of gathering were not tried."""


def offloaded_to_host(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that offloads to the host what it offloads to NVMe, for a simulation."""
    config = copy.deepcopy(config)
    for what in OFFLOADS:
        if offload_device(config, what) == "nvme":
            config[ZERO][what]["device"] = "cpu"
    return config


def swap_buffers(config: Mapping[str, Any], offloaded: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes in the host, and on NVMe, of the state that a rank offloads.

    DeepSpeed moves parameters and optimizer state through pinned buffers in the host. Their numbers
    and sizes are options of the config.

    Args:
        config: the config of the engine.
        offloaded: bytes of "parameters", "gradients" and "optimizer".
    """
    host, disk = sum(offloaded.values()), 0
    sections = {what: config[ZERO].get(what) or {} for what in OFFLOADS}
    if offload_device(config, "offload_param") == "nvme":
        section, moved = sections["offload_param"], offloaded.get("parameters", 0)
        size = section.get("buffer_size", _BUFFER_SIZE) * (4 if _trains_in_float32(config) else 2)
        host += section.get("buffer_count", 5) * size - moved
        disk += moved
    if offload_device(config, "offload_optimizer") == "nvme":
        moved = offloaded.get("optimizer", 0) + offloaded.get("gradients", 0)
        # Weights and two states of Adam, of which one is as large as a group of parameters.
        group = 4 * config[ZERO].get("sub_group_size", _SUB_GROUP_SIZE)
        size = min(offloaded.get("optimizer", 0) // 3, group)
        host += sections["offload_optimizer"].get("buffer_count", 4) * size - moved
        disk += moved
    return host, disk


def buffers_on_device(config: Mapping[str, Any], largest: int) -> int:
    """Return the bytes that an engine with an optimizer in the host keeps on the device for it.

    Gradients pass through them: at stage 3 through a bucket, below it one parameter at a time.

    Args:
        config: the engine's.
        largest: elements of the largest parameter.
    """
    if offload_device(config, "offload_optimizer") is None:
        return 0
    elements = largest
    if stage_of(config) == 3:
        has_bucket = config[ZERO].get("contiguous_gradients", True)
        elements = int(config[ZERO]["reduce_bucket_size"]) if has_bucket else 0
    return elements * (4 if _trains_in_float32(config) else 2)


def limits_of(config: Mapping[str, Any], ranks: int) -> list[int]:
    """Return the most parameters of a model that an engine handles at a time, in several respects.

    They are in two buckets of gradients, and at stage 3 gathered, or stepped by all ranks.
    """
    section = config[ZERO]
    buckets = 2 * max(
        int(section[name]) for name in ("allgather_bucket_size", "reduce_bucket_size")
    )
    if stage_of(config) != 3:
        return [buckets]
    own = (section.get(f"{part}max_live_parameters") for part in ("", "stage3_"))
    live = int(next(filter(None, own), _MAX_LIVE))
    return [buckets, live, ranks * int(section.get("sub_group_size", _SUB_GROUP_SIZE))]


def _trains_in_float32(config: Mapping[str, Any]) -> bool:
    return not any((config.get(half) or {}).get("enabled") for half in ("bf16", "fp16"))


class _Config:
    """A config under construction, whose values options and facts must not contradict."""

    def __init__(self, user: Mapping[str, Any]) -> None:
        self.made: dict[str, Any] = copy.deepcopy(dict(user))

    def get(self, path: tuple[str, ...]) -> Any:
        """Return the value at a path, or None if the path has no value."""
        section: Any = self.made
        for key in path:
            if not isinstance(section, Mapping) or key not in section:
                return None
            section = section[key]
        return section

    def put(self, path: tuple[str, ...], value: Any, said: str, advice: str = "") -> None:
        """Write a value that was given elsewhere (`said`); refuse another one in the config."""
        check_finite(said.partition("=")[0], value)
        there = self.get(path)
        if there not in (None, AUTO, value):
            raise ConfigurationError(
                f"config: {'.'.join(path)}={there!r}, but {said}: "
                + (advice or "give it in one place, or write 'auto' into the config")
            )
        section = self.made
        for key in path[:-1]:
            if section.get(key) is None:  # null in a file means the same as nothing
                section[key] = {}
            section = section[key]
        section[path[-1]] = value

    def fill(self, path: tuple[str, ...], default: Any) -> None:
        """Write a default where the config says nothing, or "auto"."""
        if self.get(path) in (None, AUTO):
            self.put(path, default, "")


def _buckets(config: _Config, facts: Facts) -> None:
    """Fill sizes of buckets: elements communicated, kept gathered and stepped at a time."""
    on_cpu = facts.device_type == "cpu"
    size = CPU_BUCKET_SIZE if on_cpu else BUCKET_SIZE
    config.fill((ZERO, "allgather_bucket_size"), size)
    config.fill((ZERO, "reduce_bucket_size"), size)
    if not on_cpu or config.get((ZERO, "stage")) != 3:
        return
    config.fill((ZERO, "sub_group_size"), size)
    for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"):
        # A key has two names; DeepSpeed knows the shorter one since 0.5.
        if config.get((ZERO, name)) is None:
            config.fill((ZERO, f"stage3_{name}"), size)


def _offload(options: Options, config: _Config) -> None:
    for asked, section, device_argument in (
        ("offload_optimizer", "offload_optimizer", "offload_optimizer_device"),
        ("offload_parameters", "offload_param", "offload_params_device"),
    ):
        device = getattr(options, device_argument)
        if device is not None and device not in OFFLOAD_DEVICES:
            raise ConfigurationError(
                f"{device_argument}={device!r}: expected {' or '.join(map(repr, OFFLOAD_DEVICES))}"
            )
        if not getattr(options, asked):
            if device is not None and config.get((ZERO, section)) is None:
                raise ConfigurationError(
                    f"{device_argument}={device!r} says where to, but nothing is offloaded: pass "
                    f"{asked}=True as well, or leave it out"
                )
            continue
        path = (ZERO, section, "device")
        if config.get(path) == "none":
            config.put(path, device or "cpu", f"{asked}=True")
        if device is None:
            config.fill(path, "cpu")
        else:
            config.put(path, device, f"{device_argument}={device!r}")
    for section in ("offload_optimizer", "offload_param"):
        if config.get((ZERO, section, "device")) in (None, "none"):
            continue
        if options.pin_memory is not None:
            said = f"pin_memory={options.pin_memory!r}"
            config.put((ZERO, section, "pin_memory"), options.pin_memory, said)
        else:
            # Page-locked memory is scarce, so that it has to be asked for.
            config.fill((ZERO, section, "pin_memory"), False)
        if config.get((ZERO, section, "device")) == "nvme":
            path = (ZERO, section, "nvme_path")
            if options.nvme_path is not None:
                config.put(path, str(options.nvme_path), f"nvme_path={str(options.nvme_path)!r}")
            else:
                config.fill(path, "/local_nvme")


def _precision(config: _Config, facts: Facts) -> None:
    if facts.precision is None:
        return
    wanted = _ENGINE_FORMATS[facts.precision]
    for section, example in (("bf16", "bf16-mixed"), ("fp16", "16-mixed")):
        enabled = section == wanted
        if not enabled and config.get((section,)) is None:
            continue
        config.put(
            (section, "enabled"),
            enabled,
            f"precision={facts.precision!r}",
            f"the two must agree; pass precision={'32-true' if enabled else example!r}, or change "
            "the config",
        )


def _steps(config: _Config, facts: Facts) -> None:
    """Write clipping, accumulation and batch sizes."""
    if facts.clip is not None:
        said = f"gradient_clip_val={facts.clip!r}"
        config.put(("gradient_clipping",), facts.clip, said)
    # Always written: DeepSpeed's own default is 1.0.
    config.fill(("gradient_clipping",), 0.0)
    if facts.loop is None:
        return
    asked = config.get(("gradient_accumulation_steps",))
    if facts.loop == "Lite":
        if asked not in (None, AUTO, 1):
            raise ConfigurationError(
                f"config: gradient_accumulation_steps={asked!r}, but a loop under Lite accumulates "
                "itself: leave it out, divide the loss, and step the optimizer after as many "
                "backward passes as you like"
            )
        accumulation = 1
    else:
        accumulation = facts.accumulation or 1
        config.put(
            ("gradient_accumulation_steps",),
            accumulation,
            f"accumulate_grad_batches={accumulation!r}",
            f"the Trainer counts the batches of a step: pass accumulate_grad_batches={asked!r}, or "
            "leave the key out",
        )
    config.fill(("gradient_accumulation_steps",), accumulation)
    _batch_sizes(config, facts, accumulation)


def _batch_sizes(config: _Config, facts: Facts, accumulation: int) -> None:
    size = facts.batch_size
    micro, whole = ("train_micro_batch_size_per_gpu",), ("train_batch_size",)
    if size is None:
        return
    if size:
        said = f"the training data loader has batch_size={size!r}"
        config.put(micro, size, said)
    elif config.get(micro) == AUTO or (config.get(micro) is None and config.get(whole) == AUTO):
        key = micro[0] if config.get(micro) == AUTO else whole[0]
        raise ConfigurationError(
            f"config: {key}='auto' is filled from the training data loader, and "
            + (
                "a loop under Lite has none yet when the model is set up"
                if facts.loop == "Lite"
                else "this one has no batch_size"
            )
            + ": write the number of samples that a rank takes at a time"
        )
    ranks = facts.world_size or 1
    if config.get(micro) is None and isinstance(config.get(whole), int):
        config.fill(micro, max(1, config.get(whole) // (ranks * accumulation)))
    # Nothing but DeepSpeed's own throughput log depends on it.
    config.fill(micro, 1)
    expected = config.get(micro) * accumulation * ranks
    config.put(
        whole,
        expected,
        f"train_micro_batch_size_per_gpu={config.get(micro)!r} on each of {ranks} rank(s) with "
        f"{accumulation} micro-batch(es) a step make {expected}",
    )


def _check_zero(config: _Config, facts: Facts) -> None:
    """Refuse combinations that DeepSpeed lacks, or computes wrongly."""
    stage = config.get((ZERO, "stage"))
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigurationError(
            f"stage={stage!r}: expected 1 (optimizer state sharded), 2 (gradients too) or 3 "
            "(parameters too); 0 shards nothing, as ddp"
        )
    made = config.made
    if stage < 2 and config.get((ZERO, "overlap_comm")):
        raise ConfigurationError(
            f"overlap_comm=True with stage={stage}: gradients are reduced in the step there, after "
            "the last backward: leave it out, or pass stage=2"
        )
    param, optimizer = (offload_device(made, w) for w in ("offload_param", "offload_optimizer"))
    if param is not None and stage != 3:
        raise ConfigurationError(
            f"offload of parameters (to {param!r}) needs stage=3, where they are sharded; received "
            f"stage={stage}: pass stage=3, or leave offload_parameters out"
        )
    if optimizer is not None and stage == 0:
        raise ConfigurationError(
            f"offload of the optimizer (to {optimizer!r}) needs stage=1, 2 or 3, received stage=0"
        )
    if optimizer == "nvme" and stage != 3:
        raise ConfigurationError(
            f"offload of the optimizer to 'nvme' needs stage=3, received stage={stage}: pass "
            "stage=3, or offload_optimizer_device='cpu'"
        )
    if facts.precision is None:
        return
    half = _ENGINE_FORMATS[facts.precision]
    if stage == 0 and half is not None:
        raise ConfigurationError(
            f"precision={facts.precision!r} with stage=0: DeepSpeed takes a step with zero "
            "gradients when it makes that optimizer, which changes the weights: pass stage=1, or "
            "strategy='ddp'"
        )
    if param == optimizer == "nvme" and half is None:
        raise ConfigurationError(
            "offload of parameters and of the optimizer, both to 'nvme', fails inside DeepSpeed "
            f"with float32 parameters (its buffers are bfloat16); received precision="
            f"{facts.precision!r}: pass precision='bf16-mixed', or offload_params_device='cpu'"
        )


def _leave_to_deepspeed(config: dict[str, Any]) -> None:
    """Remove "auto" where DeepSpeed has a default of its own."""
    for name in (ZERO, "activation_checkpointing", "aio"):
        section = config.get(name)
        if isinstance(section, dict):
            config[name] = {key: value for key, value in section.items() if value != AUTO}


def _check_auto(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Refuse an `auto` that nothing here fills; while facts are missing, some still will be."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_auto(value, (*path, key))
        elif value == AUTO and (*path, key) not in _FILLED_LATER:
            raise ConfigurationError(
                f"config: {'.'.join((*path, key))}='auto' cannot be filled from the run: write a "
                "value, or leave it out"
            )


_FILLED_LATER = {
    ("gradient_accumulation_steps",),
    ("train_micro_batch_size_per_gpu",),
    ("train_batch_size",),
    ("fp16", "enabled"),
    ("bf16", "enabled"),
    ("data_types", "keep_in_fp32_modules"),  # DeepSpeed's own "auto"
}
