# Run by test_from_accelerate.py: what two ranks accumulate and save.
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from stratagem import Lite

found = {}
lite = Lite(accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=3)
lite.launch()
rank = lite.global_rank


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
