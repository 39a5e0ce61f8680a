"""The accelerator passes the kit where there is no device; tests/devices plays one."""

from __future__ import annotations

import pytest

from stratagem_testing import AcceleratorConformance

pytestmark = pytest.mark.conformance


class TestMPS(AcceleratorConformance):
    accelerator = "mps"
    without_devices = True
