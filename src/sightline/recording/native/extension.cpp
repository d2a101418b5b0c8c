// The Python type around a recording, and the functions of the extension.
#include "api_calls.h"
#include "checksum.h"
#include "module_calls.h"
#include "python_values.h"
#include "recording_methods.h"
#include "recording_object.h"
#include "termination.h"

namespace sightline {
namespace {

uint64_t next_serial = 1;

// Free everything now, or when the slot is needed: a call may still be inside the recording.
void release(Recording& recording) {
  if (recording.visitors.load() != 0) {
    if (!recording.left) Py_INCREF(recording.session);  // a call that is inside may use it again
    recording.left = true;
    return;
  }
  recording.clear();
  if (recording.left) Py_DECREF(recording.session);
  recording.left = false;
  recording.session = nullptr;
}

// Recording(session, level, begin, no_form, one_tensor, tensor_offset, kwargs_slot)
PyObject* recording_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* session;
  const char* level;
  long long begin;
  int no_form, one_tensor;
  Py_ssize_t tensor_offset, kwargs_slot;
  if (!PyArg_ParseTuple(
          args, "OsLiinn", &session, &level, &begin, &no_form, &one_tensor, &tensor_offset, &kwargs_slot)) {
    return nullptr;
  }
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Recording& recording = slots[slot];
    if (recording.left) {
      const Lock lock(recording.mutex);
      release(recording);
    }
    if (recording.session != nullptr) continue;
    auto* self = reinterpret_cast<RecordingObject*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    const Lock lock(recording.mutex);
    recording.clear();
    recording.session = session;
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
    release(*recording);
  }
  Py_TYPE(self)->tp_free(self);
}

// start(frame, stack): record on this thread; `stack` is that of `frame`, which stays where it is.
PyObject* recording_start(PyObject* self, PyObject* args) {
  PyObject* frame;
  int stack;
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyArg_ParseTuple(args, "Oi", &frame, &stack)) return nullptr;
  const auto slot = reinterpret_cast<RecordingObject*>(self)->slot;
  {
    const Lock lock(recording->mutex);
    recording->owner = this_thread();
    ThreadState* state = state_of(slot, *recording);
    if (PyFrame_Check(frame)) {
      Py_INCREF(frame);  // until the end: the frame's address alone may mean another by then
      state->anchors[0] = {frame_of(frame), nullptr, reinterpret_cast<PyFrameObject*>(frame), stack, -1, false};
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

// stack(frame): the number of the stack of a frame, from the thread's anchor on.
PyObject* recording_stack(PyObject* self, PyObject* frame) {
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyFrame_Check(frame)) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  ThreadState bare;  // without an anchor: to the top
  bare.anchors.push_back(StackAnchor{});
  return PyLong_FromLong(recording->stack_of(bare, frame_of(frame), lock));
}

PyObject* recording_halt(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  recording->running = false;
  stop_listening();
  Storages::Dead dead;
  const Lock lock(recording->mutex);
  recording->values.memory.examine_all(now() - recording->begin, dead);
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

PyObject* recording_next_id(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(0);
  Lock lock(recording->mutex);
  if (ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording)) {
    end_api_call(*recording, *state, lock);
  }
  return PyLong_FromLong(recording->next_id++);
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

// Act on this thread's state between two ops, once the storages they have freed are written.
template <class Act>
PyObject* between_ops(PyObject* self, Act act) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  Storages::Dead dead;  // freed after the mutex is given up
  Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr) Py_RETURN_NONE;
  end_api_call(*recording, *state, lock);
  recording->values.memory.examine_all(now() - recording->begin, dead);
  act(*recording, *state, lock);
  Py_RETURN_NONE;
}

// begin_step(frame, closure): an optimizer steps, called by `frame`; it may call a function of the code `closure`.
PyObject* recording_begin_step(PyObject* self, PyObject* args) {
  PyObject *frame, *closure;
  if (!PyArg_ParseTuple(args, "O!O", &PyFrame_Type, &frame, &closure)) return nullptr;
  return between_ops(self, [&](Recording& recording, ThreadState& state, Lock& lock) {
    const int32_t stack = recording.stack_of(state, frame_of(frame), lock);
    const auto* code = PyCode_Check(closure) ? reinterpret_cast<PyCodeObject*>(closure) : nullptr;
    state.anchors.push_back(
        {frame_of(frame), frame_of(frame)->previous, nullptr, stack, state.top().call, true, state.phase, code});
    state.phase = kOptimizer;
  });
}

// end_step(): it has stepped.
PyObject* recording_end_step(PyObject* self, PyObject*) {
  return between_ops(self, [](Recording& recording, ThreadState& state, Lock&) {
    if (state.top().optimizer) recording.pop_anchor(state);
  });
}

// exclude_time(nanoseconds): leave them out of the durations of the ops and calls open on this thread.
PyObject* recording_exclude_time(PyObject* self, PyObject* nanoseconds) {
  const int64_t taken = PyLong_AsLongLong(nanoseconds);
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  const Lock lock(recording->mutex);
  const auto found = recording->threads.find(this_thread());
  if (found != recording->threads.end()) found->second->spent += taken;
  Py_RETURN_NONE;
}

// enter_region(info, form, inputs, frame): compiled code begins, called from `frame`; the number of its op and its
// stack, or None where nothing begins.
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
  return Py_BuildValue("(ii)", state->region.id, stack);
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
    release(*recording);
    recording->serial = 0;
  }
  Py_RETURN_NONE;
}

const PyMethodDef own_methods[] = {
    {"release", recording_release, METH_NOARGS, "release(): forget everything."},
    {"start", recording_start, METH_VARARGS, "start(frame, stack): record on this thread."},
    {"halt", recording_halt, METH_NOARGS, "halt(): record nothing more."},
    {"finish", recording_finish, METH_NOARGS, "finish(): close the open calls."},
    {"listen_to_nodes", recording_listen_to_nodes, METH_NOARGS, "listen_to_nodes(): see compiled backward passes."},
    {"stack", recording_stack, METH_O, "stack(frame): the number of its stack."},
    {"next_id", recording_next_id, METH_NOARGS, "next_id(): a number in the order of ops and calls."},
    {"observe", recording_observe, METH_VARARGS, "observe(ops, api, calls): which events observers get."},
    {"context", recording_context, METH_NOARGS, "context(): modules whose calls are open here, and the phase."},
    {"begin_step", recording_begin_step, METH_VARARGS, "begin_step(frame, closure): an optimizer steps."},
    {"end_step", recording_end_step, METH_NOARGS, "end_step(): it has stepped."},
    {"exclude_time", recording_exclude_time, METH_O, "exclude_time(nanoseconds): leave them out of the open durations of this thread."},
    {"enter_region", recording_enter_region, METH_VARARGS, "enter_region(info, form, inputs, frame)"},
    {"leave_region", recording_leave_region, METH_NOARGS, "leave_region(): the number of its op, or -1."},
    {"fail", recording_fail, METH_O, "fail(codes): an exception has passed these."},
    {"raised", recording_raised, METH_NOARGS, "raised(): the stack of the last op that raised, or -1."}};

// All methods, with the empty one that ends them; they stay where they are, since the type refers to them.
PyMethodDef* recording_methods() {
  static std::vector<PyMethodDef> all = [] {
    std::vector<PyMethodDef> methods(std::begin(own_methods), std::end(own_methods));
    for (const std::vector<PyMethodDef>& more : {row_methods(), value_methods(), measurement_methods()}) {
      methods.insert(methods.end(), more.begin(), more.end());
    }
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

// mute(on): record nothing of this thread from now on, until it is called as often with False.
PyObject* mute(PyObject*, PyObject* on) {
  WithGil::silent += PyObject_IsTrue(on) == 1 ? 1 : -1;
  Py_RETURN_NONE;
}

// pause_profilers(on): from the outermost on to its end no observer of ops sees this thread, as in `Unobserved`. Torch's
// Python functions do not say whether there are any: an ExecutionTraceObserver is no profiler.
PyObject* pause_profilers(PyObject*, PyObject* on) {
  thread_local int depth = 0;
  thread_local bool were_enabled = true;
  if (PyObject_IsTrue(on) == 1) {
    if (depth++ == 0) {
      were_enabled = at::isRecordFunctionEnabled();
      at::enableRecordFunction(false);
    }
  } else if (depth > 0 && --depth == 0) {
    at::enableRecordFunction(were_enabled);
  }
  Py_RETURN_NONE;
}

// The replacement of Dynamo's `set_eval_frame`. It has to be written in C: Dynamo puts its callback back when a Python
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
    {"mute", mute, METH_O, "Whether to record nothing of this thread."},
    {"pause_profilers", pause_profilers, METH_O, "Whether no observer of ops sees this thread."},
    {"scalar_type_name", scalar_type_name, METH_O, "The C++ name of the dtype with a number."},
    {"enter_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter_module)), METH_FASTCALL,
     "A global forward pre-hook."},
    {"leave_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave_module)), METH_FASTCALL,
     "A global forward hook."},
    {"crc32", crc32, METH_O, "The CRC-32 of bytes, as of zlib.crc32."},
    {"after_fork", after_fork, METH_NOARGS, "Forget everything, in a forked child."},
    {"delay_termination", delay_termination, METH_O, "SIGTERM ends the process so many seconds later."},
    {"restore_termination", restore_termination, METH_NOARGS, "SIGTERM as it was."},
    {"has_crashed", has_crashed, METH_NOARGS, "Whether a thread has crashed and waits."},
    {"written_after_crash", written_after_crash, METH_NOARGS, "The last batch of a recording is written."},
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
