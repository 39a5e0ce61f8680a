"""Transforms without randomness, whose draws in workers are Stratagem's own."""


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class Resize:
    def __init__(self, size, scale=None):
        self.size = size

    def __call__(self, image):
        return image


RandomResizedCrop = Resize


class ToTensor:
    def __call__(self, image):
        return image.pixels
