#include "api_calls.h"

#include "observers.h"
#include "python_values.h"

namespace sightline {
namespace {

PyObject* local(const Frame* frame, int slot) {
  PyObject* held = frame->localsplus[slot];
  return held != nullptr && PyCell_Check(held) ? PyCell_GET(held) : held;
}

// What a call was given: objects in order, and names for the last of them.
struct Operands {
  c10::SmallVector<PyObject*, 8> objects;
  PyObject* names = nullptr;
  PyObject* keywords = nullptr;
  PyObject* callable = nullptr;
  bool mirrored = false;  // the right operand is the tensor whose method is called
};

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

PyObject* tuple_of(const Operands& operands) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(operands.objects.size()));
  Py_ssize_t at = 0;
  for (PyObject* object : operands.objects) PyTuple_SET_ITEM(tuple, at++, Py_NewRef(object ? object : Py_None));
  return tuple;
}

// The form and the values of a call; `maker` and `number` say how what it was given is to be understood.
void read_call(
    Recording& recording, const Operands& operands, const char* maker, int32_t number, ApiCall& api, Lock& lock) {
  Arguments found;
  const bool readable = read_operands(recording, operands, found, lock);
  const uint64_t key = mixed(found.key, static_cast<uint64_t>(number) + 0xA1B1);
  if (readable) {
    for (const at::TensorBase* tensor : found.tensors) {
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
    const auto shared = static_cast<unsigned long long>(readable ? found.key : 0);
    Owned answer(PyObject_CallMethod(
        recording.host, "new_api_form", "siKOOO", maker, number, shared, given.get(), operands.names ? operands.names : Py_None,
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

// Keep what a call was given for observers.
template <class Make>
void keep_given(Recording& recording, ApiCall& api, const char* maker, int32_t number, PyObject* names,
                PyObject* keywords, Lock& lock, Make make_values) {
  if (!recording.observes_api) return;
  ask(lock, [&] {
    api.given = Py_BuildValue("(siNOO)", maker, number, make_values(), names ? names : Py_None, keywords ? keywords : Py_None);
    if (api.given == nullptr) recording.fault();
  });
}

const Site& site_of(Recording& recording, PyCodeObject* code, int32_t number, int instruction, Lock& lock) {
  const uint64_t key = static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(instruction);
  const auto found = recording.api.sites.find(key);
  if (found != recording.api.sites.end()) return found->second;
  Site site;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.host, "new_site", "Oi", code, instruction));
    int kind, keywords, is_tuple;
    PyObject* names;
    if (!answer ||
        !PyArg_ParseTuple(
            answer.get(), "iiiiiOppii", &kind, &site.depth, &site.count, &site.callable, &site.mirrored, &names, &keywords,
            &is_tuple, &site.args_slot, &site.kwargs_slot)) {
      recording.fault();
      return;
    }
    site.kind = static_cast<SiteKind>(kind);
    site.has_keywords = keywords != 0;
    site.is_tuple = is_tuple != 0;
    if (names != Py_None) site.names = names;  // the host keeps it
  });
  return recording.api.sites.emplace(key, site).first->second;
}

// What identifies a callable without keeping it: methods that are bound anew for each call share their definition.
const void* key_of(PyObject* callable) {
  if (PyCFunction_CheckExact(callable)) return reinterpret_cast<PyCFunctionObject*>(callable)->m_ml;
  if (Py_IS_TYPE(callable, &PyMethodDescr_Type)) return reinterpret_cast<PyMethodDescrObject*>(callable)->d_method;
  if (PyType_Check(callable)) return callable;
  return Py_TYPE(callable);
}

const CallableTraits& callable_traits(Recording& recording, PyObject* callable, Lock& lock) {
  const void* key = key_of(callable);
  const auto found = recording.api.callables.find(key);
  if (found != recording.api.callables.end()) return found->second;
  CallableTraits traits;
  traits.by_op = true;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.host, "new_callable", "O", callable));
    int several, by_op, partial;
    if (!answer || !PyArg_ParseTuple(answer.get(), "ippp", &traits.info, &several, &by_op, &partial)) {
      recording.fault();
      return;
    }
    traits.several = several != 0;
    traits.by_op = by_op != 0;
    traits.partial = partial != 0;
  });
  return recording.api.callables.emplace(key, traits).first->second;
}

// The name of a call that no function of torch's stands behind: `float(x)`, `if x:`, `sum(list)`.
const CallableTraits& traits_by_op(Recording& recording, const OpTraits& op, PyObject* callable, Lock& lock) {
  const void* who = callable == nullptr ? nullptr : key_of(callable);
  const uint64_t key = mixed(reinterpret_cast<uint64_t>(who), static_cast<uint64_t>(op.number));
  const auto found = recording.api.by_op.find(key);
  if (found != recording.api.by_op.end()) return found->second;
  CallableTraits traits;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(
        recording.host, "new_call_by_op", "iO", op.number, callable == nullptr ? Py_None : callable));
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
    Owned answer(PyObject_CallMethod(recording.host, "new_function", "O", function));
    PyObject* parameters = nullptr;
    int backward;
    if (!answer || !PyArg_ParseTuple(answer.get(), "ipO!", &traits.info, &backward, &PyList_Type, &parameters)) {
      recording.fault();
      return;
    }
    traits.backward = backward != 0;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(parameters); ++at) {  // the host keeps the objects
      PyObject* one = PyList_GET_ITEM(parameters, at);
      PyObject* name = PyTuple_GET_ITEM(one, 1);
      traits.parameters.push_back(
          {static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(one, 0))), name == Py_None ? nullptr : name,
           PyTuple_GET_ITEM(one, 2)});
    }
  });
  return recording.api.functions.emplace(function, traits).first->second;
}

// What was passed for a parameter that the function has given another value since. The caller's operand stack still
// shows where each argument was, but what it points to may be gone: only None is recognised without looking at it.
PyObject* passed(const Frame* caller, const Site& site, const Parameter& parameter, PyObject* now, Lock& lock) {
  PyObject* fallback = parameter.fallback == Py_Ellipsis ? now : parameter.fallback;
  if (site.kind == SiteKind::kSpread && site.args_slot >= 0) {  // `f(*args, **kwargs)` of what the caller was given
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
  PyObject* const* stack = caller->localsplus + code_of(caller)->co_nlocalsplus + site.depth;
  const int named = site.names == nullptr ? 0 : static_cast<int>(PyTuple_GET_SIZE(site.names));
  const bool method = stack[0] != nullptr;
  const int first = method ? 1 : 2;
  const int positional = site.count - named + (method ? 1 : 0);
  int at = parameter.slot < positional ? parameter.slot : -1;
  for (int which = 0; at < 0 && which < named; ++which) {
    PyObject* name = PyTuple_GET_ITEM(site.names, which);
    if (name == parameter.name) at = positional + which;
  }
  if (at < 0) return fallback;
  return stack[first + at] == Py_None ? Py_None : now;
}

// Whether, inside one call of a function, an op at one instruction can come after one at another.
bool may_follow(Recording& recording, PyCodeObject* code, int before, int after, Lock& lock) {
  const uint64_t key = mixed(reinterpret_cast<uint64_t>(code), static_cast<uint64_t>(before) << 32 | static_cast<uint32_t>(after));
  const auto found = recording.api.follows.find(key);
  if (found != recording.api.follows.end()) return found->second;
  bool follows = after > before;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.host, "may_follow", "Oii", code, before, after));
    if (answer) follows = PyObject_IsTrue(answer.get()) == 1;
    if (PyErr_Occurred()) recording.fault();
  });
  recording.api.follows.emplace(key, follows);
  return follows;
}

// Where a torch function and the frames inside it are, outermost first.
c10::SmallVector<Place, 4> places_inside(const Recording::Path& path, const Frame* function) {
  c10::SmallVector<Place, 4> found;
  bool inside = false;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    inside |= *at == function;
    if (inside) found.push_back({*at, code_of(*at), instruction_of(*at)});
  }
  return found;
}

// Whether frames that were at one place can be at another within the same call of the outermost.
bool goes_on(
    Recording& recording, const c10::SmallVector<Place, 4>& before, const c10::SmallVector<Place, 4>& after, Lock& lock) {
  for (size_t at = 0; at < before.size() && at < after.size(); ++at) {
    if (before[at].frame != after[at].frame || before[at].code != after[at].code) return true;
    if (may_follow(recording, before[at].code, before[at].instruction, after[at].instruction, lock)) return true;
    if (before[at].instruction != after[at].instruction) return false;
  }
  return false;
}

bool is_tensor(const Recording& recording, PyObject* object) {
  const auto found = recording.types.kinds.find(Py_TYPE(object));
  return found != recording.types.kinds.end() && found->second == TypeKind::kTensor;
}

bool takes_subject(const Recording& recording, PyObject* subject, const Arguments& given) {
  return subject != nullptr && is_tensor(recording, subject) && !given.tensors.empty() &&
      given.tensors[0]->unsafeGetTensorImpl() == recording.types.tensor_of(subject).unsafeGetTensorImpl();
}

// What a `functools.partial` calls, with what it adds.
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

// Whether an op at the place of an open call is the first of the next call there. An indexing call begins with what
// it indexes; for others the first op decides.
bool begins_again(
    const Recording& recording, ApiCall& api, const OpTraits& traits, PyObject* subject, const Arguments& given) {
  if (api.read_number) {
    api.began |= takes_subject(recording, subject, given);
    return false;
  }
  if (!api.indexes) return traits.reads_number || api.first == &traits;
  if (traits.reads_number) return api.began;
  const bool began = api.began;
  const bool takes = takes_subject(recording, subject, given);
  api.began |= takes;
  return began && takes;
}

// The operands of the instruction a frame is at.
bool operands_at(Recording& recording, const Frame* frame, const Site& site, Operands& into) {
  PyObject* const* stack = frame->localsplus + code_of(frame)->co_nlocalsplus + site.depth;
  switch (site.kind) {
    case SiteKind::kCall: {
      const bool method = stack[0] != nullptr;
      into.callable = method ? stack[0] : stack[1];
      const int count = site.count + (method ? 1 : 0);
      into.objects.append(stack + (method ? 1 : 2), stack + (method ? 1 : 2) + count);
      into.names = site.names;
      return into.callable != nullptr;
    }
    case SiteKind::kSpread:
      into.callable = stack[1];
      // What is no tuple is made one first, and may be gone by now.
      if (into.callable == nullptr || !site.is_tuple) return false;
      if (stack[2] == nullptr || !PyTuple_CheckExact(stack[2])) return false;
      into.objects.append(
          reinterpret_cast<PyTupleObject*>(stack[2])->ob_item,
          reinterpret_cast<PyTupleObject*>(stack[2])->ob_item + PyTuple_GET_SIZE(stack[2]));
      if (site.has_keywords && stack[3] != nullptr && PyDict_CheckExact(stack[3]) && PyDict_GET_SIZE(stack[3]) > 0) {
        into.keywords = stack[3];
      }
      return true;
    case SiteKind::kBinary: {
      PyObject *left = stack[0], *right = stack[1];
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
      into.objects = {stack[0]};
      return stack[0] != nullptr;
    case SiteKind::kSlice:
      into.objects = {stack[0], stack[1], stack[2]};
      return stack[0] != nullptr && is_tensor(recording, stack[0]);
    case SiteKind::kStore:  // value, container, index
      into.objects = {stack[1], stack[2], stack[0]};
      return stack[0] != nullptr && stack[1] != nullptr && stack[2] != nullptr && is_tensor(recording, stack[1]);
    default:
      return false;
  }
}

}  // namespace

void end_api_call(Recording& recording, ThreadState& state, Lock& lock) {
  ApiCall& api = state.api;
  if (api.id < 0) return;
  recording.ops.write(
      {api.id, api.info, api.form, api.result, api.stack, api.call, -1, api.bits, -1, -1, api.start - recording.begin,
       api.end - api.start - (api.spent_at_end - api.spent)},
      api.inputs.data(), api.inputs.size(), api.outputs.data(), api.outputs.size());
  const int32_t id = std::exchange(api.id, -1);
  api.backward = false;
  if (api.given != nullptr) notify_api_call(recording, state, id, lock);
  api.inputs.clear();
  api.outputs.clear();
}

void begin_api_call(
    Recording& recording, ThreadState& state, OpTraits& traits, const Arguments& given,
    c10::ArrayRef<const c10::IValue> values, int64_t entered, Lock& lock) {
  const Frame* innermost = current_frame();
  const bool in_backward = state.node != -1;
  const Frame* function = nullptr;  // the outermost of torch's own functions below the mark
  Recording::Path path;
  recording.path_to_mark(state, innermost, path, lock);
  int32_t stack = state.top().above;
  int32_t outside = stack;  // the stack of the caller of the torch function
  int32_t innermost_code = -1;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    const CodeTraits* code = recording.traits_of(code_of(*at), lock);
    if (code->api && function == nullptr) {
      function = *at;
      outside = stack;
    }
    if (!code->hidden) stack = recording.stacks.child(stack, code->number, instruction_of(*at));
    innermost_code = code->number;
  }
  state.stack = stack;
  ApiCall& api = state.api;
  size_t operands_count = 0;
  if (in_backward && api.id >= 0 && api.backward) {  // what runs in a backward pass belongs to its call
    api.bits &= ~(kRaised << kFlagShift);  // what an op of it has raised was caught
    return;
  }
  if (function != nullptr) {
    const auto inside = places_inside(path, function);
    if (api.id >= 0 && api.python && api.frame == function && api.stack == outside &&
        (api.read_number || goes_on(recording, api.inside, inside, lock))) {
      api.inside = inside;
      api.read_number = traits.reads_number;
      api.bits &= ~(kRaised << kFlagShift);
      if (!api.backward) state.stack = api.stack;
      return;
    }
    end_api_call(recording, state, lock);
    const FunctionTraits& known = function_traits(recording, function, lock);
    if (known.info < 0) return;
    Operands operands;
    const Frame* caller = caller_of(function);
    const CodeTraits* calling = caller == nullptr ? nullptr : recording.traits_of(code_of(caller), lock);
    for (const Parameter& parameter : known.parameters) {
      PyObject* held = local(function, parameter.slot);
      if (parameter.name != nullptr && calling != nullptr && calling->number >= 0) {
        const Site site = site_of(recording, code_of(caller), calling->number, instruction_of(caller), lock);
        held = passed(caller, site, parameter, held, lock);
      }
      operands.objects.push_back(held);
    }
    const int32_t info = known.info;
    api.backward = known.backward;
    read_call(recording, operands, "function", info, api, lock);
    keep_given(recording, api, "function", info, nullptr, nullptr, lock, [&] { return tuple_of(operands); });
    api.info = info;
    api.frame = function;
    api.inside = inside;
    api.python = true;
    api.several = true;
    api.returns_nothing = api.backward;
    api.stack = outside;
  } else {
    if (innermost == nullptr || path.empty() || innermost_code < 0 || in_backward) {
      if (!in_backward || api.id < 0 || !api.backward) end_api_call(recording, state, lock);
      return;
    }
    const int instruction = instruction_of(innermost);
    const Site site = site_of(recording, code_of(innermost), innermost_code, instruction, lock);
    Operands operands;
    bool readable = operands_at(recording, innermost, site, operands);
    PyObject* subject = readable && !operands.objects.empty() ? operands.objects[0] : nullptr;
    const bool same_place = api.id >= 0 && !api.python && api.frame == innermost && api.instruction == instruction;
    if (same_place && (api.several || api.read_number) && api.subject == subject &&
        !begins_again(recording, api, traits, subject, given)) {
      api.read_number = traits.reads_number;
      return;
    }
    end_api_call(recording, state, lock);
    CallableTraits known;
    if (operands.callable != nullptr) {
      known = callable_traits(recording, operands.callable, lock);
      if (known.partial) {
        unwrap_partial(operands, lock);
        known = callable_traits(recording, operands.callable, lock);
      }
      if (known.by_op) {
        known = traits_by_op(recording, traits, operands.callable, lock);
        readable = false;  // what was passed to `max(x, y)` is not what its comparison was given
      } else if (PyCFunction_CheckExact(operands.callable)) {
        PyObject* self = PyCFunction_GET_SELF(operands.callable);
        if (self != nullptr && is_tensor(recording, self)) operands.objects.insert(operands.objects.begin(), self);
      }
    } else if (readable && site.callable >= 0) {
      known.info = operands.mirrored ? site.mirrored : site.callable;
      known.several = site.kind == SiteKind::kStore || site.count != 0;
      known.returns_nothing = site.kind == SiteKind::kStore;
    } else {
      known = traits_by_op(recording, traits, nullptr, lock);
    }
    if (known.info < 0) return;
    api.backward = false;
    if (readable) {
      operands_count = operands.objects.size();
      const char* maker = site.kind == SiteKind::kSlice ? "slice" : "call";
      read_call(recording, operands, maker, known.info, api, lock);
      keep_given(recording, api, maker, known.info, operands.names, operands.keywords, lock, [&] { return tuple_of(operands); });
    } else {
      // Its operands cannot be read: what its op was given is the next best.
      for (const at::TensorBase* tensor : given.tensors) api.inputs.push_back(recording.value_of(*tensor, lock));
      api.form = recording.form_of(traits, given, values, lock);
      keep_given(recording, api, "op", traits.number, nullptr, nullptr, lock, [&] { return python_list(values, object_of); });
    }
    api.info = known.info;
    api.frame = innermost;
    api.instruction = instruction;
    api.python = false;
    api.several = known.several;
    api.returns_nothing = known.returns_nothing;
    api.subject = subject;
    api.indexes = site.kind != SiteKind::kCall && site.kind != SiteKind::kSpread;
    api.began = takes_subject(recording, subject, given);
    api.stack = stack;
  }
  api.first = &traits;
  api.read_number = traits.reads_number && (api.python || operands_count > 1);
  api.id = recording.next_id++;
  api.call = state.top().call;
  api.bits = state.number << kThreadShift | (in_backward ? kBackward : state.phase);
  api.result = recording.no_form;
  api.outputs.clear();
  api.start = api.end = now();
  api.spent = api.spent_at_end = state.spent + (api.start - entered);
  if (!api.backward) state.stack = api.stack;
}

void end_api_op(
    Recording& recording, ThreadState& state, const OpenOp& op, c10::ArrayRef<c10::IValue> made, bool raised,
    int64_t end, Lock& lock) {
  ApiCall& api = state.api;
  api.end = end;
  api.spent_at_end = state.spent;
  if (raised) {
    api.bits |= kRaised << kFlagShift;
    api.outputs.clear();
    api.results.clear();
    api.result = recording.no_form;
    // Else an op inside has raised: one that is written in terms of others may also do so before the first of them.
    if (!recording.wants_aten || recording.raised_stack != state.stack) recording.raised_stack = api.stack;
    return;
  }
  if (!recording.wants_aten && op.traits->mutates != 0) {
    api.bits |= kMutates << kFlagShift;
    for (c10::TensorImpl* impl : op.changed) {
      const auto found = recording.values.known.find(impl);
      if (found == recording.values.known.end()) continue;
      auto alive = found->second.ref.lock();
      if (alive) recording.new_version(at::TensorBase{std::move(alive)}, api.id, found->second.value, lock);
    }
  }
  if (api.returns_nothing) return;
  Arguments results;
  for (const c10::IValue& value : made) read(value, results);
  api.outputs.clear();
  api.results.clear();
  for (const at::TensorBase* tensor : results.tensors) {
    api.outputs.push_back(recording.produced(*tensor, api.id, nullptr, lock));
    if (recording.observes_api) api.results.emplace_back(tensor->getIntrusivePtr());
  }
  api.result = recording.result_form(*op.traits, made, true, lock);
}

}  // namespace sightline
