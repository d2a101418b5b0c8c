#include "call_operands.h"

#include "python_values.h"

namespace sightline {
namespace {

PyTypeObject* read_all(const PythonTypes& types, const Operands& operands, Arguments& into) {
  for (PyObject* object : operands.objects) {
    PyTypeObject* unknown = object == nullptr ? nullptr : types.read(object, into);
    if (unknown != nullptr) return unknown;
  }
  PyTypeObject* unknown = operands.names == nullptr ? nullptr : types.read(operands.names, into);
  return unknown == nullptr && operands.keywords != nullptr ? types.read(operands.keywords, into) : unknown;
}

// Read a key, asking Python for types it does not know yet. False if Python must read everything.
bool read_operands(Recording& recording, const Operands& operands, Arguments& into, Lock& lock) {
  for (;;) {
    into = Arguments();
    PyTypeObject* unknown = read_all(recording.types, operands, into);
    if (unknown == nullptr && into.needs_gil) {
      const PythonTypes types = recording.types;  // the mutex is given up
      ask(lock, [&] {
        into = Arguments();
        into.has_gil = true;
        unknown = read_all(types, operands, into);
        into.hold();
      });
    }
    if (unknown == nullptr) return !into.needs_python;
    recording.learn_type(unknown, lock);
  }
}

// A key that identifies a callable without keeping it: methods that are bound anew for each call share their definition.
const void* key_of(PyObject* callable) {
  if (PyCFunction_CheckExact(callable)) return reinterpret_cast<PyCFunctionObject*>(callable)->m_ml;
  if (Py_IS_TYPE(callable, &PyMethodDescr_Type)) return reinterpret_cast<PyMethodDescrObject*>(callable)->d_method;
  if (Py_IS_TYPE(callable, &PyWrapperDescr_Type)) return reinterpret_cast<PyWrapperDescrObject*>(callable)->d_base;
  if (PyType_Check(callable)) return callable;
  return Py_TYPE(callable);
}

}  // namespace

PyObject* local(const Frame* frame, int slot) {
  PyObject* held = slot_of(frame, slot);
  return held != nullptr && PyCell_Check(held) ? PyCell_GET(held) : held;
}

bool is_tensor(const Recording& recording, PyObject* object) {
  const auto found = recording.types.kinds.find(Py_TYPE(object));
  return found != recording.types.kinds.end() && found->second == TypeKind::kTensor;
}

PyObject* tuple_of(const Operands& operands) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(operands.objects.size()));
  Py_ssize_t at = 0;
  for (PyObject* object : operands.objects) PyTuple_SET_ITEM(tuple, at++, Py_NewRef(object ? object : Py_None));
  return tuple;
}

void read_call(
    Recording& recording, const Operands& operands, const char* maker, int32_t number, ApiCall& api, Lock& lock) {
  Arguments arguments;
  const bool readable = read_operands(recording, operands, arguments, lock);
  const uint64_t key = mixed(arguments.key, static_cast<uint64_t>(number) + 0xA1B1);
  if (readable) {
    for (const at::TensorBase* tensor : arguments.tensors) {
      if (tensor->defined()) api.inputs.push_back(recording.value_of(*tensor, lock));
    }
    const auto known = recording.forms.find(key);
    if (known != recording.forms.end()) {
      api.form = known->second;
      return;
    }
  }
  api.form = recording.no_form;
  ask(lock, [&] {
    Owned given(tuple_of(operands));
    const auto shared = static_cast<unsigned long long>(readable ? arguments.key : 0);
    Owned answer(PyObject_CallMethod(
        recording.session, "new_api_form", "siKOOO", maker, number, shared, given.get(), operands.names ? operands.names : Py_None,
        operands.keywords ? operands.keywords : Py_None));
    PyObject* list = nullptr;
    if (!answer || !PyArg_ParseTuple(answer.get(), "iO!", &api.form, &PyList_Type, &list)) {
      recording.fault();
      return;
    }
    if (readable) return;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at) {
      api.inputs.push_back(static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(list, at))));
    }
  });
  if (readable) recording.forms.emplace(key, api.form);
}

const Site& site_of(Recording& recording, PyCodeObject* code, int32_t number, int instruction, Lock& lock) {
  const uint64_t key = static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(instruction);
  const auto found = recording.api.sites.find(key);
  if (found != recording.api.sites.end()) return found->second;
  Site site;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.session, "new_site", "Oi", code, instruction));
    int kind, keywords, is_tuple, truth;
    PyObject* names;
    if (!answer ||
        !PyArg_ParseTuple(
            answer.get(), "iiiiiOppiip", &kind, &site.depth, &site.count, &site.callable, &site.mirrored, &names, &keywords,
            &is_tuple, &site.args_slot, &site.kwargs_slot, &truth)) {
      recording.fault();
      return;
    }
    site.kind = static_cast<SiteKind>(kind);
    site.has_keywords = keywords != 0;
    site.is_tuple = is_tuple != 0;
    site.truth = truth != 0;
    if (names != Py_None) site.names = names;  // Python keeps it
  });
  return recording.api.sites.emplace(key, site).first->second;
}

const CallableTraits& callable_traits(Recording& recording, PyObject* callable, Lock& lock) {
  const void* key = key_of(callable);
  const auto found = recording.api.callables.find(key);
  if (found != recording.api.callables.end()) return found->second;
  CallableTraits traits;
  traits.by_op = true;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.session, "new_callable", "O", callable));
    int several, by_op, partial, indexes;
    if (!answer || !PyArg_ParseTuple(answer.get(), "ipppp", &traits.info, &several, &by_op, &partial, &indexes)) {
      recording.fault();
      return;
    }
    traits.several = several != 0;
    traits.by_op = by_op != 0;
    traits.partial = partial != 0;
    traits.indexes = indexes != 0;
  });
  return recording.api.callables.emplace(key, traits).first->second;
}

const CallableTraits& traits_by_op(Recording& recording, const OpTraits& op, PyObject* callable, Lock& lock) {
  const void* who = callable == nullptr ? nullptr : key_of(callable);
  const uint64_t key = mixed(reinterpret_cast<uint64_t>(who), static_cast<uint64_t>(op.number));
  const auto found = recording.api.by_op.find(key);
  if (found != recording.api.by_op.end()) return found->second;
  CallableTraits traits;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(
        recording.session, "new_call_by_op", "iO", op.number, callable == nullptr ? Py_None : callable));
    int nothing;
    if (!answer || !PyArg_ParseTuple(answer.get(), "ip", &traits.info, &nothing)) recording.fault();
    else traits.returns_nothing = nothing != 0;
  });
  return recording.api.by_op.emplace(key, traits).first->second;
}

const FunctionTraits& function_traits(Recording& recording, const Frame* frame, Lock& lock) {
  PyObject* function = function_of(frame);
  const auto found = recording.api.functions.find(function);
  if (found != recording.api.functions.end()) return found->second;
  FunctionTraits traits;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.session, "new_function", "O", function));
    PyObject* parameters = nullptr;
    int backward;
    if (!answer || !PyArg_ParseTuple(answer.get(), "ipO!", &traits.info, &backward, &PyList_Type, &parameters)) {
      recording.fault();
      return;
    }
    traits.backward = backward != 0;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(parameters); ++at) {  // Python keeps the objects
      PyObject* one = PyList_GET_ITEM(parameters, at);
      PyObject* name = PyTuple_GET_ITEM(one, 1);
      traits.parameters.push_back(
          {static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(one, 0))), name == Py_None ? nullptr : name,
           PyTuple_GET_ITEM(one, 2)});
    }
  });
  return recording.api.functions.emplace(function, traits).first->second;
}

// The caller's operand stack still shows where each argument was, but the object may be gone: only None is
// recognised by its address.
PyObject* passed(const Frame* caller, const Site& site, const Parameter& parameter, PyObject* now, Lock& lock) {
  PyObject* fallback = parameter.fallback == Py_Ellipsis ? now : parameter.fallback;
  if (site.kind == SiteKind::kSpread && site.args_slot >= 0) {  // `f(*args, **kwargs)` of the caller's own arguments
    PyObject* args = local(caller, site.args_slot);
    if (args == nullptr || !PyTuple_CheckExact(args)) return now;
    if (parameter.slot < PyTuple_GET_SIZE(args)) return PyTuple_GET_ITEM(args, parameter.slot);
    PyObject* keywords = site.kwargs_slot >= 0 ? local(caller, site.kwargs_slot) : nullptr;
    if (keywords == nullptr || !PyDict_CheckExact(keywords)) return site.has_keywords ? now : fallback;
    PyObject* found = nullptr;
    ask(lock, [&] { found = PyDict_GetItemWithError(keywords, parameter.name); });
    return found == nullptr ? fallback : found;
  }
  if (site.kind != SiteKind::kCall) return now;
  const int named = site.names == nullptr ? 0 : static_cast<int>(PyTuple_GET_SIZE(site.names));
  const bool method = call_has_self(caller, site.depth);
  const int first = method ? 1 : 2;
  const int positional = site.count - named + (method ? 1 : 0);
  int at = parameter.slot < positional ? parameter.slot : -1;
  for (int which = 0; at < 0 && which < named; ++which) {
    PyObject* name = PyTuple_GET_ITEM(site.names, which);
    if (name == parameter.name) at = positional + which;
  }
  if (at < 0) return fallback;
  return operand(caller, site.depth + first + at) == Py_None ? Py_None : now;
}

void unwrap_partial(Operands& operands, Lock& lock) {
  ask(lock, [&] {
    Owned function(PyObject_GetAttrString(operands.callable, "func"));
    Owned args(PyObject_GetAttrString(operands.callable, "args"));
    Owned keywords(PyObject_GetAttrString(operands.callable, "keywords"));
    if (!function || !args || !keywords || !PyTuple_CheckExact(args.get()) || !PyDict_CheckExact(keywords.get())) {
      PyErr_Clear();
      return;
    }
    operands.callable = function.get();  // the partial holds all three
    PyObject** first = reinterpret_cast<PyTupleObject*>(args.get())->ob_item;
    operands.objects.insert(operands.objects.begin(), first, first + PyTuple_GET_SIZE(args.get()));
    if (operands.keywords == nullptr && PyDict_GET_SIZE(keywords.get()) > 0) operands.keywords = keywords.get();
  });
}

bool operands_at(Recording& recording, const Frame* frame, const Site& site, Operands& into) {
  const auto at = [&](int position) { return operand(frame, site.depth + position); };
  switch (site.kind) {
    case SiteKind::kCall: {
      const bool method = call_has_self(frame, site.depth);
      into.callable = at(call_callable(method));
      for (int position = method ? 1 : 2; position < site.count + 2; ++position) into.objects.push_back(at(position));
      into.names = site.names;
      return into.callable != nullptr;
    }
    case SiteKind::kSpread: {
      into.callable = at(kSpreadCallable);
      // Anything but a tuple is converted to one first, and may be gone by now.
      if (into.callable == nullptr || !site.is_tuple) return false;
      PyObject* given = at(2);
      if (given == nullptr || !PyTuple_CheckExact(given)) return false;
      PyObject** first = reinterpret_cast<PyTupleObject*>(given)->ob_item;
      into.objects.append(first, first + PyTuple_GET_SIZE(given));
      PyObject* keywords = site.has_keywords ? at(3) : nullptr;
      if (keywords != nullptr && PyDict_CheckExact(keywords) && PyDict_GET_SIZE(keywords) > 0) into.keywords = keywords;
      return true;
    }
    case SiteKind::kBinary: {
      PyObject *left = at(0), *right = at(1);
      if (left == nullptr || right == nullptr) return false;
      if (!is_tensor(recording, left)) {
        if (site.count != 0 || !is_tensor(recording, right)) return false;  // `list[x]`, `[x] == [y]`
        std::swap(left, right);
        into.mirrored = true;
      }
      into.objects = {left, right};
      return true;
    }
    case SiteKind::kUnary:
      into.objects = {at(0)};
      return at(0) != nullptr;
    case SiteKind::kSlice:
      into.objects = {at(0), at(1), at(2)};
      return at(0) != nullptr && is_tensor(recording, at(0));
    case SiteKind::kStore:  // value, container, index
      into.objects = {at(1), at(2), at(0)};
      return at(0) != nullptr && at(1) != nullptr && at(2) != nullptr && is_tensor(recording, at(1));
    case SiteKind::kStoreSlice:  // value, container, start, stop
      into.objects = {at(1), at(2), at(3), at(0)};
      return at(0) != nullptr && at(1) != nullptr && is_tensor(recording, at(1));
    default:
      return false;
  }
}
}  // namespace sightline
