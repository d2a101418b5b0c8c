"""``sightline demo``: trace the embedded transformer, forward and backward, and print the views."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from sightline.errors import SightlineError, TorchMissing

if TYPE_CHECKING:
    from sightline.api import Trace

#: The views in the order they are shown: name, and what the headline says of it.
VIEWS: Final = {
    "overview": "print(t): what was recorded",
    "call_order": "t.call_order(): the order in which modules were called",
    "log": "t.log(): modules and functions with their inputs and outputs",
    "code": "t.code(fold=True): ops and shapes under the lines that ran them",
    "source": "t.source(): the source, annotated line by line",
    "summary": "t.summary(): per module, what it cost",
}


@click.command("demo")
@click.option("--view", "views", multiple=True, type=click.Choice(list(VIEWS)), help="Only this view.")
@click.option("--source", "show_source", is_flag=True, help="Print the model's source and stop.")
def command(views: tuple[str, ...], show_source: bool) -> None:
    """Trace a small transformer, forward and backward, and print the views."""
    if show_source:
        click.echo(Path(__file__).with_name("demo_model.py").read_text("utf-8"), nl=False)
        return
    try:
        trace = record()
    except SightlineError as error:
        raise click.ClickException(str(error)) from error
    for name in views or VIEWS:
        click.secho(f"\n── {VIEWS[name]} ".ljust(100, "─"), bold=True)
        show(trace, name)


def record() -> Trace:
    """Run the model once, forward and backward, inside a trace."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissing("The demo runs a model: install torch, then run it again.") from error
    from sightline.cli.demo_model import TinyTransformer, next_token_loss, sample
    from sightline.tracing import trace

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyTransformer()
    tokens, targets = sample()
    with trace(model, name="demo") as recording:
        next_token_loss(model, tokens, targets).backward()
    return recording


def show(trace: Trace, name: str) -> None:
    """Print one view of the trace."""
    if name == "overview":
        print(trace)
    elif name == "code":
        trace.code(fold=True).print()
    else:
        getattr(trace, name)().print()
