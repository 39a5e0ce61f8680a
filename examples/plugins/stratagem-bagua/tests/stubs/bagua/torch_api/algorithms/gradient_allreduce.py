from bagua.torch_api.algorithms import Algorithm


class GradientAllReduceAlgorithm(Algorithm):
    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__()
        self.options = {"hierarchical": hierarchical, "average": average}
