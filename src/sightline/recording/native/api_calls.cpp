#include "api_calls.h"

#include "call_operands.h"
#include "observers.h"
#include "python_values.h"

namespace sightline {
namespace {

// Keep the arguments of a call for observers.
template <class Make>
void keep_given(Recording& recording, ApiCall& api, const char* maker, int32_t number, PyObject* names,
                PyObject* keywords, Lock& lock, Make make_values) {
  if (!recording.observes_api) return;
  ask(lock, [&] {
    api.given = Py_BuildValue("(siNOO)", maker, number, make_values(), names ? names : Py_None, keywords ? keywords : Py_None);
    if (api.given == nullptr) recording.fault();
  });
}

// Whether, inside one call of a function, an op at one instruction can come after one at another.
bool may_follow(Recording& recording, PyCodeObject* code, int before, int after, Lock& lock) {
  const uint64_t key = mixed(reinterpret_cast<uint64_t>(code), static_cast<uint64_t>(before) << 32 | static_cast<uint32_t>(after));
  const auto found = recording.api.follows.find(key);
  if (found != recording.api.follows.end()) return found->second;
  bool follows = after > before;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.session, "may_follow", "Oii", code, before, after));
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

enum class Progress { kSamePlace, kOn, kNew };

// Whether frames that were at one place can be at another within the same call of the outermost.
Progress progress(
    Recording& recording, const c10::SmallVector<Place, 4>& before, const c10::SmallVector<Place, 4>& after, Lock& lock) {
  if (before[0].code != after[0].code) return Progress::kNew;
  for (size_t at = 0; at < before.size() && at < after.size(); ++at) {
    if (before[at].frame != after[at].frame || before[at].code != after[at].code) return Progress::kOn;
    if (may_follow(recording, before[at].code, before[at].instruction, after[at].instruction, lock)) return Progress::kOn;
    if (before[at].instruction != after[at].instruction) return Progress::kNew;
  }
  return before.size() == after.size() ? Progress::kSamePlace : Progress::kNew;
}

// Whether the backward pass that an op runs in is that of the open call, or one that its nodes have started. Both run
// inside torch's function that calls the engine, a second one inside a second such function.
bool is_pass_of_call(Recording& recording, ThreadState& state, const Frame* innermost, Lock& lock) {
  ApiCall& api = state.api;
  if (state.task < 0) return false;
  if (state.task == api.task || state.task == api.inner_task) return true;
  const Frame* at = innermost;
  while (at != nullptr && at != api.frame) at = caller_of(at);
  if (at == nullptr) return false;
  int engines = 0;
  for (at = innermost; at != api.frame; at = caller_of(at)) engines += recording.traits_of(code_of(at), lock)->engine;
  if (engines > 1) api.inner_task = state.task;
  else if (engines == 1 && api.task < 0) api.task = state.task;
  else return false;
  return true;
}

bool stores(const Site& site) { return site.kind == SiteKind::kStore || site.kind == SiteKind::kStoreSlice; }

bool takes_subject(const Recording& recording, PyObject* subject, const Arguments& given) {
  return subject != nullptr && is_tensor(recording, subject) && !given.tensors.empty() &&
      given.tensors[0]->unsafeGetTensorImpl() == recording.types.tensor_of(subject).unsafeGetTensorImpl();
}

// Whether an op at the place of an open call is the first of the next call there. An indexing call begins with its
// subject; for others the first op decides.
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

// Whether an op inside a torch function belongs to the open call of it. Where no frame has moved, either the function is
// called again, or a C function it calls runs several ops.
bool goes_on(
    Recording& recording, ApiCall& api, const OpTraits& traits, const c10::SmallVector<Place, 4>& inside, int32_t code,
    const Arguments& given, Lock& lock) {
  if (api.read_number) return true;
  const Progress moved = progress(recording, api.inside, inside, lock);
  if (moved != Progress::kSamePlace) {
    api.first = &traits;
    api.subject = nullptr;
    return moved == Progress::kOn;
  }
  const Place& place = inside.back();
  const Site site = site_of(recording, place.code, code, place.instruction, lock);
  if (site.truth && (traits.truth || traits.reads_number)) return true;
  Operands operands;
  if (!operands_at(recording, place.frame, site, operands)) return false;
  CallableTraits called;
  called.several = called.indexes = stores(site) || site.count != 0;
  if (operands.callable != nullptr) called = callable_traits(recording, operands.callable, lock);
  // C++ that calls operators, as many as it likes
  const bool helper = operands.callable != nullptr && called.info < 0 && !called.by_op;
  if (!called.several && !helper) return false;
  PyObject* subject = operands.objects.empty() ? nullptr : operands.objects[0];
  if (helper && api.subject != nullptr) return api.subject == subject;
  if (api.subject != subject) {
    api.subject = subject;
    api.indexes = called.indexes;
    api.began = subject != nullptr && is_tensor(recording, subject) &&
        recording.types.tensor_of(subject).unsafeGetTensorImpl() == api.tensor;
  }
  return helper || !begins_again(recording, api, traits, subject, given);
}

const void* first_tensor(const Arguments& given) {
  return given.tensors.empty() ? nullptr : given.tensors[0]->unsafeGetTensorImpl();
}

}  // namespace

void end_api_call(Recording& recording, ThreadState& state, Lock& lock) {
  ApiCall& api = state.api;
  if (api.id < 0) return;
  recording.ops.write(
      {.start = api.start - recording.begin, .duration = api.end - api.start - (api.spent_at_end - api.spent),
       .id = api.id, .info = api.info, .form = api.form, .result = api.result, .stack = api.stack, .call = api.call,
       .bits = api.bits},
      api.inputs, api.outputs);
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
  const bool in_backward = state.in_backward();
  const Frame* function = nullptr;  // the outermost of torch's own functions below the anchor
  Recording::Path path;
  recording.path_to_anchor(state, innermost, path, lock);
  int32_t stack = state.top().stack;
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
  const bool after_backward = api.id >= 0 && api.backward;
  if (in_backward && after_backward && is_pass_of_call(recording, state, innermost, lock)) {
    api.bits &= ~(kRaised << kFlagShift);  // the exception of an op inside it was caught
    return;
  }
  if (function != nullptr) {
    const auto inside = places_inside(path, function);
    const bool same_pass = !in_backward || !after_backward;
    if (same_pass && api.id >= 0 && api.python && api.frame == function && api.stack == outside &&
        goes_on(recording, api, traits, inside, innermost_code, given, lock)) {
      api.inside = inside;
      api.tensor = first_tensor(given);
      api.read_number = traits.reads_number;
      api.bits &= ~(kRaised << kFlagShift);
      if (!api.backward) state.stack = api.stack;
      return;
    }
    end_api_call(recording, state, lock);
    const FunctionTraits& known = function_traits(recording, function, lock);
    if (known.info < 0 || (in_backward && !known.backward)) return;
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
    api.subject = nullptr;
    api.task = state.task;
    api.inner_task = -1;
    api.returns_nothing = api.backward;
    api.stack = outside;
  } else {
    if (innermost == nullptr || path.empty() || innermost_code < 0 || in_backward) {
      end_api_call(recording, state, lock);
      return;
    }
    const int instruction = instruction_of(innermost);
    Site site = site_of(recording, code_of(innermost), innermost_code, instruction, lock);
    if (site.truth && (traits.truth || traits.reads_number)) site = Site();
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
        readable = false;  // the arguments of `max(x, y)` are not those of its comparison
      } else if (PyCFunction_CheckExact(operands.callable)) {
        PyObject* self = PyCFunction_GET_SELF(operands.callable);
        if (self != nullptr && is_tensor(recording, self)) operands.objects.insert(operands.objects.begin(), self);
      }
    } else if (readable && site.callable >= 0) {
      known.info = operands.mirrored ? site.mirrored : site.callable;
      known.several = stores(site) || site.count != 0;
      known.returns_nothing = stores(site);
    } else {
      known = traits_by_op(recording, traits, nullptr, lock);
    }
    if (known.info < 0) return;
    api.backward = false;
    if (readable) {
      operands_count = operands.objects.size();
      const bool slices = site.kind == SiteKind::kSlice || site.kind == SiteKind::kStoreSlice;
      const char* maker = slices ? "slice" : "call";
      read_call(recording, operands, maker, known.info, api, lock);
      keep_given(recording, api, maker, known.info, operands.names, operands.keywords, lock, [&] { return tuple_of(operands); });
    } else {
      // Its operands cannot be read: the arguments of its op are the next best.
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
    api.indexes = operands.callable == nullptr || known.indexes;
    api.began = takes_subject(recording, subject, given);
    api.stack = stack;
  }
  api.first = &traits;
  api.tensor = first_tensor(given);
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
    Recording& recording, ThreadState& state, const OpenOp& op, c10::ArrayRef<c10::IValue> outputs, bool raised,
    int64_t end, Lock& lock) {
  ApiCall& api = state.api;
  api.end = end;
  api.spent_at_end = state.spent;
  if (raised) {
    api.bits |= kRaised << kFlagShift;
    api.outputs.clear();
    api.results.clear();
    api.result_metadata.clear();
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
  for (const c10::IValue& value : outputs) read(value, results);
  api.outputs.clear();
  api.results.clear();
  api.result_metadata.clear();
  for (const at::TensorBase* tensor : results.tensors) {
    api.outputs.push_back(recording.output(*tensor, api.id, nullptr, lock));
    if (!recording.observes_api) continue;
    api.results.emplace_back(tensor->getIntrusivePtr());
    api.result_metadata.push_back(recording.metadata_of(*tensor, lock));
  }
  api.result = recording.result_form(*op.traits, outputs, true, lock);
}

}  // namespace sightline
