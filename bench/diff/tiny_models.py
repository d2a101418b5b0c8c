"""Tiny models of transformers with random weights, as the pairs are built from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()

VOCABULARY: Final = 61
_DECODER: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_CONFIGS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {
        **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3,
        "conv_kernel": 3}),
    "bert": ("BertForSequenceClassification", "BertConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "head_dim": 8, "sliding_window": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 32}),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 32}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}),
    "clip": ("CLIPModel", "CLIPConfig", {
        "text_config": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 16, "eos_token_id": 2},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 8},
        "projection_dim": 16}),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 4, "image_size": 32,
        "layer_scale_init_value": 0.5}),
    "vit": ("ViTForImageClassification", "ViTConfig", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 16, "patch_size": 8}),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "bottleneck"}),
}  # fmt: skip

Inputs = dict[str, Any]
Change = Callable[[Any], Any]  #: of the second model; what it returns, if anything, takes its place


def made(name: str, attention: str = "eager", **settings: Any) -> tuple[nn.Module, Inputs]:
    """A model in eval mode, its weights spread like those of a trained one, and what to call it with."""
    model_name, config_name, given = _CONFIGS[name]
    config = getattr(transformers, config_name)(**{**given, **settings})
    config._attn_implementation = attention
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, model_name)(config).eval()
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * parameter.shape[-1] ** -0.5)
            else:  # biases that are zero and scales that are one would hide what is done with them
                parameter.add_(torch.randn(parameter.shape, generator=drawn) * 0.1)
    return model, _inputs(name)


def _inputs(name: str) -> Inputs:
    drawn = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=drawn)}
    if name in ("resnet", "convnext"):
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=drawn)}
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=drawn)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, -2:] = 0
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20, generator=drawn), "decoder_input_ids": ids[:, :5]}
    if name == "clip":
        ids[:, -1] = 2
        images = torch.randn(3, 3, 16, 16, generator=drawn)
        return {"input_ids": ids, "pixel_values": images, "attention_mask": torch.ones_like(ids)}
    if name == "mamba":
        return {"input_ids": ids, "use_cache": False}
    if name == "t5":
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]}
    if name in ("bert",):
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}
