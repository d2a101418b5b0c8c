// C++ data as Python objects. Everything here needs the GIL.
#pragma once

#include "arguments.h"

PyObject* THPVariable_Wrap(const at::TensorBase& tensor);  // of libtorch_python; its header needs pybind11
c10::impl::PyInterpreter* getPyInterpreter();

namespace sightline {

// Stands for a tensor where Python needs to know only that there is one.
inline PyObject* slot_marker(const at::TensorBase&) { return Py_NewRef(Py_Ellipsis); }

template <class Slot>
PyObject* object_in(const Slot* slot) {
  if constexpr (requires { slot->load_pyobj(); }) {
    return slot->load_pyobj();
  } else if constexpr (requires { slot->check_pyobj(); }) {
    return slot->check_pyobj().value_or(nullptr);
  } else {  // torch 2.8
    return slot->check_pyobj(getPyInterpreter()).value_or(nullptr);
  }
}

// The object that Python has for a tensor; null if it has none.
inline PyObject* object_in(const at::TensorBase& tensor) { return object_in(tensor.unsafeGetTensorImpl()->pyobj_slot()); }

// Who makes an object for a tensor that torch is about to hand to Python decides of which class it is:
// `nn.Parameter(data)` would fail.
inline bool has_object(const at::TensorBase& tensor) { return object_in(tensor) != nullptr; }

// Another tensor with the same elements; the tensor itself where torch cannot make one. It has a version counter of
// its own: torch copies a result whose counter is shared.
inline at::Tensor alias_of(const at::TensorBase& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  try {
    return at::Tensor(impl->shallow_copy_and_detach(c10::VariableVersion(0), true));
  } catch (const std::exception&) {
    return at::Tensor(tensor);
  }
}

inline PyObject* object_of(const at::TensorBase& tensor) {
  return THPVariable_Wrap(has_object(tensor) ? tensor : alias_of(tensor));
}

inline PyObject* python_text(const c10::Device& device) { return PyUnicode_FromString(device.str().c_str()); }

template <class Wrap>
PyObject* python_of(const c10::IValue& value, Wrap wrap);

template <class Items, class Wrap>
PyObject* python_list(const Items& items, Wrap wrap) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(items.size()));
  Py_ssize_t at = 0;
  for (const c10::IValue& item : items) {
    PyObject* object = python_of(item, wrap);
    if (object == nullptr) PyErr_Clear();
    PyList_SET_ITEM(list, at++, object == nullptr ? Py_NewRef(Py_None) : object);
  }
  return list;
}

inline PyObject* python_number(const at::TensorBase& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return PyFloat_FromDouble(*static_cast<const double*>(tensor.const_data_ptr()));
    case at::kFloat: return PyFloat_FromDouble(*static_cast<const float*>(tensor.const_data_ptr()));
    case at::kLong: return PyLong_FromLongLong(*static_cast<const int64_t*>(tensor.const_data_ptr()));
    case at::kBool: return PyBool_FromLong(*static_cast<const bool*>(tensor.const_data_ptr()));
    case at::kComplexDouble: {
      const auto* parts = static_cast<const double*>(tensor.const_data_ptr());
      return PyComplex_FromDoubles(parts[0], parts[1]);
    }
    default: return slot_marker(tensor);
  }
}

// An argument as Python data: tensors as `wrap` makes them, objects of C++ as (kind, text).
template <class Wrap>
PyObject* python_of(const c10::IValue& value, Wrap wrap) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) Py_RETURN_NONE;
    if (is_number(tensor)) return python_number(tensor);
    return wrap(tensor);
  }
  if (value.isNone()) Py_RETURN_NONE;
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isString()) {
    return PyUnicode_DecodeUTF8(value.toStringRef().data(), static_cast<Py_ssize_t>(value.toStringRef().size()), "replace");
  }
  if (value.isList()) return python_list(value.toListRef(), wrap);
  if (value.isTuple()) {
    Owned list(python_list(value.toTupleRef().elements(), wrap));
    return PyList_AsTuple(list.get());
  }
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return PyComplex_FromDoubles(number.real(), number.imag());
  }
  if (value.isDevice()) return Py_BuildValue("(sN)", "device", python_text(value.toDevice()));
  if (value.isGenerator()) return Py_BuildValue("(ss)", "object", "Generator");
  if (value.isSymInt()) {
    const c10::SymInt symbol = value.toSymInt();
    if (const auto number = symbol.maybe_as_int()) return PyLong_FromLongLong(*number);
    return Py_BuildValue("(ss)", "symbol", symbol.toSymNode()->str().c_str());
  }
  if (value.isSymFloat() && value.toSymFloat().is_symbolic()) {
    return Py_BuildValue("(ss)", "symbol", value.toSymFloat().toSymNodeImpl()->str().c_str());
  }
  if (const std::string* group = group_name(value)) return Py_BuildValue("(ss)", "group", group->c_str());
  if (const char* reduction = reduction_name(value)) return Py_BuildValue("(ss)", "symbol", reduction);
  return Py_BuildValue("(ss)", "object", value.tagKind().c_str());
}

inline PyObject* python_tuple(c10::IntArrayRef items) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(items.size()));
  for (size_t at = 0; at < items.size(); ++at) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(at), PyLong_FromLongLong(items[at]));
  }
  return tuple;
}

inline PyObject* python_numbers(const int32_t* numbers, size_t count) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(count));
  for (size_t at = 0; at < count; ++at) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(at), PyLong_FromLong(numbers[at]));
  }
  return list;
}

}  // namespace sightline
