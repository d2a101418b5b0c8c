"""Models of the generated programs: each is source text, with the text of a batch and of a loss for it.

A new one is a function with `@architecture` that draws its sizes from ``rng``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True)
class Architecture:
    """The source of a model. In ``inputs`` and ``target`` stands ``{n}`` for the size of a batch."""

    source: str
    inputs: str
    target: str
    loss: str  #: of ``{model}``, ``x`` and ``y``
    output: str  #: a tensor of the model's output for ``x``
    build: str = "Net()"
    type: str = "Net"
    trunk: str = ""  #: a submodule whose parameters can be frozen, or have a rate of their own
    criterion: str = ""  #: the loss as a module, of ``{model}(x)`` and ``y``; empty if there is none
    smooth: bool = True  #: whether it works with LBFGS, double backward and ``torch.compile``


ARCHITECTURES: dict[str, Callable[[random.Random], Architecture]] = {}


def architecture(
    function: Callable[[random.Random], Architecture],
) -> Callable[[random.Random], Architecture]:
    """Register a kind of architecture by the name of its function."""
    ARCHITECTURES[function.__name__] = function
    return function


def _classifier(
    source: str, inputs: str, classes: int, *, trunk: str = "", smooth: bool = True
) -> Architecture:
    return Architecture(
        dedent(source).strip(), inputs, f"torch.randint(0, {classes}, ({{n}},))",
        "F.cross_entropy({model}(x), y)", "{model}(x)", trunk=trunk, criterion="nn.CrossEntropyLoss()",
        smooth=smooth,
    )  # fmt: skip


def _activation(rng: random.Random) -> str:
    return rng.choice(["F.gelu", "torch.tanh", "F.silu", "F.softplus"])


@architecture
def sequential(rng: random.Random) -> Architecture:
    """An `nn.Sequential` without a class of its own."""
    wide = rng.choice([8, 12])
    layers = ["nn.Linear(6, {0})", rng.choice(["nn.Tanh()", "nn.GELU()", "nn.SiLU()"])]
    layers += rng.choice([[], ["nn.Dropout(0.1)"], ["nn.LayerNorm({0})"]])
    build = f"nn.Sequential({', '.join([*layers, 'nn.Linear({0}, 3)'])})".format(wide)
    return Architecture(
        "", "torch.randn({n}, 6)", "torch.randint(0, 3, ({n},))", "F.cross_entropy({model}(x), y)",
        "{model}(x)", build=build, type="Sequential", criterion="nn.CrossEntropyLoss()",
    )  # fmt: skip


@architecture
def residual(rng: random.Random) -> Architecture:
    """Equal blocks in a `ModuleList`, which is never called."""
    wide, depth, act = rng.choice([8, 10]), rng.randint(2, 5), _activation(rng)
    drop = rng.choice([0.0, 0.1])
    source = f"""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm({wide})
            self.fc = nn.Linear({wide}, {wide})
            self.drop = nn.Dropout({drop})

        def forward(self, x):
            return x + self.drop({act}(self.fc(self.norm(x))))


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(6, {wide})
            self.blocks = nn.ModuleList(Block() for _ in range({depth}))
            self.head = nn.Linear({wide}, 4)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)
    """
    return _classifier(source, "torch.randn({n}, 6)", 4, trunk="stem")


@architecture
def shared(rng: random.Random) -> Architecture:
    """One module called several times, and one registered under two names."""
    times = rng.randint(2, 4)
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(5, 8)
            self.cell = nn.Linear(8, 8)
            self.again = self.cell
            self.act = nn.Tanh()
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.act(self.stem(x))
            for _ in range({times}):
                x = self.act(self.cell(x))
            return self.head(self.again(x))
    """
    return _classifier(source, "torch.randn({n}, 5)", 3, trunk="stem")


@architecture
def tied(rng: random.Random) -> Architecture:
    """An embedding whose weight is the head's too."""
    words, wide, long = rng.choice([11, 16]), 8, rng.choice([5, 7])
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding({words}, {wide})
            self.mix = nn.Linear({wide}, {wide})
            self.head = nn.Linear({wide}, {words}, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.mix(self.embed(ids)))).flatten(0, 1)
    """
    return Architecture(
        dedent(source).strip(), f"torch.randint(0, {words}, ({{n}}, {long}))",
        f"torch.randint(0, {words}, ({{n}} * {long},))", "F.cross_entropy({model}(x), y)", "{model}(x)",
        trunk="mix", criterion="nn.CrossEntropyLoss()",
    )  # fmt: skip


@architecture
def convolution(rng: random.Random) -> Architecture:
    """Convolutions with batch norm, whose buffers change in training."""
    wide = rng.choice([4, 6])
    norm = rng.choice([f"nn.BatchNorm2d({wide})", f"nn.GroupNorm(2, {wide})"])
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, {wide}, 3, padding=1)
            self.norm = {norm}
            self.pool = nn.AdaptiveAvgPool2d(2)
            self.head = nn.Linear({wide} * 4, 3)

        def forward(self, x):
            x = {_activation(rng)}(self.norm(self.conv(x)))
            return self.head(self.pool(x).flatten(1))
    """
    return _classifier(source, "torch.randn({n}, 2, 6, 6)", 3, trunk="conv", smooth=False)


@architecture
def recurrent(rng: random.Random) -> Architecture:
    """A recurrent layer, whose output is a tuple."""
    kind, both = rng.choice(["GRU", "LSTM", "RNN"]), rng.choice([False, True])
    wide = 6
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.{kind}(4, {wide}, batch_first=True, bidirectional={both})
            self.head = nn.Linear({wide * (2 if both else 1)}, 3)

        def forward(self, x):
            states, _ = self.rnn(x)
            return self.head(states[:, -1])
    """
    return _classifier(source, f"torch.randn({{n}}, {rng.choice([4, 5])}, 4)", 3, trunk="rnn", smooth=False)


@architecture
def attention(rng: random.Random) -> Architecture:
    """Attention written by hand, with a parameter and a buffer of its own."""
    long, heads = rng.choice([5, 6]), rng.choice([1, 2])
    source = f"""
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones({long}, {long}).tril().bool())

        def forward(self, x):
            n, long, _ = x.shape
            q, k, v = self.qkv(x).view(n, long, 3, {heads}, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).reshape(n, long, 8))


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(13, 8)
            self.place = nn.Parameter(torch.zeros({long}, 8))
            self.attention = Attention()
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 13)

        def forward(self, ids):
            x = self.embed(ids) + self.place
            x = self.norm(x + self.attention(x))
            return self.head(x).flatten(0, 1)
    """
    return Architecture(
        dedent(source).strip(), f"torch.randint(0, 13, ({{n}}, {long}))",
        f"torch.randint(0, 13, ({{n}} * {long},))", "F.cross_entropy({model}(x), y)", "{model}(x)",
        trunk="embed", criterion="nn.CrossEntropyLoss()",
    )  # fmt: skip


@architecture
def transformer(rng: random.Random) -> Architecture:
    """torch's own encoder layers, one of which has a fast path in evaluation."""
    depth, drop = rng.randint(1, 2), rng.choice([0.0, 0.1])
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout={drop}, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, {depth}, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))
    """
    return _classifier(
        source, f"torch.randn({{n}}, {rng.choice([3, 5])}, 8)", 3, trunk="encoder", smooth=False
    )


@architecture
def dict_output(rng: random.Random) -> Architecture:
    """A model that takes keywords and returns a dict."""
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.classes = nn.Linear(8, 3)
            self.value = nn.Linear(8, 1)

        def forward(self, x, scale=None):
            hidden = {_activation(rng)}(self.body(x))
            if scale is not None:
                hidden = hidden * scale
            return {{"classes": self.classes(hidden), "value": self.value(hidden).squeeze(-1)}}


    def loss_of(output, y):
        return F.cross_entropy(output["classes"], y) + 0.1 * output["value"].pow(2).mean()
    """
    call = rng.choice(["{model}(x)", "{model}(x=x)", "{model}(x, scale=torch.full((1,), 0.5))"])
    return Architecture(
        dedent(source).strip(), "torch.randn({n}, 6)", "torch.randint(0, 3, ({n},))",
        f"loss_of({call}, y)", f"{call}['classes']", trunk="body",
    )  # fmt: skip


@architecture
def tuple_output(rng: random.Random) -> Architecture:
    """A model of two branches that returns a tuple; one branch is two layers deep."""
    wide = rng.choice([6, 8])
    source = f"""
    class Branch(nn.Module):
        def __init__(self, wide):
            super().__init__()
            self.up = nn.Linear(4, wide)
            self.down = nn.Linear(wide, 2)

        def forward(self, x):
            return self.down({_activation(rng)}(self.up(x)))


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = Branch({wide})
            self.spread = Branch({wide + 2})

        def forward(self, x):
            return self.mean(x), F.softplus(self.spread(x)) + 0.1
    """
    return Architecture(
        dedent(source).strip(), "torch.randn({n}, 4)", "torch.randn({n}, 2)",
        "sum(F.mse_loss(each, y) for each in {model}(x))", "{model}(x)[0]", trunk="mean",
    )  # fmt: skip


@architecture
def functional(rng: random.Random) -> Architecture:
    """Layers as functions of parameters that stand in no module of torch's."""
    wide = rng.choice([6, 8])
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn({wide}, 5) * 0.3)
            self.second = nn.Parameter(torch.randn(3, {wide}) * 0.3)
            self.bias = nn.Parameter(torch.zeros(3))
            self.register_buffer("scale", torch.full((), 0.5))

        def forward(self, x):
            hidden = {_activation(rng)}(F.linear(x, self.first)) * self.scale
            return F.linear(hidden, self.second, self.bias)
    """
    return _classifier(source, "torch.randn({n}, 5)", 3)


@architecture
def regression(rng: random.Random) -> Architecture:
    """A small regression with a nested container."""
    source = f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Sequential(nn.Linear(4, 8), nn.Tanh()),
                nn.Sequential(nn.Linear(8, 8), nn.{rng.choice(["SiLU", "GELU"])}()),
            )
            self.heads = nn.ModuleDict({{"a": nn.Linear(8, 1), "b": nn.Linear(8, 1)}})

        def forward(self, x):
            hidden = self.body(x)
            return self.heads["a"](hidden) + self.heads["b"](hidden)
    """
    return Architecture(
        dedent(source).strip(), "torch.randn({n}, 4)", "torch.randn({n}, 1)", "F.mse_loss({model}(x), y)",
        "{model}(x)", trunk="body", criterion="nn.MSELoss()",
    )  # fmt: skip
