# Run by test_gathering.py: what two ranks gather, pad and split.
import json
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from stratagem import Lite, seed_everything
from stratagem.errors import StratagemError

found = {}
lite = Lite(accelerator="cpu", devices=2, strategy="ddp")
lite.launch()
rank = lite.global_rank


def gathered(loader, read=lambda batch: batch):
    return [lite.gather_for_metrics(read(batch)) for batch in loader]


def numbers(batches):
    return [batch.tolist() for batch in batches]


def refused(call):
    try:
        call()
    except StratagemError as error:
        return str(error)


# -- 9 samples
for size in (1, 2, 4, 5, 9):
    for workers in (0, 1) if size == 2 else (0,):
        loader = lite.setup_dataloaders(DataLoader(range(9), size, num_workers=workers))
        found[f"batches of {size}, {workers} workers"] = numbers(gathered(loader))
loader = lite.setup_dataloaders(DataLoader(range(9), 2, drop_last=True))
found["drop_last"] = numbers(gathered(loader))
loader = lite.setup_dataloaders(DataLoader(range(1), 2))
found["one sample"] = numbers(gathered(loader))
seed_everything(3)
loader = lite.setup_dataloaders(DataLoader(range(9), 2, shuffle=True))
found["shuffled"] = [sorted(n for b in numbers(gathered(loader)) for n in b) for _ in range(2)]
loader = lite.setup_dataloaders(DataLoader(range(9), 2, sampler=[8, 7, 6, 5, 4, 3, 2, 1, 0]))
found["own sampler"] = numbers(gathered(loader))
sampler = DistributedSampler(range(9), num_replicas=2, rank=rank, shuffle=False)
loader = lite.setup_dataloaders(DataLoader(range(9), 2, sampler=sampler))
found["DistributedSampler"] = numbers(gathered(loader))

# -- other data than a tensor
loader = lite.setup_dataloaders(DataLoader(range(9), 4))
found["nested"] = [
    [d["x"].tolist(), d["pair"][0].tolist(), d["pair"][1], d["half"].float().sum().item()]
    for d in gathered(
        loader,
        lambda b: {
            "x": b * 10,
            "pair": (b.view(-1, 1), [f"s{n}" for n in b.tolist()]),
            "half": b.bool(),
        },
    )
]
found["list of tensors"] = [
    [t.tolist() for t in batch] for batch in gathered(loader, lambda b: [b, -b])
]
found["names"] = gathered(loader, lambda b: [f"s{n}" for n in b.tolist()])
found["scalar"] = numbers(gathered(loader, lambda b: torch.tensor(rank + 0.5)))
whole = torch.cat(list(loader))
found["after the loop"] = lite.gather_for_metrics(whole).tolist()
found["list after the loop"] = lite.gather_for_metrics([str(n) for n in whole.tolist()])
for _ in lite.setup_dataloaders(DataLoader(range(4), 4)):
    whole = torch.cat(list(loader))  # a loop within another one
    found["after an inner loop"] = lite.gather_for_metrics(whole).tolist()
found["other after the loop"] = lite.gather_for_metrics(torch.arange(1)).tolist()
for batch in loader:
    found["by class"] = refused(lambda: lite.gather_for_metrics(torch.ones(7)))
found["other structure"] = refused(lambda: lite.gather_for_metrics([torch.ones(1)] * (rank + 1)))
found["other shape"] = refused(lambda: lite.gather_for_metrics(torch.ones(2, rank + 1)))
found["no tensor"] = refused(lambda: lite.gather_for_metrics(3))
next(iter(loader))  # an iteration that is left

# -- data that the user has divided, unevenly
mine = [[0, 1], [2, 3], [4]] if rank == 0 else [[5, 6, 7]]
found["uneven"] = numbers(
    gathered(lite.join_uneven_inputs([torch.tensor(batch) for batch in mine]))
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(rank * 10, rank * 10 + 3))


found["stream"] = numbers(gathered(lite.setup_dataloaders(DataLoader(Stream(), 2))))
padded = lite.pad_across_processes(torch.full((2, rank + 1), rank + 1), dim=1, pad_index=-1)
found["padded"] = padded.tolist()
first = lite.pad_across_processes({"a": torch.full((rank + 1,), 7)}, pad_first=True)["a"]
found["padded first"] = [first.tolist(), lite.pad_across_processes(torch.tensor(1), dim=3).item()]
with lite.split_between_processes(["a", "b", "c"]) as part:
    found["split"] = [part]
with lite.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
    found["split"].append(part)
with lite.split_between_processes({"x": torch.arange(3), "y": (1, 2, 3)}, True) as part:
    found["split"].append([part["x"].tolist(), part["y"]])
with lite.split_between_processes(["a"]) as part:
    found["split"].append(part)


def split_unevenly():
    with lite.split_between_processes({"x": [1], "y": [1, 2]}):
        pass


found["split unevenly"] = refused(split_unevenly)

with open(f"found{rank}.json", "w") as file:
    json.dump(found, file)
