"""Accuracy and F1 under the names of `evaluate`."""


class Metric:
    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self):
        pairs, self.pairs = self.pairs, []
        hits = sum(a == b == 1 for a, b in pairs)
        positives = sum(a + b for a, b in pairs)
        accuracy = sum(a == b for a, b in pairs) / len(pairs)
        return {"accuracy": accuracy, "f1": 2 * hits / max(1, positives), "samples": len(pairs)}


def load(name, part):
    return Metric()
