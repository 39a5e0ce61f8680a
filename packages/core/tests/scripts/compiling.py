# Run by test_compile.py.
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

# torch.compile itself looks at gradients of non-leaves.
warnings.filterwarnings("ignore", message="The .grad attribute")
made = []


def graphs(graph, inputs):
    made.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
    return graph.forward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(
            nn.Linear(5, 6),
            Block(),
            Block(),
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            nn.Linear(6, 1),
        )

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Wide(Net):
    def __init__(self):
        super().__init__()
        wide = [nn.Linear(400, 400) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(5, 400), *wide, nn.Linear(400, 1))


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.prod(1, keepdim=True))


def fit(strategy, net=None, ckpt_path=None, **arguments):
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **{"max_epochs": 2, **arguments},
    )
    made.clear()
    torch.compiler.reset()
    net = Net() if net is None else net
    trainer.fit(net, DataLoader(data, 4), DataLoader(data, 4), ckpt_path=ckpt_path)
    every = trainer.ranks.gather_objects(losses.values)
    return trainer, [sum(each) / 2 for each in zip(*every, strict=True)], list(made)


def parallelize(model, mesh):
    for block in (model.net[1], model.net[2]):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor_parallel"], plan)


def by_block(module):
    return isinstance(module, Block) or (isinstance(module, nn.Sequential) and len(module) == 2)


strategies = {
    "ddp": lambda: DDPStrategy(),
    "ddp, small buckets": lambda: DDPStrategy(bucket_cap_mb=1),
    "ddp_sharded": lambda: "ddp_sharded",
    "fsdp, root alone": lambda: "fsdp",
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy=by_block),
    "fsdp, checkpointed": lambda: FSDPStrategy(
        auto_wrap_policy=by_block, activation_checkpointing=True
    ),
    "model_parallel": lambda: ModelParallelStrategy(
        tensor_parallel_size=2, parallelize_fn=parallelize
    ),
}
only = sys.argv[1:] or list(strategies)
out = {}
for name in only:
    make = strategies[name]
    kind = Wide if "buckets" in name else Net
    _, expected, none = fit(make(), kind())
    trainer, losses, found = fit(make(), kind(), compile={"backend": graphs})
    here = {"expected": expected, "losses": losses, "graphs": found, "none": none}
    out[name] = here
    if name in ("ddp", "fsdp"):
        path = Path(f"{name}.ckpt").absolute()
        trainer, _, _ = fit(make(), max_epochs=1, compile={"backend": graphs})
        trainer.save_checkpoint(path)
        here["resumed"] = fit(make(), ckpt_path=path, compile={"backend": graphs})[1]
        here["resumed eagerly"] = fit(make(), ckpt_path=path)[1]
        here["inductor"] = fit(make(), max_epochs=1, compile=True)[1]
        net = Net()
        for index in range(1, 4):
            net.net[index] = torch.compile(net.net[index], backend=graphs)
        trainer, here["own"], here["own graphs"] = fit(make(), net)
        here["names"] = list(net.state_dict()) == list(Net().state_dict())
        trainer, here["handed over"], _ = fit(make(), torch.compile(Net(), backend=graphs))
Path(f"out{trainer.global_rank}.json").write_text(json.dumps(out))
