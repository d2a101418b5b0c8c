"""Training loops of one model: accumulation, groups, several optimizers and losses, closures …"""

from __future__ import annotations

import random

from tests.truth.architectures import Architecture
from tests.truth.ingredients import EVALUATE, clipping, optimizer, reading, schedule, zeroing
from tests.truth.loops import Facts, Loop, block, loop, text


def _sizes(rng: random.Random) -> str:
    """The size of a batch in iteration ``i``."""
    return rng.choice(["4", "6", "4 + i % 2", "6 if i else 3"])


@loop
def plain(rng: random.Random, net: Architecture) -> Loop:
    """Epochs of forward, backward and step, with some of everything that goes with them."""
    epochs, batches = rng.randint(1, 3), rng.randint(1, 4)
    of = optimizer(rng)
    plan, clip, read = schedule(rng, of, epochs * batches), clipping(rng), reading(rng)
    use_criterion = bool(net.criterion) and rng.random() < 0.4
    loss = "criterion({model}(x), y)" if use_criterion else net.loss
    before = rng.random() < 0.5
    zero = zeroing(rng)
    evaluates = rng.random() < 0.5
    body = block(
        f"for epoch in range({epochs}):",
        block(
            f"for i in range({batches}):",
            f"x, y = batch({_sizes(rng)})",
            zero if before else "",
            f"loss = {loss.format(model='model')}",
            "loss.backward()",
            clip,
            "optimizer.step()",
            plan.each_step,
            "" if before else zero,
            read,
        ),
        plan.each_epoch,
        f"evaluate(model, {rng.randint(1, 2)})  # evaluation" if evaluates else "",
    )
    setup = text(
        "criterion = nn." + net.criterion.removeprefix("nn.") if use_criterion else "",
        f"optimizer = {of.text}",
        plan.setup,
    )
    facts = Facts(
        epochs * batches,
        {"model": 1} | ({"criterion": 1} if use_criterion else {}),
        {"criterion": net.criterion[3:-2]},
        1,
        (of.type,),
        loss_read=read.startswith("losses"),
        norm_read=clip.startswith("norms"),
    )
    return Loop(
        setup, body, facts, EVALUATE.format(n=5, loss=net.loss.format(model="model")) if evaluates else ""
    )


@loop
def criterion_made_anew(rng: random.Random, net: Architecture) -> Loop:
    """The loss is a module that each iteration makes for itself; its total keeps a number, not a graph."""
    steps, of = rng.randint(3, 5), optimizer(rng)
    if not net.criterion:
        return plain(rng, net)
    body = block(
        f"for i in range({steps}):",
        f"x, y = batch({_sizes(rng)})",
        zeroing(rng),
        f"loss = {net.criterion}(model(x), y)",
        "loss.backward()",
        "optimizer.step()",
        "losses.append(loss.item())",
        "total += losses[-1]",
    )
    facts = Facts(
        steps,
        {"model": 1, "criterion": 1},
        {"criterion": net.criterion[3:-2]},
        optimizers=(of.type,),
        loss_read=True,
        collected=True,
    )
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def accumulation(rng: random.Random, net: Architecture) -> Loop:
    """Several backward passes before each optimizer step, with the loss divided by their number."""
    steps, each = rng.randint(2, 4), rng.randint(2, 3)
    of = optimizer(rng)
    plan, clip = schedule(rng, of, steps), clipping(rng)
    divides = rng.random() < 0.7
    when = rng.choice(["whole", "before", "after", ""])
    divide = f"loss = loss / {each}" if divides else ""
    body = block(
        f"for i in range({steps * each}):",
        "x, y = batch(4)",
        f"loss = {net.loss.format(model='model')}",
        "losses.append(loss.item())" if when == "before" else "",
        f"(loss / {each}).backward()" if divides and when == "whole" else text(divide, "loss.backward()"),
        "losses.append(loss.item())" if when in ("after", "whole") else "",
        block(f"if (i + 1) % {each} == 0:", clip, "optimizer.step()", plan.each_step, zeroing(rng)),
    )
    divisor = each if divides and when in ("before", "whole", "") else 1
    facts = Facts(
        steps,
        {"model": each},
        backwards=each,
        optimizers=(of.type,),
        loss_read=bool(when),
        loss_divisor=divisor,
        norm_read=clip.startswith("norms"),
    )
    return Loop(text(f"optimizer = {of.text}", plan.setup if plan.each_step else ""), body, facts)


@loop
def groups(rng: random.Random, net: Architecture) -> Loop:
    """Parameter groups with rates of their own, the trunk frozen or slower."""
    if not net.trunk:
        return plain(rng, net)
    steps, kind = rng.randint(2, 4), rng.choice(["SGD", "AdamW"])
    slow, fast = rng.choice([(0.001, 0.01), (0.0005, 0.002)])
    freezes = rng.random() < 0.4
    setup = text(
        f"trunk = list(model.{net.trunk}.parameters())",
        "known = {id(each) for each in trunk}",
        "rest = [each for each in model.parameters() if id(each) not in known]",
        block("for each in trunk:", "each.requires_grad_(False)") if freezes else "",
        f"optimizer = torch.optim.{kind}(rest, lr={fast})"
        if freezes
        else f"optimizer = torch.optim.{kind}([dict(params=trunk, lr={slow}), dict(params=rest)], lr={fast})",
    )
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        "optimizer.zero_grad()",
        f"loss = {net.loss.format(model='model')}",
        "loss.backward()",
        "optimizer.step()",
        "losses.append(loss.item())",
    )
    return Loop(setup, body, Facts(steps, {"model": 1}, optimizers=(kind,), loss_read=True))


@loop
def two_optimizers(rng: random.Random, net: Architecture) -> Loop:
    """One model whose trunk and rest have an optimizer each, stepped one after the other."""
    if not net.trunk:
        return plain(rng, net)
    steps = rng.randint(2, 4)
    first, second = optimizer(rng, "trunk"), optimizer(rng, "rest")
    setup = text(
        f"trunk = list(model.{net.trunk}.parameters())",
        "known = {id(each) for each in trunk}",
        "rest = [each for each in model.parameters() if id(each) not in known]",
        f"slow = {first.text}",
        f"fast = {second.text}",
    )
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(5)",
        f"loss = {net.loss.format(model='model')}",
        "slow.zero_grad()",
        "fast.zero_grad()",
        "loss.backward()",
        "slow.step()",
        "fast.step()",
        reading(rng),
    )
    return Loop(setup, body, Facts(steps, {"model": 1}, optimizers=(first.type, second.type)))


@loop
def closure(rng: random.Random, net: Architecture) -> Loop:
    """An optimizer that evaluates a closure; LBFGS does so several times a step."""
    if not net.smooth:
        return plain(rng, net)
    steps = rng.randint(1, 3)
    lbfgs = rng.random() < 0.6
    times = rng.randint(1, 2) if lbfgs else 1
    of = (
        f"torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter={times}, max_eval=9, tolerance_grad=0,"
        " tolerance_change=0)"
        if lbfgs
        else "torch.optim.SGD(model.parameters(), lr=0.01)"
    )
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(6)",
        "",
        block(
            "def closure():",
            "optimizer.zero_grad()",
            f"loss = {net.loss.format(model='model')}",
            "loss.backward()",
            "return loss",
        ),
        "loss = optimizer.step(closure)",
        "losses.append(loss.item())",
    )
    facts = Facts(
        steps,
        {"model": times},
        backwards=times,
        optimizers=("LBFGS" if lbfgs else "SGD",),
        loss_read=times == 1,
    )
    return Loop(text(f"optimizer = {of}"), body, facts)


@loop
def several_losses(rng: random.Random, net: Architecture) -> Loop:
    """Two forwards and two losses in a step, with a backward pass each or one of their sum."""
    steps, of = rng.randint(2, 4), optimizer(rng)
    apart = rng.random() < 0.5
    weight = rng.choice([0.5, 0.1])
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        f"first = {net.loss.format(model='model')}",
        "first.backward()" if apart else "",
        "x, y = batch(3)",
        f"second = {net.loss.format(model='model')}",
        "second.backward()" if apart else f"loss = first + {weight} * second",
        "" if apart else "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append((first.item(), second.item()))" if apart else "losses.append(loss.item())",
    )
    facts = Facts(steps, {"model": 2}, backwards=2 if apart else 1, optimizers=(of.type,), loss_read=True)
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def mixed_precision(rng: random.Random, net: Architecture) -> Loop:
    """Autocast to bfloat16, with a gradient scaler that may skip a step."""
    steps, of = rng.randint(2, 5), rng.choice(["SGD", "AdamW"])
    scales = rng.random() < 0.6
    overflow = rng.randrange(steps) if scales and rng.random() < 0.5 else -1
    clips = scales and rng.random() < 0.5
    loss = net.loss.format(model="model")
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        "optimizer.zero_grad()",
        block("with torch.autocast('cpu', dtype=torch.bfloat16):", f"loss = {loss}"),
        block(f"if i == {overflow}:", "loss = loss * float('inf')") if overflow >= 0 else "",
        "scaler.scale(loss).backward()" if scales else "loss.backward()",
        text("scaler.unscale_(optimizer)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
        if clips
        else "",
        text("scaler.step(optimizer)", "scaler.update()") if scales else "optimizer.step()",
        "losses.append(loss.item())",
    )
    setup = text(
        f"optimizer = torch.optim.{of}(model.parameters(), lr=0.001)",
        "scaler = torch.amp.GradScaler('cpu', init_scale=4.0)" if scales else "",
    )
    facts = Facts(
        steps,
        {"model": 1},
        optimizers=(of,),
        loss_read=True,
        collected=True,
        skipped=(overflow,) if overflow >= 0 else (),
        healthy=overflow < 0,
    )
    return Loop(setup, body, facts)


@loop
def named_steps(rng: random.Random, net: Architecture) -> Loop:
    """Steps that the program names with `sl.step`."""
    steps, of = rng.randint(2, 4), optimizer(rng)
    form = rng.choice(["step{i}", "batch {i}", "iteration{i}"])
    body = block(
        f"for i in range({steps}):",
        block(
            f"with step(f{form!r}):",
            "x, y = batch(4)",
            "optimizer.zero_grad()",
            f"loss = {net.loss.format(model='model')}",
            "loss.backward()",
            "optimizer.step()",
            "losses.append(loss.item())",
        ),
    )
    names = tuple(form.replace("{i}", str(i)) for i in range(steps))
    facts = Facts(
        steps,
        {"model": 1},
        optimizers=(of.type,),
        loss_read=True,
        step_names=tuple(name if form != "step{i}" else str(i) for i, name in enumerate(names)),
    )
    return Loop(f"optimizer = {of.text}", body, facts)


@loop
def failing(rng: random.Random, net: Architecture) -> Loop:
    """A run that raises inside the block: the loop's own exception, or a shape that does not fit."""
    steps, of = rng.randint(1, 3), optimizer(rng)
    inside = rng.random() < 0.5
    fault = "torch.ones(3, 4) @ torch.ones(3, 4)" if inside else "raise ValueError('the data ended')"
    body = block(
        f"for i in range({steps + 1}):",
        "x, y = batch(4)",
        f"loss = {net.loss.format(model='model')}",
        block(f"if i == {steps}:", fault),
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
        raises="RuntimeError" if inside else "ValueError",
        healthy=False,
    )
    return Loop(f"optimizer = {of.text}", body, facts)
