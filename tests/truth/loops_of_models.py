"""Loops around several models, or models that are called in less usual ways."""

from __future__ import annotations

import random
from textwrap import dedent

from tests.truth.architectures import Architecture
from tests.truth.ingredients import clipping, optimizer
from tests.truth.loops import Facts, Loop, block, loop, text
from tests.truth.loops_of_training import plain


@loop
def adversarial(rng: random.Random, net: Architecture) -> Loop:
    """A generator and a critic with an optimizer each, which take turns."""
    steps, rate = rng.randint(2, 4), rng.choice([0.001, 0.002])
    kind = rng.choice(["Adam", "RMSprop"])
    setup = text(
        "G, D = Generator(), Critic()",
        f"optimizer_d = torch.optim.{kind}(D.parameters(), lr={rate})",
        f"optimizer_g = torch.optim.{kind}(G.parameters(), lr={rate / 2})",
        "goal = F.binary_cross_entropy_with_logits",
    )
    body = block(
        f"for i in range({steps}):",
        "real, noise = torch.randn(6, 4), torch.randn(6, 2)",
        "fake = G(noise)",
        "real_score, fake_score = D(real), D(fake.detach())",
        "loss_d = goal(real_score, torch.ones(6, 1)) + goal(fake_score, torch.zeros(6, 1))",
        "optimizer_d.zero_grad()",
        "loss_d.backward()",
        "optimizer_d.step()",
        "score = D(fake)",
        "loss_g = goal(score, torch.ones_like(score))",
        "optimizer_g.zero_grad()",
        "loss_g.backward()",
        "optimizer_g.step()",
        "losses.append((loss_d.item(), loss_g.item()))",
    )
    functions = """
    class Generator(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))


    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(4, 8)
            self.score = nn.Linear(8, 1)

        def forward(self, x):
            return self.score(torch.tanh(self.hidden(x)))
    """
    facts = Facts(
        steps,
        {"G": 1, "D": 3},
        {"G": "Generator", "D": "Critic"},
        backwards=2,
        optimizers=(kind, kind),
        loss_read=True,
    )
    return Loop(setup, body, facts, f"\n{dedent(functions).strip()}\n", model="")


@loop
def averaged(rng: random.Random, net: Architecture) -> Loop:
    """An exponential moving average of the weights, and its evaluation."""
    steps, of = rng.randint(2, 4), optimizer(rng)
    setup = text(
        "average = torch.optim.swa_utils.AveragedModel("
        "model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))"
        if rng.random() < 0.5
        else "average = copy.deepcopy(model)",
        f"optimizer = {of.text}",
    )
    by_hand = "deepcopy" in setup
    update = (
        block(
            "with torch.no_grad():",
            block(
                "for mine, other in zip(average.parameters(), model.parameters()):",
                "mine.lerp_(other, 0.1)",
            ),
        )
        if by_hand
        else "average.update_parameters(model)"
    )
    ends = rng.random() < 0.6
    body = text(
        block(
            f"for i in range({steps}):",
            "x, y = batch(4)",
            f"loss = {net.loss.format(model='model')}",
            "loss.backward()",
            "optimizer.step()",
            "optimizer.zero_grad()",
            update,
            "losses.append(loss.item())",
        ),
        block(
            "with torch.no_grad():",
            "average.eval()",
            "x, y = batch(8)",
            f"losses.append(({net.loss.format(model='average')}).item())  # evaluation",
        )
        if ends
        else "",
    )
    facts = Facts(
        steps,
        {"model": 1},
        {"average": net.type if by_hand else "AveragedModel"},
        optimizers=(of.type,),
        loss_read=True,
    )
    return Loop(setup, body, facts)


@loop
def distillation(rng: random.Random, net: Architecture) -> Loop:
    """A student that learns from a frozen teacher of the same class."""
    steps, of = rng.randint(2, 4), optimizer(rng)
    output = net.output
    body = block(
        f"for i in range({steps}):",
        "x, _ = batch(5)",
        block("with torch.no_grad():", f"target = {output.format(model='teacher')}"),
        f"loss = F.mse_loss({output.format(model='model')}, target)",
        "optimizer.zero_grad()",
        "loss.backward()",
        "optimizer.step()",
        "losses.append(loss.item())",
    )
    freeze = (
        block("for each in teacher.parameters():", "each.requires_grad_(False)") if rng.random() < 0.5 else ""
    )
    setup = text(f"teacher = {net.build}", "teacher.eval()", freeze, f"optimizer = {of.text}")
    facts = Facts(
        steps,
        {"teacher": 1, "model": 1},
        {"teacher": net.type},
        optimizers=(of.type,),
        loss_read=True,
        unused=net.output not in net.loss,
    )
    return Loop(setup, body, facts, model=rng.choice(["model", ""]))


@loop
def siamese(rng: random.Random, net: Architecture) -> Loop:
    """A model that is called twice in each step, once with each of a pair."""
    steps, of = rng.randint(2, 4), optimizer(rng)
    # The cosine of two single numbers is 1 or -1, whatever they are: nothing would be learned.
    single = net.target.endswith(", 1)")
    distance = "F.mse_loss(left, right)" if single else "1 - F.cosine_similarity(left, right, dim=-1).mean()"
    body = block(
        f"for i in range({steps}):",
        "x, _ = batch(4)",
        f"left = {net.output.format(model='model')}",
        "x, _ = batch(4)",
        f"right = {net.output.format(model='model')}",
        f"loss = {distance}",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
    )
    facts = Facts(
        steps, {"model": 2}, optimizers=(of.type,), loss_read=True, unused=net.output not in net.loss
    )
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def inference(rng: random.Random, net: Architecture) -> Loop:
    """Batches through a model in evaluation, with nothing trained."""
    times = rng.randint(1, 5)
    guard = rng.choice(["torch.no_grad()", "torch.inference_mode()"])
    sizes = rng.choice(["4", "3 + i"])
    body = block(
        f"with {guard}:",
        block(
            f"for i in range({times}):",
            f"x, y = batch({sizes})",
            f"out = {net.output.format(model='model')}",
        ),
    )
    return Loop("model.eval()", body, Facts(0, {"model": times}, backwards=0))


@loop
def generation(rng: random.Random, net: Architecture) -> Loop:
    """A loop that appends a token at a time, as ``generate`` does."""
    times = rng.randint(2, 8)
    functions = """
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.rnn = nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0])
    """
    body = block(
        "with torch.no_grad():",
        "ids = torch.tensor([[1, 2, 3]])",
        block(
            f"for _ in range({times}):",
            "token = model(ids)[:, -1].argmax(-1, keepdim=True)",
            "ids = torch.cat([ids, token], dim=1)",
        ),
    )
    facts = Facts(0, {"model": times}, {"model": "Decoder"}, backwards=0)
    return Loop("model = Decoder().eval()", body, facts, f"\n{dedent(functions).strip()}\n")


@loop
def penalty(rng: random.Random, net: Architecture) -> Loop:
    """A penalty on the gradient of the output by the input, through a second backward pass."""
    if not net.smooth or "randint" in net.inputs:
        return plain(rng, net)
    steps, of = rng.randint(2, 3), optimizer(rng)
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        "x.requires_grad_(True)",
        f"out = {net.output.format(model='model')}",
        "(slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)",
        "loss = out.pow(2).mean() + slope.pow(2).mean()",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
    )
    facts = Facts(
        steps,
        {"model": 1},
        optimizers=(of.type,),
        loss_read=True,
        unused=net.output not in net.loss,
        gradients=steps,
    )
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def checkpointed(rng: random.Random, net: Architecture) -> Loop:
    """Blocks that are computed again in the backward pass."""
    steps, depth, of = rng.randint(2, 3), rng.randint(2, 3), optimizer(rng)
    reentrant = rng.random() < 0.4
    functions = f"""
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.tanh(self.fc(x))


    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(5, 8)
            self.cells = nn.ModuleList(Cell() for _ in range({depth}))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            x = self.stem(x)
            for cell in self.cells:
                x = checkpoint(cell, x, use_reentrant={reentrant})
            return self.head(x)
    """
    body = block(
        f"for i in range({steps}):",
        "x, y = torch.randn(4, 5), torch.randint(0, 2, (4,))",
        "loss = F.cross_entropy(model(x), y)",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
    )
    facts = Facts(steps, {"model": 1}, {"model": "Deep"}, optimizers=(of.type,), loss_read=True)
    return Loop(
        text("model = Deep()", f"optimizer = {of.text}"), body, facts, f"\n{dedent(functions).strip()}\n"
    )


@loop
def compiled(rng: random.Random, net: Architecture) -> Loop:
    """A model that `torch.compile` compiles in the block, with a backend that needs no compiler."""
    if not net.smooth:
        return plain(rng, net)
    steps, of = rng.randint(2, 3), optimizer(rng, "net.parameters()")
    backend = rng.choice(["eager", "aot_eager"])
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        f"loss = {net.loss.format(model='model')}",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
    )
    setup = text(
        "torch._dynamo.reset()",
        "net = model",
        f"model = torch.compile(net, backend={backend!r})",
        f"optimizer = {of.text}",
    )
    facts = Facts(steps, {"model": 1}, optimizers=(of.type,), loss_read=True, compiled=True)
    return Loop(setup, body, facts, model="net")


@loop
def compiled_part(rng: random.Random, net: Architecture) -> Loop:
    """A model of which `torch.compile` compiles a part, whose gradients come from compiled code or not."""
    steps, of, clip = rng.randint(2, 3), optimizer(rng), clipping(rng)
    functions = f"""
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            body = nn.Sequential(nn.Linear(5, 8), nn.{rng.choice(["SiLU", "Tanh"])}(), nn.Linear(8, 4))
            self.body = torch.compile(body, backend="{rng.choice(["eager", "aot_eager"])}")
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.body(x))
    """
    body = block(
        f"for i in range({steps}):",
        "x, y = torch.randn(4, 5), torch.randint(0, 2, (4,))",
        "loss = F.cross_entropy(model(x), y)",
        "loss.backward()",
        clip,
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
    )
    facts = Facts(
        steps,
        {"model": 1},
        {"model": "Partly"},
        optimizers=(of.type,),
        loss_read=True,
        norm_read=clip.startswith("norms"),
        compiled=True,
        parts=2,
    )
    setup = text("torch._dynamo.reset()", "model = Partly()", f"optimizer = {of.text}")
    return Loop(setup, body, facts, f"\n{dedent(functions).strip()}\n")


@loop
def threads(rng: random.Random, net: Architecture) -> Loop:
    """Another thread runs a model of its own meanwhile, which the recording does not see."""
    steps, of = rng.randint(2, 3), optimizer(rng)
    functions = """
    def work(other):
        for _ in range(5):
            other(torch.ones(2, 3)).sum().backward()
    """
    body = block(
        f"for i in range({steps}):",
        "worker = threading.Thread(target=work, args=(other,))",
        "worker.start()",
        "x, y = batch(4)",
        f"loss = {net.loss.format(model='model')}",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
        "worker.join()",
    )
    facts = Facts(steps, {"model": 1}, optimizers=(of.type,), loss_read=True, parallel=True)
    setup = text("other = nn.Sequential(nn.Linear(3, 3), nn.Tanh())", f"optimizer = {of.text}")
    return Loop(setup, body, facts, f"\n{dedent(functions).strip()}\n")
