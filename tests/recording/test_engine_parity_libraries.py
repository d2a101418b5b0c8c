"""Both engines record the same of training and inference as libraries run them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recording.engine_parity import assert_parity
from tests.recording.engines import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]
# At the top: Lightning replaces ``torch.compile`` when it is imported.
accelerate = pytest.importorskip("accelerate")
diffusers = pytest.importorskip("diffusers")
lightning = pytest.importorskip("pytorch_lightning")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=19
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(autouse=True, scope="module")
def first_model() -> None:
    """transformers adds a method to ``nn.Module`` when it makes its first model."""
    language_model()


def test_transformers_trainer(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(8) % 20, "labels": torch.arange(8) % 20} for _ in range(8)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no",
    )  # fmt: skip

    pristine = language_model()

    def train() -> None:
        transformers.Trainer(copy.deepcopy(pristine), args, train_dataset=data).train()

    t = assert_parity(train)
    assert [op.name for op in t.ops].count("Tensor.backward") == 3


def test_generate() -> None:
    model = language_model().eval()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def generate() -> None:
        model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.generate(prompt, max_new_tokens=3, do_sample=True, top_k=5, pad_token_id=0)
        model.generate(prompt, max_new_tokens=3, num_beams=2, pad_token_id=0)

    t = assert_parity(generate, model)
    assert len(t.module_calls.where(module="")) >= 9


def test_lightning(tmp_path: Path) -> None:
    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.layers(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Tensor) -> None:
            self.log("validation", self.layers(batch).mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def fit() -> None:
        batches: Any = torch.ones(6, 4)
        lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
            gradient_clip_val=1.0, accumulate_grad_batches=2,
        ).fit(
            Net(),
            torch.utils.data.DataLoader(batches, batch_size=2),
            torch.utils.data.DataLoader(batches, batch_size=2),
        )  # fmt: skip

    assert_parity(fit)


def test_accelerate_with_lora() -> None:
    pristine = language_model()

    def train() -> None:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1)
        model = peft.get_peft_model(copy.deepcopy(pristine), config)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        data: Any = torch.randint(20, (8, 6))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    t = assert_parity(train)
    assert any("lora_A" in str(op.module) for op in t.ops)


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip


def test_a_diffusers_pipeline() -> None:
    model, scheduler = unet().eval(), diffusers.DDPMScheduler(num_train_timesteps=10)
    diffusers.DDPMPipeline(model, scheduler)  # the first one imports, and makes tensors meanwhile

    def sample() -> None:
        pipeline = diffusers.DDPMPipeline(model, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        pipeline(batch_size=1, num_inference_steps=2, output_type="np")

    assert_parity(sample, model)


def test_diffusion_training() -> None:
    pristine = unet()

    def train() -> None:
        model = copy.deepcopy(pristine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)
        for _ in range(2):
            clean, noise = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
            steps = torch.randint(0, 10, (2,))
            noisy = scheduler.add_noise(clean, noise, steps)
            nn.functional.mse_loss(model(noisy, steps).sample, noise).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_parity(train)
