// The methods of a recording that hand its rows to Python.
#include "recording_methods.h"
#include "recording_object.h"

namespace sightline {
namespace {

PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(numbers.data()), static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t)));
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
        int64_t numbers[ValueRow::kWidth];
        row.write(numbers);
        out.insert(out.end(), std::begin(numbers), std::end(numbers));
      }
      if (take) recording->values.rows.clear();
    } else if (wanted == "fresh") {
      for (const FreshValueRow& row : recording->values.fresh_rows) {
        const int64_t numbers[] = {row.id, row.metadata, row.producer};
        out.insert(out.end(), std::begin(numbers), std::end(numbers));
      }
      if (take) recording->values.fresh_rows.clear();
    } else if (wanted == "memory") {
      recording->values.memory.examine_all(now() - recording->begin, dead);
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
            {.start = api.start - recording->begin, .duration = 0, .id = api.id, .info = api.info, .form = api.form,
             .result = recording->no_form, .stack = api.stack, .call = api.call,
             .bits = api.bits | kUnfinished << kFlagShift},
            api.inputs, c10::ArrayRef<int32_t>());
      }
      for (const OpenCall& call : state->calls) {
        open_calls.write(
            {.start = call.start - recording->begin,
             .duration = current - call.start - (state->spent - call.spent), .end = kNoEnd, .id = call.id,
             .module = call.module, .parent = call.parent, .stack = state->anchors[call.anchor].stack,
             .bits = call.bits | kUnfinished << kFlagShift, .input_form = call.input_form,
             .output_form = recording->no_form},
            call.inputs, c10::ArrayRef<int32_t>());
      }
    }
    open_ops.append_to(ops);
    open_calls.append_to(calls);
  }
  Owned first(bytes_of(ops)), second(bytes_of(calls));
  return PyTuple_Pack(2, first.get(), second.get());
}

// counters(): numbers written to ops and calls so far, open ops and calls, threads, faults that Python does not know of.
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

// unrecorded(): how many modules were called on threads that nothing records, and the class of the first.
PyObject* recording_unrecorded(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return Py_BuildValue("(is)", 0, "");
  const Lock lock(recording->mutex);
  return Py_BuildValue("(Ls)", static_cast<long long>(recording->unrecorded_calls), recording->unrecorded_module.c_str());
}

}  // namespace

std::vector<PyMethodDef> row_methods() {
  return {
      {"rows", recording_rows, METH_VARARGS, "rows(name, take): a stream of numbers."},
      {"open_rows", recording_open_rows, METH_NOARGS, "open_rows(): rows of the ops and calls that have not ended."},
      {"unrecorded", recording_unrecorded, METH_NOARGS, "unrecorded(): module calls on threads that nothing records."},
      {"counters", recording_counters, METH_NOARGS, "counters(): how much was written."},
  };
}

}  // namespace sightline
