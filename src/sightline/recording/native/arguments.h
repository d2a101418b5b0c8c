// The arguments of a call: its tensors in order, and a key for everything else. Calls with equal keys have
// equal *forms*; the form itself is made in Python, once for each key.
#pragma once

#include "process_groups.h"
#include "values.h"

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sightline {

struct Arguments {
  uint64_t key = 0x243F6A8885A308D3ull;
  c10::SmallVector<const at::TensorBase*, 8> tensors;
  bool needs_python = false;  // only Python can read one, or one must be read each time
  bool needs_gil = false;  // it holds a list or a dict, which another thread may be changing
  bool has_gil = false;
  std::vector<at::Tensor> held;  // tensors that were read with the GIL, kept until their values are known

  // Another thread may release the tensors once it has the GIL: hold them.
  void hold() {
    held.reserve(tensors.size());
    for (const at::TensorBase*& tensor : tensors) {
      held.emplace_back(*tensor);
      tensor = &held.back();
    }
  }

  void add(uint64_t more) { key = mixed(key, more); }
  void add_double(double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    add(bits);
  }
  void add_text(std::string_view text) {
    add(text.size());
    add(std::hash<std::string_view>{}(text));
  }
};

enum Tag : uint64_t { kTensor = 1, kNone, kInt, kFloat, kBool, kText, kList, kTuple, kDict, kDevice, kComplex,
                      kGenerator, kOther, kNumberTensor, kObject, kSlice, kGroup, kReduction };

// A Python number that torch has wrapped into a tensor without dimensions; Python sees the number.
inline bool is_number(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.dim() == 0 && tensor.is_cpu() &&
      has_memory(tensor.unsafeGetTensorImpl());
}

inline void add_number(const at::TensorBase& tensor, Arguments& into) {
  into.add(kNumberTensor);
  into.add(static_cast<uint64_t>(tensor.scalar_type()));
  if (tensor.element_size() > static_cast<int64_t>(sizeof(double))) {
    into.needs_python = true;
    return;
  }
  uint64_t bits = 0;
  std::memcpy(&bits, tensor.const_data_ptr(), static_cast<size_t>(tensor.element_size()));
  into.add(bits);
}

inline void read(const c10::IValue& value, Arguments& into) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      into.add(kNone);
    } else if (is_number(tensor)) {
      add_number(tensor, into);
    } else {
      into.add(kTensor);
      into.tensors.push_back(&tensor);
    }
  } else if (value.isNone()) {
    into.add(kNone);
  } else if (value.isInt()) {
    into.add(kInt);
    into.add(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    into.add(kBool);
    into.add(value.toBool());
  } else if (value.isDouble()) {
    into.add(kFloat);
    into.add_double(value.toDouble());
  } else if (value.isList()) {
    const auto items = value.toListRef();
    into.add(kList);
    into.add(items.size());
    for (const c10::IValue& item : items) read(item, into);
  } else if (value.isTuple()) {
    const auto& items = value.toTupleRef().elements();
    into.add(kTuple);
    into.add(items.size());
    for (const c10::IValue& item : items) read(item, into);
  } else if (value.isString()) {
    into.add(kText);
    into.add_text(value.toStringRef());
  } else if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    into.add(kDevice);
    into.add(static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index()));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    into.add(kComplex);
    into.add_double(number.real());
    into.add_double(number.imag());
  } else if (value.isGenerator()) {
    into.add(kGenerator);
  } else if (const std::string* group = group_name(value)) {
    into.add(kGroup);
    into.add_text(*group);
  } else if (const char* reduction = reduction_name(value)) {
    into.add(kReduction);
    into.add_text(reduction);
  } else if (value.isObject()) {
    into.add(kObject);  // such as the work of a collective: all are written alike
  } else {
    into.add(kOther);
    into.needs_python = true;  // a symbol, a stream, an object
  }
}

// How objects of a Python type are read; Python says so, once for each type.
enum class TypeKind : uint8_t { kTensor, kSequence, kMapping, kSingleton, kNamed, kPython, kDevice };

// Reading Python objects needs no GIL where they belong to a call of this thread: they are held by its frames.
class PythonTypes {
 public:
  std::unordered_map<PyTypeObject*, TypeKind> kinds;  // keys are pinned
  size_t tensor_offset = 0;  // where a Python tensor keeps its C++ one; differs between torch versions

  const at::TensorBase& tensor_of(PyObject* object) const {
    return *reinterpret_cast<const at::TensorBase*>(reinterpret_cast<const char*>(object) + tensor_offset);
  }

  // Null if all types are known, else the first that is not.
  PyTypeObject* read(PyObject* object, Arguments& into, int depth = 0) const {
    PyTypeObject* type = Py_TYPE(object);
    if (object == Py_None) {
      into.add(kNone);
    } else if (type == &PyBool_Type) {
      into.add(kBool);
      into.add(object == Py_True);
    } else if (type == &PyLong_Type) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
      into.add(kInt);
      into.add(static_cast<uint64_t>(number));
      into.needs_python |= overflow != 0;
    } else if (type == &PyFloat_Type) {
      into.add(kFloat);
      into.add_double(PyFloat_AS_DOUBLE(object));
    } else if (type == &PyUnicode_Type) {
      into.add(kText);
      into.add_text({static_cast<const char*>(PyUnicode_DATA(object)),
                     static_cast<size_t>(PyUnicode_GET_LENGTH(object) * PyUnicode_KIND(object))});
    } else if (type == &PySlice_Type) {
      const auto* slice = reinterpret_cast<PySliceObject*>(object);
      into.add(kSlice);
      for (PyObject* part : {slice->start, slice->stop, slice->step}) {
        if (PyTypeObject* unknown = read_slice_end(part, into)) return unknown;
      }
    } else {
      const auto found = kinds.find(type);
      if (found == kinds.end()) return type;
      return read_by_kind(object, type, found->second, into, depth);
    }
    return nullptr;
  }

 private:
  static constexpr int kDeepest = 8;

  PyTypeObject* read_slice_end(PyObject* part, Arguments& into) const {
    // A tensor as an end of a slice is written as `<tensor>` and is no input.
    if (part != Py_None && Py_TYPE(part) != &PyLong_Type) into.needs_python = true;
    return part == Py_None || Py_TYPE(part) == &PyLong_Type ? read(part, into) : nullptr;
  }

  PyTypeObject* read_by_kind(PyObject* object, PyTypeObject* type, TypeKind kind, Arguments& into, int depth) const {
    switch (kind) {
      case TypeKind::kTensor:
        into.add(kTensor);
        into.tensors.push_back(&tensor_of(object));
        return nullptr;
      case TypeKind::kSequence: {
        const bool list = PyList_Check(object);
        if (list && !into.has_gil) {
          into.needs_gil = true;
          return nullptr;
        }
        const Py_ssize_t size = list ? PyList_GET_SIZE(object) : PyTuple_GET_SIZE(object);
        into.add(list ? kList : kTuple);
        into.add(reinterpret_cast<uint64_t>(type));
        into.add(static_cast<uint64_t>(size));
        into.needs_python |= depth >= kDeepest;
        for (Py_ssize_t at = 0; at < size && depth < kDeepest; ++at) {
          PyObject* item = list ? PyList_GET_ITEM(object, at) : PyTuple_GET_ITEM(object, at);
          if (PyTypeObject* unknown = read(item, into, depth + 1)) return unknown;
        }
        return nullptr;
      }
      case TypeKind::kMapping: {
        if (!into.has_gil) {
          into.needs_gil = true;
          return nullptr;
        }
        into.add(kDict);
        into.add(static_cast<uint64_t>(PyDict_GET_SIZE(object)));
        into.needs_python |= depth >= kDeepest;
        Py_ssize_t position = 0;
        PyObject *name, *item;
        while (depth < kDeepest && PyDict_Next(object, &position, &name, &item)) {
          into.needs_python |= Py_TYPE(name) != &PyUnicode_Type;
          PyTypeObject* unknown = read(name, into, depth + 1);
          if (unknown == nullptr) unknown = read(item, into, depth + 1);
          if (unknown != nullptr) return unknown;
        }
        return nullptr;
      }
      case TypeKind::kSingleton:  // a dtype, a layout: the object is its own name, and lives for ever
        into.add(kObject);
        into.add(reinterpret_cast<uint64_t>(object));
        return nullptr;
      case TypeKind::kDevice: {  // a Python object around a `c10::Device` and nothing else
        const auto* device = reinterpret_cast<const c10::Device*>(reinterpret_cast<const char*>(object) + sizeof(PyObject));
        into.add(Tag::kDevice);
        into.add(static_cast<uint64_t>(device->type()) << 8 | static_cast<uint8_t>(device->index()));
        return nullptr;
      }
      case TypeKind::kNamed:  // shown by the name of its type
        into.add(kObject);
        into.add(reinterpret_cast<uint64_t>(type));
        return nullptr;
      default:
        into.add(kOther);
        into.needs_python = true;
        return nullptr;
    }
  }
};

}  // namespace sightline
