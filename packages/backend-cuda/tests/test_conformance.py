"""The CUDA backend's components pass the kits, as far as they run without a GPU."""

from __future__ import annotations

import pytest

from stratagem_cuda.precision import BitsandbytesPrecision, Float8Precision, Float16Mixed
from stratagem_testing import AcceleratorConformance, PrecisionConformance

pytestmark = pytest.mark.conformance


class TestCUDA(AcceleratorConformance):
    accelerator = "cuda"
    without_devices = True


class TestNamedFloat16(PrecisionConformance):
    """As its name is refused on the CPU."""

    precision = "16-mixed"

    @classmethod
    def checks(cls) -> list[str]:
        return [name for name in super().checks() if name.startswith("itself/")]


class TestFloat16(PrecisionConformance):
    precision = Float16Mixed


def emulated() -> Float8Precision:
    return Float8Precision(emulate=True)


class TestFloat8(PrecisionConformance):
    precision = emulated
    tolerance = 0.15


def eight_bits() -> BitsandbytesPrecision:
    return BitsandbytesPrecision("int8")


class TestEightBits(PrecisionConformance):
    precision = eight_bits


class TestFourBits(PrecisionConformance):
    precision = BitsandbytesPrecision
    tolerance = 0.2
