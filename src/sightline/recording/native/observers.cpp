#include "observers.h"

#include "python_values.h"

namespace sightline {
namespace {

// A tensor as observers see it: an alias of it is known as the same value.
PyObject* known_object(Recording& recording, const at::TensorBase& tensor) {
  if (has_object(tensor)) return THPVariable_Wrap(tensor);
  const at::Tensor alias = alias_of(tensor);
  {
    const Lock lock(recording.mutex);
    const int32_t value = recording.values.find(tensor.unsafeGetTensorImpl());
    if (value >= 0) recording.values.know(alias, value);
  }
  return THPVariable_Wrap(alias);
}

}  // namespace

void notify_op(
    Recording& recording, const ThreadState& state, const OpenOp& op, c10::ArrayRef<c10::IValue> outputs,
    int32_t result_form, int phase, bool raised, bool nonfinite, Lock& lock) {
  const int32_t api = state.api.id >= 0 ? state.api.info : -1;
  const int32_t stack = state.stack;
  const auto node = static_cast<long long>(state.node);
  const int worker = !state.own;
  const auto wrap = [&](const at::TensorBase& tensor) { return known_object(recording, tensor); };
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(
        recording.session, "op_ended", "iiiLiiiNNNiiii", op.traits->number, op.id, stack, node, phase, api, worker,
        python_numbers(op.inputs.data(), op.inputs.size()), python_list(op.given, THPVariable_Wrap), python_list(outputs, wrap),
        op.form, result_form, static_cast<int>(raised), static_cast<int>(nonfinite)));
    if (!answer) recording.fault();
  });
}

void notify_api_call(Recording& recording, ThreadState& state, int32_t id, Lock& lock) {
  const ApiCall& api = state.api;
  PyObject* given = std::exchange(state.api.given, nullptr);
  const std::vector<WeakTensor> results = std::move(state.api.results);
  state.api.results.clear();
  const std::vector<int32_t> metadata = std::move(state.api.result_metadata);
  state.api.result_metadata.clear();
  const std::vector<int32_t> inputs = api.inputs;
  const int32_t info = api.info, stack = api.stack, form = api.form, result_form = api.result;
  const int phase = api.bits & ((1 << kFlagShift) - 1), worker = !state.own;
  const int raised = (api.bits >> kFlagShift & kRaised) != 0;
  ask(lock, [&] {
    PyObject* list = PyList_New(0);
    for (const WeakTensor& result : results) {
      auto alive = result.lock();
      if (!alive) continue;
      Owned object(known_object(recording, at::Tensor(std::move(alive))));
      if (object) PyList_Append(list, object.get());
    }
    Owned answer(PyObject_CallMethod(
        recording.session, "api_call_ended", "iiiiiNNNNiii", info, id, stack, phase, worker,
        python_numbers(inputs.data(), inputs.size()), given, list, python_numbers(metadata.data(), metadata.size()), form,
        result_form, raised));
    if (!answer) recording.fault();
  });
}

void notify_enter(Recording& recording, const CallEvent& call, PyObject* args, PyObject* kwargs, Lock& lock) {
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(
        recording.session, "module_entered", "iiiniOO", call.module, call.id, call.phase,
        static_cast<Py_ssize_t>(call.depth), call.form, args, kwargs ? kwargs : Py_None));
    if (!answer) recording.fault();
  });
}

void notify_leave(
    Recording& recording, const CallEvent& call, PyObject* args, PyObject* kwargs, PyObject* result, Lock& lock) {
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(
        recording.session, "module_left", "iiiniOOOi", call.module, call.id, call.phase,
        static_cast<Py_ssize_t>(call.depth), call.form, args, kwargs ? kwargs : Py_None, result ? result : Py_None,
        static_cast<int>(result == nullptr)));
    if (!answer) recording.fault();
  });
}

}  // namespace sightline
