from typing import Any

import torch

from bagua.torch_api.algorithms import Algorithm


class QAdamOptimizer(torch.optim.Adam):
    def __init__(self, params: Any, lr: float = 1e-3, warmup_steps: int = 100) -> None:
        super().__init__(params, lr=lr)
        self.warmup_steps = warmup_steps


class QAdamAlgorithm(Algorithm):
    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError("q_adam_optimizer: a QAdamOptimizer")
        super().__init__()
        self.options = {"optimizer": q_adam_optimizer}
