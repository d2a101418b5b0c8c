// The methods of a recording for its measurements.
#include "recording_methods.h"

#include "recording_object.h"

namespace sightline {
namespace {

// measure(depth, views, parameters, some_modules, checks, reports, parameter_type): how results of ops are measured.
PyObject* recording_measure(PyObject* self, PyObject* args) {
  int depth, views, parameters, checks, reports, some_modules;
  PyTypeObject* type;
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyArg_ParseTuple(
          args, "ipppppO!", &depth, &views, &parameters, &some_modules, &checks, &reports, &PyType_Type, &type)) {
    return nullptr;
  }
  const Lock lock(recording->mutex);
  Measurements& measurements = recording->measurements;
  measurements.depth = static_cast<Measurements::Depth>(depth);
  measurements.views = views != 0;
  measurements.parameters = parameters != 0;
  measurements.checks = checks != 0;
  measurements.reports = reports != 0;
  measurements.some_modules = some_modules != 0;
  measurements.tables.numbers = measurements.depth != Measurements::kNothing;
  measurements.tables.fingerprints = measurements.depth == Measurements::kFingerprints;
  measurements.parameter_type = type;  // one of torch's: it stays
  Py_RETURN_NONE;
}

// report_nonfinite(on): whether Python is notified of NaNs and infinities.
PyObject* recording_report_nonfinite(PyObject* self, PyObject* on) {
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->measurements.reports = PyObject_IsTrue(on) == 1;
  }
  Py_RETURN_NONE;
}

// choose_module(number): the ops of its calls are measured.
PyObject* recording_choose_module(PyObject* self, PyObject* number) {
  if (Recording* recording = recording_of(self)) {
    const auto at = static_cast<size_t>(PyLong_AsLong(number));
    const Lock lock(recording->mutex);
    auto& modules = recording->measurements.modules;
    if (at >= modules.size()) modules.resize(at + 1);
    modules[at] = 1;
  }
  Py_RETURN_NONE;
}

// is_measured(value, first): whether a value was examined; with `first` it is from now on.
PyObject* recording_is_measured(PyObject* self, PyObject* args) {
  int value, first;
  if (!PyArg_ParseTuple(args, "ip", &value, &first)) return nullptr;
  Recording* recording = recording_of(self);
  if (recording == nullptr || value < 0) Py_RETURN_TRUE;
  const Lock lock(recording->mutex);
  Measurements& measurements = recording->measurements;
  return PyBool_FromLong(first ? !measurements.first_time(value) : measurements.known(value));
}

// nonfinite(value): how many NaNs and infinities it has, or None.
PyObject* recording_nonfinite(PyObject* self, PyObject* number) {
  const auto value = static_cast<int32_t>(PyLong_AsLong(number));
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  const Lock lock(recording->mutex);
  const auto found = recording->measurements.nonfinite.find(value);
  if (found == recording->measurements.nonfinite.end()) Py_RETURN_NONE;
  return Py_BuildValue("(LL)", static_cast<long long>(found->second.first), static_cast<long long>(found->second.second));
}

PyObject* recording_checked(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(0);
  const Lock lock(recording->mutex);
  return PyLong_FromLongLong(recording->measurements.checked);
}

// add_statistics(value, min, max, mean, std, l2, zeros, nans, infs, lane, lane, lane, lane)
PyObject* recording_add_statistics(PyObject* self, PyObject* args) {
  int value;
  Reading reading;
  long long counts[3], lanes[4];
  if (!PyArg_ParseTuple(
          args, "idddddLLLLLLL", &value, &reading.least, &reading.most, &reading.mean, &reading.deviation, &reading.norm,
          &counts[0], &counts[1], &counts[2], &lanes[0], &lanes[1], &lanes[2], &lanes[3])) {
    return nullptr;
  }
  reading.zeros = counts[0];
  reading.nans = counts[1];
  reading.infs = counts[2];
  std::copy_n(lanes, 4, reading.lanes);
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->measurements.add(value, reading);
  }
  Py_RETURN_NONE;
}

// add_kernel(device, dtype, many, function, shared, threads, block, fewest, most): a kernel for tensors of a dtype.
PyObject* recording_add_kernel(PyObject* self, PyObject* args) {
  int device, dtype, many;
  unsigned long long function;
  long long block, fewest, most;
  DeviceKernel kernel;
  if (!PyArg_ParseTuple(
          args, "iipKIILLL", &device, &dtype, &many, &function, &kernel.shared, &kernel.threads, &block, &fewest, &most)) {
    return nullptr;
  }
  kernel.function = reinterpret_cast<void*>(function);
  kernel.block = block;
  kernel.fewest = fewest;
  kernel.most = most;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->measurements.tables.add_kernel(device, dtype, many != 0, kernel);
  }
  Py_RETURN_NONE;
}

// add_table(device, stream, capacity, sums, counts, alarm, host_count, matrix, list, list_here): its number.
PyObject* recording_add_table(PyObject* self, PyObject* args) {
  int device;
  unsigned long long stream, numbers[7];
  long long capacity;
  if (!PyArg_ParseTuple(
          args, "iKLKKKKKKK", &device, &stream, &capacity, &numbers[0], &numbers[1], &numbers[2], &numbers[3],
          &numbers[4], &numbers[5], &numbers[6])) {
    return nullptr;
  }
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  DeviceTable table{};
  table.sums = numbers[0];
  table.counts = numbers[1];
  table.alarm = numbers[2];
  table.host_count = numbers[3];
  table.matrix = numbers[4];
  table.list = numbers[5];
  table.list_here = reinterpret_cast<int64_t*>(numbers[6]);
  table.capacity = capacity;
  const Lock lock(recording->mutex);
  return PyLong_FromSize_t(recording->measurements.tables.add_table(device, reinterpret_cast<void*>(stream), std::move(table)));
}

// set_weights(device, address, count): the weights of a fingerprint's rows.
PyObject* recording_set_weights(PyObject* self, PyObject* args) {
  int device;
  unsigned long long address;
  long long count;
  if (!PyArg_ParseTuple(args, "iKL", &device, &address, &count)) return nullptr;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->measurements.tables.set_weights(device, address, count);
  }
  Py_RETURN_NONE;
}

// table_rows(number): value and elements of each row of a table.
PyObject* recording_table_rows(PyObject* self, PyObject* number) {
  const auto at = static_cast<size_t>(PyLong_AsSize_t(number));
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyBytes_FromStringAndSize(nullptr, 0);
  const Lock lock(recording->mutex);
  const std::vector<int64_t>& rows = recording->measurements.tables.rows(at);
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(rows.data()), static_cast<Py_ssize_t>(rows.size() * sizeof(int64_t)));
}

// watch_alarm(address): memory in which a device counts NaNs and infinities.
PyObject* recording_watch_alarm(PyObject* self, PyObject* address) {
  const auto* alarm = reinterpret_cast<const volatile int64_t*>(PyLong_AsUnsignedLongLong(address));
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->measurements.tables.alarms.push_back(alarm);
  }
  Py_RETURN_NONE;
}

// acknowledge(count): Python has examined so many.
PyObject* recording_acknowledge(PyObject* self, PyObject* count) {
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->measurements.tables.acknowledged = PyLong_AsLongLong(count);
  }
  Py_RETURN_NONE;
}

// read_numbers(tensor, fingerprint): the numbers of a tensor in CPU memory, or None if it has none of its own.
PyObject* recording_read_numbers(PyObject* self, PyObject* args) {
  PyObject* object;
  int fingerprint;
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyArg_ParseTuple(args, "Op", &object, &fingerprint)) return nullptr;
  const at::TensorBase* tensor = recording->tensor_in(object);
  if (tensor == nullptr || !tensor->is_cpu() || !is_measurable(*tensor)) Py_RETURN_NONE;
  const Reading reading = read_numbers(*tensor, fingerprint != 0);
  return Py_BuildValue(
      "(dddddLLL[LLLL])", reading.least, reading.most, reading.mean, reading.deviation, reading.norm,
      static_cast<long long>(reading.zeros), static_cast<long long>(reading.nans), static_cast<long long>(reading.infs),
      static_cast<long long>(reading.lanes[0]), static_cast<long long>(reading.lanes[1]),
      static_cast<long long>(reading.lanes[2]), static_cast<long long>(reading.lanes[3]));
}

}  // namespace

std::vector<PyMethodDef> measurement_methods() {
  return {
      {"measure", recording_measure, METH_VARARGS, "measure(depth, views, parameters, some_modules, checks, reports, type)"},
      {"report_nonfinite", recording_report_nonfinite, METH_O, "report_nonfinite(on): whether Python is notified of NaNs and infinities."},
      {"choose_module", recording_choose_module, METH_O, "choose_module(number): the ops of its calls are measured."},
      {"is_measured", recording_is_measured, METH_VARARGS, "is_measured(value, mark): whether a value was measured; mark it as measured."},
      {"nonfinite", recording_nonfinite, METH_O, "nonfinite(value): its NaNs and infinities, or None."},
      {"add_statistics", recording_add_statistics, METH_VARARGS, "add_statistics(value, numbers…): statistics that Python has taken."},
      {"add_kernel", recording_add_kernel, METH_VARARGS, "add_kernel(device, dtype, many, function, …): how to measure."},
      {"add_table", recording_add_table, METH_VARARGS, "add_table(device, stream, capacity, addresses…): its number."},
      {"set_weights", recording_set_weights, METH_VARARGS, "set_weights(device, address, count): of fingerprints."},
      {"table_rows", recording_table_rows, METH_O, "table_rows(number): value and elements of each row."},
      {"watch_alarm", recording_watch_alarm, METH_O, "watch_alarm(address): where a device counts NaNs and infinities."},
      {"acknowledge", recording_acknowledge, METH_O, "acknowledge(count): Python has examined so many."},
      {"read_numbers", recording_read_numbers, METH_VARARGS, "read_numbers(tensor, fingerprint): a tensor's numbers."},
      {"checked", recording_checked, METH_NOARGS, "checked(): how many tensors were examined."},
  };
}

}  // namespace sightline
