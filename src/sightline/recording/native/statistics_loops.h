// The inner loops of statistics. Included once for each instruction set, inside a namespace of its own, so there is
// no include guard and nothing in here but loops over vectors.

// Whether any number is not finite: then its magnitude plus `carry` reaches into the sign bit.
template <class Word>
bool any_nonfinite(const Word* words, size_t count, Word carry) {
  constexpr Word magnitude = static_cast<Word>(~Word{0}) >> 1;
  Word carried[kLanes] = {};
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      carried[lane] = static_cast<Word>(carried[lane] | ((words[at + lane] & magnitude) + carry));
    }
  }
  for (; at < count; ++at) carried[0] = static_cast<Word>(carried[0] | ((words[at] & magnitude) + carry));
  Word all = 0;
  for (const Word one : carried) all = static_cast<Word>(all | one);
  return all > magnitude;
}

// Numbers of a stretch, as deviations from `pivot`; NaNs and infinities are only counted. `Count` is the
// integer of the same size, as which comparisons come out: -1 for true.
template <class Number, class Count>
void add_numbers(const Number* numbers, size_t count, Number pivot, Sums& sums) {
  constexpr size_t lanes = kVector / sizeof(Number);
  typedef Number Vector __attribute__((vector_size(kVector)));
  typedef Count Counts __attribute__((vector_size(kVector)));
  // Single precision loses digits in long sums: a few vectors at a time, then on in double precision.
  using Doubles = typename DoublesFor<Number>::Type;
  const Vector infinity = Vector{} + std::numeric_limits<Number>::infinity();
  Vector least = infinity, most = -infinity, total{}, spread{}, squares{};
  Doubles all_total{}, all_spread{}, all_squares{};
  Counts zeros{}, finite{}, nans{};
  const auto add = [&](const Number* from) {
    Vector number;
    std::memcpy(&number, from, sizeof number);
    const Counts fine = (number < infinity) & (number > -infinity);
    const Vector plain = fine ? number : Vector{}, apart = fine ? number - pivot : Vector{};
    const Vector low = fine ? number : infinity, high = fine ? number : -infinity;
    least = low < least ? low : least;
    most = high > most ? high : most;
    total += apart;
    spread += apart * apart;
    squares += plain * plain;
    zeros -= number == Vector{};
    finite -= fine;
    nans -= number != number;
  };
  const auto carry_over = [&] {
    all_total += __builtin_convertvector(total, Doubles);
    all_spread += __builtin_convertvector(spread, Doubles);
    all_squares += __builtin_convertvector(squares, Doubles);
    total = spread = squares = Vector{};
  };
  size_t at = 0;
  for (; at + kTogether * lanes <= count; at += kTogether * lanes) {
    for (size_t one = 0; one < kTogether; ++one) add(numbers + at + one * lanes);
    carry_over();
  }
  for (; at + lanes <= count; at += lanes) add(numbers + at);
  if (at < count) {  // the last ones, filled up with NaNs that are not counted
    Number rest[lanes];
    std::fill_n(rest, lanes, std::numeric_limits<Number>::quiet_NaN());
    std::copy(numbers + at, numbers + count, rest);
    add(rest);
    sums.nans -= static_cast<int64_t>(at + lanes - count);
  }
  carry_over();
  for (size_t lane = 0; lane < lanes; ++lane) {
    sums.least = std::min(sums.least, static_cast<double>(least[lane]));
    sums.most = std::max(sums.most, static_cast<double>(most[lane]));
    sums.total += all_total[lane];
    sums.spread += all_spread[lane];
    sums.squares += all_squares[lane];
    sums.zeros += static_cast<int64_t>(zeros[lane]);
    sums.finite += static_cast<int64_t>(finite[lane]);
    sums.nans += static_cast<int64_t>(nans[lane]);
  }
  sums.count += static_cast<int64_t>(count);
}

void widen_bfloat16(const uint16_t* words, size_t count, float* out) {
  auto* bits = reinterpret_cast<uint32_t*>(out);
  for (size_t at = 0; at < count; ++at) bits[at] = static_cast<uint32_t>(words[at]) << 16;
}

// The exponent of a half is moved to that of a float by a multiplication, which also does for the subnormal ones.
void widen_float16(const uint16_t* words, size_t count, float* out) {
  for (size_t at = 0; at < count; ++at) {
    const uint32_t magnitude = words[at] & 0x7FFFu;
    const uint32_t bits = magnitude << 13;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    number *= 0x1p112f;
    uint32_t wide;
    std::memcpy(&wide, &number, sizeof wide);
    wide |= magnitude >= 0x7C00u ? 0x7F800000u : 0u;
    wide |= (words[at] & 0x8000u) << 16;
    std::memcpy(out + at, &wide, sizeof wide);
  }
}

// Rows of bytes times the four columns of the matrix, each row with its weight: see `fingerprints.py`.
void add_rows(const int8_t* octets, size_t width, size_t rows, const int16_t* matrix, const int32_t* weights,
              int64_t* lanes) {
  for (size_t row = 0; row < rows; ++row, octets += width) {
    int32_t sums[4] = {};
    for (size_t at = 0; at < width; ++at) {
      const auto octet = static_cast<int16_t>(octets[at]);
      sums[0] += octet * matrix[at];
      sums[1] += octet * matrix[kRow + at];
      sums[2] += octet * matrix[2 * kRow + at];
      sums[3] += octet * matrix[3 * kRow + at];
    }
    for (size_t lane = 0; lane < 4; ++lane) {
      const auto product = static_cast<uint64_t>(static_cast<int64_t>(sums[lane]) * weights[row]);
      lanes[lane] = static_cast<int64_t>(static_cast<uint64_t>(lanes[lane]) + product);
    }
  }
}
