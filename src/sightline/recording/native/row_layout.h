// Written by `make schema` from src/sightline/schema/; a test checks that it is current.
// The rows of a recording: the engine keeps one for each op, module call and value until Python reads it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sightline {

inline constexpr int kFlagShift = 4;
inline constexpr int kThreadShift = 12;
inline constexpr int kMoved = 256;
inline constexpr int kInherited = -1;
inline constexpr int64_t kNoEnd = int64_t{1} << 60;

inline constexpr int kRaised = 1;
inline constexpr int kUnfinished = 2;
inline constexpr int kTraining = 8;
inline constexpr int kEvaluation = 16;
inline constexpr int kNoGrad = 32;
inline constexpr int kMutates = 4;
inline constexpr int kRequiresGrad = 1;

enum Phase : int { kForward, kBackward, kRecompute, kOptimizer };
enum Kind : int { kKindInput, kKindParameter, kKindBuffer, kKindState, kKindConstant, kKindActivation, kKindGradient, kKindExternal, kKindEvicted };

struct OpRow {
  int64_t sequence = -1;  // the number of the autograd node that comes next
  int64_t node = -1;  // the number of the autograd node that was running
  int64_t start = -1;  // since the recording began
  int64_t duration = -1;  // the time it took, the recorder's own included
  int32_t id = -1;
  int32_t info = -1;  // the operation that was called, into `Tables.operations`
  int32_t form = -1;  // its arguments
  int32_t result = -1;  // the form of its result; -1: a single tensor
  int32_t stack = -1;  // the innermost source position
  int32_t call = -1;  // the id of the module call it ran in
  int32_t parent = -1;  // the id of the API call it came from
  int32_t bits = -1;  // phase, flags and thread

  // The fixed numbers of a row: its length, the id, the fields, how many inputs it has.
  static constexpr size_t kWidth = 14;
  void write(int64_t* to, size_t inputs, size_t outputs) const {
    to[0] = static_cast<int64_t>(kWidth + inputs + outputs);
    to[1] = id;
    to[2] = info;
    to[3] = form;
    to[4] = result;
    to[5] = stack;
    to[6] = call;
    to[7] = parent;
    to[8] = sequence;
    to[9] = node;
    to[10] = start;
    to[11] = duration;
    to[12] = bits;
    to[13] = static_cast<int64_t>(inputs);
  }
};

struct CallRow {
  int64_t start = -1;  // since the recording began
  int64_t duration = -1;  // the time it took, the recorder's own left out
  int64_t end = -1;  // the first id after it; `NO_END` while it runs
  int32_t id = -1;
  int32_t module = -1;  // the module that was called
  int32_t parent = -1;  // the id of the call around it
  int32_t stack = -1;  // the source position that called it
  int32_t bits = -1;  // phase, flags and thread
  int32_t input_form = -1;  // how its inputs are nested
  int32_t output_form = -1;  // how its outputs are nested

  // The fixed numbers of a row: its length, the id, the fields, how many inputs it has.
  static constexpr size_t kWidth = 12;
  void write(int64_t* to, size_t inputs, size_t outputs) const {
    to[0] = static_cast<int64_t>(kWidth + inputs + outputs);
    to[1] = id;
    to[2] = module;
    to[3] = parent;
    to[4] = stack;
    to[5] = bits;
    to[6] = start;
    to[7] = duration;
    to[8] = end;
    to[9] = input_form;
    to[10] = output_form;
    to[11] = static_cast<int64_t>(inputs);
  }
};

struct ValueRow {
  int64_t storage = -1;  // its address
  int64_t offset = -1;  // elements from the start of the storage
  int32_t id = -1;
  int32_t meta = -1;  // shape, dtype and device
  int32_t producer = -1;  // the id of the op that made it
  int32_t previous = -1;  // the id of the value it replaces
  int32_t base = -1;  // the id of the value it is a view of
  int16_t kind = -1;  // a position in `KINDS`
  int16_t flags = -1;  // `VALUE_FLAGS` and `MOVED`

  // The fixed numbers of a row: its length, the id, the fields.
  static constexpr size_t kWidth = 10;
  void write(int64_t* to) const {
    to[0] = static_cast<int64_t>(kWidth);
    to[1] = id;
    to[2] = meta;
    to[3] = storage;
    to[4] = offset;
    to[5] = kind;
    to[6] = producer;
    to[7] = previous;
    to[8] = base;
    to[9] = flags;
  }
};

}  // namespace sightline
