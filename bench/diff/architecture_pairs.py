"""Further pairs, in other architectures and of other kinds than those of `pairs.py`."""

from __future__ import annotations

from typing import Any, Final

import torch
from editing import edited
from pairs import Pair
from torch import Tensor, nn
from torch.nn import functional as F

# -- planted -------------------------------------------------------------------------------------------------


def _no_gelu(model: Any) -> None:
    edited(model.model.encoder, "nn.functional.gelu(self.conv2(inputs_embeds))", "self.conv2(inputs_embeds)")


def _cross_attention(model: Any) -> None:
    edited(model.model.decoder.layers[1].encoder_attn, "self.v_proj(current_states)",
           "self.v_proj(current_states.roll(1, 1))")  # fmt: skip


def _quick_gelu(model: Any) -> None:
    model.text_model.encoder.layers[1].mlp.activation_fn = nn.GELU()


def _no_exp(model: Any) -> None:
    edited(model, "self.logit_scale.exp()", "self.logit_scale")


def _parallel_residual(model: Any) -> None:
    model.gpt_neox.layers[1].use_parallel_residual = False


def _position_offset(model: Any) -> None:
    model.model.decoder.embed_positions.offset = 1


def _alibi(model: Any) -> None:
    model.transformer.h[1].self_attention.beta = 0.5


def _embed_scale(model: Any) -> None:
    model.model.embed_tokens.embed_scale.fill_(1.0)


def _softcap(model: Any) -> None:
    model.model.layers[1].self_attn.attn_logit_softcapping = 30.0


def _post_norm(model: Any) -> None:
    edited(model.model.layers[1], "hidden_states = self.post_attention_layernorm(hidden_states)\n", "pass\n")


def _key_norm(model: Any) -> None:
    edited(model.model.layers[1].self_attn, "self.k_norm(self.k_proj(hidden_states).view(hidden_shape))",
           "self.k_proj(hidden_states).view(hidden_shape)")  # fmt: skip


def _layer_scale(model: Any) -> None:
    layer = model.convnext.encoder.stages[1].layers[0]
    edited(layer, "features = self.layer_scale_parameter * features", "pass")


def _halves(model: Any) -> None:
    edited(model.model.layers[1].mlp, "gate, up_states = up_states.chunk(2, dim=-1)",
           "up_states, gate = up_states.chunk(2, dim=-1)")  # fmt: skip


def _transposed(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous()


def _swapped_weights(model: Any) -> None:
    one, other = (model.bert.encoder.layer[at].attention.self.query.weight for at in (0, 1))
    one.data, other.data = other.data, one.data


def _skip(model: Any) -> None:
    edited(model.backbone.layers[1].mixer, "D=self.D.float(),\n            z=gate",
           "D=None,\n            z=gate")  # fmt: skip


def _no_softplus(model: Any) -> None:
    edited(model.backbone.layers[0].mixer, "delta_softplus=True,\n            return_last_state",
           "delta_softplus=False,\n            return_last_state")  # fmt: skip


def _decay(model: Any) -> None:
    edited(model.backbone.layers[2].mixer, "A = -torch.exp(self.A_log.float())", "A = -self.A_log.float()")


def _decoder_scale(model: Any) -> None:
    model.config.scale_decoder_outputs = False


def _buckets(model: Any) -> None:
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance = 4


def _t5_bidirectional(model: Any) -> None:
    model.encoder.block[0].layer[0].SelfAttention.is_decoder = True


def _experts_swapped(model: Any) -> None:
    parameter = model.model.layers[1].mlp.experts.down_proj
    parameter.data = parameter.data.flip(0).contiguous()


def _softmax_after_topk(model: Any) -> None:
    edited(model.model.layers[1].mlp.gate,
           "router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)",
           "router_probs = torch.sigmoid(router_logits.float())")  # fmt: skip


def _class_token_last(model: Any) -> None:
    edited(model.vit.embeddings, "torch.cat((cls_tokens, embeddings), dim=1)",
           "torch.cat((embeddings, cls_tokens), dim=1)")  # fmt: skip


def _interleaved(model: Any) -> None:
    edited(model.model.layers[1].self_attn,
           "x1 = x[..., : x.shape[-1] // 2]\n    x2 = x[..., x.shape[-1] // 2 :]",
           "x1 = x[..., 0::2]\n    x2 = x[..., 1::2]", "rotate_half", "apply_rotary_pos_emb")  # fmt: skip


def _bert_eps(model: Any) -> None:
    model.bert.encoder.layer[2].output.LayerNorm.eps = 1e-5


def _mean_pool(model: Any) -> None:
    edited(
        model.bert.pooler,
        "first_token_tensor = hidden_states[:, 0]",
        "first_token_tensor = hidden_states.mean(1)",
    )


# -- equal up to rounding ------------------------------------------------------------------------------------


def _scores_scaled(model: Any) -> None:
    """The scores are scaled, not the queries."""
    for layer in model.model.encoder.layers:
        edited(layer.self_attn, "(self.q_proj(hidden_states) * self.scaling)", "self.q_proj(hidden_states)")
        inner = layer.self_attn.forward.__func__.__globals__
        original = inner["eager_attention_forward"]

        def scaled(
            *args: Any, original: Any = original, scale: float = layer.self_attn.scaling, **kwargs: Any
        ) -> Any:
            return original(*args, **{**kwargs, "scaling": scale})

        inner["eager_attention_forward"] = scaled


class _GateAndUp(nn.Module):
    """Two projections where the original has one."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        gate, up = mlp.gate_up_proj.weight.detach().chunk(2)
        self.gate_proj, self.up_proj = (nn.Linear(gate.shape[1], gate.shape[0], bias=False) for _ in range(2))
        self.gate_proj.weight.data, self.up_proj.weight.data = gate.clone(), up.clone()
        self.down_proj = mlp.down_proj

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _two_projections(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = _GateAndUp(layer.mlp)


class _Patches(nn.Module):
    """A matrix product over unfolded patches for the convolution."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, x: Tensor) -> Any:
        size = self.weight.shape[-1]
        side = x.shape[-1] // size
        product = F.linear(F.unfold(x, size, stride=size).transpose(1, 2), self.weight.flatten(1), self.bias)
        return product.transpose(1, 2).unflatten(2, (side, side))


def _unfolded(model: Any) -> None:
    embeddings = model.vit.embeddings.patch_embeddings
    embeddings.projection = _Patches(embeddings.projection)


def _einsum(model: Any) -> None:
    for layer in model.gpt_neox.layers:
        edited(layer.attention, "torch.matmul(query, key.transpose(2, 3)) * scaling",
               "torch.einsum('bhqd,bhkd->bhqk', query * scaling, key)",
               "eager_attention_forward")  # fmt: skip


def _in_place(model: Any) -> None:
    for layer in model.model.layers:
        edited(layer, "hidden_states = self.mlp(hidden_states)\n    hidden_states = residual + hidden_states",
               "hidden_states = residual.add_(self.mlp(hidden_states))")  # fmt: skip


def _chunked(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.chunk_size_feed_forward = 1


class _NormOfParts(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Any:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def _norm_of_parts(model: Any) -> None:
    for layer in model.model.decoder.layers:
        layer.self_attn_layer_norm = _NormOfParts(layer.self_attn_layer_norm)
        layer.final_layer_norm = _NormOfParts(layer.final_layer_norm)


def _nothing(model: Any) -> None:
    pass


ARCHITECTURE_PAIRS: Final[tuple[Pair, ...]] = (
    Pair("GELU left out of a stem", "whisper", _no_gelu, "model.encoder", r"gelu"),
    Pair("values rolled by one", "whisper", _cross_attention,
         r"model.decoder.layers.1.encoder_attn(.v_proj)?", r"roll"),
    Pair("GELU for quick GELU", "clip", _quick_gelu, "text_model.encoder.layers.1.mlp.activation_fn",
         r"sigmoid.*gelu"),
    Pair("exp of the scale left out", "clip", _no_exp, "CLIPModel", r"exp"),
    Pair("residuals in a row", "gpt_neox", _parallel_residual,
         r"gpt_neox.layers.1(.post_attention_layernorm)?", r"takes|\+"),
    Pair("positions without offset", "opt", _position_offset, "model.decoder.embed_positions",
         r"term 2 against 1"),
    Pair("half of the scores", "bloom", _alibi, "transformer.h.1.self_attention", r"beta 1.*0\.5"),
    Pair("embeddings not scaled", "gemma", _embed_scale, "model.embed_tokens", r"embed_scale"),
    Pair("another soft cap", "gemma2", _softcap, "model.layers.1.self_attn", r"50.*30"),
    Pair("norm after attention left out", "gemma2", _post_norm,
         r"model.layers.1(.post_attention_layernorm)?", r"post_attention_layernorm"),
    Pair("norm of keys left out", "qwen3", _key_norm, r"model.layers.1.self_attn(.k_norm)?", r"k_norm"),
    Pair("layer scale left out", "convnext", _layer_scale, "convnext.encoder.stages.1.layers.0",
         r"layer_scale|\*"),
    Pair("gate and up in other halves", "phi3", _halves, r"model.layers.1.mlp(.activation_fn)?", r"takes"),
    Pair("a weight transposed", "llama", _transposed, "model.layers.1.self_attn.q_proj", r"q_proj\.weight"),
    Pair("weights of two layers swapped", "bert", _swapped_weights,
         "bert.encoder.layer.0.attention.self.query", r"query\.weight"),
    Pair("skip connection left out", "mamba", _skip, "backbone.layers.1.mixer", r"\bD\b|\*|\+"),
    Pair("softplus left out", "mamba", _no_softplus, "backbone.layers.0.mixer", r"softplus"),
    Pair("exp of the decay left out", "mamba", _decay, "backbone.layers.2.mixer", r"exp"),
    Pair("decoder not scaled", "t5", _decoder_scale, "T5ForConditionalGeneration", r"\*"),
    Pair("buckets of nearer positions", "t5", _buckets, r"encoder.block.0.layer.0.SelfAttention",
         r"div|/|4\.159|\d against"),
    Pair("positions in one direction", "t5", _t5_bidirectional, r"encoder.block.0.layer.0.SelfAttention",
         r"min|gt|>|against"),
    Pair("experts in another order", "mixtral", _experts_swapped, r"model.layers.1.mlp.experts",
         r"down_proj"),
    Pair("sigmoid in the router", "mixtral", _softmax_after_topk, "model.layers.1.mlp.gate",
         r"softmax.*sigmoid"),
    Pair("class token at the end", "vit", _class_token_last, "vit.embeddings", r"cat|takes"),
    Pair("rotation of neighbours", "llama", _interleaved, "model.layers.1.self_attn",
         r"slice|step|takes|neg"),
    Pair("a smaller eps", "bert", _bert_eps, "bert.encoder.layer.2.output.LayerNorm", r"eps.*1e-12.*1e-05"),
    Pair("mean for the first token", "bert", _mean_pool, r"bert.pooler(.dense)?", r"mean"),
    Pair("= scores scaled, not queries", "whisper", _scores_scaled),
    Pair("= gate and up by two", "phi3", _two_projections),
    Pair("= patches unfolded", "vit", _unfolded),
    Pair("= einsum for matmul", "gpt_neox", _einsum),
    Pair("= residual in place", "qwen3", _in_place),
    Pair("= feed-forward in chunks", "bert", _chunked),
    Pair("= layer norm of parts", "opt", _norm_of_parts),
    Pair("= SDPA for its parts (T5)", "t5", _nothing, attention=("eager", "sdpa")),
    Pair("= SDPA for its parts (CLIP)", "clip", _nothing, attention=("eager", "sdpa")),
    Pair("= SDPA for its parts (Whisper)", "whisper", _nothing, attention=("eager", "sdpa")),
    Pair("= SDPA for its parts (Qwen 3)", "qwen3", _nothing, attention=("eager", "sdpa")),
    Pair("= convolutions twice", "convnext", _nothing),
)  # fmt: skip
