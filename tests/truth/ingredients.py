"""Parts that training loops choose from: optimizers, schedules, clipping, reading of losses, evaluation."""

from __future__ import annotations

import random
from dataclasses import dataclass

OPTIMIZERS = {
    "SGD": "torch.optim.SGD({0}, lr={1}, momentum=0.9)",
    "Adam": "torch.optim.Adam({0}, lr={1})",
    "AdamW": "torch.optim.AdamW({0}, lr={1}, weight_decay=0.01)",
    "RMSprop": "torch.optim.RMSprop({0}, lr={1})",
    "NAdam": "torch.optim.NAdam({0}, lr={1})",
    "Adagrad": "torch.optim.Adagrad({0}, lr={1})",
}
_RATES = {"SGD": [0.05, 0.01], "Adagrad": [0.01, 0.02]}

_PACKAGE = "torch.optim.lr_scheduler."
#: Schedulers by when they are stepped; ``{0}`` is the optimizer, ``{1}`` its rate, ``{2}`` how many steps;
#: ``@`` stands for torch's package before the names of further ones.
SCHEDULERS = {
    "step": [
        "CosineAnnealingLR({0}, T_max={2})",
        "OneCycleLR({0}, max_lr={1}, total_steps={2} + 1, cycle_momentum=False)",
        "LambdaLR({0}, lambda at: min(1.0, (at + 1) / 3))",
        "LambdaLR({0}, lambda at: at / 2 if at < 2 else 1 / at)",
        "LinearLR({0}, start_factor=0.25, total_iters=3)",
        "CyclicLR({0}, base_lr={1} / 10, max_lr={1}, step_size_up=2, cycle_momentum=False)",
        "CosineAnnealingWarmRestarts({0}, T_0=3)",
        "PolynomialLR({0}, total_iters={2} + 1, power=2.0)",
        "SequentialLR({0}, [@LinearLR({0}, 0.1, total_iters=2), @CosineAnnealingLR({0}, T_max={2})], [2])",
    ],
    "epoch": [
        "StepLR({0}, step_size=1, gamma=0.5)",
        "ExponentialLR({0}, gamma=0.9)",
        "MultiStepLR({0}, milestones=[1], gamma=0.1)",
    ],
    "plateau": [
        "ReduceLROnPlateau({0}, patience=0, factor=0.5)",
    ],
}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: its class, its rate, and the text that makes it."""

    type: str
    rate: float
    text: str


def optimizer(rng: random.Random, parameters: str = "model.parameters()") -> Optimizer:
    """An optimizer of some parameters."""
    kind = rng.choice(list(OPTIMIZERS))
    rate = rng.choice(_RATES.get(kind, [0.001, 0.003, 0.0005]))
    return Optimizer(kind, rate, OPTIMIZERS[kind].format(parameters, rate))


@dataclass(frozen=True)
class Schedule:
    """A scheduler: the text that makes it, and the lines that step it, after a step and after an epoch."""

    setup: str = ""
    each_step: str = ""
    each_epoch: str = ""


def schedule(
    rng: random.Random, of: Optimizer, steps: int, loss: str = "loss", name: str = "optimizer"
) -> Schedule:
    """A scheduler of an optimizer, or none."""
    kind = rng.choice(["", "step", "step", "epoch", "plateau"])
    if not kind or steps < 2:
        return Schedule()
    text = f"@{rng.choice(SCHEDULERS[kind])}".format(name, of.rate, steps)
    setup = f"scheduler = {text.replace('@', _PACKAGE)}"
    if kind == "step":
        return Schedule(setup, each_step="scheduler.step()")
    return Schedule(setup, each_epoch=f"scheduler.step({f'{loss}.item()' if kind == 'plateau' else ''})")


def clipping(rng: random.Random, parameters: str = "model.parameters()") -> str:
    """A line that clips gradients, or none."""
    return rng.choice(
        [
            "",
            f"torch.nn.utils.clip_grad_norm_({parameters}, 1.0)",
            f"norms.append(torch.nn.utils.clip_grad_norm_({parameters}, 0.5).item())",
            f"torch.nn.utils.clip_grad_norm_({parameters}, 0.1, norm_type=float('inf'))",
            f"torch.nn.utils.clip_grad_norm_(list({parameters})[:2], 0.1)",
            f"torch.nn.utils.clip_grad_value_({parameters}, 0.1)",
        ]
    )


def reading(rng: random.Random, loss: str = "loss") -> str:
    """A line in which the program reads its loss, or none."""
    return rng.choice(
        [
            f"losses.append({loss}.item())",
            f"losses.append({loss}.item())",
            f"losses.append(float({loss}))",
            f"total = total + {loss}.detach()",
            f"print(end='' if {loss} > 0 else '')",
            "",
        ]
    )


def zeroing(rng: random.Random, name: str = "optimizer") -> str:
    """A line that clears gradients."""
    return rng.choice([f"{name}.zero_grad()", f"{name}.zero_grad(set_to_none=True)"])


EVALUATE = '''
def evaluate(model, batches):
    """The mean loss of some batches."""
    model.eval()
    losses = []
    with torch.no_grad():
        for _ in range(batches):
            x, y = batch({n})
            losses.append({loss}.item())
    model.train()
    return sum(losses) / len(losses)
'''
