# Run by test_pretrained.py, on two ranks: a folder of weights into shards and out of them.
import json
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from stratagem import Lite
from stratagem.checkpoint import PretrainedWeights, save_pretrained
from stratagem.errors import StratagemError
from stratagem.strategies import MeshStrategy
from stratagem_extras.pretrained import folder as reading

found = {}
read = 0
read_bytes = reading.StoredTensor._read_bytes


def counted(self, file, place, memory):
    global read
    read += len(memory)
    read_bytes(self, file, place, memory)


reading.StoredTensor._read_bytes = counted


def model():
    layers = OrderedDict(
        table=nn.Embedding(7, 6),
        up=nn.Linear(6, 12),
        act=nn.Tanh(),
        down=nn.Linear(12, 6),
        norm=nn.BatchNorm1d(6),
        head=nn.Linear(6, 7, bias=False),
    )
    whole = nn.Sequential(layers)
    whole.head.weight = whole.table.weight
    return nn.Sequential(OrderedDict(net=whole))


def refused(call):
    try:
        call()
    except StratagemError as error:
        return type(error).__name__, str(error)


lite = None
for name, strategy in {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "ddp_sharded": "ddp_sharded",
    "mesh": MeshStrategy(
        tensor=2, tensor_plan={"net.up": "colwise_packed_2", "net.down": "rowwise"}
    ),
    "mesh, shards": MeshStrategy(),
}.items():
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
    lite.launch()
    torch.manual_seed(lite.global_rank)
    mine = lite.setup(model())
    read = 0
    lite.load_weights(mine, "in")
    bytes_read = read
    save_pretrained(mine, f"out {name}", max_shard_size=300)
    save_pretrained(mine, f"like {name}", like="in")
    other = refused(lambda: lite.load_weights(mine, "other"))  # noqa: B023 - called at once
    save_pretrained(mine, f"after {name}")
    taken = refused(lambda: save_pretrained(mine, "in"))  # noqa: B023 - called at once
    found[name] = {"read": bytes_read, "other": other, "taken": taken}

# A folder that one rank lacks, as on a node that it was not copied to.
weights = PretrainedWeights("in")
if lite.global_rank == 1:
    object.__setattr__(weights, "folder", Path("elsewhere"))
found["absent"] = refused(lambda: lite.load_weights(mine, weights))
Path(f"found{lite.global_rank}.json").write_text(json.dumps(found))
