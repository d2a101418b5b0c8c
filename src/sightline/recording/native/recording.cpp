// The first look-ups of a recording (operators, tensors, forms, stacks), and the rows it writes.
#include "recording.h"

#include <cstring>

#include "api_calls.h"
#include "python_values.h"

namespace sightline {

thread_local int WithGil::silent = 0;

namespace {

int32_t as_number(PyObject* object) { return object == nullptr ? -1 : static_cast<int32_t>(PyLong_AsLong(object)); }

// Whether a function of this code is among the frames of a path.
bool passes(const Recording::Path& path, const PyCodeObject* code) {
  return code != nullptr && std::any_of(path.begin(), path.end(), [&](const Frame* at) { return code_of(at) == code; });
}

// Have the main thread raise the exception that a function returns, unless it returns none.
int raise_error(void* argument) {
  Owned callable(static_cast<PyObject*>(argument));
  Owned error(PyObject_CallNoArgs(callable.get()));
  if (!error) return -1;
  if (error.get() == Py_None) return 0;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  return -1;
}

}  // namespace

// With the GIL and a Python error: have it counted. An interrupt is handed on to the program it was meant for.
void Recording::fault() {
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_Clear();
    PyErr_SetInterrupt();
    return;
  }
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  if (error != nullptr && traceback != nullptr) PyException_SetTraceback(error, traceback);
  if (session != nullptr && error != nullptr) {
    Owned answer(PyObject_CallMethod(session, "handle_fault", "O", error));
    if (!answer) PyErr_Clear();
    // Not before Python has returned: it would be the one to raise it.
    if (answer && answer.get() != Py_None && Py_AddPendingCall(raise_error, Py_NewRef(answer.get())) < 0) Py_DECREF(answer.get());
  }
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
}

OpTraits* Recording::traits_of(const at::RecordFunction& event, Lock& lock) {
  const char* name = event.name();
  const char* overload = event.overload_name();
  // Names of operators live as long as their schemas; other marks may be texts on a caller's stack.
  const void* key = overload[0] == '\0' ? static_cast<const void*>(name) : overload;
  const auto found = traits_.find(key);
  if (found != traits_.end() && std::strcmp(found->second->name.c_str(), name) == 0 &&
      found->second->overload == overload) {
    return found->second.get();
  }
  // Autograd marks each of its nodes so, with a text of its own each time.
  if (std::strncmp(name, "autograd::engine", 16) == 0) return nullptr;
  const auto handle = c10::Dispatcher::singleton().findOp({name, overload});
  if (!handle.has_value()) return nullptr;
  auto traits = std::make_unique<OpTraits>();
  traits->name = name;
  traits->overload = overload;
  traits->leaf = !handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  for (uint8_t backend = 1; backend <= static_cast<uint8_t>(c10::BackendComponent::EndOfBackendKeys); ++backend) {
    const auto key = c10::toRuntimePerBackendFunctionalityKey(
        c10::DispatchKey::Dense, static_cast<c10::BackendComponent>(backend));
    if (!traits->leaf && handle->hasKernelForDispatchKey(key)) traits->kernels |= uint64_t{1} << backend;
  }
  // Autograd runs it by itself: nothing reaches a backend, and no data change.
  if (traits->name == "aten::detach_") traits->leaf = false;
  traits->autocast_cpu = handle->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
  traits->autocast_cuda = handle->hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA);
  traits->arguments = handle->schema().arguments().size();
  traits->returns = handle->schema().returns().size();
  traits->truth = traits->name == "aten::is_nonzero";
  traits->reads_number = traits->name == "aten::item" || traits->name == "aten::_local_scalar_dense";
  traits->python = traits->name.compare(0, 6, "aten::") != 0;
  const std::string name_copy = traits->name, overload_copy = traits->overload;
  const bool answered = ask(lock, [&] {
    Owned answer(PyObject_CallMethod(session, "new_op", "ss", name_copy.c_str(), overload_copy.c_str()));
    int seen, constant, chosen, uninitialized, relabels, keeps_order, maybe_view, preserves;
    unsigned long long mutates;
    if (!answer ||
        !PyArg_ParseTuple(
            answer.get(), "ippiKpppppi", &traits->number, &seen, &constant, &traits->aliases, &mutates, &chosen,
            &uninitialized, &relabels, &keeps_order, &maybe_view, &preserves)) {
      fault();
      return;
    }
    traits->seen = seen != 0;
    traits->constant = constant != 0;
    traits->mutates = mutates;
    traits->measured = {chosen != 0, uninitialized != 0, relabels != 0, keeps_order != 0, maybe_view != 0,
                        static_cast<Preserves>(preserves)};
  });
  if (!answered) return nullptr;
  auto& kept = traits_[key];
  if (kept != nullptr && kept->name == name && kept->overload == overload) return kept.get();
  if (kept != nullptr) {  // an operator that was registered anew where another had been: open ops still refer to it
    static std::vector<std::unique_ptr<OpTraits>> gone;
    gone.push_back(std::move(kept));
  }
  kept = std::move(traits);
  return kept.get();
}

int32_t Recording::metadata_of(const at::TensorBase& tensor, Lock& lock) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const uint64_t key = metadata_key(impl);
  if (key != 0) {
    const auto found = values.metadata.find(key);
    if (found != values.metadata.end()) return found->second;
  }
  int32_t number = -1;
  ask(lock, [&] {
    PyObject* answer;
    if (key != 0) {
      answer = PyObject_CallMethod(
          session, "plain_metadata", "NNss", python_tuple(impl->sizes()), python_tuple(impl->strides()),
          c10::toString(c10::typeMetaToScalarType(impl->dtype())), impl->device().str().c_str());
    } else {
      answer = PyObject_CallMethod(session, "metadata", "N", object_of(tensor));
    }
    Owned held(answer);
    number = as_number(answer);
    if (PyErr_Occurred()) fault();
  });
  if (key != 0 && number >= 0) values.metadata.emplace(key, number);
  return std::max(number, 0);
}

// The value of a tensor that is used. Python explains one that no recorded op made.
int32_t Recording::value_of(const at::TensorBase& tensor, Lock& lock) {
  const auto known = values.known.find(tensor.unsafeGetTensorImpl());
  if (known != values.known.end()) {
    values.memory.use(known->second.place);
    if (known->second.is_current(known->first)) return known->second.value;
    return add_version(tensor, known->second, lock);
  }
  if (unexplained) return output(tensor, -1, nullptr, lock);
  if (in_backward) {
    const int32_t saved = values.saved(tensor.unsafeGetTensorImpl(), metadata_of(tensor, lock));
    if (saved >= 0) {
      values.know(tensor, saved);
      return saved;
    }
    // Parameters are known, and every op is seen: the compiled code that ran last has made it.
    if (wants_aten && last_region >= 0) return output(tensor, last_region, nullptr, lock);
  }
  const int32_t id = values.next++;
  ValueRow row{.storage = 0, .offset = 0, .id = id, .kind = kKindExternal, .flags = 0};
  ask(lock, [&] {
    Owned object(THPVariable_Wrap(tensor));
    const auto bytes = static_cast<long long>(storage_bytes(tensor.unsafeGetTensorImpl()));
    Owned answer(object ? PyObject_CallMethod(session, "explain_tensor", "OiL", object.get(), id, bytes) : nullptr);
    int kind, flags;
    if (!answer || !PyArg_ParseTuple(answer.get(), "iiii", &kind, &row.producer, &row.base, &flags)) {
      fault();
      return;
    }
    row.kind = static_cast<int16_t>(kind);
    row.flags = static_cast<int16_t>(flags);
  });
  row.meta = metadata_of(tensor, lock);
  if (const void* storage = storage_of(tensor.unsafeGetTensorImpl())) {
    row.storage = reinterpret_cast<int64_t>(storage);
    row.offset = tensor.storage_offset();
  }
  values.rows.push_back(row);
  const int32_t met = values.find(tensor.unsafeGetTensorImpl());
  if (met < 0) values.know(tensor, id);
  return met < 0 ? id : met;  // Python, or another thread, has registered it meanwhile
}

// A new version of a tensor that was given other data without an op.
int32_t Recording::add_version(const at::TensorBase& tensor, const KnownTensor& before, Lock& lock) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const void* storage = storage_of(impl);
  const bool moved = before.storage != storage;
  const int32_t previous = before.value;  // `before` is not read again: the mutex is unlocked meanwhile
  const int32_t base = moved && storage != nullptr ? values.find_storage(storage, impl) : -1;
  const int32_t metadata = metadata_of(tensor, lock);
  const int32_t id = values.next++;
  const int flags = (tensor.requires_grad() ? kRequiresGrad : 0) | (moved && base < 0 ? kMoved : 0);
  values.rows.push_back(
      {.storage = reinterpret_cast<int64_t>(storage), .offset = storage ? impl->storage_offset() : 0, .id = id,
       .meta = metadata, .previous = previous, .base = base, .kind = kKindActivation,
       .flags = static_cast<int16_t>(flags)});
  values.know_storage(tensor, id, metadata);
  values.know(tensor, id);
  return id;
}

int32_t Recording::new_version(const at::TensorBase& tensor, int32_t op, int32_t previous, Lock& lock) {
  const int32_t metadata = metadata_of(tensor, lock);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const void* storage = storage_of(impl);
  const int32_t id = values.next++;
  values.rows.push_back(
      {.storage = reinterpret_cast<int64_t>(storage), .offset = storage ? impl->storage_offset() : 0, .id = id,
       .meta = metadata, .producer = op, .previous = previous, .kind = kKindActivation, .flags = 0});
  values.know_storage(tensor, id, metadata);
  values.know(tensor, id);
  return id;
}

// The value of a result: that of a tensor which is known, or a new one, which may be a view of an input.
int32_t Recording::output(const at::TensorBase& tensor, int32_t op, const OpenOp* from, Lock& lock) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto known = values.known.find(impl);
  if (known != values.known.end()) {
    // A tensor that an op changed without declaring it has a new version all the same.
    if (known->second.is_current(impl)) return known->second.value;
    return op < 0 ? add_version(tensor, known->second, lock) : new_version(tensor, op, known->second.value, lock);
  }
  const int32_t metadata = metadata_of(tensor, lock);
  const int32_t id = values.next++;
  const bool view = from != nullptr && from->alias_storage != nullptr && storage_of(impl) == from->alias_storage;
  if (!wants_aten && op >= 0) {  // ops are not seen, so only its memory shows that a tensor is a view
    const void* storage = storage_of(impl);
    values.rows.push_back(
        {.storage = reinterpret_cast<int64_t>(storage), .offset = storage ? impl->storage_offset() : 0, .id = id,
         .meta = metadata, .producer = op, .kind = kKindActivation, .flags = 0});
  } else if (view) {
    values.rows.push_back(
        {.storage = 0, .offset = impl->storage_offset(), .id = id, .meta = metadata, .producer = op,
         .base = from->alias_value, .kind = kKindActivation, .flags = 0});
  } else {
    values.fresh_rows.push_back({id, metadata, op});
  }
  values.know_storage(tensor, id, metadata);
  values.know(tensor, id);
  return id;
}

int32_t Recording::form_of(
    const OpTraits& traits, const Arguments& read, c10::ArrayRef<const c10::IValue> given, Lock& lock) {
  const uint64_t key = mixed(read.key, static_cast<uint64_t>(traits.number) + 0x1000);
  if (!read.needs_python) {
    const auto found = forms.find(key);
    if (found != forms.end()) return found->second;
  }
  int32_t form = no_form;
  ask(lock, [&] {
    const auto shared = static_cast<unsigned long long>(read.needs_python ? 0 : read.key);
    Owned answer(PyObject_CallMethod(session, "new_form", "iKN", traits.number, shared, python_list(given, slot_marker)));
    if (answer) form = as_number(answer.get());
    if (PyErr_Occurred()) fault();
  });
  if (!read.needs_python) forms.emplace(key, form);
  return form;
}

// The form of the results of an op, or of the API call that ran it: Python's bindings make tuples of
// lists, and give some of them names.
int32_t Recording::result_form(const OpTraits& traits, c10::ArrayRef<c10::IValue> outputs, bool api, Lock& lock) {
  if (outputs.size() == 1 && outputs[0].isTensor() && outputs[0].toTensor().defined()) return -1;
  if (outputs.empty()) return no_form;
  Arguments arguments;
  for (const c10::IValue& value : outputs) read(value, arguments);
  const uint64_t key = mixed(mixed(arguments.key, 0x5EED + outputs.size()), api ? static_cast<uint64_t>(traits.number) + 1 : 0);
  const auto known = forms.find(key);
  if (known != forms.end()) return known->second;
  int32_t form = no_form;
  ask(lock, [&] {
    const char* method = api ? "new_api_result_form" : "new_result_form";
    Owned answer(PyObject_CallMethod(session, method, "iN", traits.number, python_list(outputs, slot_marker)));
    if (answer) form = as_number(answer.get());
    if (PyErr_Occurred()) fault();
  });
  if (!arguments.needs_python) forms.emplace(key, form);
  return form;
}

void Recording::learn_type(PyTypeObject* type, Lock& lock) {
  int kind = static_cast<int>(TypeKind::kPython);
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(session, "new_type", "O", type));
    if (answer) kind = as_number(answer.get());
    if (PyErr_Occurred()) fault();
  });
  types.kinds.emplace(type, static_cast<TypeKind>(kind));
}

const CodeTraits* Recording::traits_of(PyCodeObject* code, Lock& lock) {
  auto found = stacks.codes.find(code);
  if (found != stacks.codes.end()) return &found->second;
  CodeTraits traits{-1, true, false, false};
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(session, "new_code", "O", code));
    int hidden, api, engine;
    if (!answer || !PyArg_ParseTuple(answer.get(), "ippp", &traits.number, &hidden, &api, &engine)) {
      fault();
      return;
    }
    traits.hidden = hidden != 0;
    traits.api = api != 0;
    traits.engine = engine != 0;
  });
  if (traits.number < 0) {
    static const CodeTraits unknown{-1, true, false, false};
    return &unknown;
  }
  return &stacks.codes.emplace(code, traits).first->second;
}

// The frames from one up to the thread's anchor. Anchors that are not on the stack belong to calls that ended without
// their hook.
void Recording::path_to_anchor(ThreadState& state, const Frame* frame, Path& path, Lock& lock) {
  for (;;) {
    path.clear();
    const Frame* at = frame;
    while (at != nullptr && !state.top().is(at)) {
      path.push_back(at);
      at = caller_of(at);
    }
    if (state.top().is(at)) {
      if (state.top().optimizer) state.phase = passes(path, state.top().closure) ? kForward : kOptimizer;
      return;
    }
    end_api_call(*this, state, lock);
    drop_anchor(state);
  }
}

int32_t Recording::stack_of(ThreadState& state, const Frame* frame, Lock& lock) {
  Path path;
  path_to_anchor(state, frame, path, lock);
  int32_t stack = state.top().stack;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    const CodeTraits* code = traits_of(code_of(*at), lock);
    if (!code->hidden) stack = stacks.child(stack, code->number, instruction_of(*at));
  }
  return stack;
}

void Recording::drop_anchor(ThreadState& state) {
  if (state.anchors.size() == 1) {  // the block's own caller has returned: walk to the top from now on
    state.anchors[0] = StackAnchor{};
    return;
  }
  if (!state.calls.empty() && state.calls.back().anchor == state.anchors.size() - 1) {
    close_call(state, c10::SmallVector<int32_t, 1>(), no_form, kRaised, now());
    return;
  }
  pop_anchor(state);
}

void Recording::pop_anchor(ThreadState& state) {
  state.phase = state.top().outer_phase;
  state.anchors.pop_back();
}

// The innermost module call has ended.
void Recording::close_call(
    ThreadState& state, const Ids& outputs, int32_t form, int flags, int64_t end) {
  OpenCall& call = state.calls.back();
  const StackAnchor& anchor = state.anchors[call.anchor];
  const int64_t duration = end - call.start - (state.spent - call.spent);
  calls.write(
      {.start = call.start - begin, .duration = duration, .end = next_id++, .id = call.id, .module = call.module,
       .parent = call.parent, .stack = anchor.stack, .bits = call.bits | flags << kFlagShift,
       .input_form = call.input_form, .output_form = form},
      call.inputs, outputs);
  state.phase = anchor.outer_phase;
  state.anchors.resize(call.anchor);
  state.calls.pop_back();
}

const at::TensorBase* Recording::tensor_in(PyObject* object) const {
  const auto found = types.kinds.find(Py_TYPE(object));
  return found != types.kinds.end() && found->second == TypeKind::kTensor ? &types.tensor_of(object) : nullptr;
}

// Read a call's arguments as Python passed them. With the GIL and the mutex, which is given up in between.
void Recording::read_python(PyObject* args, PyObject* kwargs, Ids& ids, int32_t& form, Lock& lock) {
  const bool bare = kwargs == nullptr || PyDict_GET_SIZE(kwargs) == 0;
  if (bare && PyTuple_CheckExact(args) && PyTuple_GET_SIZE(args) == 1) {  // the arguments of most modules
    const auto kind = types.kinds.find(Py_TYPE(PyTuple_GET_ITEM(args, 0)));
    if (kind != types.kinds.end() && kind->second == TypeKind::kTensor) {
      ids.push_back(value_of(types.tensor_of(PyTuple_GET_ITEM(args, 0)), lock));
      form = one_tensor;
      return;
    }
  }
  for (;;) {
    Arguments arguments;
    arguments.has_gil = true;  // the caller of a module holds it
    PyTypeObject* unknown = types.read(args, arguments);
    if (unknown == nullptr && kwargs != nullptr && PyDict_GET_SIZE(kwargs) > 0) unknown = types.read(kwargs, arguments);
    if (unknown != nullptr) {
      learn_type(unknown, lock);
      continue;
    }
    PyObject* named = kwargs == nullptr || PyDict_GET_SIZE(kwargs) == 0 ? Py_None : kwargs;
    if (!arguments.needs_python) {
      const uint64_t key = mixed(arguments.key, 0xCA11);
      const auto known = forms.find(key);
      if (known != forms.end()) {
        form = known->second;
      } else {
        ask(lock, [&] {
          Owned answer(PyObject_CallMethod(session, "new_call_form", "OO", args, named));
          if (answer) form = as_number(answer.get());
          if (PyErr_Occurred()) fault();
        });
        forms.emplace(key, form);
      }
      for (const at::TensorBase* tensor : arguments.tensors) ids.push_back(value_of(*tensor, lock));
      return;
    }
    ask(lock, [&] {
      Owned answer(PyObject_CallMethod(session, "read", "OO", args, named));
      PyObject* list = nullptr;
      if (answer && PyArg_ParseTuple(answer.get(), "iO!", &form, &PyList_Type, &list)) {
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at) ids.push_back(as_number(PyList_GET_ITEM(list, at)));
      }
      if (PyErr_Occurred()) fault();
    });
    return;
  }
}

// The number of a module that is called. With the GIL.
int32_t Recording::module_of(PyObject* module, Lock& lock) {
  const auto found = modules_.find(module);
  if (found != modules_.end() && PyWeakref_GET_OBJECT(found->second.ref) == module) return found->second.number;
  int32_t number = -1;
  PyObject* ref = nullptr;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(session, "module", "O", module));
    if (answer) number = as_number(answer.get());
    if (number >= 0) ref = PyWeakref_NewRef(module, nullptr);
    if (PyErr_Occurred()) fault();
  });
  if (ref == nullptr) return -1;
  KnownModule& kept = modules_[module];
  Py_XDECREF(kept.ref);
  kept = {ref, number};
  return number;
}

// With the GIL.
void Recording::clear() {
  for (const auto& [module, known] : modules_) Py_XDECREF(known.ref);
  modules_.clear();
  Py_CLEAR(base);
  for (auto& [thread, state] : threads) Py_CLEAR(state->api.given);
  observes_ops = observes_api = observes_calls = false;
  unexplained = false;
  stacks = Stacks();
  values = Values();
  ops = OpRows();
  calls = CallRows();
  forms.clear();
  traits_.clear();
  types = PythonTypes();
  api = ApiTables();
  measurements = Measurements();
  threads.clear();
  next_id = 0;
  faults = 0;
  raised_stack = -1;
  last_region = -1;
  unrecorded_calls = 0;
  unrecorded_module.clear();
}

}  // namespace sightline
