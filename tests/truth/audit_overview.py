"""Audits the first screen, `print(t)`: each of its lines is read as a person reads it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from tests.truth import quantities as q
from tests.truth.audit_modules import ModuleTruth
from tests.truth.audit_steps import StepTruth, check_rates
from tests.truth.findings import Auditor
from tests.truth.running import Run
from tests.truth.screens import Screen, Table, screen

_HEAD = re.compile(r"(?P<name>.+?)  torch (?P<torch>\S+) · (?P<rest>.+) · (?P<time>[^·]+)")
_OPS = re.compile(r"(?P<total>[\d,]+) (?:\((?P<parts>.+)\)|(?P<phase>\w+))")
_MODULES = re.compile(
    r"(?P<modules>[\d,]+) called, (?P<calls>[\d,]+) calls?(?:; besides (?P<brief>.+), each called once)?"
)
_VALUES = re.compile(rf"(?P<values>[\d,]+) in (?P<storages>[\d,]+) storages of (?P<size>{q.SIZE})"
                     r"(?: · (?P<external>[\d,]+) external)?(?: · (?P<evicted>[\d,]+) evicted)?")  # fmt: skip
_STEPS = re.compile(rf"(?P<count>[\d,]+)(?:, with (?P<optimizers>[\d,]+) optimizer steps)?, "
                    rf"(?P<time>{q.TIME})(?P<median> at the median)?, recording included"
                    r"(?:; loss (?P<loss>[^;]+))?(?P<skipped>; skipped by the scaler)?"
                    r"; step=(?P<last>\d+) shows one")  # fmt: skip
_STEP = re.compile(
    rf"(?P<name>[^,]+), (?P<time>{q.TIME}), recording included(?:; loss (?P<loss>.+?))?"
    r"(?P<skipped>; skipped by the scaler)?"
)
_HOST = re.compile(
    rf"(?P<total>{q.TIME})(?:, (?P<inside>{q.TIME}) in ops)? (?:\((?P<parts>.+)\)|(?P<phase>[\w ]+))"
)
_OUTSIDE = re.compile(
    r"(?P<name>.+?)(?: ×(?P<count>[\d,]+))?(?P<without> without gradients)?, "
    r"(?P<where>before the first step(?:, after .+?)?|after .+?|in the step that (?P<failed>failed)); "
    rf"(?P<time>{q.TIME})(?P<median> at the median)?"
)
#: Where a program makes a loss infinite, so that the scaler of gradients skips the step.
_OVERFLOW = re.compile(r"loss = loss \* float\('inf'\)")
_CALLED = re.compile(r"(?P<name>.+?)(?: ×(?P<count>\d+)(?:…(?P<most>\d+))?)?")
_KIND = re.compile(
    r"(?:steps? (?P<first>\d+)(?:…(?P<last>\d+))?|(?P<count>[\d,]+) of (?P<of>[\d,]+) steps): (?P<content>.+)"
)
_REPEATED = re.compile(
    rf"(?P<name>.+) ×(?P<count>[\d,]+), (?P<time>{q.TIME}) at the median; the first (?P<first>{q.TIME})"
    r"(?:, on (?P<given>[^;]+); the last on (?P<last>[^;]+))?"
)
_VIEWS = ("code", "log", "call_order", "summary", "memory", "source", "problems")
_KEYS = {
    "+N: N more": r"\+\d",
    "×N: N times": r"×\d",
    "N…M: from call to call": r"\d…\d",
    "same: as the input": "→ same",
    "[…, N]: leading sizes as in the input": r"\[…, ",
    "→ alone: the output": r"(?m)^→ ",
    "+N other: N more kinds of calls, with other tensors": r"\+\d+ other",
    "share: of the host time": "",
    "gradient norm: before clipping": "gradient norm",
    "time: with the backward pass": "",
}


def _ends(counts: Sequence[int]) -> tuple[int, int]:
    return min(counts), max(counts)


def _name(text: str) -> str:
    match = _CALLED.fullmatch(text)
    return match["name"] if match else text


def _stated_ends(match: re.Match[str] | None) -> tuple[int, int]:
    """The least and the most of ``D ×3``, ``D ×1…3`` or ``D``."""
    assert match is not None
    count = int(match["count"] or 1)
    return count, int(match["most"] or count)


def audit_overview(run: Run) -> Auditor:
    """The false statements of the first screen."""
    return OverviewAuditor(run, str(run.trace)).audit()


class OverviewAuditor(Auditor):
    """Reads the first screen line by line."""

    def __init__(self, run: Run, text: str) -> None:
        super().__init__("overview")
        self.run, self.truth, self.facts = run, run.truth, run.program.facts
        self.screen: Screen = screen(text)
        self.modules = ModuleTruth(run.truth)
        self.steps = StepTruth(run)
        self.one = ", step " in run.name  # the screen of one step

    def audit(self) -> OverviewAuditor:
        titles = [title for title, _ in self.screen.facts]
        for title, text in self.screen.facts:
            reader = getattr(self, f"_{title.replace(' ', '_').rstrip(':').lower()}", None)
            if reader is None:
                self.unknown(f"{title}  {text}")
            else:
                reader(text)
        for title in ("modules", "values", "more"):
            self.expect(title in titles, f"{title} line", "is missing", "every first screen has it")
        shown = "step" if self.one else "steps"
        self.equal(shown in titles, self.facts.steps > 0, "steps line")
        if not self.truth.exception:
            expected = bool(self._outside_calls()) and self.facts.steps > 0
            self.equal("outside" in titles, expected, "outside line")
        repeats = not self.facts.steps and max(self.facts.calls.values(), default=0) > 1
        self.equal("calls" in titles, repeats, "calls line")
        for table in self.screen.tables:
            self._table(table)
        return self

    # -- head ------------------------------------------------------------------------------------------------

    def _trace(self, text: str) -> None:
        match = _HEAD.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        models = self.truth.models
        name = type(models[0]).__name__ if models else "trace"
        self.equal(match["name"], self.run.program.options.get("name", name) + self.run.name, "name", text)
        self.equal(match["torch"], torch.__version__, "torch version", text)
        parts = match["rest"].split(" · ")
        self.equal(parts[0], "cpu", "device", text)
        options = dict(part.partition("=")[::2] for part in parts[1:])
        self.equal(options.pop("ops", None), self.run.program.options.get("ops", "both"), "ops=", text)
        if "last" in self.run.program.options and not self.run.name:
            self.equal(
                options.pop("last", None), f"{self.run.program.options['last']}, after 0 more", "last=", text
            )
        engine = self._engine()
        self.equal(options.pop("engine", None), "python" if engine == "python" else None, "engine=", text)
        self.equal(options, {}, "options", text)
        time = q.duration(match["time"])
        self.expect(
            0 < time.value - time.tolerance <= self.run.wall, "duration", text, f"at most {self.run.wall} ns"
        )

    # -- counts ----------------------------------------------------------------------------------------------

    def _phases(self, text: str) -> tuple[int, dict[str, int]]:
        match = _OPS.fullmatch(text)
        if match is None:
            self.unknown(text)
            return 0, {}
        total = int(match["total"].replace(",", ""))
        if match["phase"]:
            return total, {match["phase"]: total}
        parts = {
            part.split()[0]: int(part.split()[1].replace(",", "")) for part in match["parts"].split(" · ")
        }
        self.equal(total, sum(parts.values()), "sum of ops", text)
        return total, parts

    def _api_ops(self, text: str) -> None:
        _, parts = self._phases(text)
        backwards = len(self.truth.backwards) + self.facts.gradients
        if self.facts.compiled:
            return
        self.equal(parts.get("backward", 0), backwards, "api ops of backward", text)

    def _aten_ops(self, text: str) -> None:
        _, parts = self._phases(text)
        if self.facts.compiled or not self.truth.lines_known or not self.truth.ops:
            return
        for phase in {*parts, *self.truth.ops}:
            most = self.truth.ops[phase]
            least = most - self.truth.detached[phase]
            # Which phase detaches on a second forward belong to depends on who looks.
            most += self.truth.detached["backward"] * (phase == "recompute")
            self.expect(least <= parts.get(phase, 0) <= most, f"aten ops of {phase}", text, (least, most))

    def _modules(self, text: str) -> None:
        match = _MODULES.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        if self.facts.compiled:
            return
        called = {id(call.module) for call in self.truth.calls}
        brief = self.truth.brief_modules()
        single = brief.total()
        self.equal(match["brief"] or "", q.counted(brief), "modules called once", text)
        self.equal(int(match["modules"].replace(",", "")), len(called) - single, "modules called", text)
        count = len(self.truth.calls) - single
        self.equal(int(match["calls"].replace(",", "")), count, "module calls", text)

    def _values(self, text: str) -> None:
        match = _VALUES.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        self.equal(int(match["values"].replace(",", "")), len(self.run.trace.values), "values", text)
        if not (self.facts.compiled or self.facts.parallel or self.facts.distributed):
            self.equal(int(match["external"] or 0), self._fused_layers(), "external values", text)
        self.equal(match["evicted"], None, "evicted values", text)

    def _engine(self) -> str | None:
        """The engine that the program or the environment chooses: then the screen says which it is."""
        return self.run.program.options.get("engine") or os.environ.get("SIGHTLINE_ENGINE")

    def _fused_layers(self) -> int:
        """The calls whose results the plain engine cannot explain by API calls: see docs/limits.md."""
        if self._engine() != "python" or self.run.program.options.get("ops") != "api":
            return 0
        return sum(call.type == "TransformerEncoderLayer" and not call.training for call in self.truth.calls)

    # -- steps -----------------------------------------------------------------------------------------------

    def _steps(self, text: str) -> None:
        match = _STEPS.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        count = int(match["count"].replace(",", ""))
        self.equal(count, self.facts.steps, "number of steps", text)
        self.equal(bool(match["median"]), count > 1, "at the median", text)
        if match["optimizers"]:
            stated = int(match["optimizers"].replace(",", ""))
            self.equal(stated, len(self.truth.steps), "steps of optimizers", text)
        elif count > 1 and self._turns() != count:
            self.expect(False, "steps of optimizers", text, len(self.truth.steps))
        self.expect(q.duration(match["time"]).value <= self.run.wall, "time of a step", text, self.run.wall)
        last = self.run.number + self.facts.steps - 1
        named = self.facts.step_names and not self.facts.step_names[-1].isdigit()
        self.expect(int(match["last"]) in (last, 0 if named else last), "step= that is offered", text, last)
        if match["loss"]:
            self.expect(self.steps.is_loss(0, match["loss"]), "loss", text, self.steps.loss_text(0))
        elif count == 1 and self.facts.loss_read:
            self.expect(False, "loss", text, f"the program read it: {self.steps.loss_text(0)}")
        self.equal(bool(match["skipped"]), count == 1 and 0 in self.facts.skipped, "skipped", text)

    def _turns(self) -> int:
        """How many steps of optimizers there are; those without a backward pass between them count as one."""
        return len({step.backwards for step in self.truth.steps})

    def _step(self, text: str) -> None:
        """The one step that this screen is about."""
        match = _STEP.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        names = self.facts.step_names
        self.equal(match["name"], names[0] if names else str(self.run.number), "name of a step", text)
        self.expect(q.duration(match["time"]).value <= self.run.wall, "time of a step", text, self.run.wall)
        if match["loss"]:
            self.expect(self.steps.is_loss(0, match["loss"]), "loss", text, self.steps.loss_text(0))
        self.equal(bool(match["skipped"]), 0 in self.facts.skipped, "skipped", text)

    def _loss(self, text: str) -> None:
        """Whose losses are shown, and what the program divides them by."""
        ranged = re.search(
            r"(?:the range over the|known of [\d…]+ of the) (\d+)(?:…(\d+))? backward passes "
            r"of (?:a step|(\d+) of the steps)(?:, |$)",
            text,
        )
        file = re.escape(self.run.path.name)
        place = rf"{file}:\d+(?: again)?(?: \([^)]+\))?(?: in \d+ of the steps)?"
        lines = [int(each) for each in re.findall(rf"{file}:(\d+)", text)]
        divided = re.search(rf"(?:divide|multiplie)[sd] by ({q.FLOAT})", text)
        rest = text.replace(ranged[0], "") if ranged else text
        rest = re.sub(rf"of the backward passes at {place}(?:(?:, | and ){place})*(?:, )?", "", rest)
        rest = re.sub(rf"which the program (had|then) (?:divide|multiplie)[sd] by {q.FLOAT}(?:, )?", "", rest)
        rest = re.sub(r"and their sum( after that)?$", "", rest)
        self.equal(rest.strip(" ,"), "", "what is said of losses", text)
        passes = self.truth.backwards
        if ranged:
            self._check_range_of_losses(ranged, text)
        for line in lines:
            self.expect(
                line in {each.line for each in passes}, "line of a backward pass", text, "no pass there"
            )
        for count in re.findall(r"in (\d+) of the steps", text):
            steps = range(self.facts.steps)
            counts = Counter(
                line for step in steps for line in {each.line for each in passes[self.facts.passes(step)]}
            )
            self.expect(int(count) in counts.values(), "steps with a backward pass", text, counts)
        if divided:
            self.expect(float(divided[1]) > 1, "divisor of a loss", text, self.facts.loss_divisor)

    def _check_range_of_losses(self, ranged: re.Match[str], text: str) -> None:
        """How many backward passes an expression makes in a step, and in how many steps several."""
        counts = [
            max(Counter(each.place for each in self.truth.backwards[self.facts.passes(step)]).values())
            for step in range(self.facts.steps)
        ]
        several = [count for count in counts if count > 1] if ranged[3] else counts
        ends = int(ranged[1]), int(ranged[2] or ranged[1])
        self.equal(ends, (min(several), max(several)), "backward passes of a step", text)
        self.equal(int(ranged[3] or len(counts)), len(several), "steps with several passes", text)

    def _norm(self, text: str) -> None:
        truth = "of the gradients: not known, those of compiled code are not measured"
        self.equal(text, truth, "norm")
        self.expect(self.facts.compiled, "norm", text, "nothing was compiled")

    def _outside_calls(self) -> list[Any]:
        """Outermost calls of modules that belong to no training step."""
        return [each for each in self.truth.calls if each.parent < 0 and each.evaluation]

    def _outside(self, text: str) -> None:
        """Modules that were called outside of the steps."""
        self.expect(text.startswith("the steps: "), "outside line", text, "the steps: …")
        stated = 0
        pieces = text.removeprefix("the steps: ").split("; ")
        for part in map("; ".join, zip(pieces[::2], pieces[1::2], strict=False)):
            match = _OUTSIDE.fullmatch(part)
            if match is None:
                self.unknown(part)
                return
            stated += int((match["count"] or "1").replace(",", ""))
            if match["failed"]:
                self.expect(bool(self.truth.exception), "the step that failed", part, "none did")
        if not self.truth.exception:  # what ran in a step that did not end belongs to none
            self.equal(stated, len(self._outside_calls()), "calls outside of the steps", text)

    def _one_step(self, text: str) -> None:
        """What one step does, or one of each kind: each step must be one of those that are described."""
        every, lines = range(self.facts.steps), text.split("\n")
        if len(lines) == 1:
            self._content(text, every)
            return
        stated = 0
        for each in lines:
            match = _KIND.fullmatch(each)
            if match is None:
                self.unknown(each)
                return
            if match["of"]:
                self.equal(int(match["of"]), len(every), "number of steps", each)
            stated += int(match["count"] or int(match["last"] or match["first"]) - int(match["first"]) + 1)
            if "other kind" in match["content"] or match["content"] == "another kind":
                continue
            names = [_name(part) for part in match["content"].partition("; ")[0].split(", ")]
            modules = Counter(map(self.steps.type_of, names))
            classes = self._optimizer_classes(match["content"])
            steps = [
                step
                for step in every
                if Counter(map(self.steps.type_of, self.facts.content(step).calls)) == modules
                and self._are_optimizers(step, classes)
            ]
            if match["first"]:
                stretch = range(int(match["first"]), int(match["last"] or match["first"]) + 1)
                self.equal([self.run.number + step for step in steps], list(stretch), "steps of a kind", each)
            else:
                self.equal(len(steps), int(match["count"]), "steps of a kind", each)
            self._content(match["content"], steps)
        self.equal(stated, len(every), "steps of all kinds", text)

    def _content(self, text: str, steps: Sequence[int]) -> None:
        """The modules, the backward passes and the optimizers of some steps of one kind."""
        if not steps:
            return
        parts = text.split("; ")
        stated, contents = self._called(parts.pop(0)), [self.facts.content(step) for step in steps]
        called = [self.steps.called(step) for step in steps]
        truth = {name: _ends([each[name] for each in called]) for name in set().union(*called)}
        self.equal(stated, truth, "modules of one step", text)
        backwards = 0, 0
        if parts and parts[0].startswith("backward"):
            match = _CALLED.fullmatch(parts.pop(0))
            backwards = _stated_ends(match)
        self.equal(
            backwards, _ends([each.backwards for each in contents]), "backward passes of one step", text
        )
        # A scaler that skips a step calls no optimizer.
        stepping = [step for step in steps if step not in self.facts.skipped]
        self.equal(len(parts), 1 if stepping else 0, "optimizers of one step", text)
        for part in parts:
            check_rates(self, part, self.truth, self.facts.content(stepping[0]).optimizers)

    def _optimizer_classes(self, text: str) -> Counter[str]:
        last = text.rpartition("; ")[2]
        parts = [] if last.startswith("backward") else re.split(r", (?![^(]*\))", last)
        return Counter(part.partition(" ")[0] for part in parts)

    def _are_optimizers(self, step: int, classes: Counter[str]) -> bool:
        numbers = self.facts.content(step).optimizers
        return classes == Counter(type(self.truth.optimizers[number]).__name__ for number in numbers)

    def _called(self, text: str) -> dict[str, tuple[int, int]]:
        """How often the classes of modules are called; variables are known by construction."""
        counts: dict[str, tuple[int, int]] = {}
        for part in text.split(", "):
            match = _CALLED.fullmatch(part)
            assert match is not None
            plain = re.sub(r"_\d+$", "", match["name"])  # without the number of one that is made anew
            name, (low, high) = self.steps.type_of(plain), _stated_ends(match)
            known = counts.get(name, (0, 0))
            counts[name] = known[0] + low, known[1] + high
        return counts

    def _calls(self, text: str) -> None:
        for part in re.split(r"; (?!the )", text):
            match = _REPEATED.fullmatch(part)
            if match is None:
                self.unknown(text)
                continue
            roots = [call for call in self.truth.calls if call.parent < 0]
            calls = [
                call
                for call in roots
                if match["name"] in (call.path, call.type, self.steps.type_of(match["name"]))
            ]
            calls = [call for call in calls if call.type == self.steps.type_of(match["name"])] or calls
            self.equal(int(match["count"].replace(",", "")), len(calls), "calls of a module", part)
            first, last = calls[0].inputs[0], calls[-1].inputs[0]
            stated = (
                (match["given"] or first, match["last"] or last)
                if first != last
                else (match["given"], match["last"])
            )
            self.equal(
                stated,
                (first, last) if first != last else (None, None),
                "inputs of the first and last call",
                part,
            )

    # -- numbers and faults ----------------------------------------------------------------------------------

    def _stats(self, text: str) -> None:
        match = re.fullmatch(r"([\d,]+) of ([\d,]+) values measured( · .*)?", text)
        if match is None:
            self.unknown(text)
            return
        self.equal(int(match[2].replace(",", "")), len(self.run.trace.values), "values", text)
        self._infinities(match[3] or "", text)

    def _check(self, text: str) -> None:
        results = "" if self.one else r": [\d,]+ results"  # which were not counted by step
        match = re.fullmatch(rf"nonfinite{results}( · .*)", text)
        if match is None:
            self.unknown(text)
            return
        self._infinities(match[1].removesuffix(" · all finite"), text)

    def _infinities(self, text: str, whole: str) -> None:
        """Only the masks of attention are infinite in a healthy run, one in each call."""
        overflow = _OVERFLOW.search(self.run.program.source)
        if overflow and self.facts.skipped:
            pointer = re.fullmatch(r"( · [1-9][\d,]* with (NaN|Inf)){1,2}: t\.nonfinite\(\)", text)
            self.expect(pointer is not None, "NaN or Inf of an overflow", whole, "counts and the view")
            line = self.run.program.source.count("\n", 0, overflow.start()) + 1
            view = str(self.run.trace.nonfinite())
            self.expect(f".py:{line}" in view, "the line of an overflow", view, f"line {line}")
            return
        masks = sum(call.type == "Attention" for call in self.truth.calls)
        if "-inf" not in self.run.program.source:
            masks = 0
        if overflow and self.one:  # gradients of the skipped step are held until the next one clears them
            text = re.sub(r" · [\d,]+ with NaN(?: and [\d,]+ with Inf)?(?=, as given)", "", text)
            masks, text = (0, "") if text == ", as given, meant or allowed" else (masks, text)
        expected = f" · {masks} with Inf, as given, meant or allowed" if masks else ""
        self.equal(text, expected, "NaN or Inf of a healthy run", whole)

    def _host_time(self, text: str) -> None:
        match = _HOST.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        total = q.duration(match["total"])
        if match["inside"]:
            inside = q.duration(match["inside"])
            least = inside.value - inside.tolerance
            self.expect(least <= total.value + total.tolerance, "time in ops", text, "at most all of it")
        self.expect(
            total.value - total.tolerance <= self.run.wall, "host time", text, f"at most {self.run.wall} ns"
        )
        if match["parts"]:
            found = re.findall(rf"(\w+) ({q.TIME})", match["parts"])
            parts = [q.duration(time) for _, time in found]
            self._parts_of_host_time(text, dict(found))
            spread = total.tolerance + sum(part.tolerance for part in parts)
            self.expect(
                abs(total.value - sum(part.value for part in parts)) <= spread,
                "sum of host time",
                text,
                "parts",
            )

    def _parts_of_host_time(self, text: str, parts: dict[str, str]) -> None:
        """The time in modules is that of the rows of the table, which hold backward passes too."""
        names = {"modules", "other", "backward", "recompute", "optimizer"}
        self.expect(set(parts) <= names, "parts of host time", text, names)
        forward = any(call.phase == "forward" for call in self.truth.calls)
        if not (self.facts.compiled or self.facts.parallel):
            self.equal("modules" in parts, forward, "time in modules", text)

    def _problems(self, text: str) -> None:
        if not self.facts.healthy or self.facts.unused:
            return
        if re.search(r"error|warning", text):
            found = [str(line) for line in str(self.run.trace.problems()).splitlines()]
            self.expect(False, "problems of a healthy program", text, "\n".join(found))
        else:
            self.expect(
                re.fullmatch(r"none found.*|\d+ notes?: t\.problems\(\)", text) is not None,
                "problems",
                text,
                "none",
            )

    def _compiled(self, text: str) -> None:
        ops = "(?:; (in its forward )?its ops are .+|; their ops are .+)?"
        match = re.fullmatch(rf"(\d+) regions? in ({q.TIME}){ops}", text)
        self.equal(match and int(match[1]), 1 if self.facts.compiled else None, "compiled regions", text)
        forward_alone = match is not None and match[3] is not None  # so its backward pass was recorded
        self.expect(
            not forward_alone or bool(self.truth.backwards), "compiled forward", text, "a backward pass"
        )

    def _threads(self, text: str) -> None:
        match = re.match(r"([\d,]+|a) module calls? on (?:other threads|another thread) ", text)
        self.expect(match is not None and self.facts.parallel, "other threads", text, self.facts.parallel)

    def _flops(self, text: str) -> None:
        self.expect("not counted" in text, "FLOPs line", text, "it is there where something is not counted")

    def _raised(self, text: str) -> None:
        first = text.splitlines()[0]
        truth = self.truth.exception.splitlines()[0] if self.truth.exception else "nothing was raised"
        self.expect(truth.startswith(first.rstrip("…")), "raised", text, truth)

    def _sightline(self, text: str) -> None:
        """The note about the op that failed, below the exception."""
        match = re.match(r"\S+ failed at (\S+):(\d+) in (\S+)", text)
        if match is None:
            self.unknown(text)
            return
        stated = match[1].rpartition("/")[2], int(match[2])
        self.equal(stated, (self.run.path.name, self.truth.exception_line), "line of a failure", text)

    def _faults(self, text: str) -> None:
        self.expect(False, "faults", text, "the recorder should not fail")

    # -- tables ----------------------------------------------------------------------------------------------

    def _table(self, table: Table) -> None:
        first = table.titles[0]
        if first == "step":
            self.steps.check_table(self, table)
        elif first == "module" and self.facts.compiled:
            return
        elif first == "module":
            self.modules.check_table(self, table)
        elif first == "heaviest lines":
            self._heaviest(table)
        else:
            self.unknown(" | ".join(table.titles))

    def _heaviest(self, table: Table) -> None:
        lines = self.run.program.source.splitlines()
        self.equal(table.titles[1:3], ("code", "ops"), "columns of the heaviest lines")
        for row in table.rows:
            match = re.fullmatch(r"(.+):(\d+) in (.+)|(.+)…", row[0])
            if match is None:
                self.unknown(row[0])
                continue
            if match[1] and self.run.path.name.startswith(match[1].rstrip("…")) and match[2]:
                code = lines[int(match[2]) - 1].strip()
                shown = row[1].rstrip("…")
                self.expect(code.startswith(shown), "code of a line", row, code)
                at = int(match[2])
                least = sum(count for (_, line), count in self.truth.op_lines.items() if line == at)
                self.expect(
                    least > 0 or self.facts.compiled, "a line that ran ops", row, "no op ran on this line"
                )

    # -- legend ----------------------------------------------------------------------------------------------

    def _key(self, text: str) -> None:
        shown = "\n".join(
            row[1] for table in self.screen.tables if table.titles[0] == "module" for row in table.rows
        )
        shown += "\n".join(title for table in self.screen.tables for title in table.titles)
        for meaning in text.replace("\n", " · ").split(" · "):
            if meaning not in _KEYS:
                self.unknown(meaning)
            elif meaning != "×N: N times":
                self.expect(
                    re.search(_KEYS[meaning], shown) is not None, "key", meaning, "no such sign in the table"
                )

    def _more(self, text: str) -> None:
        self.equal(tuple(re.findall(r"t\.(\w+)\(\)", text)), _VIEWS, "views", text)
