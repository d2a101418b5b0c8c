// `stats=` and `check=`: which results of ops are measured, and the results.
#pragma once

#include "device_tables.h"
#include "statistics.h"

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>

#include <utility>
#include <vector>

namespace sightline {

// How the result of an operator shows NaNs and infinities of its input: by the elements themselves, by something bounded,
// by a product with a plain number, a quotient, a sum. Python's numbers.
enum class Preserves { kNothing, kCopy, kBounded, kProduct, kQuotient, kSum };

// A result that has its NaNs where another has them, and its infinities too unless it is bounded.
struct Implied {
  int32_t value, from;
  bool bounded;
};

// The traits of an operator that measuring needs, requested once.
struct Measured {
  bool chosen = false;  // among those whose numbers are taken
  bool uninitialized = false;  // its result holds whatever was in memory before
  bool relabels = false;  // its result is a view of every element of its input
  bool keeps_order = false;  // and in the same order
  bool maybe_view = false;  // it may return a view, or a copy
  Preserves preserves = Preserves::kNothing;
};

class Measurements {
 public:
  enum Depth { kNothing, kNumbers, kFingerprints };

  Depth depth = kNothing;  // of `stats=`
  bool views = false;  // fingerprints also of views in another order
  bool parameters = false;
  bool checks = false;  // `check=`: examine every result
  bool reports = false;  // Python is notified of NaNs and infinities
  bool some_modules = false;  // only ops of certain modules are measured
  std::vector<uint8_t> modules;  // by number: whether it is one of them
  PyTypeObject* parameter_type = nullptr;
  int64_t checked = 0;  // tensors examined
  size_t devices = 0;  // tensors measured on a device whose alarm C++ does not read
  DeviceTables tables;
  ska::flat_hash_map<int32_t, std::pair<int64_t, int64_t>> nonfinite;  // NaNs and infinities of values that have any
  std::vector<Implied> copies;  // results that follow from examined tensors
  ska::flat_hash_set<const void*> rewritten;  // storages that were changed through a view of them

  bool on() const { return depth != kNothing || checks; }

  // Whether numbers are taken in a module.
  bool includes(int32_t module) const {
    if (depth == kNothing || !some_modules) return depth != kNothing;
    const auto at = static_cast<size_t>(module);
    return at < modules.size() && modules[at];
  }

  bool known(int32_t value) const { return static_cast<size_t>(value) < taken_.size() && taken_[static_cast<size_t>(value)]; }

  // Whether a value has not been examined; from now on it has.
  bool first_time(int32_t value) {
    const auto at = static_cast<size_t>(value);
    if (at >= taken_.size()) taken_.resize(std::max<size_t>(4096, at + 1 + at / 2));
    return !std::exchange(taken_[at], 1);
  }

  // Whether a module is called for the first time: then its parameters are read. What changes them is an op, whose
  // results are read as those of any other.
  bool first_call(size_t module) {
    if (module >= called_.size()) called_.resize(std::max<size_t>(256, module + 1 + module / 2));
    return !std::exchange(called_[module], 1);
  }

  void add(int32_t value, const Reading& reading) {
    if (reading.nans != 0 || reading.infs != 0) nonfinite[value] = {reading.nans, reading.infs};
    rows_.emplace_back(value, reading);
  }

  // Rows of 64-bit numbers: value, zeros, NaNs, infinities, lanes; the rest are bits of doubles.
  void append_to(std::vector<int64_t>& out) const {
    for (const auto& [value, reading] : rows_) {
      out.insert(out.end(), {value, reading.zeros, reading.nans, reading.infs});
      out.insert(out.end(), std::begin(reading.lanes), std::end(reading.lanes));
      for (const double number : {reading.least, reading.most, reading.mean, reading.deviation, reading.norm}) {
        int64_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        out.push_back(bits);
      }
    }
  }

  void forget_rows() { rows_.clear(); }

 private:
  std::vector<uint8_t> taken_;  // by value
  std::vector<uint8_t> called_;  // by module
  std::vector<std::pair<int32_t, Reading>> rows_;
};

}  // namespace sightline
