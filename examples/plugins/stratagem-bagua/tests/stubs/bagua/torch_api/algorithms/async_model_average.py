from typing import Any

from bagua.torch_api.algorithms import Algorithm


class AsyncModelAverageAlgorithm(Algorithm):
    """Between `resume` and `abort` its background thread changes weights."""

    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0
    ) -> None:
        super().__init__()
        self.options = {"interval": sync_interval_ms, "warmup": warmup_steps}
        self.runs = False

    def forward(self) -> None:
        if not self.runs:
            raise RuntimeError("training while the algorithm is aborted: call resume first")
        super().forward()

    def resume(self, module: Any) -> None:
        if self.runs or module.bagua_algorithm is not self:
            raise RuntimeError("resume: it runs already, or belongs to another module")
        self.runs = True
        self.calls.append("resume")

    def abort(self, module: Any) -> None:
        if not self.runs or module.bagua_algorithm is not self:
            raise RuntimeError("abort: it does not run, or belongs to another module")
        self.runs = False
        self.calls.append("abort")
