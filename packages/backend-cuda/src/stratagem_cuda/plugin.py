"""What this distribution offers for GPUs of NVIDIA and AMD: specs only, no torch and no SDK."""

from typing import Any

from stratagem.discovery import (
    AcceleratorSpec,
    ComponentSpec,
    PrecisionSpec,
    hookimpl,
    torch_build,
)
from stratagem.errors import ConfigurationError
from stratagem_cuda.precision.requirement import (
    BITSANDBYTES,
    TORCHAO,
    TORCHAO_MX,
    TRANSFORMER_ENGINE,
)

_QUANTIZED = {
    "nf4": "frozen weights in 4 bits, quantiles of a normal distribution",
    "nf4-dq": "frozen weights in 4 bits as nf4, with quantised scales",
    "fp4": "frozen weights in 4 bits, as floating-point numbers",
    "fp4-dq": "frozen weights in 4 bits as fp4, with quantised scales",
    "int8": "frozen weights in 8 bits",
    "int8-training": "weights in float16 and multiply in 8 bits",
}
_TRANSFORMER_ENGINE = {"transformer-engine": "bfloat16", "transformer-engine-float16": "float16"}


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this backend provides."""
    return (
        AcceleratorSpec(
            name="cuda",
            target="stratagem_cuda.accelerator:CUDAAccelerator",
            api_version=2,
            summary="NVIDIA GPUs, and AMD's by ROCm; nccl or rccl between ranks",
            aliases=("gpu", "rocm"),
            probe="stratagem_cuda.probe:cuda_availability",
            priority=100,
            data_parallel_kernels=True,
        ),
        PrecisionSpec(
            name="16-mixed",
            target="stratagem_cuda.precision.float16:Float16Mixed",
            api_version=2,
            summary="float32 parameters, float16 where autocast finds it safe, losses scaled",
            aliases=("16",),
            accelerators=("cuda",),
        ),
        PrecisionSpec(
            name="float8",
            target="stratagem_cuda.precision.float8:Float8Precision",
            api_version=2,
            summary="linear layers multiply in float8 (torchao), the rest as bf16-mixed",
            requires=(str(TORCHAO),),
            incompatible_because="stratagem_cuda.precision.objections:float8",
        ),
        PrecisionSpec(
            name="mxfp8",
            target="stratagem_cuda.precision.mxfp8:MXFP8Precision",
            api_version=2,
            summary="linear layers multiply in MXFP8 (torchao), the rest as bf16-mixed",
            requires=(str(TORCHAO_MX),),
            incompatible_because="stratagem_cuda.precision.objections:mxfp8",
        ),
        *(
            PrecisionSpec(
                name=mode,
                target="stratagem_cuda.precision.bitsandbytes:BitsandbytesPrecision",
                api_version=2,
                summary=f"linear layers have {what} (bitsandbytes)",
                init_args={"mode": mode},
                requires=(str(BITSANDBYTES),),
                incompatible_because="stratagem_cuda.precision.objections:bitsandbytes",
            )
            for mode, what in _QUANTIZED.items()
        ),
        *(
            PrecisionSpec(
                name=name,
                target="stratagem_cuda.precision.transformer_engine:TransformerEnginePrecision",
                api_version=2,
                summary=f"linear layers multiply in float8 (Transformer Engine), else {dtype}",
                init_args={"name": name},
                accelerators=("cuda",),
                requires=(str(TRANSFORMER_ENGINE),),
                incompatible_because="stratagem_cuda.precision.objections:transformer_engine",
            )
            for name, dtype in _TRANSFORMER_ENGINE.items()
        ),
    )


@hookimpl
def stratagem_run_planned(plan: Any) -> None:
    """Refuse accelerator="rocm" with a build of torch for NVIDIA's GPUs."""
    asked = plan.request.accelerator
    if plan.accelerator.name != "cuda" or not isinstance(asked, str) or asked.lower() != "rocm":
        return
    build = torch_build()
    if build is not None and build.hip is None:
        raise ConfigurationError(
            f"accelerator={asked!r} means AMD's GPUs, and torch {build.version} was built for CUDA "
            f"{build.cuda}: pass accelerator='cuda', or install a build of torch for ROCm"
        )
