"""A zoo of real architectures, each tiny and random: what a recorder meets outside its own tests.

`ZOO` lists them. ``build()`` makes the model, in training mode, and what to call it with; seed torch first
to have the same one twice. Nothing is downloaded: the weights are what the constructors draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]
Making = Callable[[], Inputs]

VOCABULARY = 61
BATCH, LENGTH = 2, 7


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model class of transformers with a configuration small enough to run in milliseconds."""

    name: str
    model: str  #: class names in transformers
    config: str
    settings: dict[str, Any]
    inputs: Making
    attention: str = ""  #: "eager" or "sdpa"; what the model prefers where empty
    trains_only: bool = False  #: its backward refuses to run in eval mode

    def build(self) -> tuple[torch.nn.Module, Inputs]:
        """The model and the keyword arguments of one forward."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        if self.attention:
            config._attn_implementation = self.attention
        model: torch.nn.Module = getattr(transformers, self.model)(config)
        return model.train(), self.inputs()

    def __str__(self) -> str:
        return self.name


# -- what models are called with -------------------------------------------------------------------------


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _mask(length: int = LENGTH) -> torch.Tensor:
    """All tokens of the first sequence, all but two of the second."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, -2:] = 0
    return mask


def causal() -> Inputs:
    ids = _ids()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def unmasked() -> Inputs:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.clone()}


def uncached() -> Inputs:
    """Without the states that these models update in place, through which there is no gradient."""
    return {"input_ids": _ids(8), "use_cache": False}


def padded() -> Inputs:
    return {"input_ids": _ids(), "attention_mask": _mask()}


def padded_labels() -> Inputs:
    return {**padded(), "labels": _ids()}


def classes() -> Inputs:
    return {**padded(), "labels": torch.randint(0, 2, (BATCH,))}


def encoder_decoder() -> Inputs:
    return {**padded(), "labels": _ids(5)}


def image(size: int = 16, channels: int = 3) -> Making:
    return lambda: {"pixel_values": torch.randn(BATCH, channels, size, size)}


def labelled_image(size: int = 16) -> Making:
    return lambda: {**image(size)(), "labels": torch.randint(0, 2, (BATCH,))}


def image_and_text() -> Inputs:
    return {**image(16)(), **padded(), "return_loss": True}


def mel() -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 24), "labels": _ids(5)}


def wave() -> Inputs:
    return {"input_values": torch.randn(BATCH, 400)}


def series() -> Inputs:
    past, future = 12, 4
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, 1),
    }


def patches_in_time() -> Inputs:
    return {"past_values": torch.randn(BATCH, 16, 3)}


def bytes_in() -> Inputs:
    return {"inputs": torch.randint(0, VOCABULARY, (BATCH, LENGTH)), "attention_mask": _mask()}


def video() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16)}


# -- configurations ----------------------------------------------------------------------------------------

#: What most decoders call it; unequal numbers of heads and key-value heads, since that is where code differs.
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 1,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_position_embeddings": 32, "attention_dropout": 0.1, "activation_dropout": 0.1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0, "layerdrop": 0.0, "vocab_size": VOCABULARY,
}  # fmt: skip
_TOWERS: dict[str, Any] = {
    "text_config": {**_ENCODER, "eos_token_id": 2, "projection_dim": 16, "attention_dropout": 0.1},
    "vision_config": {
        **{key: _VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "projection_dim": 16,
        "attention_dropout": 0.1,
    },
    "projection_dim": 16,
}  # fmt: skip

ZOO: tuple[Architecture, ...] = (
    # -- decoders
    Architecture("gpt2", "GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2}, causal),
    Architecture("gpt2-eager", "GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2, "reorder_and_upcast_attn": True}, padded_labels, "eager"),
    Architecture("llama", "LlamaForCausalLM", "LlamaConfig", _DECODER, causal),
    Architecture("llama-eager", "LlamaForCausalLM", "LlamaConfig", _DECODER, padded_labels, "eager"),
    Architecture("mistral", "MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 4}, causal),
    Architecture("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _DECODER, padded_labels),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}, causal),
    Architecture("gemma", "GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 8}, causal),
    Architecture("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {
        **_DECODER, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, causal),
    Architecture("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {
        **_DECODER, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, causal),
    Architecture("phi", "PhiForCausalLM", "PhiConfig", {**_DECODER, "num_key_value_heads": 4}, causal),
    Architecture("phi3", "Phi3ForCausalLM", "Phi3Config", {**_DECODER, "resid_pdrop": 0.1}, causal),
    Architecture("falcon", "FalconForCausalLM", "FalconConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_dropout": 0.1, "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2}, causal),
    Architecture("falcon-alibi", "FalconForCausalLM", "FalconConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, "bos_token_id": 1,
        "eos_token_id": 2}, padded_labels),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {
        **_DECODER, "hidden_dropout": 0.1}, causal),
    Architecture("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32, "resid_dropout": 0.1,
        "bos_token_id": 1, "eos_token_id": 2}, causal),
    Architecture("gptj", "GPTJForCausalLM", "GPTJConfig", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4,
        "resid_pdrop": 0.1, "bos_token_id": 1, "eos_token_id": 2}, causal),
    Architecture("opt", "OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}, padded_labels),
    Architecture("bloom", "BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2}, padded_labels),
    Architecture("mpt", "MptForCausalLM", "MptConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}, causal),
    Architecture("cohere", "CohereForCausalLM", "CohereConfig", {**_DECODER, "use_qk_norm": True}, causal),
    # -- mixtures of experts
    Architecture("mixtral", "MixtralForCausalLM", "MixtralConfig", {
        **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}, causal),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "output_router_logits": True}, causal),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **_DECODER, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}, causal),
    Architecture("gpt_oss", "GptOssForCausalLM", "GptOssConfig", {
        **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
        causal),
    Architecture("switch_transformers", "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig", {**_T5, "num_experts": 4, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.01}, encoder_decoder),
    # -- states instead of attention
    Architecture("mamba", "MambaForCausalLM", "MambaConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
        "conv_kernel": 3}, unmasked),
    Architecture("mamba2", "Mamba2ForCausalLM", "Mamba2Config", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "n_groups": 2, "chunk_size": 4}, unmasked),
    Architecture("rwkv", "RwkvForCausalLM", "RwkvConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "context_length": 32}, uncached),
    Architecture("xlstm", "xLSTMForCausalLM", "xLSTMConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_blocks": 2, "num_heads": 4, "chunk_size": 4,
        "qk_dim_factor": 1.0}, uncached),
    Architecture("recurrent_gemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {
        **_DECODER, "num_key_value_heads": 1, "head_dim": 8, "lru_width": 32, "num_hidden_layers": 3,
        "attention_window_size": 4}, unmasked),
    Architecture("jamba", "JambaForCausalLM", "JambaConfig", {
        **_DECODER, "num_experts": 2, "use_mamba_kernels": False, "mamba_d_state": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}, causal),
    # -- encoders
    Architecture("bert", "BertForSequenceClassification", "BertConfig", _ENCODER, classes),
    Architecture("bert-eager", "BertForMaskedLM", "BertConfig", _ENCODER, padded_labels, "eager"),
    Architecture("roberta", "RobertaForMaskedLM", "RobertaConfig", _ENCODER, padded_labels),
    Architecture("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", {
        "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
        "max_position_embeddings": 32, "sinusoidal_pos_embds": True}, padded_labels),
    Architecture("albert", "AlbertForMaskedLM", "AlbertConfig", {
        **_ENCODER, "embedding_size": 16, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        padded_labels),
    Architecture("electra", "ElectraForPreTraining", "ElectraConfig", {
        **_ENCODER, "embedding_size": 16},
        lambda: {**padded(), "labels": torch.randint(0, 2, (BATCH, LENGTH))}),
    Architecture("deberta", "DebertaForMaskedLM", "DebertaConfig", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, padded_labels),
    Architecture("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4,
        "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}, padded_labels),
    Architecture("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", {
        **_ENCODER, "local_attention": 4, "global_attn_every_n_layers": 2, "attention_dropout": 0.1},
        padded_labels),
    Architecture("longformer", "LongformerForMaskedLM", "LongformerConfig", {
        **_ENCODER, "attention_window": 4}, lambda: {**padded_labels(), "global_attention_mask":
        torch.tensor([[1] + [0] * (LENGTH - 1)] * BATCH)}),
    Architecture("big_bird", "BigBirdForMaskedLM", "BigBirdConfig", {
        **_ENCODER, "max_position_embeddings": 64, "block_size": 4, "num_random_blocks": 1},
        lambda: {"input_ids": _ids(48), "attention_mask": _mask(48), "labels": _ids(48)}),
    Architecture("funnel", "FunnelForMaskedLM", "FunnelConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48,
        "block_sizes": [1, 1], "num_decoder_layers": 1}, padded_labels),
    Architecture("fnet", "FNetForMaskedLM", "FNetConfig", _ENCODER,
        lambda: {"input_ids": _ids(), "labels": _ids()}),
    Architecture("xlnet", "XLNetLMHeadModel", "XLNetConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, padded_labels),
    Architecture("canine", "CanineModel", "CanineConfig", {
        **_ENCODER, "local_transformer_stride": 8, "num_hash_buckets": 32, "num_hash_functions": 4,
        "downsampling_rate": 4, "upsampling_kernel_size": 4},
        lambda: {"input_ids": _ids(16), "attention_mask": torch.ones(BATCH, 16, dtype=torch.long)}),
    Architecture("reformer", "ReformerModelWithLMHead", "ReformerConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16,
        "feed_forward_size": 48, "attn_layers": ["local", "lsh"], "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 16), "max_position_embeddings": 16, "is_decoder": True,
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2, "num_hashes": 1,
        "hash_seed": 0}, lambda: {"input_ids": _ids(16), "labels": _ids(16)}, trains_only=True),
    # -- encoder and decoder
    Architecture("t5", "T5ForConditionalGeneration", "T5Config", _T5, encoder_decoder),
    Architecture("longt5", "LongT5ForConditionalGeneration", "LongT5Config", {
        **_T5, "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4},
        encoder_decoder),
    Architecture("bart", "BartForConditionalGeneration", "BartConfig", {
        **_SEQ2SEQ, "encoder_layerdrop": 0.2, "forced_eos_token_id": None}, encoder_decoder),
    Architecture("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", {
        **_SEQ2SEQ, "forced_eos_token_id": None}, encoder_decoder),
    Architecture("prophetnet", "ProphetNetForConditionalGeneration", "ProphetNetConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 48, "num_encoder_layers": 2,
        "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4, "max_position_embeddings": 32, "ngram": 2}, encoder_decoder),
    # -- images
    Architecture("vit", "ViTForImageClassification", "ViTConfig", _VISION, labelled_image()),
    Architecture("deit", "DeiTForImageClassification", "DeiTConfig", _VISION, labelled_image()),
    Architecture("vit_mae", "ViTMAEForPreTraining", "ViTMAEConfig", {
        **_VISION, "decoder_hidden_size": 16, "decoder_intermediate_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2}, image()),
    Architecture("beit", "BeitForImageClassification", "BeitConfig", {
        **_VISION, "use_relative_position_bias": True, "drop_path_rate": 0.2}, labelled_image()),
    Architecture("dinov2", "Dinov2ForImageClassification", "Dinov2Config", {
        **_VISION, "drop_path_rate": 0.2, "mlp_ratio": 2}, labelled_image()),
    Architecture("swin", "SwinForImageClassification", "SwinConfig", {
        "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4],
        "window_size": 4, "drop_path_rate": 0.2}, labelled_image()),
    Architecture("segformer", "SegformerForSemanticSegmentation", "SegformerConfig", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16, "drop_path_rate": 0.2},
        lambda: {**image(32)(), "labels": torch.randint(0, 2, (BATCH, 32, 32))}),
    Architecture("convnext", "ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.2},
        labelled_image(32)),
    Architecture("resnet", "ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "bottleneck"},
        labelled_image(32)),
    Architecture("mobilevit", "MobileViTForImageClassification", "MobileViTConfig", {
        "image_size": 32, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
        "num_attention_heads": 2}, labelled_image(32)),
    Architecture("levit", "LevitForImageClassification", "LevitConfig", {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8], "down_ops": [["Subsample", 8, 2, 2, 2, 1], ["Subsample", 8, 2, 2, 2, 1]]},
        labelled_image(64)),
    Architecture("poolformer", "PoolFormerForImageClassification", "PoolFormerConfig", {
        "depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [7, 3],
        "strides": [4, 2], "padding": [2, 1]}, labelled_image(32)),
    Architecture("timesformer", "TimesformerModel", "TimesformerConfig", {
        **_VISION, "num_frames": 4}, video),
    Architecture("clip", "CLIPModel", "CLIPConfig", _TOWERS, image_and_text),
    Architecture("siglip", "SiglipModel", "SiglipConfig", _TOWERS, image_and_text),
    Architecture("vilt", "ViltModel", "ViltConfig", {
        **_ENCODER, "image_size": 16, "patch_size": 8}, lambda: {**image(16)(), **padded()}),
    # -- sound, series, anything
    Architecture("whisper", "WhisperForConditionalGeneration", "WhisperConfig", {
        **{key: value for key, value in _SEQ2SEQ.items() if key != "max_position_embeddings"},
        "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "dropout": 0.1}, mel),
    Architecture("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH, lambda: {
        **wave(), "labels": torch.randint(1, VOCABULARY, (BATCH, 4))}),
    Architecture("hubert", "HubertModel", "HubertConfig", {**_SPEECH, "layerdrop": 0.2}, wave),
    Architecture("wavlm", "WavLMModel", "WavLMConfig", _SPEECH, wave),
    Architecture("encodec", "EncodecModel", "EncodecConfig", {
        "num_filters": 4, "hidden_size": 16, "num_lstm_layers": 1, "upsampling_ratios": [4, 2],
        "codebook_size": 16, "codebook_dim": 16, "target_bandwidths": [6.0], "sampling_rate": 800},
        lambda: {"input_values": torch.randn(BATCH, 1, 200)}),
    Architecture("time_series_transformer", "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig", {
        "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 4],
        "num_time_features": 1, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}, series),
    Architecture("patchtst", "PatchTSTForPretraining", "PatchTSTConfig", {
        "num_input_channels": 3, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16, "random_mask_ratio": 0.4,
        "do_mask_input": True}, patches_in_time),
    Architecture("perceiver", "PerceiverForMaskedLM", "PerceiverConfig", {
        "num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "qk_channels": 16, "v_channels": 16,
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}, bytes_in),
    Architecture("decision_transformer", "DecisionTransformerModel", "DecisionTransformerConfig", {
        "state_dim": 5, "act_dim": 3, "hidden_size": 16, "n_layer": 2, "n_head": 2, "max_ep_len": 16},
        lambda: {"states": torch.randn(BATCH, 4, 5), "actions": torch.randn(BATCH, 4, 3),
                 "returns_to_go": torch.randn(BATCH, 4, 1), "timesteps": torch.arange(4).expand(BATCH, 4),
                 "attention_mask": torch.ones(BATCH, 4)}),
)  # fmt: skip
