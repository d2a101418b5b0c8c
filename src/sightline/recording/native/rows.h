// Rows of a recording while it grows: 32-bit numbers in blocks that never move, written out as the 64-bit streams
// that `schema/streams.py` describes.
#pragma once

#include "row_layout.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <type_traits>
#include <vector>

namespace sightline {

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

// Rows of one kind: how long it is, how many inputs it has, the struct, then its inputs and its outputs.
template <class Row>
class Rows {
 public:
  template <class Inputs, class Outputs>
  void write(const Row& row, const Inputs& inputs, const Outputs& outputs) {
    const size_t size = kFixed + inputs.size() + outputs.size();
    int32_t* at = blocks.row(size);
    at[0] = static_cast<int32_t>(size);
    at[1] = static_cast<int32_t>(inputs.size());
    std::memcpy(at + 2, &row, sizeof(Row));
    at = std::copy(inputs.begin(), inputs.end(), at + kFixed);
    std::copy(outputs.begin(), outputs.end(), at);
    ++count;
  }

  void append_to(std::vector<int64_t>& out) const {
    blocks.each([&](const int32_t* at) {
      const auto size = static_cast<size_t>(at[0]), inputs = static_cast<size_t>(at[1]);
      Row row;
      std::memcpy(static_cast<void*>(&row), at + 2, sizeof(Row));
      int64_t numbers[Row::kWidth];
      row.write(numbers, inputs, size - kFixed - inputs);
      out.insert(out.end(), std::begin(numbers), std::end(numbers));
      out.insert(out.end(), at + kFixed, at + size);
      return size;
    });
  }

  Blocks blocks;
  size_t count = 0;

 private:
  static constexpr size_t kFixed = 2 + sizeof(Row) / sizeof(int32_t);
  static_assert(sizeof(Row) % sizeof(int32_t) == 0 && std::is_trivially_copyable_v<Row>);
};

using OpRows = Rows<OpRow>;
using CallRows = Rows<CallRow>;

}  // namespace sightline
