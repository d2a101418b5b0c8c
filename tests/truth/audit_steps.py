"""Audits what is said of training steps: how many, what one does, rates, losses, norms, notes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from tests.truth import quantities as q
from tests.truth.findings import Auditor
from tests.truth.ground_truth import Truth
from tests.truth.running import Run
from tests.truth.screens import Table

_OPTIMIZER = re.compile(r"(?P<type>\w+)(?: \(lr (?P<rates>[^)]+)\))?(?: ×(?P<count>\d+))?")
_MORE = re.compile(r"… ([\d,]+) more")
_TITLES = {"step", "time", "loss", "gradient norm", "peak memory", ""}
_NOTES = (
    re.compile(r"skipped by the scaler"),
    re.compile(r"(?P<times>\d+)× the median"),
    re.compile(r"slow(est)?"),
    re.compile(r"(?P<ops>[\d,]+) ops, (?:the others|most) (?P<others>[\d,]+)"),
)


class StepTruth:
    """The training steps of a program, by construction and as observed."""

    def __init__(self, run: Run) -> None:
        self.run, self.truth, self.facts = run, run.truth, run.program.facts

    def type_of(self, name: str) -> str:
        """The class that a name of a module stands for: a variable, or a class itself."""
        return self.facts.types.get(name, self.run.program.type if name == "model" else name)

    def called(self, step: int) -> Counter[str]:
        """The classes of the modules that a step calls."""
        counts: Counter[str] = Counter()
        for name, count in self.facts.content(step).calls.items():
            counts[self.type_of(name)] += count
        return counts

    # -- losses ----------------------------------------------------------------------------------------------

    def losses(self, step: int) -> list[list[float]]:
        """The losses of a step, by the expression of `backward`."""
        passes = self.truth.backwards[self.facts.passes(step)]
        losses = [each.loss for each in passes]
        if self.facts.collected:
            losses = self.run.losses[self.facts.passes(step)]
        groups: dict[tuple[int, int], list[float]] = {}
        for each, loss in zip(passes, losses, strict=True):
            groups.setdefault(each.place, []).append(loss)
        return list(groups.values())

    def loss_text(self, step: int) -> str:
        """The losses of a step, for a message."""
        scale = f", divided by {self.facts.loss_divisor} before" if self.facts.loss_divisor != 1 else ""
        return f"{self.losses(step)}{scale}"

    def is_loss(self, step: int, text: str) -> bool:
        """Whether a text says the losses of a step: a number or a range for each line, in order."""
        groups = self.losses(step)
        parts = [part for part in re.split(r", |; ", text) if not part.startswith("sum ")]
        if len(parts) > len(groups) or not self._are_sums(step, text):
            return False
        at = 0
        for part in parts:  # a loss that the program did not read is not known
            while at < len(groups) and not self._is_range(part, groups[at]):
                at += 1
            if at == len(groups):
                return False
            at += 1
        return True

    def _are_sums(self, step: int, text: str) -> bool:
        """Whether each sum is that of losses, as weighted, whose gradients one update uses."""
        passes = self.truth.backwards[self.facts.passes(step)]
        groups: dict[tuple[int, ...], list[float]] = {}
        for each in passes:
            groups.setdefault((*each.place, each.updates), []).append(each.loss)
        whole = [sum(losses) for losses in groups.values() if len(losses) > 1]
        stated = [q.number(each) for each in re.findall(rf"sum ({q.FLOAT})", text)]
        return all(any(each.holds(loss) for loss in whole) for each in stated)

    def _is_range(self, text: str, losses: Sequence[float]) -> bool:
        ends = [q.number(end) for end in text.split("…")]
        scaled = [loss * self.facts.loss_divisor for loss in losses]
        fell = scaled[0] > scaled[-1]
        if len(ends) == 1:
            return all(ends[0].holds(loss) for loss in scaled) or ends[0].holds(sum(scaled) / len(scaled))
        ordered = sorted(scaled, reverse=fell)
        return ends[0].holds(ordered[0]) and ends[1].holds(ordered[-1])

    # -- the table -------------------------------------------------------------------------------------------

    def check_table(self, auditor: Auditor, table: Table) -> None:
        """The table of steps on the first screen."""
        auditor.expect(set(table.titles) <= _TITLES, "columns of steps", table.titles, _TITLES)
        if self.facts.loss_read:
            auditor.expect(
                "loss" in table.titles, "losses of steps", table.titles, "the program read every loss"
            )
        if self.facts.norm_read and self._has_one_norm():
            auditor.expect(
                "gradient norm" in table.titles, "gradient norms", table.titles, "the program clipped by norm"
            )
        number = 0
        for row in table.rows:
            more = _MORE.fullmatch(row[0].strip())
            if more:
                number += int(more[1].replace(",", ""))
                continue
            cells = dict(zip(table.titles, row, strict=True))
            name = self.facts.step_names[number] if self.facts.step_names else str(number)
            auditor.equal(cells["step"].strip(), name, "number of a step", row)
            self._check_row(auditor, number, cells)
            number += 1
        auditor.equal(number, self.facts.steps, "steps in the table")

    def _check_row(self, auditor: Auditor, step: int, cells: dict[str, str]) -> None:
        loss, norm = cells.get("loss", ""), cells.get("gradient norm", "")
        if loss or self.facts.loss_read:
            auditor.expect(
                bool(loss) and self.is_loss(step, loss),
                "loss of a step",
                f"step {step}: {loss}",
                self.loss_text(step),
            )
        if norm or (self.facts.norm_read and self._has_one_norm()):
            truth = self.norm(step)
            known = bool(norm) and (math.isfinite(truth) or not math.isfinite(float(norm)))
            holds = known and (not math.isfinite(truth) or q.number(norm).holds(truth))
            auditor.expect(holds, "gradient norm of a step", f"step {step}: {norm}", truth)
        auditor.expect(
            q.duration(cells["time"]).value <= self.run.wall, "time of a step", cells["time"], self.run.wall
        )
        notes = [note.strip() for note in re.split(r", (?!the others|most)", cells.get("", "")) if note]
        self._check_notes(auditor, step, notes)

    def _has_one_norm(self) -> bool:
        """Whether a step clips once: models that are trained in turns have a norm each, and none together."""
        return len(self.truth.norms) <= self.facts.steps

    def norm(self, step: int) -> float:
        """The norm of the gradients of a step: of all that its optimizers found, before clipping."""
        if step in self.facts.skipped:
            return math.inf
        mine = self.truth.steps[self.facts.optimizer_steps(step)]
        return math.sqrt(sum(each.norm**2 for each in mine))

    def _check_notes(self, auditor: Auditor, step: int, notes: Sequence[str]) -> None:
        for note in notes:
            match = next((match for form in _NOTES if (match := form.fullmatch(note))), None)
            if match is None:
                auditor.unknown(note)
                continue
            if note.startswith("skipped"):
                auditor.expect(
                    step in self.facts.skipped,
                    "skipped by the scaler",
                    f"step {step}: {note}",
                    self.facts.skipped,
                )
            if match.groupdict().get("ops"):
                counts = [len(each.ops) for each in self.run.trace.steps]
                stated = [int(match[name].replace(",", "")) for name in ("ops", "others")]
                most = Counter(counts).most_common(1)[0][0]
                auditor.equal(stated, [counts[step], most], "ops of a step", f"step {step}: {note}")


def check_rates(auditor: Auditor, text: str, truth: Truth, stepping: Sequence[int]) -> None:
    """``AdamW (lr 0 → 0.001 → 3e-05) ×2, SGD (lr 0.1)``: the optimizers of a step and their rates' turns.

    ``stepping`` are those that step in it, as often as they do.
    """
    stated: Counter[str] = Counter()
    free = {
        (number, time): [step.rate for step in truth.steps if step.optimizer == number]
        for number, times in Counter(stepping).items()
        for time in range(times)
    }
    for part in re.split(r", (?![^(]*\))", text):
        match = _OPTIMIZER.fullmatch(part)
        if match is None:
            auditor.unknown(part)
            return
        for _ in range(int(match["count"] or 1)):
            kind = match["type"]
            stated[kind] += 1
            candidates = [key for key in free if type(truth.optimizers[key[0]]).__name__ == kind]
            fitting = [key for key in candidates if is_course(match["rates"] or "", free[key])]
            auditor.expect(
                bool(fitting), "learning rates", part, {n: turning_points(free[n]) for n in candidates}
            )
            for key in fitting[:1] or candidates[:1]:
                del free[key]
    truths = Counter(type(truth.optimizers[number]).__name__ for number in stepping)
    auditor.equal(stated, truths, "optimizers", text)


def turning_points(rates: Sequence[float]) -> list[float]:
    """The first rate, where its course turns, and the last."""
    course = [rate for at, rate in enumerate(rates) if at == 0 or rate != rates[at - 1]]
    inner = [b for a, b, c in zip(course, course[1:], course[2:], strict=False) if (b > a) != (c > b)]
    return [*course[:1], *inner, *(course[-1:] if len(course) > 1 else [])]


def is_course(text: str, rates: Sequence[float]) -> bool:
    """Whether ``0 → 0.001 → 3e-05`` says how the rate went: its ends and its extremes at least."""
    points = turning_points(rates)
    groups = re.split(" and | in the lowest group, ", text)
    if len(groups) > 1:  # the truth is that of the group with the highest rate
        return any(is_course(group, rates) for group in groups)
    left_out = re.search(r"… ([\d,]+) more turns? → ", text)
    if left_out:
        text = text.replace(left_out[0], "")
        if len(re.findall(q.FLOAT, text)) + int(left_out[1].replace(",", "")) != len(points):
            return False
    stated = [q.number(each) for each in re.findall(q.FLOAT, text.replace("→", " "))]
    at = 0
    for each in stated:
        while at < len(points) and not each.holds(points[at]):
            at += 1
        if at == len(points):
            return False
        at += 1 if len(stated) > 1 else 0
    extremes = (points[0], points[-1], min(points), max(points))
    return all(any(each.holds(extreme) for each in stated) for extreme in extremes)
