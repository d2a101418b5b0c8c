"""Loops whose steps differ: unequal turns, two trainings, incomplete windows, more and more calls …"""

from __future__ import annotations

import random

from tests.truth.architectures import Architecture
from tests.truth.ingredients import OPTIMIZERS, clipping, optimizer, zeroing
from tests.truth.loops import Content, Facts, Loop, block, loop, text


@loop
def unequal_turns(rng: random.Random, net: Architecture) -> Loop:
    """A critic that steps several times before its generator steps once."""
    rounds, times = rng.randint(2, 3), rng.randint(2, 3)
    kind, rate = rng.choice(["Adam", "RMSprop", "SGD"]), rng.choice([0.002, 0.001])
    setup = text(
        "G, D = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)), nn.Linear(3, 1)",
        f"optimizer_d = torch.optim.{kind}(D.parameters(), lr={rate})",
        f"optimizer_g = torch.optim.{rng.choice([kind, 'AdamW'])}(G.parameters(), lr={rate / 2})",
    )
    body = block(
        f"for i in range({rounds}):",
        block(
            f"for _ in range({times}):",
            "fake = G(torch.randn(5, 2)).detach()",
            "loss_d = D(fake).mean() - D(torch.randn(5, 3)).sigmoid().mean()",
            "optimizer_d.zero_grad()",
            "loss_d.backward()",
            "optimizer_d.step()",
            "losses.append(loss_d.item())",
        ),
        "loss_g = -D(G(torch.randn(5, 2))).mean()",
        "optimizer_g.zero_grad()",
        "loss_g.backward()",
        "optimizer_g.step()",
        "losses.append(loss_g.item())",
    )
    one = Content({"G": 1, "D": 2})
    both = Content({"G": 2, "D": 3}, 2, (0, 1))
    contents = (*[one] * (times - 1), both) * rounds
    types = {"G": "Sequential", "D": "Linear"}
    return Loop(setup, body, Facts(len(contents), types=types, loss_read=True, contents=contents), model="")


@loop
def two_trainings(rng: random.Random, net: Architecture) -> Loop:
    """A training after another one: of other weights, or of the same ones with another optimizer."""
    first, second = rng.randint(2, 4), rng.randint(1, 4)
    kinds = rng.sample(list(OPTIMIZERS), 2)
    other_weights = rng.random() < 0.6
    names = ("encoder", "decoder", "classifier") if other_weights else ("model", "", "model")
    makers = [OPTIMIZERS[kind] for kind in kinds]
    if other_weights:
        setup = text(
            "encoder, decoder, classifier = nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)",
            "x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))",
            f"optimizer = {makers[0].format('encoder.parameters()', 0.01)}",
        )
        losses = ["F.mse_loss(decoder(encoder(x)), x[:, :4])", "F.cross_entropy(classifier(encoder(x)), y)"]
        trained = "classifier.parameters()"
        contents = Content({"encoder": 1, "decoder": 1}), Content({"encoder": 1, "classifier": 1}, 1, (1,))
    else:
        setup = f"optimizer = {makers[0].format('model.parameters()', 0.001)}"
        losses, trained = [net.loss.format(model="model")] * 2, "model.parameters()"
        contents = Content({"model": 1}), Content({"model": 1}, 1, (1,))
    steps = [
        block(
            f"for i in range({count}):",
            "" if other_weights else "x, y = batch(4)",
            f"loss = {loss}",
            zeroing(rng),
            "loss.backward()",
            "optimizer.step()",
            "losses.append(loss.item())",
        )
        for count, loss in zip((first, second), losses, strict=True)
    ]
    body = text(
        steps[0],
        f"optimizer = {makers[1].format(trained, 0.002)}",
        f"{names[0]}.requires_grad_(False)" if other_weights and rng.random() < 0.5 else "",
        steps[1],
    )
    facts = Facts(
        first + second,
        types={"encoder": "Linear", "decoder": "ReLU", "classifier": "Linear"},
        loss_read=True,
        contents=(*[contents[0]] * first, *[contents[1]] * second),
    )
    return Loop(setup, body, facts, model="" if other_weights else "model")


@loop
def incomplete_window(rng: random.Random, net: Architecture) -> Loop:
    """Accumulated gradients whose last window is not full; divided by the size of a full one."""
    full, each, of = rng.randint(1, 3), rng.randint(2, 3), optimizer(rng)
    rest, divides = rng.randint(1, each - 1), rng.random() < 0.6
    batches, clip = full * each + rest, clipping(rng)
    body = block(
        f"for i in range({batches}):",
        "x, y = batch(4)",
        f"loss = {net.loss.format(model='model')}",
        f"loss = loss / {each}" if divides else "",
        "loss.backward()",
        "losses.append(loss.item())",
        block(f"if (i + 1) % {each} == 0 or i + 1 == {batches}:", clip, "optimizer.step()", zeroing(rng)),
    )
    contents = *[Content({"model": each}, each)] * full, Content({"model": rest}, rest)
    facts = Facts(full + 1, loss_read=True, norm_read=clip.startswith("norms"), contents=contents)
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def weighted_passes(rng: random.Random, net: Architecture) -> Loop:
    """Two losses with weights of their own, each with a backward pass."""
    steps, of, weight = rng.randint(2, 4), optimizer(rng), rng.choice([0.5, 0.25, 2])
    loss = net.loss.format(model="model")
    one_line = "first.backward(retain_graph=True)", f"({weight} * second).backward()"
    passes = rng.choice(
        [
            "; ".join(one_line),
            text(*one_line),
            block(f"for weight, each in ((1, first), ({weight}, second)):", "(weight * each).backward()"),
            block(
                f"for weight, each in ((torch.tensor(1.0), first), (torch.tensor({weight}), second)):",
                "(weight * each).backward()",
            ),
        ]
    )
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        f"first = {loss}",
        "x, y = batch(4)",
        f"second = {loss}",
        passes,
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append((first.item(), second.item()))",
    )
    facts = Facts(steps, {"model": 2}, backwards=2, optimizers=(of.type,), loss_read=True, collected=True)
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def growing_calls(rng: random.Random, net: Architecture) -> Loop:
    """Episodes that get longer: the model is called once more in each step."""
    steps, least, of = rng.randint(2, 4), rng.randint(1, 3), optimizer(rng)
    body = block(
        f"for i in range({steps}):",
        "parts = []",
        block(
            f"for _ in range({least} + i):",
            "x, y = batch(3)",
            f"parts.append({net.loss.format(model='model')})",
        ),
        "loss = torch.stack(parts).mean()",
        "optimizer.zero_grad()",
        "loss.backward()",
        "optimizer.step()",
        "losses.append(loss.item())",
    )
    contents = tuple(Content({"model": least + number}) for number in range(steps))
    return Loop(f"optimizer = {of.text}", body, Facts(steps, loss_read=True, contents=contents))


@loop
def target_network(rng: random.Random, net: Architecture) -> Loop:
    """A copy of the model that gives goals without gradients, in every second step."""
    steps, of = rng.randint(3, 6), optimizer(rng)
    body = block(
        f"for i in range({steps}):",
        "x, _ = batch(5)",
        block(
            "if i % 2 == 0:",
            block("with torch.no_grad():", f"goal = {net.output.format(model='target')} + 0.5"),
        ),
        f"loss = F.mse_loss({net.output.format(model='model')}, goal)",
        "optimizer.zero_grad()",
        "loss.backward()",
        "optimizer.step()",
        "losses.append(loss.item())",
    )
    setup = text("target = copy.deepcopy(model).requires_grad_(False)", f"optimizer = {of.text}")
    contents = tuple(
        Content({"model": 1} if number % 2 else {"target": 1, "model": 1}) for number in range(steps)
    )
    facts = Facts(
        steps,
        types={"target": net.type},
        loss_read=True,
        unused=net.output not in net.loss,
        contents=contents,
    )
    return Loop(setup, body, facts)
