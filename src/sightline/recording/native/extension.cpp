// The Python type around a recording, and the functions of the extension.
#include "api_calls.h"
#include "checksum.h"
#include "measurement_methods.h"
#include "module_calls.h"
#include "python_values.h"
#include "recording_object.h"
#include "termination.h"

namespace sightline {
namespace {

uint64_t next_serial = 1;

PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(numbers.data()), static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t)));
}

// Free everything now, or when the slot is needed: a call may still be inside the recording.
void let_go(Recording& recording) {
  if (recording.visitors.load() != 0) {
    if (!recording.left) Py_INCREF(recording.host);  // who is inside may ask it again
    recording.left = true;
    return;
  }
  recording.clear();
  if (recording.left) Py_DECREF(recording.host);
  recording.left = false;
  recording.host = nullptr;
}

// Recording(host, level, begin, no_form, one_tensor, tensor_offset, kwargs_slot)
PyObject* recording_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* host;
  const char* level;
  long long begin;
  int no_form, one_tensor;
  Py_ssize_t tensor_offset, kwargs_slot;
  if (!PyArg_ParseTuple(
          args, "OsLiinn", &host, &level, &begin, &no_form, &one_tensor, &tensor_offset, &kwargs_slot)) {
    return nullptr;
  }
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Recording& recording = slots[slot];
    if (recording.left) {
      const Lock lock(recording.mutex);
      let_go(recording);
    }
    if (recording.host != nullptr) continue;
    auto* self = reinterpret_cast<RecordingObject*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    const Lock lock(recording.mutex);
    recording.clear();
    recording.host = host;
    recording.serial = self->serial = next_serial++;
    self->slot = slot;
    const std::string wanted = level;
    recording.wants_api = wanted == "api" || wanted == "both";
    recording.wants_aten = wanted == "aten" || wanted == "both";
    recording.begin = begin;
    recording.no_form = no_form;
    recording.one_tensor = one_tensor;
    recording.types.tensor_offset = static_cast<size_t>(tensor_offset);
    recording.kwargs_slot = kwargs_slot;
    recording.handle = recording.node_handle = 0;
    recording.owner = 0;
    return reinterpret_cast<PyObject*>(self);
  }
  Py_RETURN_NONE;  // all slots are in use
}

void recording_dealloc(PyObject* self) {
  if (Recording* recording = recording_of(self)) {
    recording->running = false;
    Storages gone;  // freed after the mutex is given up
    const Lock lock(recording->mutex);
    std::swap(gone, recording->values.memory);
    let_go(*recording);
  }
  Py_TYPE(self)->tp_free(self);
}

// start(frame, above): record on this thread; `above` is the stack of `frame`, which stays where it is.
PyObject* recording_start(PyObject* self, PyObject* args) {
  PyObject* frame;
  int above;
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyArg_ParseTuple(args, "Oi", &frame, &above)) return nullptr;
  const auto slot = reinterpret_cast<RecordingObject*>(self)->slot;
  {
    const Lock lock(recording->mutex);
    recording->owner = this_thread();
    ThreadState* state = state_of(slot, *recording);
    if (PyFrame_Check(frame)) {
      Py_INCREF(frame);  // until the end: the frame's address alone may mean another by then
      state->marks[0] = {frame_of(frame), nullptr, reinterpret_cast<PyFrameObject*>(frame), above, -1, false};
      recording->base = frame;
    }
  }
  if (recording->wants_api || recording->wants_aten) {
    listen(slot);
  }
  recording->running = true;
  Py_RETURN_NONE;
}

// listen_to_nodes(): see compiled backward passes on this thread.
PyObject* recording_listen_to_nodes(PyObject* self, PyObject*) {
  if (recording_of(self) != nullptr) listen_to_nodes(reinterpret_cast<RecordingObject*>(self)->slot);
  Py_RETURN_NONE;
}

// stack(frame): the number of the stack of a frame, from the thread's mark on.
PyObject* recording_stack(PyObject* self, PyObject* frame) {
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyFrame_Check(frame)) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  ThreadState bare;  // without a mark: to the top
  bare.marks.push_back(Mark{});
  return PyLong_FromLong(recording->stack_of(bare, frame_of(frame), lock));
}

PyObject* recording_halt(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  recording->running = false;
  stop_listening();
  Storages::Dead dead;
  const Lock lock(recording->mutex);
  recording->values.memory.look_at_all(now() - recording->begin, dead);
  recording->values.memory.end();
  for (auto& [thread, state] : recording->threads) {
    state->ops.clear();
    state->nodes.clear();
  }
  Py_RETURN_NONE;
}

PyObject* recording_finish(PyObject* self, PyObject*) {
  if (Recording* recording = recording_of(self)) {
    Lock lock(recording->mutex);
    const int64_t end = now();
    const c10::SmallVector<int32_t, 1> nothing;
    for (auto& [thread, state] : recording->threads) {
      end_api_call(*recording, *state, lock);
      while (!state->calls.empty()) recording->close_call(*state, nothing, recording->no_form, kUnfinished, end);
    }
  }
  Py_RETURN_NONE;
}

// rows(name, take): a stream as bytes of 64-bit numbers; with `take` it is empty afterwards.
PyObject* recording_rows(PyObject* self, PyObject* args) {
  const char* name;
  int take;
  if (!PyArg_ParseTuple(args, "sp", &name, &take)) return nullptr;
  Recording* recording = recording_of(self);
  std::vector<int64_t> out;
  Storages::Dead dead;  // freed after the mutex is given up
  if (recording != nullptr) {
    const Lock lock(recording->mutex);
    const std::string wanted = name;
    if (wanted == "ops") {
      recording->ops.append_to(out);
      if (take) recording->ops.blocks.clear();
    } else if (wanted == "calls") {
      recording->calls.append_to(out);
      if (take) recording->calls.blocks.clear();
    } else if (wanted == "values") {
      for (const ValueRow& row : recording->values.rows) {
        const int64_t numbers[] = {10, row.id, row.metadata, row.address, row.offset, row.kind,
                                   row.producer, row.previous, row.base, row.flags};
        out.insert(out.end(), std::begin(numbers), std::end(numbers));
      }
      if (take) recording->values.rows.clear();
    } else if (wanted == "plain_values") {
      for (const PlainValueRow& row : recording->values.plain_rows) {
        const int64_t numbers[] = {row.id, row.metadata, row.producer};
        out.insert(out.end(), std::begin(numbers), std::end(numbers));
      }
      if (take) recording->values.plain_rows.clear();
    } else if (wanted == "memory") {
      recording->values.memory.look_at_all(now() - recording->begin, dead);
      recording->values.memory.append_to(out);
      if (take) recording->values.memory.rows.clear();
    } else if (wanted == "stacks") {
      for (const Stacks::Node& node : recording->stacks.nodes) {
        out.push_back(node.parent);
        out.push_back(node.code);
        out.push_back(node.instruction);
      }
    } else if (wanted == "statistics") {
      recording->measurements.append_to(out);
      if (take) recording->measurements.forget_rows();
    } else if (wanted == "copies") {
      for (const Implied& one : recording->measurements.copies) {
        out.insert(out.end(), {one.value, one.from, one.bounded ? 1 : 0});
      }
    } else if (wanted == "alive") {
      for (const auto& [impl, tensor] : recording->values.known) {
        if (!tensor.ref.expired()) out.push_back(tensor.value);
      }
    }
  }
  return bytes_of(out);
}

// open_rows(): streams of the ops and calls that have begun and not ended.
PyObject* recording_open_rows(PyObject* self, PyObject*) {
  std::vector<int64_t> ops, calls;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    OpRows open_ops;
    CallRows open_calls;
    const int64_t current = now();
    for (const auto& [thread, state] : recording->threads) {
      const ApiCall& api = state->api;
      if (api.id >= 0) {
        open_ops.write(
            {api.id, api.info, api.form, recording->no_form, api.stack, api.call, -1,
             api.bits | kUnfinished << kFlagShift, -1, -1, api.start - recording->begin, 0},
            api.inputs.data(), api.inputs.size(), nullptr, 0);
      }
      for (const OpenCall& call : state->calls) {
        open_calls.write(
            {call.id, call.module, call.parent, state->marks[call.mark].above, call.bits | kUnfinished << kFlagShift,
             call.input_form, recording->no_form, call.start - recording->begin,
             current - call.start - (state->spent - call.spent), kNoEnd},
            call.inputs, c10::SmallVector<int32_t, 1>());
      }
    }
    open_ops.append_to(ops);
    open_calls.append_to(calls);
  }
  Owned first(bytes_of(ops)), second(bytes_of(calls));
  return PyTuple_Pack(2, first.get(), second.get());
}

// counters(): numbers written to ops and calls so far, what is open, threads, faults that Python does not know of.
PyObject* recording_counters(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return Py_BuildValue("(iiiii)", 0, 0, 0, 0, 0);
  const Lock lock(recording->mutex);
  size_t open = 0;
  for (const auto& [thread, state] : recording->threads) open += state->calls.size() + (state->api.id >= 0);
  return Py_BuildValue(
      "(nnnni)", recording->ops.blocks.written(), recording->calls.blocks.written(), open,
      static_cast<Py_ssize_t>(recording->threads.size()), recording->faults.load());
}

PyObject* recording_next_id(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(0);
  Lock lock(recording->mutex);
  if (ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording)) {
    end_api_call(*recording, *state, lock);
  }
  return PyLong_FromLong(recording->next_id++);
}

// find(tensor): its current value, or -1.
PyObject* recording_find(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  const at::TensorBase* tensor = recording->tensor_in(object);
  return PyLong_FromLong(tensor == nullptr ? -1 : recording->values.find(tensor->unsafeGetTensorImpl()));
}

// known_all(tensors): the current value of each in a list, or None.
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
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t at = 0; found != nullptr && at < values.size(); ++at) {
    PyObject* value = values[at] < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(values[at]);
    PyList_SET_ITEM(found, static_cast<Py_ssize_t>(at), value);
  }
  return found;
}

// value(tensor): its current value; one never seen before is explained by the host.
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
          {reinterpret_cast<int64_t>(storage), storage ? tensor->storage_offset() : 0, id, metadata, -1, -1, -1,
           static_cast<int16_t>(kind), static_cast<int16_t>(tensor->requires_grad())});
      recording->values.know(*tensor, id);
      added.back().first = id;
      if (!impl->has_storage()) continue;
      const c10::SymInt bytes = impl->unsafe_storage().sym_nbytes();
      if (!bytes.is_heap_allocated()) added.back().second = bytes.as_int_unchecked();
    }
  }
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(added.size()));
  for (size_t at = 0; found != nullptr && at < added.size(); ++at) {
    PyList_SET_ITEM(found, static_cast<Py_ssize_t>(at), Py_BuildValue("iL", added[at].first, static_cast<long long>(added[at].second)));
  }
  return found;
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
  std::vector<std::pair<int32_t, at::Tensor>> found;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    for (const auto& [impl, tensor] : recording->values.known) {
      auto alive = tensor.ref.lock();
      if (alive) found.emplace_back(tensor.value, at::Tensor(std::move(alive)));
    }
  }
  PyObject* list = PyList_New(0);
  for (const auto& [value, tensor] : found) {
    Owned pair(Py_BuildValue("(iN)", value, THPVariable_Wrap(tensor)));
    if (list == nullptr || !pair || PyList_Append(list, pair.get()) < 0) return nullptr;
  }
  return list;
}

// observe(ops, api, calls): which events observers get.
PyObject* recording_observe(PyObject* self, PyObject* args) {
  int ops, api, calls;
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyArg_ParseTuple(args, "ppp", &ops, &api, &calls)) return nullptr;
  recording->observes_ops = ops != 0;
  recording->observes_api = api != 0;
  recording->observes_calls = calls != 0;
  Py_RETURN_NONE;
}

// context(): the modules whose calls are open on this thread, outermost first, and the phase of its ops.
PyObject* recording_context(PyObject* self, PyObject*) {
  std::vector<int32_t> modules;
  int phase = kForward;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    if (ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording)) {
      for (const OpenCall& call : state->calls) modules.push_back(call.module);
      phase = state->phase;
    }
  }
  return Py_BuildValue("(Ni)", python_numbers(modules.data(), modules.size()), phase);
}

// begin_step(frame, closure): an optimizer steps, called by `frame`; it may call a function of the code `closure`.
PyObject* recording_begin_step(PyObject* self, PyObject* args) {
  PyObject *frame, *closure;
  if (!PyArg_ParseTuple(args, "O!O", &PyFrame_Type, &frame, &closure)) return nullptr;
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  Storages::Dead dead;  // freed after the mutex is given up
  Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr) Py_RETURN_NONE;
  end_api_call(*recording, *state, lock);
  recording->values.memory.look_at_all(now() - recording->begin, dead);
  const int32_t above = recording->stack_of(*state, frame_of(frame), lock);
  const auto* code = PyCode_Check(closure) ? reinterpret_cast<PyCodeObject*>(closure) : nullptr;
  state->marks.push_back(
      {frame_of(frame), frame_of(frame)->previous, nullptr, above, state->top().call, true, state->phase, code});
  state->phase = kOptimizer;
  Py_RETURN_NONE;
}

// end_step(): it has stepped.
PyObject* recording_end_step(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  Storages::Dead dead;  // freed after the mutex is given up
  Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr) Py_RETURN_NONE;
  end_api_call(*recording, *state, lock);
  recording->values.memory.look_at_all(now() - recording->begin, dead);
  if (state->top().optimizer) recording->pop_mark(*state);
  Py_RETURN_NONE;
}

// exclude_time(nanoseconds): do not count so much of what is open on this thread.
PyObject* recording_exclude_time(PyObject* self, PyObject* nanoseconds) {
  const int64_t taken = PyLong_AsLongLong(nanoseconds);
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  const Lock lock(recording->mutex);
  const auto found = recording->threads.find(this_thread());
  if (found != recording->threads.end()) found->second->spent += taken;
  Py_RETURN_NONE;
}

// enter_region(info, form, inputs, frame): compiled code begins, called from `frame`.
PyObject* recording_enter_region(PyObject* self, PyObject* args) {
  int info, form;
  PyObject *inputs, *frame;
  if (!PyArg_ParseTuple(args, "iiO!O", &info, &form, &PyList_Type, &inputs, &frame)) return nullptr;
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr || state->region.id >= 0) Py_RETURN_NONE;
  end_api_call(*recording, *state, lock);
  listen_to_nodes(reinterpret_cast<RecordingObject*>(self)->slot);
  const int32_t stack = PyFrame_Check(frame) ? recording->stack_of(*state, frame_of(frame), lock) : -1;
  state->region = {recording->next_id++, info, form, stack, now(), nullptr, {}, state->spent};
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(inputs); ++at) {
    state->region.inputs.push_back(static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(inputs, at))));
  }
  Py_RETURN_NONE;
}

// leave_region(): it has ended; the number of its op, or -1.
PyObject* recording_leave_region(PyObject* self, PyObject*) {
  const int64_t end = now();
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr || state->region.id < 0) return PyLong_FromLong(-1);
  return PyLong_FromLong(end_region(*recording, *state, -1, end));
}

// fail(codes): an exception has passed functions of these codes; whether an API call that is open is among them.
PyObject* recording_fail(PyObject* self, PyObject* codes) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_FALSE;
  const Lock lock(recording->mutex);
  for (auto& [thread, state] : recording->threads) {
    ApiCall& api = state->api;
    if (api.id < 0 || !api.python || api.inside.empty()) continue;
    if (PySet_Contains(codes, reinterpret_cast<PyObject*>(api.inside[0].code)) != 1) continue;
    api.bits |= kRaised << kFlagShift;
    recording->raised_stack = api.stack;
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

PyObject* recording_raised(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  return PyLong_FromLong(recording == nullptr ? -1 : recording->raised_stack);
}

// release(): forget everything, and let another recording have the slot.
PyObject* recording_release(PyObject* self, PyObject*) {
  if (Recording* recording = recording_of(self)) {
    Storages gone;  // freed after the mutex is given up
    const Lock lock(recording->mutex);
    std::swap(gone, recording->values.memory);
    let_go(*recording);
    recording->serial = 0;
  }
  Py_RETURN_NONE;
}

const PyMethodDef own_methods[] = {
    {"release", recording_release, METH_NOARGS, "release(): forget everything."},
    {"start", recording_start, METH_VARARGS, "start(frame, above): record on this thread."},
    {"halt", recording_halt, METH_NOARGS, "halt(): record nothing more."},
    {"finish", recording_finish, METH_NOARGS, "finish(): close what is open."},
    {"listen_to_nodes", recording_listen_to_nodes, METH_NOARGS, "listen_to_nodes(): see compiled backward passes."},
    {"stack", recording_stack, METH_O, "stack(frame): the number of its stack."},
    {"rows", recording_rows, METH_VARARGS, "rows(name, take): a stream of numbers."},
    {"open_rows", recording_open_rows, METH_NOARGS, "open_rows(): rows of what has not ended."},
    {"counters", recording_counters, METH_NOARGS, "counters(): how much was written."},
    {"next_id", recording_next_id, METH_NOARGS, "next_id(): a number in the order of ops and calls."},
    {"find", recording_find, METH_O, "find(tensor): its value, or -1."},
    {"find_all", recording_find_all, METH_O, "find_all(tensors): the value of each, or None."},
    {"value", recording_value, METH_O, "value(tensor): its value, a new one if it has none."},
    {"forget", recording_forget, METH_O, "forget(tensor): its value, which it no longer has."},
    {"rebind", recording_rebind, METH_VARARGS, "rebind(tensor, value): the tensor has this value from now on."},
    {"find_storage", recording_find_storage, METH_O, "find_storage(tensor): the newest value in its storage, or -1."},
    {"add_all", recording_add_all, METH_VARARGS, "add_all(tensors, kind): a new value of each, and the bytes of its storage."},
    {"type_kind", recording_type_kind, METH_VARARGS, "type_kind(type, kind): how its objects are read."},
    {"live_tensors", recording_live_tensors, METH_NOARGS, "live_tensors(): values of the tensors that are still alive."},
    {"observe", recording_observe, METH_VARARGS, "observe(ops, api, calls): which events observers get."},
    {"context", recording_context, METH_NOARGS, "context(): modules whose calls are open here, and the phase."},
    {"begin_step", recording_begin_step, METH_VARARGS, "begin_step(frame, closure): an optimizer steps."},
    {"end_step", recording_end_step, METH_NOARGS, "end_step(): it has stepped."},
    {"exclude_time", recording_exclude_time, METH_O, "exclude_time(nanoseconds): do not count them in what is open on this thread."},
    {"enter_region", recording_enter_region, METH_VARARGS, "enter_region(info, form, inputs, frame)"},
    {"leave_region", recording_leave_region, METH_NOARGS, "leave_region(): the number of its op, or -1."},
    {"fail", recording_fail, METH_O, "fail(codes): an exception has passed these."},
    {"raised", recording_raised, METH_NOARGS, "raised(): the stack of the last op that raised, or -1."}};


// All methods, with the empty one that ends them; they stay where they are, since the type refers to them.
PyMethodDef* recording_methods() {
  static std::vector<PyMethodDef> all = [] {
    std::vector<PyMethodDef> methods(std::begin(own_methods), std::end(own_methods));
    const std::vector<PyMethodDef> more = measurement_methods();
    methods.insert(methods.end(), more.begin(), more.end());
    methods.push_back({nullptr, nullptr, 0, nullptr});
    return methods;
  }();
  return all.data();
}

PyTypeObject* recording_type = nullptr;
PyType_Slot recording_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(recording_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(recording_dealloc)},
    {Py_tp_methods, recording_methods()},
    {Py_tp_doc, const_cast<char*>("One recording of the native engine.")},
    {0, nullptr}};
PyType_Spec recording_spec = {"sightline.recording.native._observer.Recording", sizeof(RecordingObject), 0,
                              Py_TPFLAGS_DEFAULT, recording_slots};

// In a forked child: nothing records, and no mutex is held by a thread that does not exist there.
PyObject* after_fork(PyObject*, PyObject*) {
  for (Recording& recording : slots) {
    recording.running = false;
    new (&recording.mutex) std::mutex();
  }
  Py_RETURN_NONE;
}

PyObject* address_at(PyObject*, PyObject* args) {
  PyObject* object;
  Py_ssize_t offset;
  if (!PyArg_ParseTuple(args, "On", &object, &offset)) return nullptr;
  return PyLong_FromVoidPtr(*reinterpret_cast<void**>(reinterpret_cast<char*>(object) + offset));
}

PyObject* scalar_type_name(PyObject*, PyObject* number) {
  return PyUnicode_FromString(c10::toString(static_cast<c10::ScalarType>(PyLong_AsLong(number))));
}

// mute(on): what this thread runs from now on is not recorded, until it is called as often with False.
PyObject* mute(PyObject*, PyObject* on) {
  WithGil::silent += PyObject_IsTrue(on) == 1 ? 1 : -1;
  Py_RETURN_NONE;
}

// What stands in for Dynamo's `set_eval_frame`. It has to be written in C: Dynamo puts its callback back when a Python
// function returns that was entered with it on.
PyObject* watched_set_eval_frame(PyObject* watch, PyObject* callback) {
  PyObject* before = PyTuple_GET_ITEM(watch, 1);
  PyObject* after = PyTuple_GET_ITEM(watch, 2);
  if (PyCallable_Check(callback)) {
    Owned seen(PyObject_CallNoArgs(before));
    if (!seen) return nullptr;
  }
  PyObject* prior = PyObject_CallOneArg(PyTuple_GET_ITEM(watch, 0), callback);
  if (prior != nullptr && !PyCallable_Check(callback)) {
    Owned seen(PyObject_CallNoArgs(after));
    if (!seen) Py_CLEAR(prior);
  }
  return prior;
}

PyMethodDef watched_definition = {"set_eval_frame", watched_set_eval_frame, METH_O, "Dynamo's, watched."};

// watch_eval_frame(real, before, after): a function that calls all three, as a region begins and ends.
PyObject* watch_eval_frame(PyObject*, PyObject* args) {
  PyObject *real, *before, *after;
  if (!PyArg_ParseTuple(args, "OOO", &real, &before, &after)) return nullptr;
  return PyCFunction_New(&watched_definition, args);
}

PyMethodDef module_methods[] = {
    {"watch_eval_frame", watch_eval_frame, METH_VARARGS, "A stand-in for Dynamo's set_eval_frame."},
    {"mute", mute, METH_O, "Whether what this thread runs is recorded."},
    {"scalar_type_name", scalar_type_name, METH_O, "What C++ calls the dtype of a number."},
    {"enter_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter_module)), METH_FASTCALL,
     "A global forward pre-hook."},
    {"leave_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave_module)), METH_FASTCALL,
     "A global forward hook."},
    {"crc32", crc32, METH_O, "What zlib.crc32 gives for the same bytes."},
    {"after_fork", after_fork, METH_NOARGS, "Forget everything, in a forked child."},
    {"delay_termination", delay_termination, METH_O, "SIGTERM ends the process so many seconds later."},
    {"restore_termination", restore_termination, METH_NOARGS, "SIGTERM as it was."},
    {"address_at", address_at, METH_VARARGS, "The address an object holds so many bytes into itself."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_observer", "The native engine.", -1, module_methods,
                                 nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace sightline

PyMODINIT_FUNC PyInit__observer() {
  using namespace sightline;
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  recording_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&recording_spec));
  if (recording_type == nullptr || PyModule_AddObject(module, "Recording", reinterpret_cast<PyObject*>(recording_type)) < 0) {
    return nullptr;
  }
  PyModule_AddIntConstant(module, "OBJECT_HEAD", static_cast<long>(sizeof(PyObject)));
  return module;
}
