#include "measure_op.h"

#include "observers.h"
#include "python_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sightline {
namespace {

// The first tensor an op was given, or null.
const at::TensorBase* first_tensor(const OpenOp& op) {
  if (op.given.empty() || !op.given[0].isTensor() || !op.given[0].toTensor().defined()) return nullptr;
  return &op.given[0].toTensor();
}

const void* memory_of(const at::TensorBase& tensor) { return storage_of(tensor.unsafeGetTensorImpl()); }

bool is_rewritten(const Measurements& measurements, const at::TensorBase& tensor) {
  return !measurements.rewritten.empty() && measurements.rewritten.find(memory_of(tensor)) != measurements.rewritten.end();
}

// A storage that was changed through a view has a new version, which has not been measured.
void note_rewritten(Measurements& measurements, const Results& results) {
  for (const auto& [tensor, value] : results.changed) {
    if (tensor.is_view() && memory_of(tensor) != nullptr) measurements.rewritten.insert(memory_of(tensor));
  }
}

bool is_parameter(const Recording& recording, const at::TensorBase& tensor) {
  PyObject* object = object_in(tensor);
  return object != nullptr && Py_TYPE(object) == recording.measurements.parameter_type;
}

using DeviceResults = c10::SmallVector<DeviceResult, 8>;

// Python measures a tensor that is nothing for the kernels here.
void measure_in_python(Recording& recording, const DeviceResult& result, Lock& lock) {
  if (!result.tensor->is_cuda()) ++recording.measurements.devices;
  ask(lock, [&] {  // the alias is released with the GIL: it has a Python object
    const at::Tensor alias = alias_of(*result.tensor);
    Owned answer(PyObject_CallMethod(recording.session, "measure_on_device", "iN", result.value, THPVariable_Wrap(alias)));
    if (!answer) recording.fault();
  });
}

// Have Python make the kernel, table or weights that tensors like this lack.
void prepare_device(Recording& recording, const at::TensorBase& tensor, bool many, Lock& lock) {
  const int device = tensor.device().index(), dtype = static_cast<int>(tensor.scalar_type());
  const auto bytes = static_cast<long long>(tensor.nbytes());
  void* stream;
  if (!DeviceTables::current_stream(device, stream)) return;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.session, "prepare_device", "iKiiL", device, stream, dtype, many, bytes));
    if (!answer) recording.fault();
  });
}

DeviceTables::Outcome launch(Recording& recording, const DeviceResult* results, size_t count, size_t& done, Lock& lock) {
  DeviceTables& tables = recording.measurements.tables;
  const DeviceTables::Outcome outcome = tables.launch(results, count, done);
  if (outcome != DeviceTables::kMissing) return outcome;
  const auto* largest = std::max_element(results, results + count, [](const auto& one, const auto& other) {
    return one.tensor->nbytes() < other.tensor->nbytes();
  });
  prepare_device(recording, *largest->tensor, count > 1, lock);
  return tables.launch(results, count, done);
}

// A tensor with gaps, or in another order than a fingerprint's, is copied first; no observer sees that copy.
DeviceTables::Outcome measure_copy(Recording& recording, const DeviceResult& result, Lock& lock) {
  const at::TensorBase& tensor = *result.tensor;
  if (tensor.is_neg() || tensor.is_complex() || tensor.is_contiguous()) return DeviceTables::kUnfit;
  try {
    const Unobserved unobserved;
    const at::Tensor copy = at::Tensor(tensor).contiguous();
    if (!recording.measurements.tables.fits(copy)) return DeviceTables::kUnfit;
    size_t done;
    const DeviceResult copied{&copy, result.value};
    return launch(recording, &copied, 1, done, lock);
  } catch (const std::exception&) {  // out of memory: Python says so
    return DeviceTables::kUnfit;
  }
}

// A list of tensors has to be copied to the device first, which takes longer than a few launches.
constexpr size_t kMany = 4;

// Tensors on devices, those alike by one launch.
void measure_on_devices(Recording& recording, DeviceResults& results, Lock& lock) {
  DeviceTables& tables = recording.measurements.tables;
  const auto is_alike = [&](const DeviceResult& one, const DeviceResult& other) {
    return one.tensor->scalar_type() == other.tensor->scalar_type() && one.tensor->device() == other.tensor->device();
  };
  for (size_t at = 0; at < results.size();) {
    size_t end = at, done = 0;
    while (end < results.size() && is_alike(results[at], results[end]) && tables.fits(*results[end].tensor)) ++end;
    if (end - at < kMany) end = std::min(end, at + 1);
    DeviceTables::Outcome outcome = DeviceTables::kUnfit;
    if (end == at && results[at].tensor->is_cuda()) {
      outcome = measure_copy(recording, results[at], lock);
      done = 1;
    } else if (end > at) {
      outcome = launch(recording, &results[at], end - at, done, lock);
    }
    if (outcome == DeviceTables::kMeasured) {
      at += done;
    } else {
      measure_in_python(recording, results[at++], lock);
    }
  }
}

// Measure a tensor once: take its numbers, or only check that it is finite. One on a device is measured there.
void take(Recording& recording, const at::TensorBase& tensor, int32_t value, bool numbers, DeviceResults& later) {
  Measurements& measurements = recording.measurements;
  if (value < 0 || !is_measurable(tensor) || !measurements.first_time(value)) return;
  if (!tensor.is_cpu()) {
    later.push_back({&tensor, value});
  } else if (numbers) {
    measurements.add(value, read_numbers(tensor, measurements.depth == Measurements::kFingerprints));
  } else if (!is_finite(tensor)) {
    measurements.add(value, read_numbers(tensor, false));
  }
}

void take_all(Recording& recording, const Results& results, bool numbers, Lock& lock) {
  DeviceResults later;
  for (const auto& [tensor, value] : results.returned) take(recording, *tensor, value, numbers, later);
  for (const auto& [tensor, value] : results.changed) take(recording, tensor, value, numbers, later);
  if (!later.empty()) measure_on_devices(recording, later, lock);
}

// Call a function with each tensor argument of an op and its value, where that is known.
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
  const Measurements& measurements = recording.measurements;
  if (!kind.chosen) return false;
  if (!measurements.some_modules) return true;
  return !state.calls.empty() && measurements.includes(state.calls.back().module);
}

// A view of all elements has the numbers of its base. It is read only if the base has changed through another view, or
// for its fingerprint where the order is another: not of a parameter, nor if it shows elements more than once.
bool is_read(const Recording& recording, const OpenOp& op, const at::TensorBase& view) {
  const Measurements& measurements = recording.measurements;
  if (is_rewritten(measurements, view)) return true;
  if (!measurements.views || op.traits->measured.keeps_order || !has_plain_sizes(view.unsafeGetTensorImpl())) return false;
  const at::TensorBase* given = first_tensor(op);
  if (given != nullptr) {
    const at::TensorBase& base = given->is_view() ? given->_base() : *given;
    if (!measurements.parameters && is_parameter(recording, base)) return false;
  }
  for (int64_t dim = 0; dim < view.dim(); ++dim) {
    if (view.stride(dim) == 0 && view.size(dim) > 1) return false;
  }
  return true;
}

void share_numbers(Measurements& measurements, int32_t base, int32_t view) {
  if (base == view || !measurements.known(base) || !measurements.first_time(view)) return;
  const auto counts = measurements.nonfinite.find(base);
  if (counts != measurements.nonfinite.end()) measurements.nonfinite[view] = std::pair(counts->second);
}

void take_numbers(Recording& recording, const OpenOp& op, const Results& results, Lock& lock) {
  Measurements& measurements = recording.measurements;
  if (op.traits->measured.relabels && results.returned.size() == 1 && !is_read(recording, op, *results.returned[0].first)) {
    if (!op.inputs.empty()) share_numbers(measurements, op.inputs[0], results.returned[0].second);
    return;
  }
  const size_t nonfinite = measurements.nonfinite.size();
  take_all(recording, results, true, lock);
  if (!results.changed.empty()) {
    note_rewritten(measurements, results);
  } else if (measurements.nonfinite.size() > nonfinite) {  // a parameter, or a tensor from before the block, may explain it
    DeviceResults later;
    each_input(recording, op, [&](const at::TensorBase& tensor, int32_t value) {
      if (tensor.is_view()) {
        const at::TensorBase& base = tensor._base();
        take(recording, base, recording.values.find(base.unsafeGetTensorImpl()), true, later);
      }
      take(recording, tensor, value, true, later);
    });
    if (!later.empty()) measure_on_devices(recording, later, lock);
  }
}

// -- the check -------------------------------------------------------------------------------------------------------

// The plain number that an op was given beside its tensor; NaN if it was given anything else.
double plain_number(const OpenOp& op) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (op.given.size() < 2) return kNone;
  const auto number = [](const c10::IValue& value) {
    if (value.isDouble()) return value.toDouble();
    if (value.isInt()) return static_cast<double>(value.toInt());
    if (!value.isTensor() || !value.toTensor().defined()) return kNone;
    const at::TensorBase& tensor = value.toTensor();
    if (!is_number(tensor)) return kNone;
    if (tensor.scalar_type() == at::kDouble) return *static_cast<const double*>(tensor.const_data_ptr());
    if (tensor.scalar_type() == at::kLong) return static_cast<double>(*static_cast<const int64_t*>(tensor.const_data_ptr()));
    return kNone;
  };
  const double factor = op.given.size() > 2 && (op.given[2].isDouble() || op.given[2].isInt()) ? number(op.given[2]) : 1;
  return number(op.given[1]) * factor;
}

// Whether a result is finite where its input is and nowhere else, unless it is bounded. A product with a number of at
// most one cannot overflow, nor a sum with one that is lost in the largest number of the dtype.
bool is_implied(const OpenOp& op, const at::TensorBase& source, const at::TensorBase& result) {
  const Preserves how = op.traits->measured.preserves;
  if (how == Preserves::kCopy) return holds(result.scalar_type(), source.scalar_type());
  if (result.scalar_type() != source.scalar_type() || !source.is_floating_point() || result.numel() != source.numel()) return false;
  if (how == Preserves::kBounded) return true;
  if (how == Preserves::kQuotient && op.given.size() > 2) return false;  // rounded to a whole number
  const double number = std::abs(plain_number(op));
  if (how == Preserves::kProduct) return number > 0 && number <= 1;
  if (how == Preserves::kQuotient) return number >= 1 && std::isfinite(number);
  return number <= (source.scalar_type() == at::kHalf ? 8 : 1e30);
}

// Whether a result is finite because its examined, finite input is.
bool follows(Recording& recording, const OpenOp& op, const Results& results) {
  Measurements& measurements = recording.measurements;
  const at::TensorBase* source = first_tensor(op);
  if (op.inputs.size() != 1 || source == nullptr || results.returned.size() != 1 || !results.changed.empty()) return false;
  const auto& [result, value] = results.returned[0];
  const int32_t from = op.inputs[0];
  if (!measurements.known(from) || measurements.nonfinite.find(from) != measurements.nonfinite.end() || source->device() != result->device()) return false;
  if (!is_measurable(*source) || !is_implied(op, *source, *result) || is_rewritten(measurements, *source)) return false;
  if (measurements.first_time(value)) measurements.copies.push_back({value, from, op.traits->measured.preserves == Preserves::kBounded});
  ++measurements.checked;
  return true;
}

// Measure the tensors that have not been measured: results of compiled code are among them.
bool examine_regions(Recording& recording, const OpenOp& op, Lock& lock) {
  bool nonfinite = false;
  Measurements& measurements = recording.measurements;
  DeviceResults later;
  each_input(recording, op, [&](const at::TensorBase& tensor, int32_t value) {
    if (value < 0 || measurements.known(value)) return;
    take(recording, tensor, value, false, later);
    nonfinite |= measurements.nonfinite.find(value) != measurements.nonfinite.end();
  });
  if (!later.empty()) measure_on_devices(recording, later, lock);
  return nonfinite;
}

bool check(Recording& recording, const OpenOp& op, const Results& results, Lock& lock) {
  Measurements& measurements = recording.measurements;
  const Measured& kind = op.traits->measured;
  bool reports = recording.last_region >= 0 && examine_regions(recording, op, lock);
  bool had_any = false, had_nan = false;
  for (const int32_t value : op.inputs) {
    const auto counts = measurements.nonfinite.find(value);
    if (counts == measurements.nonfinite.end()) continue;
    had_any = true;
    had_nan |= counts->second.first != 0;
  }
  const bool view_of_fine = op.traits->aliases >= 0 && !kind.maybe_view && !had_any;
  if (view_of_fine || (kind.preserves != Preserves::kNothing && follows(recording, op, results))) return reports;
  note_rewritten(measurements, results);
  take_all(recording, results, false, lock);
  const auto count = [&](const at::TensorBase& tensor, int32_t value) {
    if (!is_measurable(tensor)) return;
    ++measurements.checked;
    const auto counts = measurements.nonfinite.find(value);
    if (counts == measurements.nonfinite.end()) return;
    reports |= (counts->second.first != 0 && !had_nan) || (counts->second.second != 0 && !had_any);
  };
  for (const auto& [tensor, value] : results.returned) count(*tensor, value);
  const bool returns_it = results.returned.size() == 1 && results.changed.size() == 1;
  for (const auto& [tensor, value] : results.changed) {
    if (!returns_it || value != results.returned[0].second) count(tensor, value);
  }
  return reports;
}

}  // namespace

bool measure_op(Recording& recording, const ThreadState& state, const OpenOp& op, const Results& results, Lock& lock) {
  const Measurements& measurements = recording.measurements;
  const Measured& kind = op.traits->measured;
  if (kind.uninitialized) return false;
  if (measurements.depth != Measurements::kNothing && is_chosen(recording, state, kind)) {
    take_numbers(recording, op, results, lock);
  }
  return measurements.checks && check(recording, op, results, lock) && measurements.reports;
}

bool has_new_inputs(const Recording& recording, const OpenCall& call) {
  const Measurements& measurements = recording.measurements;
  return measurements.includes(call.module) && std::any_of(call.inputs.begin(), call.inputs.end(), [&](int32_t value) {
    return value >= 0 && !measurements.known(value);
  });
}

void measure_parameters(Recording& recording, PyObject* module, int32_t number, Tensors& held, Lock& lock) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_parameters"), PyUnicode_InternFromString("_buffers")};
  Measurements& measurements = recording.measurements;
  if (!measurements.parameters || !measurements.includes(number) || !measurements.first_call(static_cast<size_t>(number))) return;
  Owned attributes(PyObject_GenericGetDict(module, nullptr));
  if (!attributes || !PyDict_CheckExact(attributes.get())) return PyErr_Clear();
  for (PyObject* name : names) {
    PyObject *tensors = PyDict_GetItemWithError(attributes.get(), name), *key, *object;
    Py_ssize_t at = 0;
    if (tensors == nullptr || !PyDict_Check(tensors)) continue;
    while (PyDict_Next(tensors, &at, &key, &object)) {
      if (const at::TensorBase* tensor = recording.tensor_in(object)) held.push_back(at::Tensor(*tensor));
    }
  }
  PyErr_Clear();
  DeviceResults later;
  for (const at::Tensor& tensor : held) {
    take(recording, tensor, recording.values.find(tensor.unsafeGetTensorImpl()), true, later);
  }
  if (!later.empty()) measure_on_devices(recording, later, lock);
}

bool is_checkpoint(const Recording& recording, const Ids& outputs) {
  const Measurements& measurements = recording.measurements;
  const bool reports = measurements.checks && measurements.reports;
  if (reports && (measurements.devices != 0 || measurements.tables.is_alarmed())) return true;
  if (!reports && measurements.depth == Measurements::kNothing) return false;
  return recording.last_region >= 0 && std::any_of(outputs.begin(), outputs.end(), [&](int32_t value) {
    return value >= 0 && !measurements.known(value);
  });
}

}  // namespace sightline
