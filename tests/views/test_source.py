"""The user's files, annotated: what counts where, what is elided, and what is said about the file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from sightline.errors import NothingMatched, UsageError
from sightline.views.rendering import width as text_width
from sightline.views.source import source
from tests.builders import NET, TORCH, TraceBuilder, make_trace
from tests.conftest import Golden


def test_a_transformer_forward_backward_and_step(golden: Golden) -> None:
    golden("source", str(source(make_trace().index)))


def test_it_keeps_to_its_width(golden: Golden) -> None:
    text = str(source(make_trace().index, width=60))
    golden("source_narrow", text)
    assert max(text_width(line) for line in text.splitlines()) <= 60


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip().startswith(start))


def test_loops_and_calls_are_merged() -> None:
    text = str(source(make_trace(24).index))
    assert line_of(text, "8 │").split()[-3:] == ["×24", "24.0", "µs"]
    assert "# native_layer_norm ×24 -> f32[2, 8, 4], f32[2, 8, 1]" in text
    assert line_of(text, "22 │").split()[-3] == "×24"


def test_a_line_reached_from_two_places_adds_up() -> None:
    b = TraceBuilder()
    b.source("n.py", "def f(x):\n    return x.relu()\na = f(x)\nb = f(x)\n")
    for line in (3, 4, 4):
        with b.at("n.py", line, "<module>"), b.at("n.py", 2, "f", "x.relu()"):
            b.op("relu", b.value(2), out=(2,))
    text = str(source(b.build().index))
    assert "×3" in line_of(text, "2 │")
    assert line_of(text, "4 │").endswith("2.00 µs")


def test_functions_that_did_not_run_are_elided() -> None:
    text = str(source(make_trace().index))
    assert "def __init__" not in text
    assert "def unused" not in text
    assert "class Net(nn.Module):" in text


def test_a_long_stretch_where_nothing_ran_loses_its_middle() -> None:
    b = TraceBuilder()
    b.source(
        "n.py", "def f(x):\n" + "".join(f"    a{i} = {i}\n" for i in range(2, 40)) + "    return x.relu()\n"
    )
    with b.at("n.py", 40, "f"):
        b.op("relu", b.value(2), out=(2,))
    shown = [line.split("│")[0].strip() for line in str(source(b.build().index)).splitlines()[1:]]
    assert shown == ["1", "2", "3", "4", "⋮", "36", "37", "38", "39", "40", ""]


def test_nested_functions_and_docstrings() -> None:
    b = TraceBuilder()
    body = '    """One.\n\n    Two.\n    """\n    def g():\n        pass\n    return x.relu()\n'
    b.source("n.py", f"def f(x):\n{body}\ndef h(): ...\n")
    with b.at("n.py", 8, "f"):
        b.op("relu", b.value(2), out=(2,))
    shown = [line.partition("│")[2].strip() for line in str(source(b.build().index)).splitlines()[1:]]
    assert [line.split("  ")[0] for line in shown] == [
        "def f(x):", '"""One.', "", "return x.relu()", "# relu -> f32[2]", "",
    ]  # fmt: skip


def test_torch_and_installed_files_only_when_asked_for() -> None:
    t = make_trace()
    assert "site-packages" not in str(source(t.index))
    text = str(source(t.index, file="torch/nn"))
    assert text.startswith("site-packages/torch/nn/modules/linear.py")
    assert "30 ops ran outside these files" in text
    assert str(source(t.index, file="*.py")).startswith("net.py")
    with pytest.raises(NothingMatched, match=r"file='nett.py' matches no source file .* mean 'net.py'"):
        source(t.index, file="nett.py")


def test_ops_without_a_line_are_counted() -> None:
    b = TraceBuilder()
    with b.at(TORCH, 3, "worker"):
        b.op("relu", b.value(2), out=(2,))
    assert str(source(b.build().index)) == "1 op ran under no line of your own files, 1.00 µs."


def test_an_empty_trace_and_a_wrong_width() -> None:
    assert str(source(TraceBuilder().build().index)) == "(no ops were recorded)"
    with pytest.raises(UsageError, match="width=10 must be a whole number from 40 up"):
        source(make_trace().index, width=10)


def real(tmp_path: Path, *, changed: bool = False) -> tuple[TraceBuilder, Path]:
    path = tmp_path / "net.py"
    path.write_text(NET)
    b = TraceBuilder()
    b.file(str(path), changed=changed)
    with b.at(str(path), 11, "Block.forward"):
        b.op("bmm", b.value(2), out=(2,))
    return b, path


def test_a_file_as_it_was_needs_no_word(tmp_path: Path) -> None:
    b, _ = real(tmp_path)
    assert "torch.softmax(scores" in str(source(b.build().index))
    assert "changed" not in str(source(b.build().index))


def test_a_changed_file_is_said_so(tmp_path: Path) -> None:
    b, _ = real(tmp_path, changed=True)
    assert "This file changed since the recording" in str(source(b.build().index))


def test_a_changed_file_is_shown_as_it_is_now(tmp_path: Path) -> None:
    b, path = real(tmp_path)
    t = b.build()
    assert "torch.softmax" in str(source(t.index))
    path.write_text(NET.replace("torch.softmax", "torch.sigmoid") + "# more\n")
    text = str(source(t.index))
    assert "This file changed since the recording" in text
    assert "torch.sigmoid" in text


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    b, path = real(tmp_path)
    path.unlink()
    text = str(source(b.build().index))
    assert "is not at hand" in text
    assert "# bmm -> f32[2]" in text


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.source("odd.py", "one two\nthree four\nfive six\nseven\n")
    with b.at("odd.py", 2, "f"):
        b.op("relu", b.value(2), out=(2,))
    assert "three four" in str(source(b.build().index))


def test_many_ops_on_a_line_are_wrapped_and_counted() -> None:
    b = TraceBuilder()
    b.source("n.py", f"y = f({'x, ' * 60})\n")
    with b.at("n.py", 1, "<module>"):
        for number in range(40):
            b.op(f"some_long_op_name_{number}", b.value(2), out=(2, number))
    text = str(source(b.build().index))
    assert max(map(text_width, text.splitlines())) <= 100
    assert "│   #   some_long_op_name_" in text
    assert "+24 more -> f32[2, 0], " in text
    assert text.rstrip("\n⋮ ").endswith("+28 more")


def test_hostile_strings_stay_text() -> None:
    evil = "\x1b[31m[bold]evil[/bold]<script>alert(1)</script>\u202e"
    b = TraceBuilder()
    b.source("evil.py", f"x = '{evil}'\n")
    with b.at("evil.py", 1, evil):
        b.op(evil, b.value(2), out=(2,))
    view = source(b.build().index)
    for color in (True, False):
        out = io.StringIO()
        view.print(color=color, file=out)
        assert "[bold]evil[/bold]" in out.getvalue()
        assert "\x1b[31m" not in out.getvalue()
    assert "\x1b" not in str(view)
    assert "<script>" not in view._repr_html_()


def test_backward_time_counts_once() -> None:
    t = make_trace()
    rows = [row for row in str(t.source()).splitlines() if "│" in row]
    forward, backward, update = (next(row for row in rows if code in row) for code in TRAIN)
    assert forward.endswith("72.0 µs")
    assert backward.endswith("43.0 µs")
    assert update.endswith("1.00 µs")
    assert next(row for row in rows if "train(model, tokens)" in row and "def" not in row).endswith("116 µs")
    assert next(row for row in rows if "⟵ add.Tensor ×2" in row).endswith("2.00 µs")


TRAIN = ("loss = model(tokens).sum()", "loss.backward()", "optimizer.step()")
