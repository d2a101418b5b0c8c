// A tensor is read in stretches of 16 KiB that stay in the cache: examined for NaNs and infinities, added to the
// fingerprint, widened to single precision and added up. Large tensors are read by all of torch's threads, each a part
// at a time; the parts are joined in their order, so that the numbers do not depend on who was faster.
#include "statistics.h"

#include "values.h"

#include <ATen/Parallel.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e4m3fnuz.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Float8_e5m2fnuz.h>
#include <c10/util/Float8_e8m0fnu.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace sightline {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kVector = 32;  // bytes
constexpr size_t kTogether = 16;  // vectors
constexpr size_t kRow = 1024;  // bytes, of the fingerprint
constexpr size_t kStretch = 16 * kRow;
constexpr size_t kPart = 16 * kStretch;  // the share of a thread at a time

struct Sums {
  double least = std::numeric_limits<double>::infinity(), most = -std::numeric_limits<double>::infinity();
  double total = 0, spread = 0;  // of deviations from the pivot, and of their squares
  double squares = 0;
  int64_t zeros = 0, finite = 0, nans = 0, count = 0;
  int64_t lanes[4] = {};

  void add(const Sums& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
    total += other.total;
    spread += other.spread;
    squares += other.squares;
    zeros += other.zeros;
    finite += other.finite;
    nans += other.nans;
    count += other.count;
    for (size_t lane = 0; lane < 4; ++lane) {
      lanes[lane] = static_cast<int64_t>(static_cast<uint64_t>(lanes[lane]) + static_cast<uint64_t>(other.lanes[lane]));
    }
  }
};

// As many doubles as there are numbers in a vector.
template <class Number>
struct DoublesFor {
  typedef double Type __attribute__((vector_size(kVector)));
};
template <>
struct DoublesFor<float> {
  typedef double Type __attribute__((vector_size(2 * kVector)));
};

namespace baseline {
#include "statistics_loops.h"
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SIGHTLINE_HAS_AVX2
#pragma GCC push_options
#pragma GCC optimize("O3")
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "statistics_loops.h"
}  // namespace avx2
#pragma GCC pop_options
#endif

struct Loops {
  bool (*nonfinite8)(const uint8_t*, size_t, uint8_t);
  bool (*nonfinite16)(const uint16_t*, size_t, uint16_t);
  bool (*nonfinite32)(const uint32_t*, size_t, uint32_t);
  bool (*nonfinite64)(const uint64_t*, size_t, uint64_t);
  void (*add_floats)(const float*, size_t, float, Sums&);
  void (*add_doubles)(const double*, size_t, double, Sums&);
  void (*widen_bfloat16)(const uint16_t*, size_t, float*);
  void (*widen_float16)(const uint16_t*, size_t, float*);
  void (*add_rows)(const int8_t*, size_t, size_t, const int16_t*, const int32_t*, int64_t*);
};

#define SIGHTLINE_LOOPS(set)                                                                            \
  Loops {                                                                                               \
    set::any_nonfinite<uint8_t>, set::any_nonfinite<uint16_t>, set::any_nonfinite<uint32_t>, set::any_nonfinite<uint64_t>,      \
        set::add_numbers<float, int32_t>, set::add_numbers<double, int64_t>, set::widen_bfloat16,       \
        set::widen_float16, set::add_rows                                                               \
  }

const Loops& loops() {
#ifdef SIGHTLINE_HAS_AVX2
  static const Loops found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
      ? SIGHTLINE_LOOPS(avx2)
      : SIGHTLINE_LOOPS(baseline);
#else
  static const Loops found = SIGHTLINE_LOOPS(baseline);
#endif
  return found;
}

// -- dtypes of the numbers -----------------------------------------------------------------------------------------

// How a number of a dtype lies in memory; of a complex one, each of its parts.
struct Format {
  c10::ScalarType type;
  size_t width;  // bytes
  uint64_t carry;  // see `any_nonfinite`; 0: this dtype cannot be checked that way
  uint64_t nan;  // that stands for all NaNs
  double largest;
  bool complex;
};

template <class Number>
uint64_t nan_bits() {
  uint64_t bits = 0;
  const auto nan = static_cast<Number>(std::numeric_limits<float>::quiet_NaN());
  std::memcpy(&bits, &nan, sizeof nan);
  return bits;
}

const Format* format_of(c10::ScalarType type) {
  using c10::ScalarType;
  static const Format formats[] = {
      {ScalarType::Float, 4, 0x00800000, nan_bits<float>(), std::numeric_limits<float>::max(), false},
      {ScalarType::Double, 8, 0x0010000000000000, nan_bits<double>(), std::numeric_limits<double>::max(), false},
      {ScalarType::BFloat16, 2, 0x0080, nan_bits<c10::BFloat16>(), 3.3895313892515355e38, false},
      {ScalarType::Half, 2, 0x0400, nan_bits<c10::Half>(), 65504, false},
      {ScalarType::Float8_e5m2, 1, 0x04, nan_bits<c10::Float8_e5m2>(), 57344, false},
      {ScalarType::Float8_e4m3fn, 1, 0x01, nan_bits<c10::Float8_e4m3fn>(), 448, false},
      {ScalarType::Float8_e5m2fnuz, 1, 0, nan_bits<c10::Float8_e5m2fnuz>(), 57344, false},
      {ScalarType::Float8_e4m3fnuz, 1, 0, nan_bits<c10::Float8_e4m3fnuz>(), 240, false},
      {ScalarType::Float8_e8m0fnu, 1, 0, nan_bits<c10::Float8_e8m0fnu>(), 1.7014118346046923e38, false},
      {ScalarType::ComplexFloat, 4, 0x00800000, nan_bits<float>(), 0, true},
      {ScalarType::ComplexDouble, 8, 0x0010000000000000, nan_bits<double>(), 0, true},
      {ScalarType::ComplexHalf, 2, 0x0400, nan_bits<c10::Half>(), 0, true},
  };
  for (const Format& format : formats) {
    if (format.type == type) return &format;
  }
  return nullptr;
}

using ByteNumbers = std::array<float, 256>;

template <class Number>
const ByteNumbers& numbers_of_bytes() {
  static const ByteNumbers found = [] {
    ByteNumbers numbers;
    for (size_t bits = 0; bits < 256; ++bits) {
      numbers[bits] = static_cast<float>(Number(static_cast<uint8_t>(bits), Number::from_bits()));
    }
    return numbers;
  }();
  return found;
}

const ByteNumbers& numbers_of_bytes(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float8_e5m2: return numbers_of_bytes<c10::Float8_e5m2>();
    case c10::ScalarType::Float8_e4m3fn: return numbers_of_bytes<c10::Float8_e4m3fn>();
    case c10::ScalarType::Float8_e5m2fnuz: return numbers_of_bytes<c10::Float8_e5m2fnuz>();
    case c10::ScalarType::Float8_e4m3fnuz: return numbers_of_bytes<c10::Float8_e4m3fnuz>();
    default: return numbers_of_bytes<c10::Float8_e8m0fnu>();
  }
}

// Numbers as floats: those that are floats already where they are.
const float* widened(const Format& format, const char* octets, size_t count, float* room) {
  const auto* words = reinterpret_cast<const uint16_t*>(octets);
  switch (format.width) {
    case 4: return reinterpret_cast<const float*>(octets);
    case 2:
      (format.type == c10::ScalarType::BFloat16 ? loops().widen_bfloat16 : loops().widen_float16)(words, count, room);
      return room;
    default: {
      const ByteNumbers& numbers = numbers_of_bytes(format.type);
      for (size_t at = 0; at < count; ++at) room[at] = numbers[static_cast<uint8_t>(octets[at])];
      return room;
    }
  }
}

bool any_nonfinite(const Format& format, const char* octets, size_t count) {
  switch (format.width) {
    case 8: return loops().nonfinite64(reinterpret_cast<const uint64_t*>(octets), count, format.carry);
    case 4: return loops().nonfinite32(reinterpret_cast<const uint32_t*>(octets), count, static_cast<uint32_t>(format.carry));
    case 2: return loops().nonfinite16(reinterpret_cast<const uint16_t*>(octets), count, static_cast<uint16_t>(format.carry));
    default: break;
  }
  if (format.carry != 0) {
    return loops().nonfinite8(reinterpret_cast<const uint8_t*>(octets), count, static_cast<uint8_t>(format.carry));
  }
  return std::memchr(octets, static_cast<int>(format.nan), count) != nullptr;  // it has one NaN and no infinities
}

// -- where they are --------------------------------------------------------------------------------------------------

// The numbers of a tensor as one row of bytes: in row-major order, or in any where the order does not matter.
class Numbers {
 public:
  Numbers(const at::TensorBase& tensor, bool ordered)
      : format(*format_of(tensor.scalar_type())),
        data_(static_cast<const char*>(tensor.const_data_ptr())),
        element_(static_cast<size_t>(tensor.element_size())),
        negative_(tensor.is_neg()),
        conjugate_(tensor.is_conj()),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()) {
    nbytes = static_cast<size_t>(tensor.numel()) * element_;
    as_it_lies_ = !negative_ && !conjugate_ &&
        (tensor.is_contiguous() || (!ordered && tensor.is_non_overlapping_and_dense()));
  }

  const Format& format;
  size_t nbytes;

  // Bytes from `begin` on; `room` is where they are brought together.
  const char* stretch(size_t begin, size_t size, std::vector<char>& room) const {
    if (as_it_lies_) return data_ + begin;
    room.resize(size);
    gather(begin / element_, size / element_, room.data());
    flip_signs(room.data(), size);
    return room.data();
  }

 private:
  void gather(size_t first, size_t count, char* out) const {
    const size_t dims = sizes_.size();
    c10::SmallVector<int64_t, 8> index(dims);
    int64_t offset = 0;
    for (size_t dim = dims, left = first; dim-- > 0;) {
      index[dim] = static_cast<int64_t>(left % static_cast<size_t>(sizes_[dim]));
      left /= static_cast<size_t>(sizes_[dim]);
      offset += index[dim] * strides_[dim];
    }
    for (size_t done = 0; done < count; ++done, out += element_) {
      std::memcpy(out, data_ + offset * static_cast<int64_t>(element_), element_);
      for (size_t dim = dims; dim-- > 0;) {
        offset += strides_[dim];
        if (++index[dim] < sizes_[dim]) break;
        offset -= index[dim] * strides_[dim];
        index[dim] = 0;
      }
    }
  }

  // Torch does these only when a number is used: `conj()` and the imaginary part of a conjugate are views.
  void flip_signs(char* octets, size_t size) const {
    if (negative_) {
      for (size_t at = format.width - 1; at < size; at += format.width) octets[at] = static_cast<char>(octets[at] ^ 0x80);
    }
    if (conjugate_) {
      for (size_t at = element_ - 1; at < size; at += element_) octets[at] = static_cast<char>(octets[at] ^ 0x80);
    }
  }

  const char* data_;
  size_t element_;
  bool negative_, conjugate_, as_it_lies_;
  c10::IntArrayRef sizes_, strides_;
};

// -- threads ---------------------------------------------------------------------------------------------------------

// Do `work(0)` to `work(count - 1)`, with torch's own threads: OpenMP's, found where torch has loaded them.
template <class Work>
void in_parallel(size_t count, const Work& work) {
  using Run = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto run = reinterpret_cast<Run>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  const auto threads = static_cast<size_t>(std::max(at::get_num_threads(), 1));
  if (run == nullptr || count < 2 || threads < 2 || at::in_parallel_region()) {
    for (size_t at = 0; at < count; ++at) work(at);
    return;
  }
  struct Job {
    const Work& work;
    size_t count;
    std::atomic<size_t> next{0};
  } job{work, count};
  const auto entry = [](void* given) {
    Job& mine = *static_cast<Job*>(given);
    for (size_t at = mine.next++; at < mine.count; at = mine.next++) mine.work(at);
  };
  run(entry, &job, static_cast<unsigned>(std::min(threads, count)), 0);
}

// -- fingerprints ----------------------------------------------------------------------------------------------------

uint64_t scrambled(uint64_t number) {
  number += 0x9E3779B97F4A7C15ull;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9ull;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBull;
  return number ^ (number >> 31);
}

// Weights of the bytes of a row, lane by lane.
const int16_t* matrix() {
  static const std::vector<int16_t> found = [] {
    std::vector<int16_t> weights(4 * kRow);
    for (size_t at = 0; at < 4 * kRow; ++at) {
      const auto drawn = static_cast<int16_t>(static_cast<int>(scrambled(at) % 254) - 127);
      weights[at % 4 * kRow + at / 4] = static_cast<int16_t>(drawn >= 0 ? drawn + 1 : drawn);
    }
    return weights;
  }();
  return found.data();
}

int32_t row_weight(size_t row) { return static_cast<int32_t>(static_cast<uint32_t>(scrambled((1ull << 40) + row)) | 1u); }

void add_fingerprint(const char* octets, size_t begin, size_t size, int64_t* lanes) {
  int32_t weights[kStretch / kRow];
  const size_t first = begin / kRow, rows = size / kRow, rest = size % kRow;
  for (size_t row = 0; row < rows; ++row) weights[row] = row_weight(first + row);
  loops().add_rows(reinterpret_cast<const int8_t*>(octets), kRow, rows, matrix(), weights, lanes);
  if (rest != 0) {
    const int32_t last = row_weight(first + rows);
    loops().add_rows(reinterpret_cast<const int8_t*>(octets + rows * kRow), rest, 1, matrix(), &last, lanes);
  }
}

// Make all NaNs alike, in a copy.
const char* with_plain_nans(const Format& format, const char* octets, size_t size, std::vector<char>& room) {
  room.assign(octets, octets + size);
  std::vector<float> numbers(format.width < 8 ? size / format.width : 0);
  const float* single = format.width < 8 ? widened(format, octets, numbers.size(), numbers.data()) : nullptr;
  for (size_t at = 0; at < size / format.width; ++at) {
    const bool wrong = single ? std::isnan(single[at]) : std::isnan(reinterpret_cast<const double*>(octets)[at]);
    if (wrong) std::memcpy(room.data() + at * format.width, &format.nan, format.width);
  }
  return room.data();
}

// -- together --------------------------------------------------------------------------------------------------------

struct Rooms {
  std::vector<char> gathered, plain;
  std::vector<float> widened;
};

void add_stretch(const Numbers& numbers, size_t begin, size_t size, double pivot, bool fingerprint, Rooms& rooms, Sums& sums) {
  const Format& format = numbers.format;
  const char* octets = numbers.stretch(begin, size, rooms.gathered);
  const size_t count = size / format.width;
  if (fingerprint) {
    const bool nonfinite = any_nonfinite(format, octets, count);
    const char* plain = nonfinite ? with_plain_nans(format, octets, size, rooms.plain) : octets;
    add_fingerprint(plain, begin, size, sums.lanes);
  }
  if (format.width == 8) {
    loops().add_doubles(reinterpret_cast<const double*>(octets), count, pivot, sums);
  } else {
    rooms.widened.resize(kStretch);
    loops().add_floats(widened(format, octets, count, rooms.widened.data()), count, static_cast<float>(pivot), sums);
  }
}

template <class Work>
void each_part(const Numbers& numbers, const Work& work) {
  in_parallel((numbers.nbytes + kPart - 1) / kPart, [&](size_t part) {
    Rooms rooms;
    const size_t end = std::min((part + 1) * kPart, numbers.nbytes);
    for (size_t at = part * kPart; at < end; at += kStretch) work(part, at, std::min(kStretch, end - at), rooms);
  });
}

Sums sums_of(const Numbers& numbers, double pivot, bool fingerprint) {
  std::vector<Sums> parts((numbers.nbytes + kPart - 1) / kPart);
  each_part(numbers, [&](size_t part, size_t at, size_t size, Rooms& rooms) {
    add_stretch(numbers, at, size, pivot, fingerprint, rooms, parts[part]);
  });
  Sums all;
  for (const Sums& part : parts) all.add(part);
  return all;
}

double first_number(const Numbers& numbers) {
  std::vector<char> room;
  float single;
  const char* octets = numbers.stretch(0, numbers.format.complex ? 2 * numbers.format.width : numbers.format.width, room);
  const double first = numbers.format.width == 8 ? *reinterpret_cast<const double*>(octets)
                                                 : static_cast<double>(*widened(numbers.format, octets, 1, &single));
  return std::isfinite(first) ? first : 0;
}

// Numbers whose squares are too large or too small: as shares of the largest, in double precision.
void read_extreme(const Numbers& numbers, const Sums& sums, Reading& reading) {
  const double largest = std::max(std::abs(sums.least), std::abs(sums.most));
  double total = 0, squares = 0, spread = 0;
  const auto each = [&](const auto& visit) {
    Rooms rooms;
    rooms.widened.resize(kStretch);
    for (size_t at = 0; at < numbers.nbytes; at += kStretch) {
      const size_t size = std::min(kStretch, numbers.nbytes - at), count = size / numbers.format.width;
      const char* octets = numbers.stretch(at, size, rooms.gathered);
      const float* single =
          numbers.format.width == 8 ? nullptr : widened(numbers.format, octets, count, rooms.widened.data());
      for (size_t one = 0; one < count; ++one) {
        const double number = single ? static_cast<double>(single[one]) : reinterpret_cast<const double*>(octets)[one];
        if (std::isfinite(number)) visit(number / largest);
      }
    }
  };
  const auto finite = static_cast<double>(sums.finite);
  each([&](double share) {
    total += share;
    squares += share * share;
  });
  const double mean = total / finite;
  each([&](double share) { spread += (share - mean) * (share - mean); });
  reading.mean = mean * largest;
  reading.deviation = sums.finite > 1 ? std::sqrt(spread / (finite - 1)) * largest : 0;
  reading.norm = std::sqrt(squares) * largest;
}

constexpr double kTiny = 1e-30;  // squares below it have lost digits in single precision, or are lost
constexpr double kCancelled = 1e-4;  // a spread this much smaller than what it is the difference of, too

}  // namespace

bool is_measurable(const at::TensorBase& tensor) {
  return format_of(tensor.scalar_type()) != nullptr && has_memory(tensor.unsafeGetTensorImpl()) && tensor.numel() > 0;
}

bool is_finite(const at::TensorBase& tensor) {
  const Numbers numbers(tensor, false);
  std::atomic<bool> nonfinite{false};
  each_part(numbers, [&](size_t, size_t at, size_t size, Rooms& rooms) {
    if (!nonfinite && any_nonfinite(numbers.format, numbers.stretch(at, size, rooms.gathered), size / numbers.format.width)) nonfinite = true;
  });
  return !nonfinite;
}

Reading read_numbers(const at::TensorBase& tensor, bool fingerprint) {
  const Numbers numbers(tensor, fingerprint);
  const auto rounded = [&](double at) { return numbers.format.width == 8 ? at : static_cast<double>(static_cast<float>(at)); };
  double pivot = first_number(numbers);
  Sums sums = sums_of(numbers, pivot, fingerprint);
  Reading reading;
  reading.zeros = sums.zeros;
  reading.nans = sums.nans;
  reading.infs = sums.count - sums.finite - sums.nans;
  std::copy_n(sums.lanes, 4, reading.lanes);
  const double nothing = std::numeric_limits<double>::quiet_NaN();
  if (sums.finite == 0) {
    reading.least = reading.most = reading.mean = reading.deviation = reading.norm = nothing;
    return reading;
  }
  const auto finite = static_cast<double>(sums.finite);
  reading.least = sums.least;
  reading.most = sums.most;
  const bool some = sums.least != 0 || sums.most != 0;
  if (!std::isfinite(sums.squares) || !std::isfinite(sums.spread) || (some && sums.squares < kTiny)) {
    read_extreme(numbers, sums, reading);
    return reading;
  }
  double spread = sums.spread - sums.total * sums.total / finite;
  if (spread < kCancelled * sums.spread && sums.least != sums.most) {
    pivot = rounded(pivot + sums.total / finite);
    const Sums again = sums_of(numbers, pivot, false);
    spread = again.spread - again.total * again.total / finite;
    sums.total = again.total;
  }
  reading.mean = sums.least == sums.most ? sums.least : pivot + sums.total / finite;
  reading.deviation = sums.finite > 1 ? std::sqrt(std::max(spread, 0.0) / (finite - 1)) : 0;
  reading.norm = std::sqrt(sums.squares);
  return reading;
}

bool holds(c10::ScalarType wide, c10::ScalarType narrow) {
  if (wide == narrow) return true;
  const Format *into = format_of(wide), *from = format_of(narrow);
  if (into == nullptr || from == nullptr || into->complex || from->complex) return false;
  return into->largest >= from->largest;
}

}  // namespace sightline
