"""The statistics and the fingerprint of a CUDA tensor in one pass: Triton kernels.

A program takes a few rows of `ROW` bytes at a time as 32-bit words, reads each word once from memory, and
takes from it the one, two or four numbers it holds and its part of the fingerprint: four products of bytes
at a time, which is one instruction. It assumes that all numbers are finite, notes whether one is not, and
only then goes over them again. At its end it adds its results to the tensor's row of a table. Sums are added
in the order the programs finish, so that the last bits of mean, deviation and norm may differ from run to
run; extremes, counts and the fingerprint are exact.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from sightline.recording.statistics.device import Cells
from sightline.recording.statistics.fingerprints import LANES, ROW, matrix_on, plain_nan, row_weights_on

_ROWS: Final = 4  # rows a program takes at a time
#: Programs for each multiprocessor, at least and at most: few for a small tensor, since the end of each takes
#: long, and for a large one as many as fit at once with the registers they use.
_PROGRAMS: Final = {"nonfinite": (8, 8), "numbers": (3, 8), "fingerprints": (3, 4)}
_BLOCK: Final = _ROWS * ROW // 4  # words of that
_WORDS: Final = 2048  # words that a program takes at a time where only NaNs and infinities are counted

#: How numbers lie in a word: their bits, and the number that carries their magnitude into the sign exactly
#: when they are not finite.
_CARRIES: Final = {
    torch.float32: 0x00800000, torch.bfloat16: 0x00800080, torch.float16: 0x04000400,
    torch.float8_e5m2: 0x04040404, torch.float8_e4m3fn: 0x01010101,
}  # fmt: skip
_MAGNITUDE: Final = {4: 0x7FFFFFFF, 2: 0x7FFF7FFF, 1: 0x7F7F7F7F}


@triton.jit  # type: ignore[untyped-decorator]
def _number(words, part: tl.constexpr, form: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the numbers in each word, in single precision."""
    if form == "float32":
        return words.to(tl.float32, bitcast=True)
    elif form == "bfloat16":
        if part == 0:
            return (words << 16).to(tl.float32, bitcast=True)
        else:
            return (words & -65536).to(tl.float32, bitcast=True)
    elif form == "float16":
        return ((words >> (16 * part)) & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif form == "float8_e5m2":
        return ((words >> (8 * part)) & 255).to(tl.int8).to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        return ((words >> (8 * part)) & 255).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _raise_alarm(alarm, host_count, odd):  # type: ignore[no-untyped-def]
    """Add to the count of NaNs and infinities, and copy it to memory of the host."""
    before = tl.atomic_add(alarm, odd, sem="relaxed")
    tl.store(host_count, before + odd)


@triton.jit  # type: ignore[untyped-decorator]
def _count_words(  # type: ignore[no-untyped-def]
    words, size, counts, alarm, host_count, at_row, carry: tl.constexpr, magnitude: tl.constexpr,
    form: tl.constexpr, parts: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    whole = size // block
    me, step = tl.cast(tl.program_id(0), tl.int64), tl.cast(tl.num_programs(0), tl.int64)
    local = tl.arange(0, block)
    carried = tl.zeros((block,), tl.int32)
    for at in range(me, whole, step):  # the end first: it was written last, and is still in the cache
        carried |= (tl.load(words + (whole - 1 - at) * block + local) & magnitude) + carry
    if whole % step == me:  # the rest
        place = whole * block + local
        carried |= (tl.load(words + place, mask=place < size, other=0) & magnitude) + carry
    sign: tl.constexpr = ~magnitude
    if tl.max(((carried & sign) != 0).to(tl.int32), 0) > 0:  # once more, to count
        nans = tl.zeros((block,), tl.int32)
        odds = tl.zeros((block,), tl.int32)
        for at in range(me, tl.cdiv(size, block), step):
            place = tl.where(at < whole, whole - 1 - at, at) * block + local
            word = tl.load(words + place, mask=place < size, other=0)
            for part in tl.static_range(parts):
                number = _number(word, part, form)
                nans += (number != number).to(tl.int32)
                odds += ((tl.abs(number) < float("inf")) == 0).to(tl.int32)
        odd, nan = tl.sum(odds, 0).to(tl.int64), tl.sum(nans, 0).to(tl.int64)
        tl.atomic_add(counts + at_row * columns + 2, nan, sem="relaxed")
        tl.atomic_add(counts + at_row * columns + 3, odd - nan, sem="relaxed")
        _raise_alarm(alarm, host_count, odd)


@triton.jit(do_not_specialize=["size", "at_row"])  # type: ignore[untyped-decorator]
def sightline_count(  # type: ignore[no-untyped-def]
    words, counts, alarm, host_count, size: tl.int64, at_row: tl.int64, carry: tl.constexpr,
    magnitude: tl.constexpr, form: tl.constexpr, parts: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Count NaNs and infinities in a tensor."""
    _count_words(
        words, size, counts, alarm, host_count, at_row, carry, magnitude, form, parts, columns, block
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row"])  # type: ignore[untyped-decorator]
def sightline_count_many(  # type: ignore[no-untyped-def]
    tensors, counts, alarm, host_count, first_row: tl.int64, carry: tl.constexpr, magnitude: tl.constexpr,
    form: tl.constexpr, parts: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The same for a list of tensors."""
    which = tl.cast(tl.program_id(1), tl.int64)
    words, size = _listed(tensors, which)
    _count_words(
        words, size, counts, alarm, host_count, first_row + which, carry, magnitude, form, parts, columns,
        block,
    )  # fmt: skip


@triton.jit
def _listed(tensors, which):  # type: ignore[no-untyped-def]
    """A tensor of a list: where its words are, and how many."""
    address = tl.load(tensors + 2 * which).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(address, 16), tl.load(tensors + 2 * which + 1)


@triton.jit
def _product(word, weight):  # type: ignore[no-untyped-def]
    """Four products of signed bytes, added up."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [word, weight], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _weighed(product, weight, lane):  # type: ignore[no-untyped-def]
    """A product times the weight of its row, in 64 bits, added to a lane."""
    return tl.inline_asm_elementwise(
        "mad.wide.s32 $0, $1, $2, $3;",
        "=l,r,r,l",
        [product, weight, lane],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _both_numbers(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):  # type: ignore[no-untyped-def]
    return tl.minimum(a0, b0), tl.maximum(a1, b1), a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


@triton.jit
def _both_lanes(a0, a1, a2, a3, b0, b1, b2, b3):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit  # type: ignore[untyped-decorator]
def _flat(part, size: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.reshape(part, (size,), can_reorder=True)


@triton.jit  # type: ignore[untyped-decorator]
def _measure_words(  # type: ignore[no-untyped-def]
    words, size, matrix, weights, sums, counts, alarm, host_count, at_row,
    nan_word: tl.constexpr, form: tl.constexpr, parts: tl.constexpr, fingerprint: tl.constexpr,
    per_row: tl.constexpr, rows: tl.constexpr, sum_columns: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    infinity = float("inf")
    quads: tl.constexpr = per_row // 4  # a thread loads four words at once, and adds them up by itself
    low = tl.full((rows, quads), infinity, tl.float32)
    high = tl.full((rows, quads), -infinity, tl.float32)
    total = tl.zeros((rows, quads), tl.float32)
    squares = tl.zeros((rows, quads), tl.float32)
    zeros = tl.zeros((rows, quads), tl.int32)
    lane_0 = tl.zeros((rows, quads), tl.int64)
    lane_1 = tl.zeros((rows, quads), tl.int64)
    lane_2 = tl.zeros((rows, quads), tl.int64)
    lane_3 = tl.zeros((rows, quads), tl.int64)
    column = tl.arange(0, quads)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    matrix_0 = tl.load(matrix + column)
    matrix_1 = tl.load(matrix + per_row + column)
    matrix_2 = tl.load(matrix + 2 * per_row + column)
    matrix_3 = tl.load(matrix + 3 * per_row + column)
    local = tl.arange(0, rows)[:, None, None] * per_row + column
    block_size: tl.constexpr = rows * per_row
    whole, blocks = size // block_size, tl.cdiv(size, block_size)
    me, step = tl.cast(tl.program_id(0), tl.int64), tl.cast(tl.num_programs(0), tl.int64)
    # Deviations from any one element sum up without losing the digits that a large mean would cost.
    pivot = _number(tl.load(words + me * block_size), 0, form)
    pivot = tl.where(tl.abs(pivot) < infinity, pivot, 0.0)
    # Whole blocks as if every number were finite, and no mask to keep loads from being wide ...
    # The end comes first: it was written last, and is still in the cache.
    ahead = tl.load(
        words + tl.maximum(whole - 1 - me, 0) * block_size + local, mask=(local >= 0) & (whole > me), other=0
    )
    for turn in range(me, whole, step):
        block = whole - 1 - turn
        word = ahead
        ahead = tl.load(words + tl.maximum(block - step, 0) * block_size + local)
        for part in tl.static_range(parts):
            number = _number(word, part, form)
            apart = number - pivot
            total += tl.sum(apart, 2)
            squares += tl.sum(apart * apart, 2)
            low = tl.minimum(low, tl.min(number, 2))
            high = tl.maximum(high, tl.max(number, 2))
            zeros += tl.sum((number == 0.0).to(tl.int32), 2)
        if fingerprint:
            weight = tl.load(weights + block * rows + tl.arange(0, rows))[:, None]
            lane_0 = _weighed(tl.sum(_product(word, matrix_0), 2), weight, lane_0)
            lane_1 = _weighed(tl.sum(_product(word, matrix_1), 2), weight, lane_1)
            lane_2 = _weighed(tl.sum(_product(word, matrix_2), 2), weight, lane_2)
            lane_3 = _weighed(tl.sum(_product(word, matrix_3), 2), weight, lane_3)
    seen = tl.cdiv(tl.maximum(whole - me, 0), step) * block_size
    begin = tl.where(whole % step == me, whole, blocks)
    # The square of a NaN or infinity is not finite, either; so has a very large number, which does no harm.
    if tl.max(_flat(((squares < infinity) == 0).to(tl.int32), rows * quads), 0) > 0:
        # ... which they were not: all of it again, with care.
        seen, begin = seen * 0, me
        low = tl.full((rows, quads), infinity, tl.float32)
        high = tl.full((rows, quads), -infinity, tl.float32)
        total = tl.zeros((rows, quads), tl.float32)
        squares = tl.zeros((rows, quads), tl.float32)
        zeros = tl.zeros((rows, quads), tl.int32)
        lane_0 = tl.zeros((rows, quads), tl.int64)
        lane_1 = tl.zeros((rows, quads), tl.int64)
        lane_2 = tl.zeros((rows, quads), tl.int64)
        lane_3 = tl.zeros((rows, quads), tl.int64)
    finite = seen * parts
    fines = tl.zeros((rows, quads), tl.int32)
    nans = tl.zeros((rows, quads), tl.int32)
    for turn in range(begin, blocks, step):
        block = tl.where(turn < whole, whole - 1 - turn, turn)
        first = block * block_size
        left = tl.minimum(size - first, block_size).to(tl.int32)
        seen += left
        inside = local < left
        word = tl.load(words + first + local, mask=inside, other=0)
        plain = word
        for part in tl.static_range(parts):
            number = _number(word, part, form)
            fine = inside & (tl.abs(number) < infinity)
            apart = tl.where(fine, number - pivot, 0.0)
            total += tl.sum(apart, 2)
            squares += tl.sum(apart * apart, 2)
            low = tl.minimum(low, tl.min(tl.where(fine, number, infinity), 2))
            high = tl.maximum(high, tl.max(tl.where(fine, number, -infinity), 2))
            zeros += tl.sum((inside & (number == 0.0)).to(tl.int32), 2)
            fines += tl.sum(fine.to(tl.int32), 2)
            wrong = number != number
            nans += tl.sum(wrong.to(tl.int32), 2)
            if fingerprint:  # NaNs count as one and the same
                if parts == 1:
                    plain = tl.where(wrong, nan_word, plain)
                elif parts == 2 and part == 0:
                    plain = tl.where(wrong, (plain & -65536) | (nan_word & 65535), plain)
                elif parts == 2:
                    plain = tl.where(wrong, (plain & 65535) | (nan_word & -65536), plain)
                else:
                    held = tl.full((1, 1, 1), 255, tl.int32) << (8 * part)
                    plain = tl.where(wrong, (plain & ~held) | (nan_word & held), plain)
        if fingerprint:
            weight = tl.load(weights + block * rows + tl.arange(0, rows))[:, None]
            lane_0 = _weighed(tl.sum(_product(plain, matrix_0), 2), weight, lane_0)
            lane_1 = _weighed(tl.sum(_product(plain, matrix_1), 2), weight, lane_1)
            lane_2 = _weighed(tl.sum(_product(plain, matrix_2), 2), weight, lane_2)
            lane_3 = _weighed(tl.sum(_product(plain, matrix_3), 2), weight, lane_3)
    n: tl.constexpr = rows * quads
    least, most, apart_total, apart_squares, zero_count, fine_count, nan_count = tl.reduce(
        (
            _flat(low, n), _flat(high, n), _flat(total.to(tl.float64), n), _flat(squares.to(tl.float64), n),
            _flat(zeros, n), _flat(fines, n), _flat(nans, n),
        ), 0, _both_numbers,
    )  # fmt: skip
    finite += fine_count.to(tl.int64)
    origin, amount = pivot.to(tl.float64), finite.to(tl.float64)
    sums += at_row * sum_columns
    counts += at_row * columns
    tl.atomic_min(sums, least.to(tl.float64), sem="relaxed")
    tl.atomic_max(sums + 1, most.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 2, apart_total + amount * origin, sem="relaxed")
    squared = apart_squares + 2.0 * origin * apart_total + amount * origin * origin
    tl.atomic_add(sums + 3, squared, sem="relaxed")
    tl.atomic_add(counts + 1, zero_count.to(tl.int64), sem="relaxed")
    odd = seen * parts - finite
    if odd > 0:
        nan = nan_count.to(tl.int64)
        tl.atomic_add(counts + 2, nan, sem="relaxed")
        tl.atomic_add(counts + 3, odd - nan, sem="relaxed")
        _raise_alarm(alarm, host_count, odd)
    if fingerprint:
        sum_0, sum_1, sum_2, sum_3 = tl.reduce(
            (_flat(lane_0, n), _flat(lane_1, n), _flat(lane_2, n), _flat(lane_3, n)), 0, _both_lanes
        )
        tl.atomic_add(counts + 4, sum_0, sem="relaxed")
        tl.atomic_add(counts + 5, sum_1, sem="relaxed")
        tl.atomic_add(counts + 6, sum_2, sem="relaxed")
        tl.atomic_add(counts + 7, sum_3, sem="relaxed")


@triton.jit(do_not_specialize=["size", "at_row"])  # type: ignore[untyped-decorator]
def sightline_measure(  # type: ignore[no-untyped-def]
    words, matrix, weights, sums, counts, alarm, host_count, size: tl.int64, at_row: tl.int64,
    nan_word: tl.constexpr, form: tl.constexpr, parts: tl.constexpr, fingerprint: tl.constexpr,
    per_row: tl.constexpr, rows: tl.constexpr, sum_columns: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Take all statistics of a tensor."""
    _measure_words(
        words, size, matrix, weights, sums, counts, alarm, host_count, at_row, nan_word, form, parts,
        fingerprint, per_row, rows, sum_columns, columns,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row"])  # type: ignore[untyped-decorator]
def sightline_measure_many(  # type: ignore[no-untyped-def]
    tensors, matrix, weights, sums, counts, alarm, host_count, first_row: tl.int64,
    nan_word: tl.constexpr, form: tl.constexpr, parts: tl.constexpr, fingerprint: tl.constexpr,
    per_row: tl.constexpr, rows: tl.constexpr, sum_columns: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The same for a list of tensors."""
    which = tl.cast(tl.program_id(1), tl.int64)
    words, size = _listed(tensors, which)
    if tl.program_id(0) * rows * per_row < size:  # else it has nothing to read
        _measure_words(
            words, size, matrix, weights, sums, counts, alarm, host_count, first_row + which, nan_word, form,
            parts, fingerprint, per_row, rows, sum_columns, columns,
        )  # fmt: skip


class Kernel(NamedTuple):
    """A compiled kernel, as C++ launches it."""

    function: int  #: a ``CUfunction``
    shared: int  #: bytes of shared memory
    threads: int
    block: int  #: words that a program reads at a time
    fewest: int  #: programs for a tensor, if it has as many blocks
    most: int


def fits(tensor: Any) -> bool:
    """Whether the kernels can read a dense tensor: whole words of a dtype they know."""
    return tensor.dtype in _CARRIES and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 16 == 0


def count(tensor: Any, cells: Cells, at_row: int) -> None:
    """Count NaNs and infinities in a dense CUDA tensor, into a row of a table."""
    words = tensor.numel() * tensor.dtype.itemsize // 4
    programs = _programs(-(-words // _WORDS), *_limits(tensor.device, "nonfinite"))
    sightline_count[(programs,)](
        _Words(tensor.data_ptr()), cells.counts, cells.alarm.count, cells.alarm.host_count, words, at_row,
        **_count_options(tensor.dtype, cells),
    )  # fmt: skip


def measure(tensor: Any, cells: Cells, at_row: int, fingerprint: bool) -> None:
    """Take all statistics of a dense CUDA tensor, into a row; the fingerprint is of its memory order."""
    words = tensor.numel() * tensor.dtype.itemsize // 4
    blocks = -(-words // _BLOCK)
    fill = "fingerprints" if fingerprint else "numbers"
    programs = _programs(blocks, *_limits(tensor.device, fill))
    sightline_measure[(programs,)](
        _Words(tensor.data_ptr()), word_matrix(tensor.device), row_weights_on(tensor.device, blocks * _ROWS),
        cells.sums, cells.counts, cells.alarm.count, cells.alarm.host_count, words, at_row,
        **_measure_options(tensor.dtype, cells, fingerprint),
    )  # fmt: skip


def compiled(dtype: torch.dtype, cells: Cells, fill: str, many: bool) -> Kernel | None:
    """The kernel that fills a row of a table on the current device, for a tensor; or rows, for many."""
    if dtype not in _CARRIES:
        return None
    device, fingerprint = cells.device, fill == "fingerprints"
    alarm = cells.alarm.count, cells.alarm.host_count
    # Compiling needs an argument of the right type for the tensor, or for the list of tensors.
    source, kinds = (cells.counts, ["*i64"]) if many else (_Words(0), ["*i32"])
    row, row_kinds = ((0,), ["i64"]) if many else ((1, 0), ["i64", "i64"])
    if fill == "nonfinite":
        kernel, options = sightline_count_many if many else sightline_count, _count_options(dtype, cells)
        kernel = kernel.warmup(source, cells.counts, *alarm, *row, grid=(1,), **options)
        kinds += ["*i64"] * 3
        block = _WORDS
    else:
        kernel = sightline_measure_many if many else sightline_measure
        options = _measure_options(dtype, cells, fingerprint)
        tables = word_matrix(device), row_weights_on(device, 1), cells.sums, cells.counts, *alarm
        kernel = kernel.warmup(source, *tables, *row, grid=(1,), **options)
        kinds += ["*i32", "*i32", "*fp64", *["*i64"] * 3]
        block = _BLOCK
    return _load(kernel, kinds + row_kinds, block, *_limits(device, fill))


def _load(kernel: Any, expected: list[str], *shape: int) -> Kernel | None:
    """The kernel as C++ launches it, if it takes just the arguments that are expected."""
    kinds = [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
    metadata = kernel.metadata
    if kinds != expected or metadata.num_ctas != 1 or metadata.global_scratch_size:
        return None
    if kernel.run is None:  # reading the attribute loads the kernel
        return None
    return Kernel(kernel.function, metadata.shared, 32 * metadata.num_warps, *shape)


def _count_options(dtype: torch.dtype, cells: Cells) -> dict[str, Any]:
    return {
        "carry": _CARRIES[dtype], "magnitude": _MAGNITUDE[dtype.itemsize], "form": _form(dtype),
        "parts": 4 // dtype.itemsize, "columns": cells.counts.shape[1], "block": _WORDS, "num_warps": 4,
    }  # fmt: skip


def _measure_options(dtype: torch.dtype, cells: Cells, fingerprint: bool) -> dict[str, Any]:
    return {
        "nan_word": _nan_word(dtype), "form": _form(dtype), "parts": 4 // dtype.itemsize,
        "fingerprint": fingerprint, "per_row": ROW // 4, "rows": _ROWS, "sum_columns": cells.sums.shape[1],
        "columns": cells.counts.shape[1], "num_warps": 4,
    }  # fmt: skip


def _programs(blocks: int, fewest: int, most: int) -> int:
    """How many programs read so many blocks."""
    return min(blocks, max(fewest, min(blocks // 8, most)))


def _limits(device: torch.device, fill: str) -> tuple[int, int]:
    fewest, most = _PROGRAMS[fill]
    return fewest * _units(device), most * _units(device)


class _Words:
    """A tensor's memory as 32-bit words, without the cost of a view."""

    dtype = torch.int32

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def data_ptr(self) -> int:
        return self._pointer


@lru_cache(maxsize=16)
def _form(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=16)
def _units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def word_matrix(device: torch.device) -> Any:
    """The matrix with the four weights of each word together, lane by lane."""
    return matrix_on(device).view(ROW // 4, 4, LANES).permute(2, 0, 1).contiguous().view(torch.int32)


@lru_cache(maxsize=64)
def _nan_word(dtype: torch.dtype) -> int:
    """The NaN that stands for all NaNs of a dtype, repeated to fill a word."""
    octets = plain_nan(dtype).reshape(1).view(torch.uint8).tolist()
    return int.from_bytes(bytes(octets * (4 // len(octets))), "little", signed=True)
