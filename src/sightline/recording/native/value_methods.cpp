// The methods of a recording for its tensors.
#include "api_calls.h"
#include "python_values.h"
#include "recording_methods.h"
#include "recording_object.h"

namespace sightline {
namespace {

// find(tensor): its current value, or -1.
PyObject* recording_find(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  const at::TensorBase* tensor = recording->tensor_in(object);
  return PyLong_FromLong(tensor == nullptr ? -1 : recording->values.find(tensor->unsafeGetTensorImpl()));
}

// find_all(tensors): the current value of each in a list, or None.
PyObject* recording_find_all(PyObject* self, PyObject* tensors) {
  if (!PyList_Check(tensors)) Py_RETURN_NONE;
  Recording* recording = recording_of(self);
  std::vector<int32_t> values(static_cast<size_t>(PyList_GET_SIZE(tensors)), -1);
  if (recording != nullptr) {
    const Lock lock(recording->mutex);
    for (size_t at = 0; at < values.size(); ++at) {
      const at::TensorBase* tensor = recording->tensor_in(PyList_GET_ITEM(tensors, static_cast<Py_ssize_t>(at)));
      if (tensor != nullptr) values[at] = recording->values.find(tensor->unsafeGetTensorImpl());
    }
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t at = 0; list != nullptr && at < values.size(); ++at) {
    PyObject* value = values[at] < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(values[at]);
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(at), value);
  }
  return list;
}

// value(tensor): its current value; one never seen before is explained by the session.
PyObject* recording_value(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  const at::TensorBase* tensor = recording->tensor_in(object);
  return PyLong_FromLong(tensor == nullptr ? -1 : recording->value_of(*tensor, lock));
}

// forget(tensor): hold no weak reference to it; returns the value it had, or -1.
PyObject* recording_forget(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  if (ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording)) {
    end_api_call(*recording, *state, lock);  // which may hold its results
  }
  const at::TensorBase* tensor = recording->tensor_in(object);
  if (tensor == nullptr) return PyLong_FromLong(-1);
  const int32_t value = recording->values.find(tensor->unsafeGetTensorImpl());
  recording->values.known.erase(tensor->unsafeGetTensorImpl());
  return PyLong_FromLong(value);
}

// rebind(tensor, value): the tensor has this value from now on, whatever it looks like.
PyObject* recording_rebind(PyObject* self, PyObject* args) {
  PyObject* object;
  int value;
  if (!PyArg_ParseTuple(args, "Oi", &object, &value)) return nullptr;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    if (const at::TensorBase* tensor = recording->tensor_in(object)) recording->values.rebind(*tensor, value);
  }
  Py_RETURN_NONE;
}

// find_storage(tensor): the newest value in the tensor's storage, or -1.
PyObject* recording_find_storage(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  const at::TensorBase* tensor = recording->tensor_in(object);
  const void* storage = tensor == nullptr ? nullptr : storage_of(tensor->unsafeGetTensorImpl());
  return PyLong_FromLong(storage == nullptr ? -1 : recording->values.find_storage(storage));
}

// add_all(tensors, kind): the values of tensors that no op has made, each with the bytes of its storage, -1 if unknown.
PyObject* recording_add_all(PyObject* self, PyObject* args) {
  PyObject* tensors;
  int kind;
  if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &tensors, &kind)) return nullptr;
  Recording* recording = recording_of(self);
  std::vector<std::pair<int32_t, int64_t>> added;
  if (recording != nullptr) {
    Lock lock(recording->mutex);
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
      const at::TensorBase* tensor = recording->tensor_in(PyList_GET_ITEM(tensors, at));
      added.emplace_back(-1, -1);
      if (tensor == nullptr) continue;
      const int32_t metadata = recording->metadata_of(*tensor, lock), id = recording->values.next++;
      const c10::TensorImpl* impl = tensor->unsafeGetTensorImpl();
      const void* storage = storage_of(impl);
      recording->values.rows.push_back(
          {.storage = reinterpret_cast<int64_t>(storage), .offset = storage ? tensor->storage_offset() : 0, .id = id,
           .meta = metadata, .kind = static_cast<int16_t>(kind),
           .flags = static_cast<int16_t>(tensor->requires_grad() ? kRequiresGrad : 0)});
      recording->values.know(*tensor, id);
      added.back() = {id, storage_bytes(impl)};
    }
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(added.size()));
  for (size_t at = 0; list != nullptr && at < added.size(); ++at) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(at), Py_BuildValue("iL", added[at].first, static_cast<long long>(added[at].second)));
  }
  return list;
}

PyObject* recording_type_kind(PyObject* self, PyObject* args) {
  PyObject* type;
  int kind;
  if (!PyArg_ParseTuple(args, "O!i", &PyType_Type, &type, &kind)) return nullptr;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->types.kinds[reinterpret_cast<PyTypeObject*>(type)] = static_cast<TypeKind>(kind);
  }
  Py_RETURN_NONE;
}

// live_tensors(): (value, tensor) of every recorded tensor that is still alive.
PyObject* recording_live_tensors(PyObject* self, PyObject*) {
  std::vector<std::pair<int32_t, at::Tensor>> living;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    for (const auto& [impl, tensor] : recording->values.known) {
      auto alive = tensor.ref.lock();
      if (alive) living.emplace_back(tensor.value, at::Tensor(std::move(alive)));
    }
  }
  PyObject* list = PyList_New(0);
  for (const auto& [value, tensor] : living) {
    Owned pair(Py_BuildValue("(iN)", value, THPVariable_Wrap(tensor)));
    if (list == nullptr || !pair || PyList_Append(list, pair.get()) < 0) return nullptr;
  }
  return list;
}

}  // namespace

std::vector<PyMethodDef> value_methods() {
  return {
      {"find", recording_find, METH_O, "find(tensor): its value, or -1."},
      {"find_all", recording_find_all, METH_O, "find_all(tensors): the value of each, or None."},
      {"value", recording_value, METH_O, "value(tensor): its value, a new one if it has none."},
      {"forget", recording_forget, METH_O, "forget(tensor): its value, which it no longer has."},
      {"rebind", recording_rebind, METH_VARARGS, "rebind(tensor, value): the tensor has this value from now on."},
      {"find_storage", recording_find_storage, METH_O, "find_storage(tensor): the newest value in its storage, or -1."},
      {"add_all", recording_add_all, METH_VARARGS, "add_all(tensors, kind): a new value of each, and the bytes of its storage."},
      {"type_kind", recording_type_kind, METH_VARARGS, "type_kind(type, kind): how its objects are read."},
      {"live_tensors", recording_live_tensors, METH_NOARGS, "live_tensors(): values of the tensors that are still alive."},
  };
}

}  // namespace sightline
