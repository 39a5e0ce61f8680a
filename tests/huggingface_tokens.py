"""Trains TokenMean of docs/start/from-huggingface.md, or its model with transformers.Trainer.

Run: python huggingface_tokens.py page.py KIND DEVICES weights.pt, where KIND is "original" or the
name of a strategy.
"""

import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

page, kind, devices, weights = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
names = runpy.run_path(page)
module, rows, each = names["TokenMean"](), names["rows"](), 8 // devices
torch.set_num_threads(1)
for part in module.modules():
    if isinstance(part, torch.nn.Dropout):
        part.p = 0.0  # ranks would draw other random numbers
if kind == "original":
    import transformers

    module.model.loss_type = "ForCausalLM"
    arguments = transformers.TrainingArguments(
        output_dir=str(weights.parent),
        use_cpu=True,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
    )
    transformers.Trainer(module.model, arguments, train_dataset=rows).train()
    is_first, state = arguments.process_index == 0, module.model.state_dict()
else:
    from torch.utils.data import DataLoader

    from stratagem import Trainer

    trainer = Trainer(
        strategy=kind,
        devices=devices,
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=each))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(module.model, options=options)
    is_first = trainer.is_global_zero
if is_first:
    torch.save(state, weights)
if kind == "original" and torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
