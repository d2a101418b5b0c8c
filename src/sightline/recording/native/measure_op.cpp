#include "measure_op.h"

#include "observers.h"
#include "python_values.h"

namespace sightline {
namespace {

// The first tensor an op was given; null if there is none.
const at::TensorBase* first_tensor(const OpenOp& op) {
  if (op.given.empty() || !op.given[0].isTensor() || !op.given[0].toTensor().defined()) return nullptr;
  return &op.given[0].toTensor();
}

const void* memory_of(const at::TensorBase& tensor) { return storage_of(tensor.unsafeGetTensorImpl()); }

bool is_rewritten(const Measurements& found, const at::TensorBase& tensor) {
  return !found.rewritten.empty() && found.rewritten.find(memory_of(tensor)) != found.rewritten.end();
}

// What was changed through a view has a new version, which nobody has looked at.
void note_rewritten(Measurements& found, const Results& results) {
  for (const auto& [tensor, value] : results.changed) {
    if (tensor.is_view() && memory_of(tensor) != nullptr) found.rewritten.insert(memory_of(tensor));
  }
}

bool is_parameter(const Recording& recording, const at::TensorBase& tensor) {
  PyObject* object = object_in(tensor);
  return object != nullptr && Py_TYPE(object) == recording.measurements.parameter_type;
}

void measure_on_device(Recording& recording, const at::TensorBase& tensor, int32_t value, Lock& lock) {
  ++recording.measurements.devices;
  ask(lock, [&] {  // the alias is let go of with the GIL: it has a Python object
    const at::Tensor alias = alias_of(tensor);
    Owned told(PyObject_CallMethod(recording.host, "measure_on_device", "iN", value, THPVariable_Wrap(alias)));
    if (!told) recording.fault();
  });
}

// Look at a tensor, if nobody has: take its numbers, or only see whether it is finite.
void take(Recording& recording, const at::TensorBase& tensor, int32_t value, bool numbers, Lock& lock) {
  Measurements& found = recording.measurements;
  if (value < 0 || !is_measurable(tensor) || !found.first_time(value)) return;
  if (!tensor.is_cpu()) {
    measure_on_device(recording, tensor, value, lock);
  } else if (numbers) {
    found.add(value, read_numbers(tensor, found.depth == Measurements::kFingerprints));
  } else if (!is_finite(tensor)) {
    found.add(value, read_numbers(tensor, false));
  }
}

void take_all(Recording& recording, const Results& results, bool numbers, Lock& lock) {
  for (const auto& [tensor, value] : results.returned) take(recording, *tensor, value, numbers, lock);
  for (const auto& [tensor, value] : results.changed) take(recording, tensor, value, numbers, lock);
}

// What an op was given, tensor by tensor with its value, as far as it is known.
template <class Visit>
void each_input(Recording& recording, const OpenOp& op, Visit visit) {
  Arguments given;
  for (const c10::IValue& value : op.given) read(value, given);
  for (const at::TensorBase* tensor : given.tensors) {
    visit(*tensor, recording.values.find(tensor->unsafeGetTensorImpl()));
  }
}

// -- statistics ------------------------------------------------------------------------------------------------------

bool is_chosen(const Recording& recording, const ThreadState& state, const Measured& kind) {
  const Measurements& found = recording.measurements;
  if (!kind.chosen) return false;
  if (!found.some_modules) return true;
  if (state.calls.empty()) return false;
  const auto module = static_cast<size_t>(state.calls.back().module);
  return module < found.modules.size() && found.modules[module];
}

// A view of all elements has the numbers of its base. It is read only if the base has changed through another view, or
// for its fingerprint where the order is another: not of a parameter, nor if it shows elements more than once.
bool is_read(const Recording& recording, const OpenOp& op, const at::TensorBase& view) {
  const Measurements& found = recording.measurements;
  if (is_rewritten(found, view)) return true;
  if (!found.views || op.traits->measured.keeps_order || !has_plain_sizes(view.unsafeGetTensorImpl())) return false;
  const at::TensorBase* given = first_tensor(op);
  if (given != nullptr) {
    const at::TensorBase& base = given->is_view() ? given->_base() : *given;
    if (!found.parameters && is_parameter(recording, base)) return false;
  }
  for (int64_t dim = 0; dim < view.dim(); ++dim) {
    if (view.stride(dim) == 0 && view.size(dim) > 1) return false;
  }
  return true;
}

void share_numbers(Measurements& found, int32_t base, int32_t view) {
  if (base == view || !found.known(base) || !found.first_time(view)) return;
  const auto odd = found.odd.find(base);
  if (odd != found.odd.end()) found.odd[view] = std::pair(odd->second);
}

void take_numbers(Recording& recording, const OpenOp& op, const Results& results, Lock& lock) {
  Measurements& found = recording.measurements;
  if (op.traits->measured.relabels && results.returned.size() == 1 && !is_read(recording, op, *results.returned[0].first)) {
    if (!op.inputs.empty()) share_numbers(found, op.inputs[0], results.returned[0].second);
    return;
  }
  const size_t odd = found.odd.size();
  take_all(recording, results, true, lock);
  if (!results.changed.empty()) {
    note_rewritten(found, results);
  } else if (found.odd.size() > odd) {  // a parameter, or what was made before the block, may explain it
    each_input(recording, op, [&](const at::TensorBase& tensor, int32_t value) {
      if (tensor.is_view()) {
        const at::TensorBase& base = tensor._base();
        take(recording, base, recording.values.find(base.unsafeGetTensorImpl()), true, lock);
      }
      take(recording, tensor, value, true, lock);
    });
  }
}

// -- the check -------------------------------------------------------------------------------------------------------

// Whether a result holds the elements of what was looked at and is finite, none of them out of range.
bool is_a_copy(Recording& recording, const OpenOp& op, const Results& results) {
  Measurements& found = recording.measurements;
  const at::TensorBase* source = first_tensor(op);
  if (op.inputs.size() != 1 || source == nullptr || results.returned.size() != 1) return false;
  const auto& [result, value] = results.returned[0];
  const int32_t from = op.inputs[0];
  if (!found.known(from) || found.odd.find(from) != found.odd.end() || source->device() != result->device()) return false;
  if (!holds(result->scalar_type(), source->scalar_type()) || is_rewritten(found, *source)) return false;
  if (found.first_time(value)) found.copies.emplace_back(value, from);
  ++found.checked;
  return true;
}

// Look at what nobody has looked at: what compiled code has made is among it.
bool look_at_regions(Recording& recording, const OpenOp& op, Lock& lock) {
  bool odd = false;
  Measurements& found = recording.measurements;
  each_input(recording, op, [&](const at::TensorBase& tensor, int32_t value) {
    if (value < 0 || found.known(value)) return;
    take(recording, tensor, value, false, lock);
    odd |= found.odd.find(value) != found.odd.end();
  });
  return odd;
}

bool check(Recording& recording, const OpenOp& op, const Results& results, Lock& lock) {
  Measurements& found = recording.measurements;
  const Measured& kind = op.traits->measured;
  bool tell = recording.last_region >= 0 && look_at_regions(recording, op, lock);
  bool had_any = false, had_nan = false;
  for (const int32_t value : op.inputs) {
    const auto odd = found.odd.find(value);
    if (odd == found.odd.end()) continue;
    had_any = true;
    had_nan |= odd->second.first != 0;
  }
  const bool view_of_fine = op.traits->aliases >= 0 && !kind.maybe_view && !had_any;
  if (view_of_fine || (kind.copies && is_a_copy(recording, op, results))) return tell;
  note_rewritten(found, results);
  take_all(recording, results, false, lock);
  const auto count = [&](const at::TensorBase& tensor, int32_t value) {
    if (!is_measurable(tensor)) return;
    ++found.checked;
    const auto odd = found.odd.find(value);
    if (odd == found.odd.end()) return;
    tell |= (odd->second.first != 0 && !had_nan) || (odd->second.second != 0 && !had_any);
  };
  for (const auto& [tensor, value] : results.returned) count(*tensor, value);
  const bool returns_it = results.returned.size() == 1 && results.changed.size() == 1;
  for (const auto& [tensor, value] : results.changed) {
    if (!returns_it || value != results.returned[0].second) count(tensor, value);
  }
  return tell;
}

}  // namespace

bool measure_op(Recording& recording, const ThreadState& state, const OpenOp& op, const Results& results, Lock& lock) {
  const Measurements& found = recording.measurements;
  const Measured& kind = op.traits->measured;
  if (kind.uninitialized) return false;
  if (found.depth != Measurements::kNothing && is_chosen(recording, state, kind)) {
    take_numbers(recording, op, results, lock);
  }
  return found.checks && check(recording, op, results, lock) && found.tells;
}

bool has_new_inputs(Recording& recording, const OpenCall& call) {
  Measurements& found = recording.measurements;
  if (found.depth == Measurements::kNothing) return false;
  const auto module = static_cast<size_t>(call.module);
  if (found.some_modules && (module >= found.modules.size() || !found.modules[module])) return false;
  return found.parameters || std::any_of(call.inputs.begin(), call.inputs.end(), [&](int32_t value) {
    return value >= 0 && !found.known(value);
  });
}

bool is_checkpoint(const Recording& recording, const Ids& outputs) {
  const Measurements& found = recording.measurements;
  if (!found.checks || !found.tells) return false;
  if (found.devices != 0) return true;
  return recording.last_region >= 0 && std::any_of(outputs.begin(), outputs.end(), [&](int32_t value) {
    return value >= 0 && !found.known(value);
  });
}

}  // namespace sightline
