"""Names that are known to live in a distribution that may not be installed."""

from __future__ import annotations

_OURS = {
    "stratagem-backend-cuda": (
        *("cuda", "gpu", "nccl", "16-mixed", "16", "float8"),
        *("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"),
        *("transformer-engine", "transformer-engine-float16"),
    ),
    "stratagem-backend-deepspeed": ("deepspeed",),
    "stratagem-backend-xla": ("xla", "xla_debug", "single_xla", "xla_fsdp", "tpu", "tpu_spawn"),
    "stratagem-lightning": ("lightning",),
    "stratagem-backend-hpu-ipu": ("hpu", "hpu_single", "hpu_parallel", "ipu", "ipu_strategy"),
}
_THIRD_PARTIES = {
    "colossalai": "colossalai",
    "bagua": "bagua",
    "hivemind": "hivemind",
    "torchft": "torchft-nightly",
}
_CLASSES = {
    "DeepSpeedStrategy": "stratagem-backend-deepspeed",
    "XLAStrategy": "stratagem-backend-xla",
    "SingleXLAStrategy": "stratagem-backend-xla",
    "XLAFSDPStrategy": "stratagem-backend-xla",
    "XLAAccelerator": "stratagem-backend-xla",
    "CUDAAccelerator": "stratagem-backend-cuda",
    "Float16Mixed": "stratagem-backend-cuda",
    "Float8Precision": "stratagem-backend-cuda",
    "BitsandbytesPrecision": "stratagem-backend-cuda",
    "TransformerEnginePrecision": "stratagem-backend-cuda",
    "HPUParallelStrategy": "stratagem-backend-hpu-ipu",
    "SingleHPUStrategy": "stratagem-backend-hpu-ipu",
    "IPUStrategy": "stratagem-backend-hpu-ipu",
    "LightningCheckpointIO": "stratagem-lightning",
    "lightning_command": "stratagem-lightning",
}


def distribution_of(name: str) -> str | None:
    """Return the distribution of ours that provides a component or class, or None if unknown."""
    if name in _CLASSES:
        return _CLASSES[name]
    wanted = name.casefold()
    for distribution, names in _OURS.items():
        if wanted in names:
            return distribution
    # deepspeed_stage_3_offload and its kin: a family, named by its first word.
    return "stratagem-backend-deepspeed" if wanted.startswith("deepspeed_") else None


def names_by_distribution() -> dict[str, tuple[str, ...]]:
    """Return what each of our backend distributions provides, whether installed or not."""
    return dict(_OURS)


def installation_hint(name: str) -> str:
    """Return a sentence that says what to install for a name, or an empty string if unknown."""
    distribution = distribution_of(name)
    if distribution is not None:
        return f"It is provided by {distribution}: pip install {distribution}."
    package = _THIRD_PARTIES.get(name.casefold())
    if package is not None:
        return (
            f"It is a third party's: install a distribution that wraps the package {package!r} "
            "and declares an entry point in the group 'stratagem.backends'."
        )
    return ""
