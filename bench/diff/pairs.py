"""The pairs of models that `bench/diff/table.py` compares: one difference planted, or equal up to rounding.

A planted pair says where the difference is: the module (on either side) and what the verdict has to say.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from editing import edited
from tiny_models import Change, Inputs, made
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Pair:
    """Two models, and what a comparison has to find."""

    name: str
    model: str
    change: Change
    module: str = ""  #: path of the module that differs, of either side; "" where nothing does
    says: str = ""  #: a regular expression that the verdict fits
    attention: tuple[str, str] = ("eager", "eager")
    settings: tuple[dict[str, Any], dict[str, Any]] = field(default=({}, {}))
    rename: dict[str, str] | None = None

    @property
    def planted(self) -> bool:
        return bool(self.module or self.says)

    def build(self) -> tuple[nn.Module, nn.Module, Inputs]:
        """Both models, with the same weights where they have the same, and their inputs."""
        first, inputs = made(self.model, self.attention[0], **self.settings[0])
        second, _ = made(self.model, self.attention[1], **self.settings[1])
        state = first.state_dict()
        second.load_state_dict({key: state[key] for key in second.state_dict() if key in state}, strict=False)
        return first, self.change(second) or second, inputs


def _nothing(model: Any) -> None:
    pass


# -- planted: constants --------------------------------------------------------------------------------------


def _gpt2_eps(model: Any) -> None:
    model.transformer.h[1].ln_2.eps = 1e-3


def _llama_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-2


def _scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def _sdpa_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 1 / 8


def _softmax_dim(model: Any) -> None:
    edited(model.bert.encoder.layer[0].attention.self, "dim=-1)", "dim=-2)", "eager_attention_forward")


def _gelu(model: Any) -> None:
    model.vit.layers[1].mlp.activation_fn = nn.GELU(approximate="tanh")


def _conv_padding(model: Any) -> None:
    convolution = model.resnet.encoder.stages[1].layers[0].layer[1].convolution
    convolution.padding, convolution.padding_mode = (2, 2), "zeros"
    convolution.dilation = (2, 2)


def _top_k(model: Any) -> None:
    model.model.layers[1].mlp.gate.top_k = 1


def _position_offset(model: Any) -> None:
    edited(model.bert.embeddings, "past_key_values_length : seq_length + past_key_values_length",
           "1 + past_key_values_length : 1 + seq_length + past_key_values_length")  # fmt: skip


# -- planted: ops that are missing, added or others ----------------------------------------------------------


def _silu(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _gate_and_up(model: Any) -> None:
    edited(model.model.layers[0].mlp, "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
           "self.gate_proj(x) * self.act_fn(self.up_proj(x))")  # fmt: skip


def _mask_sense(model: Any) -> None:
    edited(model.model.layers[0].self_attn, "attn_weights = attn_weights + attention_mask",
           "attn_weights = attn_weights.masked_fill(attention_mask == 0, -1e9)",
           "eager_attention_forward")  # fmt: skip


def _no_mask(model: Any) -> None:
    edited(
        model.transformer.h[1].attn, "if attention_mask is not None:", "if False:", "eager_attention_forward"
    )


def _no_scaling(model: Any) -> None:
    edited(model.transformer.h[0].attn, "key.transpose(-1, -2)) * scaling", "key.transpose(-1, -2))",
           "eager_attention_forward")  # fmt: skip


def _extra_scaling(model: Any) -> None:
    edited(model.model.layers[2], "hidden_states = self.mlp(hidden_states)",
           "hidden_states = self.mlp(hidden_states) * 0.5")  # fmt: skip


def _no_residual(model: Any) -> None:
    edited(model.transformer.h[1], "hidden_states = attn_output + residual", "hidden_states = attn_output")


def _norm_moved(model: Any) -> None:
    edited(model.transformer.h[2], "residual = hidden_states\n    hidden_states = self.ln_2(hidden_states)",
           "hidden_states = self.ln_2(hidden_states)\n    residual = hidden_states")  # fmt: skip


def _no_token_types(model: Any) -> None:
    edited(model.bert.embeddings, "inputs_embeds + token_type_embeddings", "inputs_embeds")


def _no_tanh(model: Any) -> None:
    edited(model.bert.pooler, "pooled_output = self.activation(pooled_output)", "pass")


def _no_one(model: Any) -> None:
    edited(
        model.model.layers[1].post_attention_layernorm, "(1.0 + self.weight.float())", "self.weight.float()"
    )


def _quantized(model: Any) -> None:
    edited(model.model.layers[1].mlp, "def forward(self, x):\n",
           "def forward(self, x):\n    x = x.to(torch.float8_e4m3fn).to(x.dtype)\n")  # fmt: skip


def _wrong_heads(model: Any) -> None:
    edited(model.model.layers[0].self_attn,
           "self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
           "self.v_proj(hidden_states).view(hidden_shape[0], -1, hidden_shape[1], self.head_dim)",
           )  # fmt: skip


def _repeated_heads(model: Any) -> None:
    edited(model.model.layers[1].self_attn,
           "[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)",
           "[:, None, :, :, :].expand(batch, n_rep, num_key_value_heads, slen, head_dim)",
           "repeat_kv", "eager_attention_forward")  # fmt: skip


def _rotated_wrong(model: Any) -> None:
    edited(model.model.layers[0].self_attn, "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)",
           "rotate_half", "apply_rotary_pos_emb")  # fmt: skip


def _no_position_bias(model: Any) -> None:
    edited(model.encoder.block[0].layer[0].SelfAttention, "position_bias=position_bias,\n        **kwargs",
           "position_bias=None,\n        **kwargs")  # fmt: skip


def _no_router_norm(model: Any) -> None:
    edited(model.model.layers[0].mlp.gate, "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)",
           "pass")  # fmt: skip


def _dropout_on(model: Any) -> None:
    model.transformer.h[1].mlp.train()


def _layer_missing(model: Any) -> None:
    del model.model.layers[1]
    model.config.num_hidden_layers = 2


# -- planted: weights, buffers, modes ------------------------------------------------------------------------


def _weight(model: Any) -> None:
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[3, 5] += 1.5


def _bias_missing(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def _bias_missing_bert(model: Any) -> None:
    layer = model.bert.encoder.layer[1].intermediate.dense
    layer.bias = None


def _untied(model: Any) -> None:
    torch.manual_seed(5)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)


def _rotary_base(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = 1.0 / (50000.0 ** (torch.arange(0, 8, 2, dtype=torch.float) / 8))


def _running_mean(model: Any) -> None:
    model.resnet.encoder.stages[0].layers[0].layer[2].normalization.running_mean += 0.3


def _batch_norm_training(model: Any) -> None:
    model.resnet.encoder.stages[1].layers[1].layer[0].normalization.train()


# -- equal up to rounding ------------------------------------------------------------------------------------


class _Separate(nn.Module):
    """Three projections where the original has one."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for at, name in enumerate("qkv"):
            weights, biases = fused.weight.detach().chunk(3, 1), fused.bias.detach().chunk(3)
            layer = nn.Linear(weights[at].shape[0], weights[at].shape[1])
            layer.weight.data, layer.bias.data = weights[at].t().contiguous(), biases[at].clone()
            self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        return torch.cat([layer(x) for layer in self.children()], -1)


def _split_projection(model: Any) -> None:
    for block in model.transformer.h:
        block.attn.c_attn = _Separate(block.attn.c_attn)


def _linear_layout(model: Any) -> None:
    """Linear layers, with weights the other way round, where the original has Conv1D."""
    for block in model.transformer.h:
        for parent, name in ((block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            conv = getattr(parent, name)
            layer = nn.Linear(*conv.weight.shape)
            layer.weight.data, layer.bias.data = (
                conv.weight.detach().t().contiguous(),
                conv.bias.detach().clone(),
            )
            setattr(parent, name, layer)


class _Unfused(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Any) -> Any:
        product = x @ self.weight.t()
        return product + self.bias


def _unfused(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.intermediate.dense = _Unfused(layer.intermediate.dense)
        layer.output.dense = _Unfused(layer.output.dense)


def _harmless(model: Any) -> None:
    for layer in model.model.layers:
        edited(layer, "residual = hidden_states\n    hidden_states = self.input_layernorm(hidden_states)",
               "residual = hidden_states.contiguous().clone()\n    hidden_states = hidden_states * 1.0\n"
               "    hidden_states = self.input_layernorm(hidden_states + 0)")  # fmt: skip


def _wide_softmax(model: Any) -> None:
    for layer in model.model.layers:
        edited(layer.self_attn, "dtype=torch.float32", "dtype=torch.float64", "eager_attention_forward")


class _Gelu(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.gelu(x, approximate="tanh")


def _fused_gelu(model: Any) -> None:
    for block in model.transformer.h:
        block.mlp.act = _Gelu()


class _FusedNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


def _fused_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm = _FusedNorm(layer.input_layernorm)
        layer.post_attention_layernorm = _FusedNorm(layer.post_attention_layernorm)


def _other_order(model: Any) -> None:
    for layer in model.model.layers:
        edited(layer.mlp, "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
               "self.up_proj(x) * self.act_fn(self.gate_proj(x))")  # fmt: skip


class _Renamed(nn.Module):
    """The same model with other names for its parts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = _Backbone(model.transformer)
        self.readout = model.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:  # noqa: ARG002
        return self.readout(self.backbone(input_ids, attention_mask))


class _Backbone(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.final = inner.wte, inner.wpe, inner.ln_f
        self.blocks = nn.ModuleList(_Block(block) for block in inner.h)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])[None])
        seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool() & mask.bool()[:, None, None, :]
        bias = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        for block in self.blocks:
            x = block(x, bias)
        return self.final(x)


class _Block(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = block.ln_1, _Mixer(block.attn), block.ln_2, block.mlp

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        x = x + self.mixer(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class _Mixer(nn.Module):
    factor = 1.0

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = attention.c_attn, attention.c_proj, attention.num_heads

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (self.factor * (width // self.heads) ** -0.5)
        mixed = (scores + bias).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def renamed(model: Any) -> Any:
    """A model of GPT-2 with other names for its parts."""
    return _Renamed(model).eval()


def _renamed_scaling(model: Any) -> Any:
    other: Any = renamed(model)
    other.backbone.blocks[1].mixer.factor = 2.0
    return other


def _copied(model: Any) -> Any:
    return copy.deepcopy(model)


def _sdpa_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.05)


_BIASED: Final = {"attention_bias": True}
_SDPA: Final = ("eager", "sdpa")

PAIRS: Final[tuple[Pair, ...]] = (
    Pair("eps of a layer norm", "gpt2", _gpt2_eps, "transformer.h.1.ln_2", r"eps.*1e-05.*0\.001"),
    Pair("eps of an RMS norm", "llama", _llama_eps, "model.layers.1.input_layernorm", r"1e-06.*0\.01"),
    Pair("attention scaled twice", "llama", _scaling, "model.layers.0.self_attn", r"0\.353.*0\.707"),
    Pair("scale of another back end", "llama", _sdpa_scaling, "model.layers.1.self_attn", r"0\.353.*0\.125",
         _SDPA),
    Pair("softmax over another dim", "bert", _softmax_dim, "bert.encoder.layer.0.attention.self",
         r"dim.*-1.*-2"),
    Pair("tanh in GELU", "vit", _gelu, "vit.layers.1.mlp.activation_fn", r"approximate.*none.*tanh"),
    Pair("dilated convolution", "resnet", _conv_padding,
         "resnet.encoder.stages.1.layers.0.layer.1.convolution", r"padding|dilation"),
    Pair("one expert, not two", "mixtral", _top_k, "model.layers.1.mlp.gate", r"topk|\bk\b.*2.*1"),
    Pair("positions off by one", "bert", _position_offset, "bert.embeddings(.position_embeddings)?",
         r"start 0 against 1"),
    Pair("another activation", "llama", _silu, "model.layers.1.mlp.act_fn", r"silu.*relu"),
    Pair("gate and up swapped", "llama", _gate_and_up, "model.layers.0.mlp(.act_fn)?", r"takes.*gate.*up"),
    Pair("sense of the mask", "llama", _mask_sense, "model.layers.0.self_attn", r"masked_fill|=="),
    Pair("mask not applied", "gpt2", _no_mask, "transformer.h.1.attn", r"^\+ "),
    Pair("scores not scaled", "gpt2", _no_scaling, "transformer.h.0.attn", r"^\* "),
    Pair("extra scaling", "llama", _extra_scaling, "model.layers.2", r"(\bmul\b|\*).*0\.5"),
    Pair("residual left out", "gpt2", _no_residual, "transformer.h.1", r"^\+ "),
    Pair("norm before the residual", "gpt2", _norm_moved, "transformer.h.2", r"^\+ "),
    Pair("token types left out", "bert", _no_token_types, "bert.embeddings", r"^\+ "),
    Pair("tanh left out", "bert", _no_tanh, "bert.pooler(.activation)?", r"tanh"),
    Pair("1 + weight left out", "gemma", _no_one, "model.layers.1.post_attention_layernorm", r"^\+ "),
    Pair("rounded to 8 bits", "llama", _quantized, "model.layers.1.mlp", r"float8|f8e4m3|Tensor.to"),
    Pair("heads viewed wrongly", "llama", _wrong_heads, "model.layers.0.self_attn", r"view|transpose"),
    Pair("heads repeated in turn", "llama", _repeated_heads, "model.layers.1.self_attn",
         r"unsqueeze.*against unsqueeze"),
    Pair("rotation reversed", "llama", _rotated_wrong, "model.layers.0.self_attn", r"^-.*takes"),
    Pair("position bias left out", "t5", _no_position_bias, "encoder.block.0.layer.0.SelfAttention", r"^\+ "),
    Pair("router not normalised", "mixtral", _no_router_norm, "model.layers.0.mlp.gate", r"div|/"),
    Pair("dropout left on", "gpt2", _dropout_on, "transformer.h.1.mlp.dropout", r"dropout"),
    Pair("a layer missing", "llama", _layer_missing, "model.layers.1", r"layers\.1"),
    Pair("one weight changed", "gpt2", _weight, "transformer.h.1.mlp.c_proj", r"c_proj\.weight"),
    Pair("bias left out", "llama", _bias_missing, "model.layers.1.self_attn.k_proj", r"bias",
         settings=(_BIASED, _BIASED)),
    Pair("bias left out of BERT", "bert", _bias_missing_bert, "bert.encoder.layer.1.intermediate.dense",
         r"bias"),
    Pair("tied weights untied", "gpt2", _untied, "lm_head", r"lm_head\.weight"),
    Pair("another rotary base", "llama", _rotary_base, "model.rotary_emb", r"inv_freq"),
    Pair("a changed running mean", "resnet", _running_mean,
         "resnet.encoder.stages.0.layers.0.layer.2.normalization", r"running_mean"),
    Pair("batch norm in training", "resnet", _batch_norm_training,
         "resnet.encoder.stages.1.layers.1.layer.0.normalization", r"train"),
    Pair("renamed, and scaled twice", "gpt2", _renamed_scaling, "backbone.blocks.1.mixer", r"0\.353.*0\.707"),
    Pair("another back end and weight", "llama", _sdpa_weight, "model.layers.1.self_attn.o_proj",
         r"o_proj\.weight", _SDPA),
    Pair("= the same twice", "mamba", _copied),
    Pair("= the same mixture twice", "mixtral", _nothing),
    Pair("= SDPA for its parts", "llama", _nothing, attention=_SDPA),
    Pair("= SDPA for its parts (GPT-2)", "gpt2", _nothing, attention=_SDPA),
    Pair("= Linear for Conv1D", "gpt2", _linear_layout),
    Pair("= q, k, v by three", "gpt2", _split_projection),
    Pair("= mm and add for addmm", "bert", _unfused),
    Pair("= harmless ops", "llama", _harmless),
    Pair("= softmax in float64", "llama", _wide_softmax),
    Pair("= GELU by one op", "gpt2", _fused_gelu),
    Pair("= RMS norm by one op", "llama", _fused_norm),
    Pair("= factors the other way", "llama", _other_order),
    Pair("= renamed and rewritten", "gpt2", renamed),
)  # fmt: skip
