"""What the user called, where that is hard to read: the native engine finds what the other one is told."""

# mypy: disable-error-code="arg-type,assignment,call-overload,operator"
# torch's stubs know less of torch than these tests call.

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sightline as sl
from sightline.recording.engine_choice import engine_status
from tests.recording.native.comparison import api, prints, record

if engine_status(build=True).engine != "native":
    pytest.skip("the native engine cannot be built here", allow_module_level=True)


def grid() -> Tensor:
    return torch.arange(6.0).reshape(2, 3)


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shown(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)


def calls(t: sl.Trace) -> list[tuple[str, str]]:
    return [(op.name, str(shown(op.args))) for op in t.ops.where(level="api")]


def reversed_operands() -> None:
    # ruff: noqa: SIM300, RUF059
    x = grid()
    _ = (
        2 + x,
        2 - x,
        2 * x,
        2 / (x + 1),
        2 // (x + 1),
        2 % (x + 1),
        2**x,
        3 < x,
        3 == x,
        x @ x.t(),
        -x,
        3 >= x,
    )
    _ = ~(x > 1), x.bool() & True, True | x.bool(), x.long() << 1, 2 << x.long(), abs(x), x != 3


def in_place() -> None:
    x = grid()
    x += 1
    x -= x * 0
    x *= 2
    x /= 2
    x **= 2
    x //= 1
    x %= 5
    b, n, y = x > 1, x.long(), 1.0
    b &= True
    b |= False
    b ^= True
    n <<= 1
    n >>= 1
    y += x
    y @= x.t()


def indexing() -> None:
    x = grid()
    _ = (
        x[0],
        x[0, 1],
        x[:, 1:],
        x[..., None],
        x[[0, 1]],
        x[x > 1],
        x[torch.tensor([0])],
        x[1:2],
        x[::2, 0],
        x[None],
    )
    x[0] = 1
    x[:, 0] = x[:, 1]
    x[x > 3] = 0
    x[[0], [1]] = 2
    x[1:] += 1
    x[0, 0] *= 3
    x[0][1] = 5
    a, b = x
    a, *b = x.t()


def comprehensions() -> None:
    x = grid()
    _ = [row * 2 for row in x], {at: row + 1 for at, row in enumerate(x)}, [row - 1 for row in iter(x)]
    _ = list(map(lambda row: row.cos(), x)), sorted(x.flatten(), key=lambda v: -v), sum(x), sum([x, x])  # noqa: C417
    _ = max(x[0]), min(x[0], key=lambda v: v * 2), any(x[0] > 1), all(x[0] >= 0), list(zip(x, x, strict=True))
    functools.reduce(operator.add, [x, x, x])
    functools.partial(torch.add, x)(1)
    functools.partial(torch.add, alpha=2)(x, x)


def dynamic() -> None:
    x = grid()
    both, more = (x, x), {"alpha": 2}
    getattr(x, "sin")()  # noqa: B009
    getattr(torch, "cos")(x)  # noqa: B009
    torch.add(*both), torch.add(*[x, x]), torch.add(x, x, **more), torch.add(*both, **more)
    torch.cat(tensors=[x, x], dim=0)
    method = x.exp
    method(), method(), torch.Tensor.add(x, 1), torch.special.expit(x), torch.linalg.norm(x)


def implicit() -> None:
    x = grid()
    if x[0, 0] or x.sum() > 3:
        assert (x >= 0).all(), f"{x.sum()}"
    while x[0, 0] < 0:
        pass
    _ = 1 < x[0, 1] < 2, 0 < x.mean() < 100, f"{x.sum():.2f}", float(x[0, 0]), int(x[0, 1]), bool(x[0, 1])
    _ = [1, 2, 3][torch.tensor(1)], (y := x + 1), y[0, 0].item(), not x[0, 0], x[0, 0] and x[0, 1], 3 in x


def blocks() -> None:
    x = grid()
    with torch.no_grad():
        y = x + 1
    try:
        x @ x
    except RuntimeError:
        y = y * 2
    finally:
        y = y - 1
    try:
        try:
            raise ValueError
        finally:
            x.exp()
    except ValueError:
        torch.sin(x).cos()
    for _ in range(3):
        F.relu(torch.add(y, 1)).sin().cos()


def coroutines() -> None:
    async def double(x: Tensor) -> Tensor:
        return x * 2

    async def rows(x: Tensor) -> Any:
        for at in range(2):
            yield x * at

    async def main(x: Tensor) -> Tensor:
        a = await double(x)
        async for row in rows(x):
            a = a + row
        return a

    def two(x: Tensor) -> Any:
        y = yield x + 1
        yield y * 2

    with contextlib.suppress(StopIteration):
        main(grid()).send(None)  # it waits for nothing: no event loop is needed
    running = two(grid())
    running.send(next(running))


def code_without_a_file() -> None:
    names = {"torch": torch, "x": grid()}
    exec("y = x + 1\nz = torch.sin(y)[0]\nclass C:\n  w = x @ x.t()\n  v = [t * 2 for t in x]\n", names)
    eval("x * 2 + y", names)


def objects() -> None:
    class Holder:
        held = grid() + 1

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.held

        def __getitem__(self, at: int) -> Tensor:
            return self.held[at]

        def __add__(self, other: Tensor) -> Tensor:
            return self.held + other

        def __iter__(self) -> Any:
            return iter(self.held)

        def __del__(self) -> None:
            self.held.neg()

    def recurse(x: Tensor, left: int) -> Tensor:
        return x if left == 0 else recurse(x + 1, left - 1) * 2

    holder = Holder()
    holder(grid()), holder[0], holder + grid(), list(holder)
    del holder
    recurse(grid(), 3)


def one_line() -> None:
    x = grid()
    for _ in range(4):
        x = x.add_(1).add(1)
    _ = x.add(1) + x.add(1) + x.add(1), torch.sin(torch.sin(torch.sin(x))), [torch.sin(x), torch.sin(x)]
    for call in (torch.sin, x.add, torch.relu, F.relu, lambda v: v[0], lambda v: v[0:1, 1]):
        call(x), call(x), call(x)
    for _ in range(3):
        torch.tensor([1.0, 2.0]), torch.tensor(5).item()


def python_functions() -> None:
    x = torch.randn(2, 3)
    image = x[None, None]
    for _ in range(2):
        F.gumbel_softmax(x, hard=True)
        torch.einsum("ij,jk,kl->il", x, x.t(), x)
        torch.block_diag(x, x)
        F.interpolate(image, size=(4, 4), mode="bilinear")
    torch.meshgrid(x[0], x[1], indexing="ij"), torch.norm(x), torch.tensordot(x, x.t(), 1)
    F.pad(x, (1, 1)), F.cross_entropy(x, torch.tensor([0, 1])), F.normalize(x), F.dropout(x, 0.5)
    _ = [F.normalize(row, dim=0) for row in x]


RUNS = [
    reversed_operands, in_place, indexing, comprehensions, dynamic, implicit, blocks, coroutines,
    code_without_a_file, objects, one_line, python_functions,
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_both_engines_name_the_same_calls(run: Callable[[], None]) -> None:
    assert calls(record(run)[1]) == calls(record(run, engine="python")[1])


def test_names_do_not_change_under_a_debugger() -> None:
    import sys

    def watch(*given: Any) -> Any:
        return watch

    plain = calls(record(comprehensions)[1])
    sys.settrace(watch)
    try:
        assert calls(record(comprehensions)[1]) == plain
    finally:
        sys.settrace(None)


def stack(t: sl.Trace) -> list[str]:
    found, at = [], t.ops[-1].frame
    while at is not None and at.function != "test_a_frame_that_is_gone_is_not_mistaken_for_another":
        found.append(at.function.rpartition(".")[2])
        at = at.parent
    return found


def test_a_frame_that_is_gone_is_not_mistaken_for_another() -> None:
    tracer = sl.trace(engine="native")

    def begin() -> None:
        tracer.start()

    def prepare() -> None:
        begin()

    def leaf(x: Tensor) -> Tensor:
        return x * 7

    def work(x: Tensor) -> Tensor:
        return leaf(x)

    x = grid()
    prepare()
    work(x)
    assert stack(tracer.stop()) == ["leaf", "work"]


STOPPED = """
class Stop(BaseException): pass
class Inner(nn.Module):
    def forward(self, x): (x + 1); raise Stop
class Outer(nn.Module):
    def __init__(self): super().__init__(); self.inner = Inner()
    def forward(self, x): return self.inner(x)
wrong = 0
for size in range(120):  # so that some frame begins where one of the module call did
    variables = ";".join(f"v{at} = 0" for at in range(size)) or "pass"
    exec(f"def work(x):\\n {variables}\\n return leaf(x)\\ndef leaf(x):\\n return x * 7")
    model, x = Outer(), torch.ones(2)
    with sl.trace(engine="native") as t:
        try: model(x)
        except Stop: pass
        work(x)
    wrong += t.ops[-1].module is not None
print(wrong)
"""


def test_a_module_call_ended_by_a_bare_exception_has_ended() -> None:
    assert prints(STOPPED) == ["0"]


BY_OP = pytest.mark.xfail(strict=True, reason="What was called is not recognised, and named by its ops.")


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: x.numpy(), "Tensor.numpy"),
        (lambda x: x.__deepcopy__({}), "Tensor.__deepcopy__"),
        (lambda x: x.__setitem__(0, 1), "Tensor.__setitem__"),
        (lambda x: operator.setitem(x, torch.tensor(1), 4.0), "Tensor.__setitem__"),
        pytest.param(
            lambda x: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2)),
            "torch.sparse_coo_tensor",
            marks=BY_OP,
        ),
    ],
    ids=["tolist", "numpy", "deepcopy", "__setitem__", "setitem", "sparse"],
)
def test_one_call_is_one_call(run: Callable[[Tensor], Any], name: str) -> None:
    x = grid()
    assert [one for one in api(record(lambda: run(x))[1]) if one != "torch.tensor"] == [name]


def test_a_store_by_a_tensor_is_one_call() -> None:
    x, at = grid(), torch.tensor(1)

    def run() -> None:
        x[at] = 4

    assert api(record(run)[1]) == ["[]="]


@pytest.mark.xfail(
    strict=True, reason="Functions of Python's own that call torch's are named by the op, not by it."
)
def test_a_function_that_is_handed_over_has_its_name() -> None:
    assert api(record(lambda: list(map(torch.sin, [grid()])))[1])[-1] == "torch.sin"


def test_a_custom_op_is_a_call() -> None:
    with torch.library._scoped_library("sightline_names", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        _, t = record(lambda: torch.ops.sightline_names.double(torch.ones(2)))
    assert api(t) == ["torch.ones", "torch.ops.sightline_names.double"]


def test_an_overload_is_called_by_its_own_name() -> None:
    x = torch.ones(2)
    assert api(record(lambda: torch.ops.aten.add.Tensor(x, x))[1]) == ["torch.ops.aten.add.Tensor"]


class Logged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.xfail(
    strict=True, reason="Inside __torch_function__ of a subclass the call is no longer where it was written."
)
def test_calls_on_a_subclass_have_their_names() -> None:
    x = torch.ones(2).as_subclass(Logged)
    assert api(record(lambda: 1 + x)[1]) == api(record(lambda: 1 + x, engine="python")[1])


def test_a_backward_call_that_computes_again_is_one_call() -> None:
    x, model = torch.ones(2, 3, requires_grad=True), nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
    _, t = record(lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    assert api(t).count("Tensor.backward") == 1
