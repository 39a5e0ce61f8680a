# Run by test_lite_resume.py.
import json
import random
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from stratagem import Lite


class Augmented(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((4,), index / 48) + 0.1 * random.random() + 0.1 * torch.rand(())


strategy = sys.argv[1]
lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
lite.launch()


def train(seed, path=None):
    random.seed(seed + lite.global_rank)
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=0.05))
    torch.manual_seed(seed + lite.global_rank)
    data = lite.setup_dataloaders(DataLoader(Augmented(), batch_size=4, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "data": data, "epoch": 0}
    if path:
        lite.load(path, state)
    losses = []
    for epoch in range(state["epoch"], 2):
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            lite.backward(loss)
            optimizer.step()
            losses.append(loss.item().hex())
            if (epoch, step) == (1, 2) and not path:
                lite.save("within.ckpt", {**state, "epoch": epoch})
    return losses


whole = train(1)
rest = train(50, "within.ckpt")
with open(f"{strategy}{lite.global_rank}.json", "w") as file:
    json.dump([whole, rest], file)
