// `stats=` and `check=` on a CUDA device: kernels that Triton has compiled, launched from here into tables that Python
// has made. Nothing waits for the device, and Python is called only to make a missing kernel or table.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace sightline {

// A compiled kernel; a null function means there is none for such tensors, and Python is not called again.
struct DeviceKernel {
  void* function = nullptr;
  unsigned shared = 0, threads = 0;
  int64_t block = 1;  // words that a program reads at a time
  int64_t fewest = 1, most = 1;  // programs for a tensor, if it has as many blocks
};

// Rows on one device, filled by the work of one stream; addresses are the device's unless said otherwise.
struct DeviceTable {
  uint64_t sums, counts, alarm, matrix;
  uint64_t host_count;  // the copy of the alarm in memory of the host
  uint64_t list;  // two words for each row: address and words of a tensor
  int64_t* list_here;  // the same, of the host
  int64_t capacity;
  std::vector<int64_t> rows;  // value and elements of each
};

// A tensor to be measured.
struct DeviceResult {
  const at::TensorBase* tensor;
  int32_t value;
};

class DeviceTables {
 public:
  enum Outcome {
    kMeasured,
    kMissing,  // Python may make the missing kernel, table or weights
    kUnfit,  // such a tensor is nothing for the kernels
  };

  bool fingerprints = false;
  bool numbers = false;  // else only NaNs and infinities are counted
  std::vector<const volatile int64_t*> alarms;  // how much was not finite, by device
  int64_t acknowledged = 0;  // how many Python has examined

  // Whether a tensor can be read where it lies.
  bool fits(const at::TensorBase& tensor) const;

  // Measure tensors of one dtype on the current device by one launch, as many of the first as there is room for; `done`
  // is how many. While a stream is captured nothing is launched: it would become a part of the graph.
  Outcome launch(const DeviceResult* results, size_t count, size_t& done);

  bool is_alarmed() const {
    int64_t sum = 0;
    for (const auto* alarm : alarms) sum += *alarm;
    return sum > acknowledged;
  }

  void add_kernel(int device, int dtype, bool many, const DeviceKernel& kernel) { kernels_[key(device, dtype, many)] = kernel; }
  size_t add_table(int device, void* stream, DeviceTable table);
  void set_weights(int device, uint64_t address, int64_t count) { weights_[device] = {address, count}; }
  const std::vector<int64_t>& rows(size_t table) const { return tables_[table].rows; }

  // The stream that works for a device now; false if it is not the current device.
  static bool current_stream(int device, void*& stream);

 private:
  static uint64_t key(int device, int dtype, bool many) {
    return static_cast<uint64_t>(device) << 16 | static_cast<uint64_t>(dtype) << 1 | static_cast<uint64_t>(many);
  }

  ska::flat_hash_map<uint64_t, DeviceKernel> kernels_;
  ska::flat_hash_map<int, std::pair<uint64_t, int64_t>> weights_;
  std::deque<DeviceTable> tables_;
  std::vector<std::pair<std::pair<int, void*>, size_t>> open_;  // by device and stream: the table with room
};

}  // namespace sightline
