// Which tensor is which. A tensor is known by its `TensorImpl` and a weak reference, which keeps the address from
// being used again; nothing here keeps the memory of a tensor alive.
#pragma once

#include "row_layout.h"
#include "storages.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

namespace sightline {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

inline uint64_t mixed(uint64_t hash, uint64_t more) {
  hash = (hash ^ more) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// A key of the metadata of a tensor. Zero: it must be read again each time.
inline uint64_t metadata_key(const c10::TensorImpl* tensor) {
  if (!has_plain_sizes(tensor) || tensor->is_python_dispatch()) return 0;
  uint64_t key = mixed(
      static_cast<uint64_t>(c10::typeMetaToScalarType(tensor->dtype())) + 1,
      static_cast<uint64_t>(tensor->device().type()) << 8 | static_cast<uint8_t>(tensor->device().index()));
  for (const auto size : tensor->sizes()) key = mixed(key, static_cast<uint64_t>(size));
  for (const auto step : tensor->strides()) key = mixed(key, static_cast<uint64_t>(step) + 0x51ED270Bull);
  return key == 0 ? 1 : key;
}

// The layout of a tensor in one number, cheap enough to be read at every use: `.data =` and `module.to(…)` give a tensor
// another one behind the dispatcher's back. Zero: it cannot be read as numbers.
inline uint64_t layout_key(const c10::TensorImpl* tensor) {
  if (!has_plain_sizes(tensor)) return 0;
  const auto sizes = tensor->sizes();
  const auto strides = tensor->strides();
  uint64_t key = static_cast<uint64_t>(c10::typeMetaToScalarType(tensor->dtype())) + 1 + (sizes.size() << 8) +
      static_cast<uint64_t>(tensor->storage_offset()) * 0xD6E8FEB86659FD93ull;
  uint64_t factor = 0x9E3779B97F4A7C15ull;  // its powers: no product waits for the one before it
  for (size_t at = 0; at < sizes.size(); ++at, factor *= 0x9E3779B97F4A7C15ull) {
    key += static_cast<uint64_t>(sizes[at]) * factor + static_cast<uint64_t>(strides[at]) * (factor >> 7 | 1);
  }
  return key == 0 ? 1 : key;
}

struct KnownStorage {
  WeakStorage ref;
  int32_t value;  // of the newest tensor that shows it so
};

// A key of the part of a storage that a tensor shows, and of the layout.
inline uint64_t shown_by(const c10::TensorImpl* tensor, int32_t meta) {
  const auto storage = reinterpret_cast<uint64_t>(storage_of(tensor));
  return mixed(mixed(storage, static_cast<uint64_t>(meta)), static_cast<uint64_t>(tensor->storage_offset()));
}

struct KnownTensor {
  WeakTensor ref;
  int32_t value;
  uint32_t place;  // of its storage
  const void* storage;  // only compared
  uint64_t layout;

  // Whether a tensor still has the memory and the layout it had when its value was made.
  bool is_current(const c10::TensorImpl* tensor) const {
    return storage == storage_of(tensor) && layout == layout_key(tensor);
  }
};

// The short row of a plain result in fresh storage: three of the numbers of a `ValueRow`.
struct FreshValueRow {
  int32_t id, metadata, producer;
};

class Values {
 public:
  std::vector<ValueRow> rows;
  std::vector<FreshValueRow> fresh_rows;
  ska::flat_hash_map<c10::TensorImpl*, KnownTensor> known;
  ska::flat_hash_map<uint64_t, int32_t> metadata;
  ska::flat_hash_map<uint64_t, KnownStorage> storages;  // by storage and layout
  Storages memory;
  int32_t next = 0;

  // The current value of a tensor, or -1.
  int32_t find(c10::TensorImpl* tensor) const {
    const auto found = known.find(tensor);
    return found == known.end() ? -1 : found->second.value;
  }

  void know(const at::TensorBase& tensor, int32_t value) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const uint32_t place = memory.note(impl, value);
    const auto found = known.find(impl);
    if (found != known.end()) {
      found->second.value = value;
      found->second.place = place;
      found->second.storage = storage_of(impl);
      found->second.layout = layout_key(impl);
      return;
    }
    known.emplace(impl, KnownTensor{WeakTensor(tensor.getIntrusivePtr()), value, place, storage_of(impl), layout_key(impl)});
    // The rest of a dead tensor is small, but on the heap it lies between blocks that could become one.
    if (impl->is_cpu() && has_plain_sizes(impl)) made_ += static_cast<size_t>(impl->numel()) * impl->itemsize();
    if (known.size() > purge_at_ || made_ > kMuch) {
      purge();
      purge_storages();
    }
  }

  // A tensor object that was given the place of another is known by that one's value, and seen to differ at its next use.
  void rebind(const at::TensorBase& tensor, int32_t value) {
    know(tensor, value);
    KnownTensor& entry = known.find(tensor.unsafeGetTensorImpl())->second;
    entry.storage = nullptr;
    entry.layout = 0;
  }

  // The newest value of another tensor whose memory is that of a storage, or -1. Reads every living one: rare.
  int32_t find_storage(const void* storage, const c10::TensorImpl* self = nullptr) const {
    int32_t best = -1;
    for (const auto& [impl, tensor] : known) {
      if (impl != self && tensor.value > best && !tensor.ref.expired() && storage_of(impl) == storage) best = tensor.value;
    }
    return best;
  }

  // Remember which value shows a storage in a certain way: autograd returns a saved tensor as a new object.
  void know_storage(const at::TensorBase& tensor, int32_t value, int32_t meta) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.requires_grad() || storage_of(impl) == nullptr) return;  // else autograd saves nothing of it
    const uint64_t key = shown_by(impl, meta);
    const auto found = storages.find(key);
    if (found != storages.end()) {
      found->second.value = value;
      return;
    }
    storages.emplace(key, KnownStorage{WeakStorage(impl->unsafe_storage().getWeakStorageImpl()), value});
    if (storages.size() > purge_storages_at_) purge_storages();
  }

  // The value whose very elements a tensor shows, or -1.
  int32_t saved(const c10::TensorImpl* impl, int32_t meta) const {
    if (storage_of(impl) == nullptr) return -1;
    const auto found = storages.find(shown_by(impl, meta));
    return found == storages.end() || found->second.ref.expired() ? -1 : found->second.value;
  }

  void purge_storages() {
    for (auto at = storages.begin(); at != storages.end();) {
      at = at->second.ref.expired() ? storages.erase(at) : std::next(at);
    }
    purge_storages_at_ = std::max<size_t>(1024, 2 * storages.size());
  }

  void purge() {
    for (auto at = known.begin(); at != known.end();) {
      at = at->second.ref.expired() ? known.erase(at) : std::next(at);
    }
    purge_at_ = std::max<size_t>(1024, 2 * known.size());
    made_ = 0;
  }

 private:
  static constexpr size_t kMuch = size_t{1} << 25;
  size_t made_ = 0;  // bytes, since the dead were forgotten
  size_t purge_at_ = 1024, purge_storages_at_ = 1024;
};

}  // namespace sightline
