"""A network for small images under timm's name; `losses` has a number of each forward."""

from torch import nn

made = []


class Network(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.default_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
        self.features = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(4, num_classes)
        self.losses = []
        made.append(self)

    def get_classifier(self):
        return self.classifier

    def forward(self, images):
        features = self.norm(self.features(images)).relu().mean((2, 3))
        scores = self.classifier(self.dropout(features))
        self.losses.append(scores.logsumexp(1).sum().item())
        return scores


def create_model(name, pretrained, num_classes):
    return Network(num_classes)
