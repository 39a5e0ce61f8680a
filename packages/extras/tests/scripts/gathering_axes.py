# Run by test_gathering.py: what four ranks of a mesh gather. `gathering_axes.py BATCHES`
import json
import sys
import torch
from torch.utils.data import DataLoader
from stratagem import Lite
from stratagem.strategies import Axis, DDPStrategy

kind = sys.argv[1]


class Mesh(DDPStrategy):
    def rank_axes(self, world_size):
        return Axis("data", 2), Axis("other", 2, batches=kind)


lite = Lite(accelerator="cpu", devices=4, strategy=Mesh())
lite.launch()
ranks = lite.ranks
_, place = ranks.coordinates(ranks.global_rank)
rows = torch.arange(14).view(7, 2)  # 7 samples of 2 tokens
loader = lite.setup_dataloaders(DataLoader(rows, 2))
found = {"tokens": [], "names": []}
for batch in loader:
    own = batch[:, place : place + 1] if kind == "parts" else batch
    found["tokens"].append(lite.gather_for_metrics(own).flatten().tolist())
    found["names"] += lite.gather_for_metrics([f"{n}" for n in own.flatten().tolist()][: len(own)])
with lite.split_between_processes([1, 2, 3]) as part:
    found["split"] = part
found["scalar"] = lite.gather_for_metrics(torch.tensor(float(ranks.global_rank))).tolist()
with open(f"found{ranks.global_rank}.json", "w") as file:
    json.dump(found, file)
