// A CRC is the remainder of a polynomial over GF(2), the message, divided by another. A stretch of the message may be
// replaced by anything with the same remainder, so four accumulators of 128 bits are moved along it: each is multiplied
// by the power of x that it is moved by, modulo the divisor, with the processor's carry-less product. The rest of
// the message then has 64 bytes and a rest, which go through a table. Bits are in zlib's order, the lowest first.
#include "checksum.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define SIGHTLINE_HAS_CARRYLESS_PRODUCT
#include <immintrin.h>
#endif

namespace sightline {
namespace {

constexpr uint32_t kDivisor = 0xEDB88320;

constexpr uint32_t times_x(uint32_t polynomial) { return (polynomial >> 1) ^ ((polynomial & 1) ? kDivisor : 0); }

// For each value of eight bytes in a row what it adds to the remainder: eight bytes are one step.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = times_x(remainder);
    tables[0][byte] = remainder;
  }
  for (size_t table = 1; table < 8; ++table) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[table - 1][byte];
      tables[table][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}
constexpr auto kTables = make_tables();

uint32_t through_tables(uint32_t remainder, const unsigned char* bytes, size_t count) {
  for (; count >= 8; bytes += 8, count -= 8) {
    remainder ^= static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8 |
        static_cast<uint32_t>(bytes[2]) << 16 | static_cast<uint32_t>(bytes[3]) << 24;
    remainder = kTables[7][remainder & 0xFF] ^ kTables[6][remainder >> 8 & 0xFF] ^ kTables[5][remainder >> 16 & 0xFF] ^
        kTables[4][remainder >> 24] ^ kTables[3][bytes[4]] ^ kTables[2][bytes[5]] ^ kTables[1][bytes[6]] ^
        kTables[0][bytes[7]];
  }
  for (; count > 0; ++bytes, --count) remainder = (remainder >> 8) ^ kTables[0][(remainder ^ *bytes) & 0xFF];
  return remainder;
}

#ifdef SIGHTLINE_HAS_CARRYLESS_PRODUCT

// x to a power modulo the divisor, as a factor: a product of two numbers in this order of bits is one bit too low.
constexpr long long power_of_x(int exponent) {
  uint32_t power = 0x80000000;  // one
  for (int step = 0; step < exponent; ++step) power = times_x(power);
  return static_cast<long long>(power) << 1;
}

constexpr size_t kStride = 64;  // bytes by which the accumulators are moved at once

// An accumulator moved by a stride; its lower half comes first in the message, so that it is moved by 64 bits more.
__attribute__((target("pclmul,sse4.1"))) inline __m128i moved(__m128i accumulator, __m128i factors) {
  return _mm_xor_si128(
      _mm_clmulepi64_si128(accumulator, factors, 0x00), _mm_clmulepi64_si128(accumulator, factors, 0x11));
}

__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(
    uint32_t remainder, const unsigned char* bytes, size_t count) {
  constexpr int kBits = static_cast<int>(kStride) * 8;
  const __m128i factors = _mm_set_epi64x(power_of_x(kBits - 32), power_of_x(kBits + 32));
  const auto load = [](const unsigned char* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  __m128i first = _mm_xor_si128(load(bytes), _mm_cvtsi32_si128(static_cast<int>(remainder)));
  __m128i second = load(bytes + 16), third = load(bytes + 32), fourth = load(bytes + 48);
  for (bytes += kStride, count -= kStride; count >= kStride; bytes += kStride, count -= kStride) {
    first = _mm_xor_si128(moved(first, factors), load(bytes));
    second = _mm_xor_si128(moved(second, factors), load(bytes + 16));
    third = _mm_xor_si128(moved(third, factors), load(bytes + 32));
    fourth = _mm_xor_si128(moved(fourth, factors), load(bytes + 48));
  }
  unsigned char left[kStride];
  const __m128i all[] = {first, second, third, fourth};
  std::memcpy(left, all, kStride);
  return through_tables(through_tables(0, left, kStride), bytes, count);
}

bool has_products() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

#endif

uint32_t crc32_of(const unsigned char* bytes, size_t count) {
#ifdef SIGHTLINE_HAS_CARRYLESS_PRODUCT
  static const bool products = has_products();
  if (products && count >= kStride) return ~by_products(~0U, bytes, count);
#endif
  return ~through_tables(~0U, bytes, count);
}

}  // namespace

PyObject* crc32(PyObject*, PyObject* bytes) {
  Py_buffer view;
  if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) != 0) return nullptr;
  uint32_t sum;
  Py_BEGIN_ALLOW_THREADS;
  sum = crc32_of(static_cast<const unsigned char*>(view.buf), static_cast<size_t>(view.len));
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&view);
  return PyLong_FromUnsignedLong(sum);
}

}  // namespace sightline
