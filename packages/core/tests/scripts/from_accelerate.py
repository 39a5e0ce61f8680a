# Run by test_from_accelerate.py: what two ranks gather, accumulate and save.
import json
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from stratagem import Lite, seed_everything
from stratagem.errors import StratagemError

found = {}
lite = Lite(accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=3)
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


# -- accumulation
class Rows(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((3,), index / 20) + 0.1 * torch.rand(())


class Counter:
    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def train(seed, *, by_hand=False, save=None, load=None):
    """Return losses and rates of 2 epochs of 5 batches each: windows of 3 and 2."""
    torch.manual_seed(7)
    lite = Lite(accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=3)
    lite.launch()
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    loader = DataLoader(Rows(), batch_size=2, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader) * 2)
    counter = Counter()
    evaluation = DataLoader(range(3))
    if by_hand:
        model, optimizer = lite.setup(net, optimizer)
        loader = lite.setup_dataloaders(loader)
    else:
        scheduler, loader, counter, model, optimizer, evaluation = lite.setup(
            scheduler, loader, counter, net, optimizer, evaluation
        )
        assert type(scheduler).__name__ == "LinearLR"
        assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    torch.manual_seed(seed + lite.global_rank)
    if load:
        lite.load_state(load)
    losses = []
    for epoch in range(counter.n // 5, 2):
        for step, batch in enumerate(loader):
            list(evaluation)  # another loader's end is not this one's
            if by_hand:
                is_last = step in (2, 4)
                with lite.no_backward_sync(model, enabled=not is_last):
                    loss = (model(batch) - 1).square().mean()
                    lite.backward(loss / 3)
                if is_last:
                    optimizer.step()
                    scheduler.step()
                    scheduler.step()
                    optimizer.zero_grad()
            else:
                with lite.accumulate(model) as is_last:
                    loss = (model(batch) - 1).square().mean()
                    lite.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            losses.append([loss.item().hex(), is_last, scheduler.get_last_lr()[0].hex()])
            counter.n += 1
            if save and counter.n == 8:
                lite.save_state(save)
    return losses, counter.n


found["by hand"], _ = train(1, by_hand=True)
found["accumulated"], _ = train(1, save="state")
found["resumed"], found["batches"] = train(50, load="state")

with open(f"found{rank}.json", "w") as file:
    json.dump(found, file)
