"""What this distribution offers for NVIDIA GPUs: specs only, no torch and no SDK."""

from stratagem.discovery import AcceleratorSpec, ComponentSpec, PrecisionSpec, hookimpl


@hookimpl
def stratagem_components() -> tuple[ComponentSpec, ...]:
    """Return everything that this backend provides."""
    return (
        AcceleratorSpec(
            name="cuda",
            target="stratagem_cuda.accelerator:CUDAAccelerator",
            api_version=1,
            summary="NVIDIA GPUs; nccl between ranks",
            aliases=("gpu",),
            probe="stratagem_cuda.probe:cuda_availability",
            priority=100,
        ),
        PrecisionSpec(
            name="16-mixed",
            target="stratagem_cuda.precision:Float16Mixed",
            api_version=1,
            summary="float32 parameters, float16 where autocast finds it safe, losses scaled",
            aliases=("16",),
            accelerators=("cuda",),
        ),
    )
