"""Images of 8 x 8 pixels that follow from their file's name, under PIL's names."""

import zlib
from types import SimpleNamespace

import torch


class Picture:
    def __init__(self, path):
        seed = zlib.crc32(path.rpartition("/")[2].encode())
        self.pixels = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed))

    def convert(self, mode):
        return self


Image = SimpleNamespace(open=Picture)
