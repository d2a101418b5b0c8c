"""The numbers and the fingerprint of a CUDA tensor in one pass: Triton kernels.

A program takes a few rows of `ROW` bytes at a time as 32-bit words, reads each word once from memory, and
takes from it the one, two or four numbers it holds and its part of the fingerprint: four products of bytes
at a time, which is one instruction. At its end it adds what it found to the tensor's row of a table. Sums
are added in the order the programs finish, so that the last bits of mean, deviation and norm may differ from
run to run; extremes, counts and the fingerprint are exact.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from sightline.recording.fingerprints import LANES, ROW, matrix_on, plain_nan, row_weights_on

_ROWS: Final = 4  # rows a program takes at a time
_PROGRAMS: Final = 4  # for each multiprocessor
_WORDS: Final = 2048  # words that are looked at at a time, where only what is not finite is counted

#: How numbers lie in a word: their bits, and what is added to their magnitude to carry into the sign exactly
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


@triton.jit(do_not_specialize=["size", "at_row"])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    words, counts, alarm, size, at_row, carry: tl.constexpr, magnitude: tl.constexpr, form: tl.constexpr,
    parts: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    size = tl.cast(size, tl.int64)  # in words
    first = tl.cast(tl.program_id(0), tl.int64) * block
    step = tl.num_programs(0) * block
    carried = tl.zeros((block,), tl.int32)
    for start in range(first, size, step):
        place = start + tl.arange(0, block)
        word = tl.load(words + place, mask=place < size, other=0)
        carried |= (word & magnitude) + carry
    sign: tl.constexpr = ~magnitude
    if tl.max(((carried & sign) != 0).to(tl.int32), 0) > 0:  # once more, to count
        nans = tl.zeros((block,), tl.int32)
        odds = tl.zeros((block,), tl.int32)
        for start in range(first, size, step):
            place = start + tl.arange(0, block)
            word = tl.load(words + place, mask=place < size, other=0)
            for part in tl.static_range(parts):
                number = _number(word, part, form)
                nans += (number != number).to(tl.int32)
                odds += ((tl.abs(number) < float("inf")) == 0).to(tl.int32)
        odd, nan = tl.sum(odds, 0).to(tl.int64), tl.sum(nans, 0).to(tl.int64)
        tl.atomic_add(counts + at_row * columns + 2, nan)
        tl.atomic_add(counts + at_row * columns + 3, odd - nan)
        tl.atomic_add(alarm, odd)


@triton.jit
def _product(word, weight):  # type: ignore[no-untyped-def]
    """Four products of signed bytes, added up."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [word, weight], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["size", "at_row"])  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    words, matrix, weights, sums, counts, alarm, size, at_row,
    nan_word: tl.constexpr, form: tl.constexpr, parts: tl.constexpr, fingerprint: tl.constexpr,
    per_row: tl.constexpr, rows: tl.constexpr, sum_columns: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    infinity = float("inf")
    low = tl.full((rows, per_row), infinity, tl.float32)
    high = tl.full((rows, per_row), -infinity, tl.float32)
    total = tl.zeros((rows, per_row), tl.float32)
    squares = tl.zeros((rows, per_row), tl.float32)
    zeros = tl.zeros((rows, per_row), tl.int32)
    fines = tl.zeros((rows, per_row), tl.int32)
    nans = tl.zeros((rows, per_row), tl.int32)
    column = tl.arange(0, per_row)
    lane_0 = tl.zeros((rows, per_row), tl.int64)
    lane_1 = tl.zeros((rows, per_row), tl.int64)
    lane_2 = tl.zeros((rows, per_row), tl.int64)
    lane_3 = tl.zeros((rows, per_row), tl.int64)
    matrix_0 = tl.load(matrix + column)[None, :]
    matrix_1 = tl.load(matrix + per_row + column)[None, :]
    matrix_2 = tl.load(matrix + 2 * per_row + column)[None, :]
    matrix_3 = tl.load(matrix + 3 * per_row + column)[None, :]
    size = tl.cast(size, tl.int64)  # in words
    blocks = tl.cdiv(size, rows * per_row)
    local = tl.arange(0, rows)[:, None] * per_row + column[None, :]
    # Deviations from any one element sum up without losing the digits that a large mean would cost.
    pivot = _number(tl.load(words + tl.cast(tl.program_id(0), tl.int64) * (rows * per_row)), 0, form)
    pivot = tl.where(tl.abs(pivot) < infinity, pivot, 0.0)
    seen = tl.zeros((1,), tl.int64)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * (rows * per_row)
        left = tl.minimum(size - first, rows * per_row).to(tl.int32)
        seen += left
        inside = local < left
        word = tl.load(words + first + local, mask=inside, other=0)
        plain = word
        for part in tl.static_range(parts):
            number = _number(word, part, form)
            fine = inside & (tl.abs(number) < infinity)
            apart = tl.where(fine, number - pivot, 0.0)
            total += apart
            squares += apart * apart
            low = tl.minimum(low, tl.where(fine, number, infinity))
            high = tl.maximum(high, tl.where(fine, number, -infinity))
            zeros += (inside & (number == 0.0)).to(tl.int32)
            fines += fine.to(tl.int32)
            wrong = number != number
            nans += wrong.to(tl.int32)
            if fingerprint:  # NaNs count as one and the same
                if parts == 1:
                    plain = tl.where(wrong, nan_word, plain)
                elif parts == 2 and part == 0:
                    plain = tl.where(wrong, (plain & -65536) | (nan_word & 65535), plain)
                elif parts == 2:
                    plain = tl.where(wrong, (plain & 65535) | (nan_word & -65536), plain)
                else:
                    held = tl.full((1, 1), 255, tl.int32) << (8 * part)
                    plain = tl.where(wrong, (plain & ~held) | (nan_word & held), plain)
        if fingerprint:
            row = tl.cast(block, tl.int64) * rows + tl.arange(0, rows)
            weight = tl.load(weights + row)[:, None].to(tl.int64)
            lane_0 += _product(plain, matrix_0).to(tl.int64) * weight
            lane_1 += _product(plain, matrix_1).to(tl.int64) * weight
            lane_2 += _product(plain, matrix_2).to(tl.int64) * weight
            lane_3 += _product(plain, matrix_3).to(tl.int64) * weight
    sums += at_row * sum_columns
    counts += at_row * columns
    fine_count = tl.sum(tl.sum(fines, 1), 0).to(tl.int64)
    origin = pivot.to(tl.float64)
    apart_total = tl.sum(tl.sum(total.to(tl.float64), 1), 0)
    apart_squares = tl.sum(tl.sum(squares.to(tl.float64), 1), 0)
    count = fine_count.to(tl.float64)
    tl.atomic_min(sums, tl.min(tl.min(low, 1), 0).to(tl.float64))
    tl.atomic_max(sums + 1, tl.max(tl.max(high, 1), 0).to(tl.float64))
    tl.atomic_add(sums + 2, apart_total + count * origin)
    tl.atomic_add(sums + 3, apart_squares + 2.0 * origin * apart_total + count * origin * origin)
    tl.atomic_add(counts + 1, tl.sum(tl.sum(zeros, 1), 0).to(tl.int64))
    odd = tl.sum(seen, 0) * parts - fine_count
    if odd > 0:
        nan = tl.sum(tl.sum(nans, 1), 0).to(tl.int64)
        tl.atomic_add(counts + 2, nan)
        tl.atomic_add(counts + 3, odd - nan)
        tl.atomic_add(alarm, odd)
    if fingerprint:
        tl.atomic_add(counts + 4, tl.sum(tl.sum(lane_0, 1), 0))
        tl.atomic_add(counts + 5, tl.sum(tl.sum(lane_1, 1), 0))
        tl.atomic_add(counts + 6, tl.sum(tl.sum(lane_2, 1), 0))
        tl.atomic_add(counts + 7, tl.sum(tl.sum(lane_3, 1), 0))


def fits(tensor: Any) -> bool:
    """Whether the kernels can read a contiguous tensor: whole words of numbers of a known form."""
    return tensor.dtype in _CARRIES and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 16 == 0


def count(tensor: Any, sums: Any, counts: Any, alarm: Any, at_row: int) -> None:
    """Count what is not finite in a contiguous CUDA tensor, into a row of the tables of `deferred`."""
    width = tensor.dtype.itemsize
    words = tensor.numel() * width // 4
    programs = min(-(-words // _WORDS), 4 * _PROGRAMS * _units(tensor.device))
    _count[(programs,)](
        _as_words(tensor), counts, alarm, words, at_row, carry=_CARRIES[tensor.dtype],
        magnitude=_MAGNITUDE[width], form=_form(tensor.dtype), parts=4 // width, columns=counts.shape[1],
        block=_WORDS, num_warps=4,
    )  # fmt: skip


def measure(tensor: Any, sums: Any, counts: Any, alarm: Any, at_row: int, fingerprint: bool) -> None:
    """Take all numbers of a contiguous CUDA tensor, into a row of the tables of `deferred`."""
    width = tensor.dtype.itemsize
    words = tensor.numel() * width // 4
    blocks = -(-words // (_ROWS * ROW // 4))
    programs = min(blocks, _PROGRAMS * _units(tensor.device))
    _measure[(programs,)](
        _as_words(tensor), _word_matrix(tensor.device), row_weights_on(tensor.device, blocks * _ROWS), sums,
        counts, alarm, words, at_row, nan_word=_nan_word(tensor.dtype), form=_form(tensor.dtype),
        parts=4 // width, fingerprint=fingerprint, per_row=ROW // 4, rows=_ROWS, sum_columns=sums.shape[1],
        columns=counts.shape[1], num_warps=8,
    )  # fmt: skip


class _Words:
    """A tensor's memory as 32-bit words, without the cost of a view."""

    dtype = torch.int32

    def __init__(self, tensor: Any) -> None:
        self._pointer = tensor.data_ptr()

    def data_ptr(self) -> int:
        return int(self._pointer)


def _as_words(tensor: Any) -> Any:
    return _Words(tensor)


@lru_cache(maxsize=16)
def _form(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=16)
def _units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def _word_matrix(device: torch.device) -> Any:
    """The matrix with the four weights of each word together, lane by lane."""
    return matrix_on(device).view(ROW // 4, 4, LANES).permute(2, 0, 1).contiguous().view(torch.int32)


@lru_cache(maxsize=64)
def _nan_word(dtype: torch.dtype) -> int:
    """The NaN that stands for all of them, as often as it goes into a word."""
    octets = plain_nan(dtype).reshape(1).view(torch.uint8).tolist()
    return int.from_bytes(bytes(octets * (4 // len(octets))), "little", signed=True)
