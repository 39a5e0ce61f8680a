"""The kit on two ranks; what does not run on a CPU is refused, and does not run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin

from stratagem.errors import ConfigurationError
from stratagem_colossalai.strategy import ColossalAIStrategy
from stratagem_testing import StrategyConformance


class TestColossalAI(StrategyConformance):
    strategy = "colossalai"
    deadline = 400.0  # importing colossalai takes a minute on busy cores
    # Importing colossalai sets it.
    allowed_leftovers = ("the environment variable CUDA_DEVICE_MAX_CONNECTIONS",)


def test_plugins_that_need_a_gpu_are_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'gemini' .* CUDA stream .* expected 'torch_ddp'"
    ):
        ColossalAIStrategy(plugin="gemini")
    with pytest.raises(ConfigurationError, match="it is not known here"):
        ColossalAIStrategy(plugin="other")


@pytest.mark.filterwarnings("ignore")
def test_gemini_does_not_run_on_a_cpu(tmp_path: object) -> None:
    """When this fails, Gemini can be served."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        net = torch.nn.Linear(4, 1)
        booster = Booster(plugin=GeminiPlugin(precision="bf16", placement_policy="static"))
        with pytest.raises(RuntimeError, match="not supported for cpu accelerator"):
            booster.boost(net, torch.optim.Adam(net.parameters()))
    finally:
        dist.destroy_process_group()
