from bagua.torch_api.algorithms import Algorithm


class ByteGradAlgorithm(Algorithm):
    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__()
        self.options = {"hierarchical": hierarchical, "average": average}
