"""Pairs with mistakes that people make when they port a model: norms, masks, positions, weights, caps."""

from __future__ import annotations

from typing import Any, Final

import torch
from editing import edited
from pairs import Pair, renamed
from torch import nn

# -- planted -------------------------------------------------------------------------------------------------


def _one_more(model: Any) -> None:
    """Gemma's norm in a Llama."""
    edited(model.model.layers[1].input_layernorm, "self.weight * hidden", "(1.0 + self.weight) * hidden")


def _mask_off_by_one(model: Any) -> Any:
    """A rewritten model whose tokens see the one after them."""
    rewritten = renamed(model)
    edited(rewritten.backbone, ".tril()", ".tril(1)")
    return rewritten


def _mask_of_others(model: Any) -> Any:
    """A rewritten model whose tokens do not see themselves, but for the first."""
    rewritten = renamed(model)
    edited(rewritten.backbone, ".tril()", ".tril(-1).index_fill_(1, torch.tensor([0]), 1.0)")
    return rewritten


def _positions_from_one(model: Any) -> None:
    edited(model.transformer, "device=inputs_embeds.device) + past_seen_tokens\n",
           "device=inputs_embeds.device) + past_seen_tokens + 1\n")  # fmt: skip


def _scale_by_heads(model: Any) -> None:
    attention = model.model.layers[2].self_attn
    attention.scaling = model.config.num_attention_heads**-0.5


def _no_mlp_residual(model: Any) -> None:
    edited(model.model.layers[1], "self.mlp(hidden_states)\n    hidden_states = residual + hidden_states",
           "self.mlp(hidden_states)")  # fmt: skip


def _attention_dropout(model: Any) -> None:
    model.model.layers[1].self_attn.attention_dropout = 0.5
    model.model.layers[1].self_attn.train()


def _post_norm(model: Any) -> None:
    model.model.decoder.layers[1].do_layer_norm_before = False


def _swapped_projections(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


def _final_cap(model: Any) -> None:
    model.config.final_logit_softcapping = 20.0


def _no_window(model: Any) -> None:
    model.model.config.layer_types = ["full_attention"] * 3


def _centred_norm(model: Any) -> None:
    edited(model.encoder.block[1].layer[1].layer_norm,
           "hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
           "(hidden_states - hidden_states.mean(-1, keepdim=True)) "
           "* torch.rsqrt(variance + self.variance_epsilon)")  # fmt: skip


def _heads_merged(model: Any) -> None:
    edited(model.model.layers[1].self_attn, "attn_output.transpose(1, 2).contiguous()",
           "attn_output.contiguous()", "eager_attention_forward")  # fmt: skip


def _average_pool(model: Any) -> None:
    model.resnet.embedder.pooler = nn.AvgPool2d(3, stride=2, padding=1)


def _keys_not_rotated(model: Any) -> None:
    edited(model.model.layers[1].self_attn, "k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k",
           "apply_rotary_pos_emb")  # fmt: skip


def _first_token(model: Any) -> None:
    edited(model.text_model, "last_hidden_state.device).argmax(dim=-1)",
           "last_hidden_state.device).argmin(dim=-1)")  # fmt: skip


def _heads_interleaved(model: Any) -> None:
    """The heads of q, k and v each for themselves, where the original has them together."""
    attention = model.gpt_neox.layers[1].attention
    size = attention.head_size
    for parameter in (attention.query_key_value.weight, attention.query_key_value.bias):
        parts = parameter.data.unflatten(0, (-1, 3, size))
        parameter.data = parts.transpose(0, 1).flatten(0, 2).contiguous()


def _mean_size(model: Any) -> None:
    edited(model.model.layers[1].post_attention_layernorm, "hidden_states.pow(2).mean(-1, keepdim=True)",
           "hidden_states.abs().mean(-1, keepdim=True)")  # fmt: skip


def _rotated_further(model: Any) -> None:
    """Positions from one; as only their differences count in attention, the results are the same."""
    edited(model.model, "+ past_seen_tokens\n", "+ past_seen_tokens + 1\n")


# -- equal up to rounding ------------------------------------------------------------------------------------


def _scaled_queries(model: Any) -> None:
    """The scale in the weights of the queries."""
    for layer in model.model.layers:
        with torch.no_grad():
            layer.self_attn.q_proj.weight.mul_(layer.self_attn.scaling)
        layer.self_attn.scaling = 1.0


PORTING_PAIRS: Final[tuple[Pair, ...]] = (
    Pair("weight of a norm plus one", "llama", _one_more, "model.layers.1.input_layernorm", r"\+"),
    Pair("a mask that sees one more", "gpt2", _mask_off_by_one, "transformer|backbone", r"tril|mask|<="),
    Pair("a mask without its diagonal", "gpt2", _mask_of_others, "transformer|backbone", r"tril|mask|<="),
    Pair("positions from one", "gpt2", _positions_from_one, "transformer", r"\+|term"),
    Pair("scaled by the number of heads", "llama", _scale_by_heads, "model.layers.2.self_attn",
         r"0\.353.*0\.5"),
    Pair("no residual around the MLP", "llama", _no_mlp_residual, "model.layers.1", r"^\+|residual"),
    Pair("dropout in attention", "llama", _attention_dropout, "model.layers.1.self_attn", r"random"),
    Pair("norms after the sum", "opt", _post_norm, r"model.decoder.layers.1(\..*)?", r"layer_norm|takes"),
    Pair("weights of gate and up swapped", "llama", _swapped_projections,
         r"model.layers.0.mlp.(gate|up)_proj", r"(gate|up)_proj\.weight"),
    Pair("another cap of the logits", "gemma2", _final_cap, "Gemma2ForCausalLM", r"30.*20"),
    Pair("no sliding window", "gemma2", _no_window, "model.layers.0.self_attn|model", r"takes|mask|window"),
    Pair("a norm that subtracts the mean", "t5", _centred_norm, "encoder.block.1.layer.1.layer_norm",
         r"mean|-"),
    Pair("heads merged in another order", "llama", _heads_merged, r"model.layers.1.self_attn(.o_proj)?",
         r"transpose"),
    Pair("average for maximum", "resnet", _average_pool, "resnet.embedder.pooler", r"max_pool.*avg_pool"),
    Pair("keys not rotated", "qwen2", _keys_not_rotated, "model.layers.1.self_attn", r"only on the first"),
    Pair("another token pooled", "clip", _first_token, "text_model", r"argmax.*argmin"),
    Pair("heads of q, k, v apart", "gpt_neox", _heads_interleaved,
         r"gpt_neox.layers.1.attention(.query_key_value)?", r"query_key_value\.(weight|bias)"),
    Pair("mean of sizes for squares", "llama", _mean_size, "model.layers.1.post_attention_layernorm",
         r"pow.*abs"),
    Pair("rotated one position further", "llama", _rotated_further, r"model(.rotary_emb)?", r"\+"),
    Pair("= scale in the weights", "llama", _scaled_queries),
)  # fmt: skip
