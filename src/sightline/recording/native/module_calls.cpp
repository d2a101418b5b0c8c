#include "module_calls.h"

#include "api_calls.h"
#include "callbacks.h"
#include "measure_op.h"
#include "observers.h"

#include <c10/core/GradMode.h>

namespace sightline {
namespace {

// The recordings that this thread works for; module hooks are the process's, and find theirs here. How many there are.
template <class Visit>
int each_here(Visit visit) {
  int count = 0;
  const uint64_t thread = this_thread();
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Recording& recording = slots[slot];
    const Recording::Visit in(recording);
    if (!recording.running.load(std::memory_order_acquire)) continue;
    Storages::Dead dead;  // freed after the mutex is given up
    Lock lock(recording.mutex);  // its holder releases it before it asks for the GIL, which this thread has
    if (thread != recording.owner && recording.threads.find(thread) == recording.threads.end()) continue;
    ThreadState* state = state_of(slot, recording);
    const bool backward = in_backward();
    if (state == nullptr || !(state->own || backward)) continue;
    ++count;
    try {
      recording.in_backward = backward;
      visit(recording, *state, lock, dead);
    } catch (...) {  // of torch's, about a tensor that is like no other: it must not reach the interpreter
      recording.faults.fetch_add(1);
    }
  }
  return count;
}

// A module is called on a thread that no recording is of: all that run note that they miss it.
void note_elsewhere(PyObject* module) {
  for (Recording& recording : slots) {
    const Recording::Visit in(recording);
    if (!recording.running.load(std::memory_order_acquire)) continue;
    const Lock lock(recording.mutex);  // as above
    if (++recording.unrecorded_calls == 1) recording.unrecorded_module = Py_TYPE(module)->tp_name;
  }
}

PyObject* keywords_of(const Recording& recording, const Frame* frame) {
  if (recording.kwargs_slot < 0 || code_of(frame)->co_nlocalsplus <= recording.kwargs_slot) return nullptr;
  PyObject* cell = slot_of(frame, static_cast<int>(recording.kwargs_slot));
  if (cell == nullptr || !PyCell_Check(cell)) return nullptr;
  PyObject* held = PyCell_GET(cell);
  return held != nullptr && PyDict_CheckExact(held) ? held : nullptr;
}

// The flags of a call that say how the module is run. Read from its dict: an attribute may be code of the user's.
int mode_of(PyObject* module) {
  static PyObject* const name = PyUnicode_InternFromString("training");
  int mode = c10::GradMode::is_enabled() ? 0 : kNoGrad;
  Owned held(PyObject_GenericGetDict(module, nullptr));
  PyObject* training = held && PyDict_CheckExact(held.get()) ? PyDict_GetItemWithError(held.get(), name) : nullptr;
  if (training == Py_True) mode |= kTraining;
  if (training == Py_False) mode |= kEvaluation;
  if (training == nullptr) PyErr_Clear();
  return mode;
}

bool modules_only(const Recording& recording) { return !recording.wants_api && !recording.wants_aten; }

}  // namespace

PyObject* enter_module(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || WithGil::silent != 0) Py_RETURN_NONE;
  const int64_t entered = now();
  PyObject *module = given[0], *args = given[1];
  const Frame* inner = current_frame();
  Tensors parameters;  // freed after the mutex is given up
  const int here = each_here([&](Recording& recording, ThreadState& state, Lock& lock, Storages::Dead& dead) {
    if (!state.api.backward) end_api_call(recording, state, lock);
    if (state.calls.empty()) recording.values.memory.examine_all(entered - recording.begin, dead);
    // A frame that is about to call `forward` is at the place of one that has: that call ended without its hook.
    while (state.anchors.size() > 1 && state.top().is(inner)) recording.drop_anchor(state);
    const Frame* caller = inner;
    while (caller != nullptr && recording.traits_of(code_of(caller), lock)->hidden) caller = caller_of(caller);
    const int32_t stack = recording.stack_of(state, caller, lock);
    const int32_t number = recording.module_of(module, lock);
    if (number < 0) return;
    // The object that `torch.compile` returned for a module counts as that module, and calls it where it may not be compiled.
    if (!state.calls.empty() && state.calls.back().module == number && state.calls.back().object != module) return;
    OpenCall call;
    call.object = module;
    call.args = args;
    call.module = number;
    call.input_form = recording.no_form;
    recording.unexplained = modules_only(recording) && !state.calls.empty();
    recording.read_python(args, keywords_of(recording, inner), call.inputs, call.input_form, lock);
    recording.unexplained = false;
    call.anchor = state.anchors.size();
    call.parent = state.top().call;
    call.id = recording.next_id++;
    const int outer_phase = state.phase;
    if (state.phase == kOptimizer) state.phase = kForward;  // a module's work is no update, even if an optimizer calls it
    call.bits = state.number << kThreadShift | (recording.in_backward ? static_cast<int>(kBackward) : state.phase);
    call.bits |= mode_of(module) << kFlagShift;
    state.anchors.push_back({inner, inner->previous, nullptr, stack, call.id, false, outer_phase});
    call.start = now();
    call.spent = state.spent;
    const int32_t id = call.id;
    state.calls.push_back(std::move(call));
    measure_parameters(recording, module, number, parameters, lock);
    if (state.calls.empty() || state.calls.back().id != id) return;  // a callback has stopped the recording
    if (recording.observes_calls || has_new_inputs(recording, state.calls.back())) {
      const CallEvent answer{number, id, phase_of(state.calls.back()), state.calls.size() - 1, state.calls.back().input_form};
      notify_enter(recording, answer, args, keywords_of(recording, inner), lock);
    }
    if (state.calls.empty() || state.calls.back().id != id) return;  // an observer has stopped the recording
    OpenCall& open = state.calls.back();
    open.start = now();
    state.spent += open.start - entered;
    open.spent = state.spent;
  });
  if (here == 0 && !in_backward()) note_elsewhere(module);
  Py_RETURN_NONE;
}

// torch passes (module, args, kwargs, result), or after an exception (module, args, result).
PyObject* leave_module(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count < 3 || WithGil::silent != 0) Py_RETURN_NONE;
  const int64_t entered = now();
  PyObject *module = given[0], *args = given[1];
  // Made before the mutex is taken: a collection that it sets off may run code of the user's.
  Owned results(count == 4 && Py_TYPE(given[3]) != reinterpret_cast<PyTypeObject*>(THPVariableClass)
                    ? PyTuple_Pack(1, given[3])
                    : nullptr);
  each_here([&](Recording& recording, ThreadState& state, Lock& lock, Storages::Dead& dead) {
    if (!state.api.backward) end_api_call(recording, state, lock);
    size_t at = state.calls.size();
    while (at > 0 && state.calls[at - 1].object != module) --at;
    if (at == 0) return;
    const c10::SmallVector<int32_t, 1> nothing;
    while (state.calls.size() > at) recording.close_call(state, nothing, recording.no_form, kRaised, entered);
    recording.values.memory.examine_since(state.calls.back().start - recording.begin, entered - recording.begin, dead);
    const CallEvent answer{state.calls.back().module, state.calls.back().id, phase_of(state.calls.back()),
                        state.calls.size() - 1, state.calls.back().input_form};
    if (count == 3) {
      recording.close_call(state, nothing, recording.no_form, kRaised, entered);
      if (recording.observes_calls) notify_leave(recording, answer, args, nullptr, nullptr, lock);
      return;
    }
    recording.unexplained = modules_only(recording);
    if (state.calls.back().args != args) {  // a hook of the module's has replaced them
      c10::SmallVector<int32_t, 4> inputs;
      int32_t form = recording.no_form;
      recording.read_python(args, PyDict_CheckExact(given[2]) ? given[2] : nullptr, inputs, form, lock);
      state.calls.back().inputs = std::move(inputs);
      state.calls.back().input_form = form;
    }
    c10::SmallVector<int32_t, 4> outputs;
    int32_t form = recording.no_form;
    if (const at::TensorBase* tensor = recording.tensor_in(given[3])) {
      outputs.push_back(recording.value_of(*tensor, lock));
      form = recording.one_tensor;
    } else if (given[3] != Py_None && results) {
      recording.read_python(results.get(), nullptr, outputs, form, lock);
    }
    recording.unexplained = false;
    recording.close_call(state, outputs, form, 0, entered);
    if (recording.observes_calls || is_checkpoint(recording, outputs)) notify_leave(recording, answer, args, given[2], given[3], lock);
    state.spent += now() - entered;
  });
  Py_RETURN_NONE;
}

}  // namespace sightline
