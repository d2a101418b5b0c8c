// When memory is allocated and freed: a weak reference to each storage, and a row when it is first seen, when its size
// has changed, and when it was freed.
//
// Torch does not report when it frees a storage, so they are examined, but never all of them at each op: those of the
// last few ops (most storages are freed soon after their last use), two others in turn, those allocated in a module
// call when it ends, and all of them when more is held than ever before. So a peak never counts storages that are gone.
#pragma once

#include "rows.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <utility>
#include <vector>

namespace sightline {

// A 64-bit number as two of 32 bits, and back.
inline int32_t low(int64_t number) { return static_cast<int32_t>(number & 0xFFFFFFFF); }
inline int32_t high(int64_t number) { return static_cast<int32_t>(number >> 32); }
inline int64_t wide(int32_t low, int32_t high) {
  return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low);
}

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Whether sizes and strides can be read as numbers: not of nested or sparse tensors, nor of those whose sizes are
// symbols, which would gain a guard when they are read.
inline bool has_plain_sizes(const c10::TensorImpl* tensor) {
  // A subclass may compute them in Python code of the user.
  if (tensor->key_set().has(c10::DispatchKey::Python)) return false;
  return tensor->layout() == c10::kStrided && !tensor->has_symbolic_sizes_strides() &&
      !tensor->key_set().has(c10::DispatchKey::NestedTensor) &&
      !tensor->key_set().has(c10::DispatchKey::FuncTorchBatched) &&
      !tensor->key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

inline const void* storage_of(const c10::TensorImpl* tensor) {
  return tensor->has_storage() && has_plain_sizes(tensor)
      ? static_cast<const void*>(tensor->unsafe_storage().unsafeGetStorageImpl())
      : nullptr;
}

// Whether every element of a tensor is in memory of its own that is there and can be read: Python's
// `tensor_memory.has_memory`. A storage may have been freed or made smaller, as FSDP does.
inline bool has_memory(const c10::TensorImpl* tensor) {
  const auto keys = tensor->key_set();
  if (!has_plain_sizes(tensor) || !tensor->has_storage() || tensor->is_meta()) return false;
  if (keys.has(c10::DispatchKey::Functionalize) || keys.has(c10::DispatchKey::ZeroTensor)) return false;
  const auto sizes = tensor->sizes();
  const auto strides = tensor->strides();
  int64_t count = 1;
  for (size_t at = 0; at < sizes.size(); ++at) {
    if (sizes[at] == 0) return true;
    count += (sizes[at] - 1) * strides[at];
  }
  const c10::Storage& storage = tensor->unsafe_storage();
  const auto needed = static_cast<size_t>(tensor->storage_offset() + count) * tensor->itemsize();
  return storage.data() != nullptr && !storage.sym_nbytes().is_heap_allocated() && storage.nbytes() >= needed;
}

// The bytes of a tensor's storage; -1 if it has none, or as many as a symbol says.
inline int64_t storage_bytes(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return -1;
  const c10::SymInt bytes = tensor->unsafe_storage().sym_nbytes();
  return bytes.is_heap_allocated() ? -1 : bytes.as_int_unchecked();
}

class Storages {
 public:
  // Weak references of storages that are gone. Releasing one may free a Python object, which needs the GIL: the
  // caller does it after it has unlocked the mutex.
  using Dead = c10::SmallVector<WeakStorage, 8>;

  Blocks rows;  // kRow numbers each: value, bytes (-1: it is freed), time
  static constexpr size_t kRow = 5;
  int64_t time = 0;  // of what is being recorded, in ns since the recording began

  static constexpr uint32_t kNoPlace = ~uint32_t{0};

  // A tensor is recorded as a value; the first value of a storage stands for it from then on. Returns the place of the
  // storage, which is its own as long as the tensor lives.
  uint32_t note(const c10::TensorImpl* tensor, int32_t value) {
    c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    const auto found = places_.find(storage);
    if (found != places_.end()) {
      use(found->second);
      return found->second;
    }
    if (over_ || storage_of(tensor) == nullptr || tensor->is_meta()) return kNoPlace;
    if (storage->sym_nbytes().is_heap_allocated()) return kNoPlace;  // a symbol, which is no number
    const uint32_t place = add(tensor, storage, value);
    heat(place);
    young_.emplace_back(place, time);
    if (young_.size() > kMostYoung) young_.erase(young_.begin(), young_.begin() + kMostYoung / 2);
    if (held_ > limit_ && ops_since_all_ * kExaminedPerOp >= places_.size()) {
      examine_all();
      limit_ = std::max(limit_, held_ + held_ / 64);
    }
    return place;
  }

  // A tensor is given to an op or a module: its storage may be freed soon.
  void use(uint32_t place) {
    if (place >= held_storages_.size()) return;
    heat(place);
    examine_size(held_storages_[place]);
  }

  // An op is about to run: examine the storages of the last ones, and two others.
  void examine(int64_t now, Dead& dead) {
    time = now;
    ++ops_since_all_;
    const size_t count = held_storages_.size();
    if (count == 0) return;
    for (const uint32_t place : hot_) is_freed(held_storages_[place]);
    for (int others = 0; others < 2; ++others) {
      if (++turn_ >= count) turn_ = 0;
      if (!is_freed(held_storages_[turn_])) examine_size(held_storages_[turn_]);
    }
    // Their turn comes at the next op; they are no longer in the cache.
    for (size_t ahead = 1; ahead <= 2 && turn_ + ahead < count; ++ahead) {
      __builtin_prefetch(held_storages_[turn_ + ahead].impl);
    }
    hand_over(dead);
  }

  // A module call that began at a certain time has ended: examine what was allocated in it.
  void examine_since(int64_t begin, int64_t now, Dead& dead) {
    time = now;
    size_t first = young_.size();
    while (first > 0 && young_[first - 1].second >= begin) --first;
    size_t kept = first;
    for (size_t at = first; at < young_.size(); ++at) {
      Held& held = held_storages_[young_[at].first];
      if (held.since == young_[at].second && !is_freed(held)) young_[kept++] = young_[at];
    }
    young_.resize(kept);
    hand_over(dead);
  }

  void examine_all(int64_t now, Dead& dead) {
    if (over_) return;
    time = now;
    examine_all();
    hand_over(dead);
  }

  // The recording has ended: storages that are freed from now on were held to its end.
  void end() { over_ = true; }

  void append_to(std::vector<int64_t>& out) const {
    rows.each([&](const int32_t* row) {
      out.insert(out.end(), {row[0], wide(row[1], row[2]), wide(row[3], row[4])});
      return kRow;
    });
  }

 private:
  struct Held {
    WeakStorage ref;
    c10::StorageImpl* impl;  // null: the place is free
    int64_t bytes, since;
    int32_t value;
  };
  static constexpr size_t kMostYoung = 1 << 14;
  static constexpr size_t kExaminedPerOp = 64;  // the most that examining all of them may come to, while more and more is held

  uint32_t add(const c10::TensorImpl* tensor, c10::StorageImpl* storage, int32_t value) {
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    Held held{tensor->unsafe_storage().getWeakStorageImpl(), storage, bytes, time, value};
    uint32_t place;
    if (free_.empty()) {
      place = static_cast<uint32_t>(held_storages_.size());
      held_storages_.push_back(std::move(held));
    } else {
      place = free_.back();
      free_.pop_back();
      held_storages_[place] = std::move(held);
    }
    places_.emplace(storage, place);
    held_ += bytes;
    write(value, bytes);
    return place;
  }

  void heat(uint32_t place) {
    if (hot_[next_hot_ % hot_.size()] != place) hot_[++next_hot_ % hot_.size()] = place;
  }

  // Whether a storage is freed; a row is written when that is first seen.
  bool is_freed(Held& held) {
    if (held.impl == nullptr) return true;
    if (!held.ref.expired()) return false;
    remove(held);
    return true;
  }

  [[gnu::noinline]] void remove(Held& held) {
    held_ -= held.bytes;
    write(held.value, -1);
    places_.erase(held.impl);
    held.impl = nullptr;
    dead_.push_back(std::move(held.ref));
    free_.push_back(static_cast<uint32_t>(&held - held_storages_.data()));
  }

  void examine_size(Held& held) {
    if (held.impl == nullptr) return;
    // The object is there as long as our reference is, even if the storage is freed by another thread just now.
    const auto bytes = static_cast<int64_t>(held.impl->nbytes());
    if (bytes == held.bytes) return;
    held_ += bytes - held.bytes;
    held.bytes = bytes;
    write(held.value, bytes);
  }

  void hand_over(Dead& dead) {
    for (WeakStorage& ref : dead_) dead.push_back(std::move(ref));
    dead_.clear();
  }

  void examine_all() {
    for (Held& held : held_storages_) {
      if (!is_freed(held)) examine_size(held);
    }
    ops_since_all_ = 0;
  }

  void write(int32_t value, int64_t bytes) {
    int32_t* row = rows.row(kRow);
    row[0] = value;
    row[1] = low(bytes);
    row[2] = high(bytes);
    row[3] = low(time);
    row[4] = high(time);
  }

  std::vector<Held> held_storages_;  // a place for each, used again
  std::vector<uint32_t> free_;  // places of storages that are gone
  ska::flat_hash_map<c10::StorageImpl*, uint32_t> places_;
  std::array<uint32_t, 8> hot_{};  // places of the storages that were used last
  size_t next_hot_ = 0, turn_ = 0;
  std::vector<std::pair<uint32_t, int64_t>> young_;  // places, in the order they were taken, and when
  int64_t held_ = 0, limit_ = 0;  // bytes; beyond the limit all are examined
  size_t ops_since_all_ = 0;  // ops since all were examined
  bool over_ = false;
  std::vector<WeakStorage> dead_;
};

}  // namespace sightline
