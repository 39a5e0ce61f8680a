from bagua.torch_api.algorithms import Algorithm


class DecentralizedAlgorithm(Algorithm):
    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        if peer_selection_mode not in ("all", "shift_one"):
            raise ValueError("peer_selection_mode: all or shift_one")
        super().__init__()
        self.options = {"mode": peer_selection_mode, "interval": communication_interval}


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        super().__init__()
        self.options = {"hierarchical": hierarchical, "interval": communication_interval}
