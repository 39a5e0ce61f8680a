"""On a GPU: the kits on the accelerator, its precisions, and strategies with one rank."""

from __future__ import annotations

import pytest

from stratagem_testing import AcceleratorConformance, PrecisionConformance, StrategyConformance

pytestmark = pytest.mark.gpu


class TestCUDA(AcceleratorConformance):
    accelerator = "cuda"
    devices = 1


class TestFloat32(PrecisionConformance):
    precision = "32-true"
    accelerator = "cuda"


class TestFloat16(PrecisionConformance):
    precision = "16-mixed"
    accelerator = "cuda"


class TestBFloat16(PrecisionConformance):
    precision = "bf16-mixed"
    accelerator = "cuda"


class OnCUDA(StrategyConformance):
    accelerator = "cuda"
    devices = 1


class TestSingleDevice(OnCUDA):
    strategy = "single_device"


class TestDDP(OnCUDA):
    strategy = "ddp"


class TestFSDP(OnCUDA):
    strategy = "fsdp"


class TestFSDPOffload(OnCUDA):
    strategy = "fsdp_cpu_offload"
