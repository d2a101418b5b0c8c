// The Python object around a recording.
#pragma once

#include "callbacks.h"

namespace sightline {

struct RecordingObject {
  PyObject_HEAD
  size_t slot;
  uint64_t serial;
};

// The recording behind an object; null once its slot serves another.
inline Recording* recording_of(PyObject* self) {
  const auto* object = reinterpret_cast<RecordingObject*>(self);
  Recording& recording = slots[object->slot];
  return recording.serial == object->serial ? &recording : nullptr;
}

}  // namespace sightline
