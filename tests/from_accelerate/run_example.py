"""Runs an example with the libraries of `stubs`, and writes its numbers to a file.

Run: python run_example.py original/tracking.py numbers.json [arguments of the example]
"""

import json
import runpy
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent / "stubs"))
script, numbers = sys.argv[1:3]
sys.argv[:3] = [script]
runpy.run_path(script, run_name="__main__")
(model,) = sys.modules["timm" if "timm" in sys.modules else "transformers"].made
weights = {name: value.double().tolist() for name, value in model.state_dict().items()}
Path(numbers).write_text(json.dumps({"losses": model.losses, "weights": weights}))
