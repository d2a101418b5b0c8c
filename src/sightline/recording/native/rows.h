// Rows of a recording while it grows: 32-bit numbers in blocks that never move, written out as the 64-bit streams
// that `trace/assembly/row_columns.py` describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace sightline {

inline constexpr int kFlagShift = 4;
inline constexpr int kThreadShift = 12;
inline constexpr int kRaised = 1;
inline constexpr int kUnfinished = 2;
inline constexpr int kMutates = 4;
inline constexpr int kTraining = 8;  // of a module call, as the next two
inline constexpr int kEvaluation = 16;
inline constexpr int kNoGrad = 32;
inline constexpr int kMoved = 256;  // of a version of a value: it is in other memory
inline constexpr int64_t kNoEnd = int64_t{1} << 60;

class Blocks {
 public:
  // Room for a row of so many numbers; valid until the next call.
  int32_t* row(size_t size) {
    if (blocks_.empty() || blocks_.back().used + size > blocks_.back().size) {
      const size_t room = std::max<size_t>(kBlock, size);
      blocks_.push_back({std::unique_ptr<int32_t[]>(new int32_t[room]), room, 0});  // not zeroed
    }
    Block& block = blocks_.back();
    int32_t* found = block.numbers.get() + block.used;
    block.used += size;
    written_ += size;
    return found;
  }

  size_t written() const { return written_; }  // ever

  template <class Visit>
  void each(Visit visit) const {  // visit(row) returns how many numbers it has
    for (const Block& block : blocks_) {
      for (size_t at = 0; at < block.used;) at += visit(block.numbers.get() + at);
    }
  }

  void clear() { blocks_.clear(); }

 private:
  static constexpr size_t kBlock = 1 << 15;
  struct Block {
    std::unique_ptr<int32_t[]> numbers;
    size_t size, used;
  };
  std::vector<Block> blocks_;
  size_t written_ = 0;
};

inline int32_t low(int64_t number) { return static_cast<int32_t>(number & 0xFFFFFFFF); }
inline int32_t high(int64_t number) { return static_cast<int32_t>(number >> 32); }
inline int64_t wide(int32_t low, int32_t high) {
  return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low);
}

struct OpRow {
  int32_t id, info, form, result, stack, call, parent, bits;
  int64_t sequence, node, start, duration;
};

struct CallRow {
  int32_t id, module, parent, stack, bits, input_form, output_form;
  int64_t start, duration, end;
};

// Both kinds of rows: fixed numbers, then inputs, then outputs.
class OpRows {
 public:
  static constexpr size_t kFixed = 18;

  void write(const OpRow& op, const int32_t* inputs, size_t given, const int32_t* outputs, size_t made) {
    int32_t* at = blocks.row(kFixed + given + made);
    *at++ = static_cast<int32_t>(kFixed + given + made);
    *at++ = static_cast<int32_t>(given);
    for (const int32_t number : {op.id, op.info, op.form, op.result, op.stack, op.call, op.parent, op.bits}) {
      *at++ = number;
    }
    for (const int64_t number : {op.sequence, op.node, op.start, op.duration}) {
      *at++ = low(number);
      *at++ = high(number);
    }
    at = std::copy_n(inputs, given, at);
    std::copy_n(outputs, made, at);
    ++count;
  }

  void append_to(std::vector<int64_t>& out) const {
    blocks.each([&](const int32_t* row) {
      const auto size = static_cast<size_t>(row[0]);
      const int32_t* wide_ones = row + 10;
      const auto at = [&](int which) { return wide(wide_ones[2 * which], wide_ones[2 * which + 1]); };
      const int64_t fixed[] = {static_cast<int64_t>(14 + size - kFixed), row[2], row[3], row[4], row[5], row[6],
                               row[7], row[8], at(0), at(1), at(2), at(3), row[9], row[1]};
      out.insert(out.end(), std::begin(fixed), std::end(fixed));
      out.insert(out.end(), row + kFixed, row + size);
      return size;
    });
  }

  Blocks blocks;
  size_t count = 0;
};

class CallRows {
 public:
  static constexpr size_t kFixed = 15;

  template <class Inputs, class Outputs>
  void write(const CallRow& call, const Inputs& inputs, const Outputs& outputs) {
    const size_t size = kFixed + inputs.size() + outputs.size();
    int32_t* at = blocks.row(size);
    *at++ = static_cast<int32_t>(size);
    *at++ = static_cast<int32_t>(inputs.size());
    for (const int32_t number :
         {call.id, call.module, call.parent, call.stack, call.bits, call.input_form, call.output_form}) {
      *at++ = number;
    }
    for (const int64_t number : {call.start, call.duration, call.end}) {
      *at++ = low(number);
      *at++ = high(number);
    }
    at = std::copy(inputs.begin(), inputs.end(), at);
    std::copy(outputs.begin(), outputs.end(), at);
  }

  void append_to(std::vector<int64_t>& out) const {
    blocks.each([&](const int32_t* row) {
      const auto size = static_cast<size_t>(row[0]);
      const auto at = [&](int which) { return wide(row[9 + 2 * which], row[10 + 2 * which]); };
      const int64_t fixed[] = {static_cast<int64_t>(12 + size - kFixed), row[2], row[3], row[4], row[5], row[6],
                               at(0), at(1), at(2), row[7], row[8], row[1]};
      out.insert(out.end(), std::begin(fixed), std::end(fixed));
      out.insert(out.end(), row + kFixed, row + size);
      return size;
    });
  }

  Blocks blocks;
};

}  // namespace sightline
