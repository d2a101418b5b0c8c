"""How many planted bugs ``sightline run`` names on its last screen, and how often it cries over healthy ones.

    python bench/insight                    the table
    python bench/insight step_first -v      one of them, with what it printed
    python bench/insight --real             that each is a bug: its check fails with it, and passes without

A bug counts as named if the last 25 lines hold its kind and the file with one of its lines. Each script runs
in a forked child of a process that has torch in it already: that saves the seconds of importing it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Final

import torch
from planted import Planted, planted

SCREEN: Final = 25  #: lines
#: What the scripts import, and torch with the first step of an optimizer.
_SLOW: Final = ("torch._dynamo", *(f"transformers.models.{model}.modeling_{model}" for model in (
    "bert", "distilbert", "gpt2", "llama", "opt", "resnet", "roberta", "vit")))  # fmt: skip
_FOUND: Final = re.compile(r"\[([a-z-]+)\]\s*$")


def in_child(work: object, folder: Path) -> tuple[int, str]:
    """Run something in a forked child; its exit code, and what it printed."""
    out = folder / "printed"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with out.open("w") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
                sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
                sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                os.chdir(folder)
                code = work() or 0  # type: ignore[operator]
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 — it is told, and the child ends
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), out.read_text(errors="replace")


def screen(name: str, script: str) -> list[str]:
    """The last lines of ``sightline run`` on a script."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / f"{name}.py").write_text(script)

        def work() -> int:
            from sightline.cli import main

            sys.argv[:] = ["sightline", "run", f"{name}.py"]
            return main() or 0

        _, text = in_child(work, folder)
    return text.splitlines()[-SCREEN:]


def is_named(bug: Planted, lines: list[str]) -> bool:
    """Whether the screen names the bug by its kind and one of its lines."""
    text = "\n".join(lines)
    if not any(re.search(rf"\b{bug.name}\.py:{line}\b", text) for line in bug.lines):
        return False
    return f"[{bug.kind}]" in text


def alarms(lines: list[str]) -> list[str]:
    """The kinds of problems on a screen."""
    return [found[1] for line in lines if (found := _FOUND.search(line))]


def checks_out(bug: Planted, script: str) -> bool:
    """Whether a script runs, and its check passes."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{bug.name}.py"
        file.write_text(script + bug.check)

        def work() -> int:
            exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})
            return 0

        code, _ = in_child(work, Path(place))
    return code == 0


def main() -> int:
    """Print the table; the exit code says whether it is as it should be."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*")
    asked.add_argument("-v", "--verbose", action="store_true", help="print the screens")
    asked.add_argument("--real", action="store_true", help="show that the bugs are real ones")
    given = asked.parse_args()
    torch.set_num_threads(1)
    for module in _SLOW:  # in every child
        importlib.import_module(module)
    bugs = planted(tuple(given.names))
    if given.real:
        return show_real(bugs)
    import sightline.cli
    import sightline.recording.recorder  # noqa: F401
    from sightline.recording.engine_choice import resolve_engine
    from sightline.recording.native.engine import load

    if resolve_engine("auto") == "native":
        load()
    named = false = 0
    print(f"{'bug':<26}{'kind':<34}{'named':<8}alarms on the repaired script")
    for bug in bugs:
        lines = screen(bug.name, bug.script)
        found = is_named(bug, lines)
        named += found
        healthy = screen(bug.name, bug.repaired)
        cried = alarms(healthy)
        false += len(cried)
        print(f"{bug.name:<26}{bug.kind:<34}{'yes' if found else 'NO':<8}{', '.join(cried)}", flush=True)
        if given.verbose:
            print("\n".join(f"    | {line}" for line in lines))
            print("\n".join(f"    + {line}" for line in healthy))
    print(f"named {named} of {len(bugs)}; {false} false alarms on their repaired twins")
    return int(named < len(bugs) or false > 0)


def show_real(bugs: list[Planted]) -> int:
    """Run each script and its repair, each with its check."""
    wrong = 0
    for bug in bugs:
        broken, repaired = checks_out(bug, bug.script), checks_out(bug, bug.repaired)
        wrong += broken or not repaired
        if broken or not repaired:
            print(f"{bug.name}: with the bug {'passes' if broken else 'fails'}, "
                  f"repaired {'passes' if repaired else 'fails'}")  # fmt: skip
    print(f"{len(bugs) - wrong} of {len(bugs)} fail with the bug and pass without it")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
