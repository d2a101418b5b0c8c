#include "device_tables.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <algorithm>

namespace sightline {
namespace {

// CUDA's driver, which a process with tensors on a device has loaded. Its headers need not be there.
struct Driver {
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  using IsCapturing = int (*)(void*, int*);
  using CopyToDevice = int (*)(uint64_t, const void*, size_t, void*);

  Launch launch = nullptr;
  IsCapturing is_capturing = nullptr;
  CopyToDevice copy_to_device = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return;
    launch = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernel"));
    is_capturing = reinterpret_cast<IsCapturing>(dlsym(library, "cuStreamIsCapturing"));
    copy_to_device = reinterpret_cast<CopyToDevice>(dlsym(library, "cuMemcpyHtoDAsync_v2"));
  }

  bool ready() const { return launch != nullptr && is_capturing != nullptr && copy_to_device != nullptr; }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

int64_t words_in(const at::TensorBase& tensor) { return static_cast<int64_t>(tensor.nbytes()) / 4; }

void* const kUnknownStream = reinterpret_cast<void*>(~uintptr_t{0});

// The driver's handle of a stream. Before torch 2.11 a stream does not tell it; torch's own ops measure then.
template <class Stream>
void* handle_of(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    return kUnknownStream;
  }
}

constexpr int64_t kRowBytes = 1024;  // of a fingerprint; each has a weight

}  // namespace

bool DeviceTables::current_stream(int device, void*& stream) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  if (guard.getDevice().index() != device) return false;
  stream = handle_of(guard.getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))));
  return stream != kUnknownStream;
}

bool DeviceTables::fits(const at::TensorBase& tensor) const {
  if (!tensor.is_cuda() || tensor.is_neg() || tensor.nbytes() % 4 != 0) return false;
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0) return false;
  // Only a fingerprint sees the order.
  return tensor.is_contiguous() || (!fingerprints && tensor.is_non_overlapping_and_dense());
}

size_t DeviceTables::add_table(int device, void* stream, DeviceTable table) {
  const std::pair<int, void*> where(device, stream);
  const size_t number = tables_.size();
  tables_.push_back(std::move(table));
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const auto& one) { return one.first == where; });
  if (found == open_.end()) {
    open_.emplace_back(where, number);
  } else {
    found->second = number;
  }
  return number;
}

DeviceTables::Outcome DeviceTables::launch(const DeviceResult* results, size_t count, size_t& done) {
  done = count;
  const at::TensorBase& first = *results[0].tensor;
  const int device = first.device().index();
  void* stream;
  if (!driver().ready() || !current_stream(device, stream)) return kUnfit;
  int capturing = 0;
  if (driver().is_capturing(stream, &capturing) != 0) return kUnfit;
  if (capturing != 0) return kMeasured;
  const auto kernel = kernels_.find(key(device, static_cast<int>(first.scalar_type()), count > 1));
  if (kernel == kernels_.end()) return kMissing;
  if (kernel->second.function == nullptr) return kUnfit;
  const std::pair<int, void*> where(device, stream);
  const auto open = std::find_if(open_.begin(), open_.end(), [&](const auto& one) { return one.first == where; });
  if (open == open_.end()) return kMissing;
  DeviceTable& table = tables_[open->second];
  const auto used = static_cast<int64_t>(table.rows.size() / 2);
  if (used >= table.capacity) return kMissing;
  if (static_cast<int64_t>(count) > table.capacity - used) {
    if (table.capacity - used == 1) return kMissing;  // one is another kernel's: begin a new table
    count = static_cast<size_t>(table.capacity - used);
  }
  int64_t most = 0;
  for (size_t at = 0; at < count; ++at) most = std::max(most, words_in(*results[at].tensor));
  const DeviceKernel& code = kernel->second;
  auto [weights, weight_count] = weights_[device];
  if (fingerprints && weight_count * kRowBytes < (most + code.block) * 4) return kMissing;

  int64_t size = words_in(first), row = used;
  uint64_t given = reinterpret_cast<uint64_t>(first.const_data_ptr()), scratch = 0;
  if (count > 1) {
    for (size_t at = 0; at < count; ++at) {
      int64_t* item = table.list_here + 2 * (used + static_cast<int64_t>(at));
      item[0] = reinterpret_cast<int64_t>(results[at].tensor->const_data_ptr());
      item[1] = words_in(*results[at].tensor);
    }
    const auto begin = static_cast<uint64_t>(used) * 16;
    given = table.list + begin;
    if (driver().copy_to_device(given, table.list_here + 2 * used, count * 16, stream) != 0) return kUnfit;
  }
  c10::SmallVector<void*, 12> arguments{&given};
  if (numbers) arguments.insert(arguments.end(), {&table.matrix, &weights, &table.sums});
  arguments.insert(arguments.end(), {&table.counts, &table.alarm, &table.host_count});
  if (count == 1) arguments.push_back(&size);
  arguments.insert(arguments.end(), {&row, &scratch, &scratch});  // Triton adds two of its own, not used here
  const int64_t blocks = std::max<int64_t>((most + code.block - 1) / code.block, 1);
  int64_t programs = std::min(blocks, std::max(code.fewest, std::min(blocks / 8, code.most)));
  // In a list most tensors are small: their programs end at once, but there should not be too many of them.
  if (count > 1) programs = std::min(programs, std::max<int64_t>(code.most / static_cast<int64_t>(count), 256));
  const auto grid = static_cast<unsigned>(programs);
  const int failed = driver().launch(
      code.function, grid, static_cast<unsigned>(count), 1, code.threads, 1, 1, code.shared, stream, arguments.data(), nullptr);
  if (failed != 0) return kUnfit;
  for (size_t at = 0; at < count; ++at) {
    table.rows.insert(table.rows.end(), {results[at].value, results[at].tensor->numel()});
  }
  done = count;
  return kMeasured;
}

}  // namespace sightline
