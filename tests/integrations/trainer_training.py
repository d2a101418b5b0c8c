"""A small training by ``transformers.Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def trainer(folder: Path, model: Any, *callbacks: Any, steps: int = 5, **options: Any) -> Any:
    data = [{"input_ids": torch.arange(8) % 20, "labels": torch.arange(8) % 20} for _ in range(32)]
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return transformers.Trainer(model, args, train_dataset=data, callbacks=list(callbacks))
