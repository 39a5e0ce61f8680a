"""One Gaudi device of the stub: `python hpu_one_process.py FOLDER lazy|eager`; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gaudi import two_devices

folder = Path(sys.argv[1])
two_devices(folder)

import torch
from device_models import Net, fit, loader, model, same, steps, trainer
from torch.nn.functional import mse_loss

from stratagem import Lite
from stratagem_hpu_ipu.hpu_accelerator import HPUAccelerator

out: dict[str, Any] = {"imported": "habana_frameworks" in sys.modules}
HPUAccelerator(lazy_mode=sys.argv[2] == "lazy").setup()

from habana_frameworks import torch as sdk

hpu: dict[str, Any] = {"accelerator": "hpu", "devices": 1}
cpu: dict[str, Any] = {"accelerator": "cpu", "devices": 1}


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", mse_loss(self.net(inputs), targets))


def calls() -> list[str]:
    names = [name for name, _ in sdk.calls]
    sdk.calls.clear()
    return names


# -- the numbers of the CPU, and the calls of two steps and of an evaluation
ours, theirs = fit(folder, **hpu), fit(folder, **cpu)
pairs = zip(ours.losses, theirs.losses, strict=True)
out["losses differ by"] = max(abs(float(a.cpu() - b)) for a, b in pairs)
out["devices"] = sorted(ours.devices)
out["calls"] = calls()
if sys.argv[2] == "eager":
    print(json.dumps(out))
    sys.exit()
fit(folder, **hpu, max_epochs=1, limit_train_batches=2)
out["calls of two steps"] = calls()
fit(folder, **hpu, max_epochs=1, limit_train_batches=2, accumulate_grad_batches=2)
out["calls of an accumulated step"] = calls()
validator = trainer(folder, **hpu, limit_val_batches=3)
validator.validate(Validated(), loader(), verbose=False)
out["calls of three validation batches"] = calls()
out["strategy"] = validator.plan.strategy.name

# -- under Lite
lite = Lite(**hpu)
lite.launch()
net = model()
module, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
batches = [tuple(tensor.to("hpu") for tensor in batch) for batch in list(loader())[:2]]
calls()
steps(lite, module, optimizer, batches)
out["calls of two steps of Lite"] = calls()
with torch.no_grad():
    module(batches[0][0])
out["calls of an evaluation of Lite"] = calls()

# -- checkpoints: in host memory, to the CPU and back, to the bit
first = trainer(folder, max_epochs=1, **hpu)
half = Net()
first.fit(half, loader())
first.save_checkpoint(folder / "hpu.ckpt")
saved = torch.load(folder / "hpu.ckpt", weights_only=True)  # to where each tensor was
tensors = [*saved["state_dict"].values()]
tensors += [t for entry in saved["optimizer_states"][0]["state"].values() for t in entry.values()]
out["saved on"] = sorted({str(tensor.device) for tensor in tensors})
tied = saved["state_dict"]["net.first.weight"], saved["state_dict"]["net.last.weight"]
out["tied"] = tied[0].data_ptr() == tied[1].data_ptr()
whole = fit(folder, **hpu)
out["resumed"] = same(
    whole.state_dict(), fit(folder, ckpt_path=folder / "hpu.ckpt", **hpu).state_dict()
)


def distance(one: Net, other: Net) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs)


reference = fit(folder, **cpu)
out["resumed on the CPU"] = distance(
    reference, fit(folder, ckpt_path=folder / "hpu.ckpt", **cpu, strategy="single_device")
)
back = trainer(folder, max_epochs=1, **cpu)
back.fit(Net(), loader())
back.save_checkpoint(folder / "cpu.ckpt")
out["resumed from the CPU"] = distance(reference, fit(folder, ckpt_path=folder / "cpu.ckpt", **hpu))

# -- what the accelerator says
accelerator = HPUAccelerator()
device = accelerator.device(1)
out["device"] = str(device)
out["stats"] = accelerator.device_stats(device)
accelerator.synchronize(device)
out["synchronized"] = calls()[-1]
out["mixed"] = sorted(fit(folder, precision="bf16-mixed", **hpu).net.dtypes)
out["fork"] = accelerator.fork_problem()


def error_of(**options: Any) -> str:
    try:
        trainer(folder, **options).fit(Net(), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


out["by index"] = error_of(accelerator="hpu", devices=[1])
out["other mode"] = error_of(accelerator=HPUAccelerator(lazy_mode=not sdk.LAZY), devices=1)
print(json.dumps(out))
