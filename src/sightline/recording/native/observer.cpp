// The native engine: callbacks of torch's `RecordFunction`, hooks of module calls, and the Python type around both.
//
// A callback never throws: torch would print a warning and go on without it. It never waits for a device, and waits
// for the GIL only where something is met for the first time.
#include "recording.h"

#include "api_calls.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

namespace sightline {
namespace {

// Callbacks are plain functions, so each recording that runs has a slot of its own and with it functions of its own.
// Threads that work for the recording's thread inherit the functions. Slots are never freed: a callback may be about
// to use one.
constexpr size_t kSlots = 8;
Recording slots[kSlots];
uint64_t next_serial = 1;

struct StateCache {
  uint64_t serial = 0;
  ThreadState* state = nullptr;
};
thread_local StateCache caches[kSlots];

uint64_t this_thread() { return at::RecordFunction::currentThreadId(); }

bool is_inherited(const Recording& recording) {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.handle_ == recording.handle) return true;
  }
  return false;
}

// Where this thread stands in a recording; null if it does not work for it.
ThreadState* state_of(size_t slot, Recording& recording) {
  StateCache& cache = caches[slot];
  if (cache.serial == recording.serial) return cache.state;
  const uint64_t thread = this_thread();
  auto found = recording.threads.find(thread);
  if (found == recording.threads.end()) {
    // A callback of an earlier recording in this slot may still be on a thread it was never taken off.
    if (thread != recording.owner && !is_inherited(recording)) return nullptr;
    auto state = std::make_unique<ThreadState>();
    state->number = static_cast<int32_t>(recording.threads.size());
    state->own = thread == recording.owner;
    state->marks.push_back(Mark{});
    found = recording.threads.emplace(thread, std::move(state)).first;
  }
  cache = {recording.serial, found->second.get()};
  return cache.state;
}

// The op inside which torch reports nothing on this thread, at our wish.
thread_local const at::RecordFunction* silenced_by = nullptr;

// The keys an op is dispatched by: those of its tensors, and what is switched on or off on this thread.
c10::DispatchKeySet keys_of(const Arguments& given) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_;
  for (const at::TensorBase* tensor : given.tensors) keys = keys | tensor->key_set();
  return keys - local.excluded_;
}

// Whether torch may be told to report nothing inside an op: nobody but us is listening.
bool alone() {
  return at::get_record_function_tls_().sorted_tls_callbacks_.size() == 1 && !at::hasGlobalCallbacks();
}

// Some dispatch an op a second time inside itself; then the inner one is what runs.
bool is_dispatched_again(const OpTraits& traits, c10::DispatchKeySet keys) {
  static const c10::DispatchKeySet wrappers{
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize};
  if (keys.has_any(wrappers)) return true;
  return (traits.autocast_cpu && keys.has(c10::DispatchKey::AutocastCPU)) ||
      (traits.autocast_cuda && keys.has(c10::DispatchKey::AutocastCUDA));
}

// The number of the autograd node that is evaluated on this thread; -1 outside a backward pass, -2 for a node that
// has none, as those that accumulate into a leaf.
int64_t current_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return -1;
  const uint64_t number = node->sequence_nr();
  return number > uint64_t{1} << 62 ? -2 : static_cast<int64_t>(number);
}

// Whether what runs inside an op are its kernel's internals.
bool is_leaf(const OpTraits& traits, c10::DispatchKeySet keys) {
  if (traits.leaf || traits.kernels == 0) return traits.leaf;
  return traits.kernels >> static_cast<uint8_t>(keys.highestBackendKey()) & 1;
}

void begin_op(Recording& recording, ThreadState& state, const at::RecordFunction& event, Lock& lock) {
  const int64_t entered = now();
  // What torch hides from every mode are its own steps on the way: copying Python data into a tensor.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return;
  OpTraits* traits = recording.traits_of(event, lock);
  if (traits == nullptr || !traits->seen) return;
  const bool outermost = state.ops.empty();
  const auto given = Recording::arguments_of(*traits, event);
  Arguments arguments;
  for (const c10::IValue& value : given) read(value, arguments);
  if (outermost) {
    state.node = current_node();
    recording.in_backward = state.node != -1;
    if (recording.wants_api) {
      begin_api_call(recording, state, *traits, arguments, given, entered, lock);
    } else {
      state.stack = recording.stack_of(state, current_frame(), lock);
    }
  }
  const c10::DispatchKeySet keys = keys_of(arguments);
  const bool leaf = recording.wants_aten ? is_leaf(*traits, keys) && !is_dispatched_again(*traits, keys) : true;
  OpenOp op;  // of our own until all is asked: Python may stop the recording, and with it what is open
  op.event = &event;
  op.traits = traits;
  op.leaf = leaf;
  op.id = -1;
  op.exceptions = std::uncaught_exceptions();
  op.alias_storage = nullptr;
  op.alias_value = -1;
  if (traits->mutates != 0 && leaf) {
    Arguments changed;
    for (size_t at = 0; at < given.size() && at < 64; ++at) {
      if (traits->mutates >> at & 1) read(given[at], changed);
    }
    for (const at::TensorBase* tensor : changed.tensors) op.changed.push_back(tensor->unsafeGetTensorImpl());
  }
  if (leaf && recording.wants_aten) {
    if (traits->constant) {
      for (const at::TensorBase* tensor : arguments.tensors) {
        if (recording.values.find(tensor->unsafeGetTensorImpl()) < 0) {
          const int32_t metadata = recording.metadata_of(*tensor, lock);
          const int32_t id = recording.values.next++;
          const void* storage = storage_of(tensor->unsafeGetTensorImpl());
          recording.values.rows.push_back(
              {reinterpret_cast<int64_t>(storage), 0, id, metadata, -1, -1, -1, 4, tensor->requires_grad()});
          recording.values.know(*tensor, id);
        }
      }
    }
    for (const at::TensorBase* tensor : arguments.tensors) op.inputs.push_back(recording.value_of(*tensor, lock));
    op.form = recording.form_of(*traits, arguments, given, lock);
    if (traits->aliases >= 0 && static_cast<size_t>(traits->aliases) < given.size()) {
      const c10::IValue& base = given[static_cast<size_t>(traits->aliases)];
      if (base.isTensor() && base.toTensor().defined()) {
        op.alias_storage = storage_of(base.toTensor().unsafeGetTensorImpl());
        op.alias_value = recording.values.find(base.toTensor().unsafeGetTensorImpl());
      }
    }
    op.id = recording.next_id++;
  }
  if (!recording.running.load(std::memory_order_acquire)) return;
  // Python of the user's (a dispatch mode, a subclass, a custom op) may want to listen inside.
  if (leaf && !traits->python && !keys.has(c10::DispatchKey::Python) && alone()) {
    at::enableRecordFunction(false);
    silenced_by = &event;
  }
  op.start = now();
  state.spent += op.start - entered;
  state.ops.push_back(std::move(op));
}

void end_op(Recording& recording, ThreadState& state, const at::RecordFunction& event, int64_t end, Lock& lock) {
  if (state.ops.empty() || state.ops.back().event != &event) return;
  // What is asked of Python meanwhile may run ops: this one is not among the open ones any more.
  const OpenOp op = std::move(state.ops.back());
  state.ops.pop_back();
  const bool raised = std::uncaught_exceptions() > op.exceptions;
  const auto outputs = Recording::results_of(*op.traits, event);
  c10::SmallVector<int32_t, 4> made;
  if (op.id >= 0) {
    const OpTraits& traits = *op.traits;
    c10::SmallVector<int32_t, 4> changed;
    if (!raised) {
      for (c10::TensorImpl* impl : op.changed) {
        const auto found = recording.values.known.find(impl);
        if (found == recording.values.known.end()) continue;
        auto alive = found->second.ref.lock();
        if (!alive) continue;
        const at::TensorBase tensor{std::move(alive)};
        changed.push_back(recording.new_version(tensor, op.id, found->second.value, lock));
      }
      Arguments results;
      for (const c10::IValue& value : outputs) read(value, results);
      for (const at::TensorBase* tensor : results.tensors) made.push_back(recording.produced(*tensor, op.id, &op, lock));
      for (const int32_t value : changed) {
        if (std::find(made.begin(), made.end(), value) == made.end()) made.push_back(value);
      }
    }
    const int phase = state.node != -1 ? kBackward : state.phase;
    const int flags = (raised ? kRaised : 0) | (traits.mutates != 0 ? kMutates : 0);
    const int32_t result = raised ? recording.no_form : recording.result_form(traits, outputs, false, lock);
    recording.ops.write(
        {op.id, traits.number, op.form, result, state.stack, state.top().call, state.api.id,
         state.number << kThreadShift | flags << kFlagShift | phase,
         static_cast<int64_t>(at::sequence_number::peek()), state.node,
         op.start - recording.begin, end - op.start},
        op.inputs.data(), op.inputs.size(), made.data(), made.size());
    if (raised) recording.raised_stack = state.stack;
  }
  if (state.ops.empty() && state.api.id >= 0) end_api_op(recording, state, op, outputs, raised, end, lock);
  state.spent += now() - end;
}

void begin_compiled_backward(Recording& recording, ThreadState& state, Lock& lock);
int32_t end_region(Recording& recording, ThreadState& state, int64_t node, int64_t end);

template <size_t Slot>
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& event) noexcept {
  Recording& recording = slots[Slot];
  const Recording::Visit visit(recording);
  if (!recording.running.load(std::memory_order_acquire) || WithGil::silent != 0) return nullptr;
  try {
    Lock lock(recording.mutex);
    ThreadState* state = state_of(Slot, recording);
    if (state == nullptr) return nullptr;
    if (event.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      state->nodes.emplace_back(&event, event.seqNr() < 0 ? -2 : event.seqNr());
      if (state->region.id < 0 && std::strcmp(event.name(), "CompiledFunctionBackward") == 0) {
        begin_compiled_backward(recording, *state, lock);
      }
    } else if (state->region.id >= 0) {
      return nullptr;
    } else if (state->ops.empty() || !state->ops.back().leaf) {
      begin_op(recording, *state, event, lock);
    }
  } catch (...) {
    recording.faults.fetch_add(1);
  }
  return nullptr;
}

template <size_t Slot>
void on_end(const at::RecordFunction& event, at::ObserverContext*) noexcept {
  // Whoever has stopped the recording meanwhile: torch is not left silent.
  if (silenced_by == &event) {
    at::enableRecordFunction(true);
    silenced_by = nullptr;
  }
  Recording& recording = slots[Slot];
  const Recording::Visit visit(recording);
  if (!recording.running.load(std::memory_order_acquire) || WithGil::silent != 0) return;
  const int64_t end = now();
  try {
    Lock lock(recording.mutex);
    ThreadState* state = state_of(Slot, recording);
    if (state == nullptr) return;
    if (event.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      if (state->nodes.empty() || state->nodes.back().first != &event) return;
      if (state->region.id >= 0 && state->region.node == &event) {
        const int32_t made = end_region(recording, *state, state->nodes.back().second, end);
        ask(lock, [&] {
          Owned told(PyObject_CallMethod(recording.host, "made_region", "i", made));
          if (PyErr_Occurred()) recording.fault();
        });
      }
      state->nodes.pop_back();
    } else {
      end_op(recording, *state, event, end, lock);
    }
  } catch (...) {
    recording.faults.fetch_add(1);
  }
}

using StartCallback = at::RecordFunctionCallback::StartCallback;
using EndCallback = at::RecordFunctionCallback::EndCallback;

template <size_t... Slot>
std::pair<StartCallback, EndCallback> callbacks_of(size_t slot, std::index_sequence<Slot...>) {
  static constexpr StartCallback starts[] = {on_start<Slot>...};
  static constexpr EndCallback ends[] = {on_end<Slot>...};
  return {starts[slot], ends[slot]};
}

// The C++ tensor of a Python object; null if it is none.
const at::TensorBase* tensor_in(const Recording& recording, PyObject* object) {
  const auto found = recording.types.kinds.find(Py_TYPE(object));
  return found != recording.types.kinds.end() && found->second == TypeKind::kTensor
      ? &recording.types.tensor_of(object)
      : nullptr;
}

// -- module calls ------------------------------------------------------------------------------------------------

// The recordings that this thread works for; module hooks are the process's, and find theirs here.
template <class Visit>
void each_here(Visit visit) {
  const uint64_t thread = this_thread();
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Recording& recording = slots[slot];
    const Recording::Visit in(recording);
    if (!recording.running.load(std::memory_order_acquire)) continue;
    Lock lock(recording.mutex);  // whoever holds it gives it up before asking for the GIL, which this thread has
    if (thread != recording.owner && recording.threads.find(thread) == recording.threads.end()) continue;
    ThreadState* state = state_of(slot, recording);
    if (state == nullptr || !(state->own || !state->nodes.empty())) continue;
    try {
      recording.in_backward = current_node() != -1;
      visit(recording, *state, lock);
    } catch (...) {  // of torch's, about a tensor that is like no other: it must not reach the interpreter
      recording.faults.fetch_add(1);
    }
  }
}

PyObject* keywords_of(const Recording& recording, const Frame* frame) {
  if (recording.kwargs_slot < 0 || code_of(frame)->co_nlocalsplus <= recording.kwargs_slot) return nullptr;
  PyObject* cell = frame->localsplus[recording.kwargs_slot];
  if (cell == nullptr || !PyCell_Check(cell)) return nullptr;
  PyObject* held = PyCell_GET(cell);
  return held != nullptr && PyDict_CheckExact(held) ? held : nullptr;
}

bool modules_only(const Recording& recording) { return !recording.wants_api && !recording.wants_aten; }

PyObject* enter_module(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || WithGil::silent != 0) Py_RETURN_NONE;
  const int64_t entered = now();
  PyObject *module = given[0], *args = given[1];
  const Frame* inner = current_frame();
  each_here([&](Recording& recording, ThreadState& state, Lock& lock) {
    if (!state.api.backward) end_api_call(recording, state);
    // A frame that is about to call `forward` is at the place of one that has: that call ended without its hook.
    while (state.marks.size() > 1 && state.top().is(inner)) recording.drop_mark(state);
    const Frame* caller = inner;
    while (caller != nullptr && recording.traits_of(code_of(caller), lock)->hidden) caller = caller_of(caller);
    const int32_t above = recording.stack_of(state, caller, lock);
    const int32_t number = recording.module_of(module, lock);
    if (number < 0) return;
    OpenCall call;
    call.object = module;
    call.args = args;
    call.module = number;
    call.input_form = recording.no_form;
    recording.glimpses = modules_only(recording) && !state.calls.empty();
    recording.read_python(args, keywords_of(recording, inner), call.inputs, call.input_form, lock);
    recording.glimpses = false;
    call.mark = state.marks.size();
    call.parent = state.top().call;
    call.id = recording.next_id++;
    call.bits = state.number << kThreadShift | (current_node() == -1 ? state.phase : static_cast<int>(kBackward));
    state.marks.push_back({inner, inner->previous, nullptr, above, call.id, false});
    call.start = now();
    state.spent += call.start - entered;
    call.spent = state.spent;
    state.calls.push_back(std::move(call));
  });
  Py_RETURN_NONE;
}

// torch passes (module, args, kwargs, result), or after an exception (module, args, result).
PyObject* leave_module(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count < 3 || WithGil::silent != 0) Py_RETURN_NONE;
  const int64_t entered = now();
  PyObject *module = given[0], *args = given[1];
  // Made before the mutex is taken: a collection that it sets off may run code of the user's.
  Owned results(count == 4 && Py_TYPE(given[3]) != reinterpret_cast<PyTypeObject*>(THPVariableClass)
                    ? PyTuple_Pack(1, given[3])
                    : nullptr);
  each_here([&](Recording& recording, ThreadState& state, Lock& lock) {
    if (!state.api.backward) end_api_call(recording, state);
    size_t at = state.calls.size();
    while (at > 0 && state.calls[at - 1].object != module) --at;
    if (at == 0) return;
    const c10::SmallVector<int32_t, 1> nothing;
    while (state.calls.size() > at) recording.close_call(state, nothing, recording.no_form, kRaised, entered);
    if (count == 3) {
      recording.close_call(state, nothing, recording.no_form, kRaised, entered);
      return;
    }
    recording.glimpses = modules_only(recording);
    if (state.calls.back().args != args) {  // a hook of the module's has replaced them
      c10::SmallVector<int32_t, 4> inputs;
      int32_t form = recording.no_form;
      recording.read_python(args, PyDict_CheckExact(given[2]) ? given[2] : nullptr, inputs, form, lock);
      state.calls.back().inputs = std::move(inputs);
      state.calls.back().input_form = form;
    }
    c10::SmallVector<int32_t, 4> outputs;
    int32_t form = recording.no_form;
    if (const at::TensorBase* tensor = tensor_in(recording, given[3])) {
      outputs.push_back(recording.value_of(*tensor, lock));
      form = recording.one_tensor;
    } else if (given[3] != Py_None && results) {
      recording.read_python(results.get(), nullptr, outputs, form, lock);
    }
    recording.glimpses = false;
    recording.close_call(state, outputs, form, 0, entered);
    state.spent += now() - entered;
  });
  Py_RETURN_NONE;
}

// The compiled backward of a region is one opaque op: what it runs are its own kernels.
void begin_compiled_backward(Recording& recording, ThreadState& state, Lock& lock) {
  int32_t info = -1;
  ask(lock, [&] {
    Owned told(PyObject_CallMethod(recording.host, "compiled_backward", nullptr));
    if (told) info = static_cast<int32_t>(PyLong_AsLong(told.get()));
    if (PyErr_Occurred()) recording.fault();
  });
  state.region = {recording.next_id++, info, recording.no_form, recording.stack_of(state, current_frame(), lock), now(),
                  state.nodes.back().first, {}};
}

int32_t end_region(Recording& recording, ThreadState& state, int64_t node, int64_t end) {
  const Region region = std::move(state.region);
  state.region = Region{};
  recording.ops.write(
      {region.id, region.info, region.form, recording.no_form, region.stack, state.top().call, -1,
       state.number << kThreadShift | (node == -1 ? state.phase : static_cast<int>(kBackward)),
       static_cast<int64_t>(at::sequence_number::peek()), node, region.start - recording.begin, end - region.start},
      region.inputs.data(), region.inputs.size(), nullptr, 0);
  return region.id;
}

// -- the Python type ---------------------------------------------------------------------------------------------

struct RecordingObject {
  PyObject_HEAD
  size_t slot;
  uint64_t serial;
};

// The recording behind an object; null once its slot serves another.
Recording* recording_of(PyObject* self) {
  const auto* object = reinterpret_cast<RecordingObject*>(self);
  Recording& recording = slots[object->slot];
  return recording.serial == object->serial ? &recording : nullptr;
}

PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(numbers.data()), static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t)));
}

// Free everything, or have it freed when the slot is wanted: somebody may be inside and go on.
void let_go(Recording& recording) {
  if (recording.visitors.load() != 0) {
    if (!recording.left) Py_INCREF(recording.host);  // who is inside may ask it again
    recording.left = true;
    return;
  }
  recording.clear();
  if (recording.left) Py_DECREF(recording.host);
  recording.left = false;
  recording.host = nullptr;
}

// Recording(host, level, begin, no_form, one_tensor, tensor_offset, kwargs_slot)
PyObject* recording_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* host;
  const char* level;
  long long begin;
  int no_form, one_tensor;
  Py_ssize_t tensor_offset, kwargs_slot;
  if (!PyArg_ParseTuple(
          args, "OsLiinn", &host, &level, &begin, &no_form, &one_tensor, &tensor_offset, &kwargs_slot)) {
    return nullptr;
  }
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Recording& recording = slots[slot];
    if (recording.left) {
      const Lock lock(recording.mutex);
      let_go(recording);
    }
    if (recording.host != nullptr) continue;
    auto* self = reinterpret_cast<RecordingObject*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    const Lock lock(recording.mutex);
    recording.clear();
    recording.host = host;
    recording.serial = self->serial = next_serial++;
    self->slot = slot;
    const std::string wanted = level;
    recording.wants_api = wanted == "api" || wanted == "both";
    recording.wants_aten = wanted == "aten" || wanted == "both";
    recording.begin = begin;
    recording.no_form = no_form;
    recording.one_tensor = one_tensor;
    recording.types.tensor_offset = static_cast<size_t>(tensor_offset);
    recording.kwargs_slot = kwargs_slot;
    recording.handle = 0;
    recording.owner = 0;
    return reinterpret_cast<PyObject*>(self);
  }
  Py_RETURN_NONE;  // all slots are in use
}

void recording_dealloc(PyObject* self) {
  if (Recording* recording = recording_of(self)) {
    recording->running = false;
    const Lock lock(recording->mutex);
    let_go(*recording);
  }
  Py_TYPE(self)->tp_free(self);
}

// start(frame, above): record on this thread; `above` is the stack of `frame`, which stays where it is.
PyObject* recording_start(PyObject* self, PyObject* args) {
  PyObject* frame;
  int above;
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyArg_ParseTuple(args, "Oi", &frame, &above)) return nullptr;
  const auto slot = reinterpret_cast<RecordingObject*>(self)->slot;
  {
    const Lock lock(recording->mutex);
    recording->owner = this_thread();
    ThreadState* state = state_of(slot, *recording);
    if (PyFrame_Check(frame)) {
      Py_INCREF(frame);  // until the end: the frame's address alone may mean another by then
      state->marks[0] = {frame_of(frame), nullptr, reinterpret_cast<PyFrameObject*>(frame), above, -1, false};
      recording->base = frame;
    }
  }
  if (recording->wants_api || recording->wants_aten) {
    const auto [start, end] = callbacks_of(slot, std::make_index_sequence<kSlots>());
    recording->handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(start, end).needsInputs(true).needsOutputs(true).scopes(
            {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  recording->running = true;
  Py_RETURN_NONE;
}

// stack(frame): the number of the stack of a frame, from the thread's mark on.
PyObject* recording_stack(PyObject* self, PyObject* frame) {
  Recording* recording = recording_of(self);
  if (recording == nullptr || !PyFrame_Check(frame)) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  ThreadState bare;  // without a mark: to the top
  bare.marks.push_back(Mark{});
  return PyLong_FromLong(recording->stack_of(bare, frame_of(frame), lock));
}

PyObject* recording_halt(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  recording->running = false;
  if (silenced_by != nullptr) {  // stopped inside an op: torch was told to be silent there
    at::enableRecordFunction(true);
    silenced_by = nullptr;
  }
  // Callbacks that were never taken off, because their recording was stopped elsewhere, go too.
  std::vector<at::CallbackHandle> stale;
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const auto ours = callbacks_of(slot, std::make_index_sequence<kSlots>());
      const bool current = slots[slot].running && slots[slot].handle == entry.handle_;
      if (entry.callback_.start() == ours.first && !current) stale.push_back(entry.handle_);
    }
  }
  for (const at::CallbackHandle handle : stale) at::removeCallback(handle);
  const Lock lock(recording->mutex);
  for (auto& [thread, state] : recording->threads) {
    state->ops.clear();
    state->nodes.clear();
  }
  Py_RETURN_NONE;
}

PyObject* recording_finish(PyObject* self, PyObject*) {
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    const int64_t end = now();
    const c10::SmallVector<int32_t, 1> nothing;
    for (auto& [thread, state] : recording->threads) {
      end_api_call(*recording, *state);
      while (!state->calls.empty()) recording->close_call(*state, nothing, recording->no_form, kUnfinished, end);
    }
  }
  Py_RETURN_NONE;
}

// rows(name, take): a stream as bytes of 64-bit numbers; with `take` it is empty afterwards.
PyObject* recording_rows(PyObject* self, PyObject* args) {
  const char* name;
  int take;
  if (!PyArg_ParseTuple(args, "sp", &name, &take)) return nullptr;
  Recording* recording = recording_of(self);
  std::vector<int64_t> out;
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
        const int64_t numbers[] = {10, row.id, row.metadata, row.address, row.offset, row.kind,
                                   row.producer, row.previous, row.base, row.flags};
        out.insert(out.end(), std::begin(numbers), std::end(numbers));
      }
      if (take) recording->values.rows.clear();
    } else if (wanted == "plain_values") {
      for (const PlainValueRow& row : recording->values.plain_rows) {
        const int64_t numbers[] = {row.id, row.metadata, row.producer};
        out.insert(out.end(), std::begin(numbers), std::end(numbers));
      }
      if (take) recording->values.plain_rows.clear();
    } else if (wanted == "stacks") {
      for (const Stacks::Node& node : recording->stacks.nodes) {
        out.push_back(node.parent);
        out.push_back(node.code);
        out.push_back(node.instruction);
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
            {api.id, api.info, api.form, recording->no_form, api.stack, api.call, -1,
             api.bits | kUnfinished << kFlagShift, -1, -1, api.start - recording->begin, 0},
            api.inputs.data(), api.inputs.size(), nullptr, 0);
      }
      for (const OpenCall& call : state->calls) {
        open_calls.write(
            {call.id, call.module, call.parent, state->marks[call.mark].above, call.bits | kUnfinished << kFlagShift,
             call.input_form, recording->no_form, call.start - recording->begin,
             current - call.start - (state->spent - call.spent), kNoEnd},
            call.inputs, c10::SmallVector<int32_t, 1>());
      }
    }
    open_ops.append_to(ops);
    open_calls.append_to(calls);
  }
  Owned first(bytes_of(ops)), second(bytes_of(calls));
  return PyTuple_Pack(2, first.get(), second.get());
}

// counters(): numbers written to ops and calls so far, what is open, threads, faults that Python was not told of.
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

PyObject* recording_next_id(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(0);
  const Lock lock(recording->mutex);
  if (ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording)) {
    end_api_call(*recording, *state);
  }
  return PyLong_FromLong(recording->next_id++);
}

// known(tensor): its current value, or -1.
PyObject* recording_known(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  const at::TensorBase* tensor = tensor_in(*recording, object);
  return PyLong_FromLong(tensor == nullptr ? -1 : recording->values.find(tensor->unsafeGetTensorImpl()));
}

// value(tensor): its current value; one never seen before is explained by the host.
PyObject* recording_value(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  const at::TensorBase* tensor = tensor_in(*recording, object);
  return PyLong_FromLong(tensor == nullptr ? -1 : recording->value_of(*tensor, lock));
}

// sharing(tensor): the newest value whose memory a tensor shows, or -1.
PyObject* recording_sharing(PyObject* self, PyObject* object) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  const at::TensorBase* tensor = tensor_in(*recording, object);
  const void* storage = tensor == nullptr ? nullptr : storage_of(tensor->unsafeGetTensorImpl());
  return PyLong_FromLong(storage == nullptr ? -1 : recording->values.sharing(storage));
}

// add(tensor, kind, name_is_kept_by_the_host): a value for a tensor that is not known yet.
PyObject* recording_add(PyObject* self, PyObject* args) {
  PyObject* object;
  int kind, producer, base, flags;
  if (!PyArg_ParseTuple(args, "Oiiii", &object, &kind, &producer, &base, &flags)) return nullptr;
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  Lock lock(recording->mutex);
  const at::TensorBase* tensor = tensor_in(*recording, object);
  if (tensor == nullptr) return PyLong_FromLong(-1);
  const int32_t metadata = recording->metadata_of(*tensor, lock);
  const int32_t id = recording->values.next++;
  const void* storage = storage_of(tensor->unsafeGetTensorImpl());
  recording->values.rows.push_back(
      {reinterpret_cast<int64_t>(storage), storage ? tensor->storage_offset() : 0, id, metadata, producer, -1, base,
       static_cast<int16_t>(kind), static_cast<int16_t>(flags)});
  recording->values.know(*tensor, id);
  return PyLong_FromLong(id);
}

PyObject* recording_type_kind(PyObject* self, PyObject* args) {
  PyObject* type;
  int kind;
  if (!PyArg_ParseTuple(args, "O!i", &PyType_Type, &type, &kind)) return nullptr;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    recording->types.kinds[reinterpret_cast<PyTypeObject*>(type)] = static_cast<TypeKind>(kind);
  }
  Py_RETURN_NONE;
}

// calls(): the numbers of the modules whose calls are open on this thread, outermost first.
PyObject* recording_calls(PyObject* self, PyObject*) {
  std::vector<int32_t> modules;
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    if (ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording)) {
      for (const OpenCall& call : state->calls) modules.push_back(call.module);
    }
  }
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(modules.size()));
  for (size_t at = 0; found != nullptr && at < modules.size(); ++at) {
    PyList_SET_ITEM(found, static_cast<Py_ssize_t>(at), PyLong_FromLong(modules[at]));
  }
  return found;
}

// phase(number, frame): what runs from now on; an optimizer's step has a mark of its own.
PyObject* recording_phase(PyObject* self, PyObject* args) {
  int phase;
  PyObject* frame;
  if (!PyArg_ParseTuple(args, "iO", &phase, &frame)) return nullptr;
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr) Py_RETURN_NONE;
  end_api_call(*recording, *state);
  if (phase == kOptimizer && PyFrame_Check(frame)) {
    const int32_t above = recording->stack_of(*state, frame_of(frame), lock);
    state->marks.push_back(
        {frame_of(frame), frame_of(frame)->previous, nullptr, above, state->top().call, true});
  } else if (state->top().optimizer) {
    state->marks.pop_back();
  }
  state->phase = phase;
  Py_RETURN_NONE;
}

// enter_region(info, form, inputs, frame): compiled code begins, called from `frame`.
PyObject* recording_enter_region(PyObject* self, PyObject* args) {
  int info, form;
  PyObject *inputs, *frame;
  if (!PyArg_ParseTuple(args, "iiO!O", &info, &form, &PyList_Type, &inputs, &frame)) return nullptr;
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_NONE;
  Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr || state->region.id >= 0) Py_RETURN_NONE;
  end_api_call(*recording, *state);
  const int32_t stack = PyFrame_Check(frame) ? recording->stack_of(*state, frame_of(frame), lock) : -1;
  state->region = {recording->next_id++, info, form, stack, now(), nullptr, {}};
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(inputs); ++at) {
    state->region.inputs.push_back(static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(inputs, at))));
  }
  Py_RETURN_NONE;
}

// leave_region(): it has ended; the number of its op, or -1.
PyObject* recording_leave_region(PyObject* self, PyObject*) {
  const int64_t end = now();
  Recording* recording = recording_of(self);
  if (recording == nullptr) return PyLong_FromLong(-1);
  const Lock lock(recording->mutex);
  ThreadState* state = state_of(reinterpret_cast<RecordingObject*>(self)->slot, *recording);
  if (state == nullptr || state->region.id < 0) return PyLong_FromLong(-1);
  return PyLong_FromLong(end_region(*recording, *state, -1, end));
}

// fail(codes): an exception has passed functions of these codes; whether an API call that is open is among them.
PyObject* recording_fail(PyObject* self, PyObject* codes) {
  Recording* recording = recording_of(self);
  if (recording == nullptr) Py_RETURN_FALSE;
  const Lock lock(recording->mutex);
  for (auto& [thread, state] : recording->threads) {
    ApiCall& api = state->api;
    if (api.id < 0 || !api.python || api.inside.empty()) continue;
    if (PySet_Contains(codes, reinterpret_cast<PyObject*>(api.inside[0].code)) != 1) continue;
    api.bits |= kRaised << kFlagShift;
    recording->raised_stack = api.stack;
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

PyObject* recording_raised(PyObject* self, PyObject*) {
  Recording* recording = recording_of(self);
  return PyLong_FromLong(recording == nullptr ? -1 : recording->raised_stack);
}

// release(): forget everything, and let another recording have the slot.
PyObject* recording_release(PyObject* self, PyObject*) {
  if (Recording* recording = recording_of(self)) {
    const Lock lock(recording->mutex);
    let_go(*recording);
    recording->serial = 0;
  }
  Py_RETURN_NONE;
}

PyMethodDef recording_methods[] = {
    {"release", recording_release, METH_NOARGS, "release(): forget everything."},
    {"start", recording_start, METH_VARARGS, "start(frame, above): record on this thread."},
    {"halt", recording_halt, METH_NOARGS, "halt(): record nothing more."},
    {"finish", recording_finish, METH_NOARGS, "finish(): close what is open."},
    {"stack", recording_stack, METH_O, "stack(frame): the number of its stack."},
    {"rows", recording_rows, METH_VARARGS, "rows(name, take): a stream of numbers."},
    {"open_rows", recording_open_rows, METH_NOARGS, "open_rows(): rows of what has not ended."},
    {"counters", recording_counters, METH_NOARGS, "counters(): how much was written."},
    {"next_id", recording_next_id, METH_NOARGS, "next_id(): a number in the order of ops and calls."},
    {"known", recording_known, METH_O, "known(tensor): its value, or -1."},
    {"value", recording_value, METH_O, "value(tensor): its value, a new one if it has none."},
    {"sharing", recording_sharing, METH_O, "sharing(tensor): the newest value of its memory, or -1."},
    {"add", recording_add, METH_VARARGS, "add(tensor, kind, producer, base, flags): a new value."},
    {"type_kind", recording_type_kind, METH_VARARGS, "type_kind(type, kind): how its objects are read."},
    {"calls", recording_calls, METH_NOARGS, "calls(): modules whose calls are open here."},
    {"phase", recording_phase, METH_VARARGS, "phase(number, frame): what runs from now on."},
    {"enter_region", recording_enter_region, METH_VARARGS, "enter_region(info, form, inputs, frame)"},
    {"leave_region", recording_leave_region, METH_NOARGS, "leave_region(): the number of its op, or -1."},
    {"fail", recording_fail, METH_O, "fail(codes): an exception has passed these."},
    {"raised", recording_raised, METH_NOARGS, "raised(): the stack of the last op that raised, or -1."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject* recording_type = nullptr;
PyType_Slot recording_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(recording_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(recording_dealloc)},
    {Py_tp_methods, recording_methods},
    {Py_tp_doc, const_cast<char*>("One recording of the native engine.")},
    {0, nullptr}};
PyType_Spec recording_spec = {"sightline.recording.native._observer.Recording", sizeof(RecordingObject), 0,
                              Py_TPFLAGS_DEFAULT, recording_slots};

// In a forked child: nothing records, and no mutex is held by a thread that does not exist there.
PyObject* after_fork(PyObject*, PyObject*) {
  for (Recording& recording : slots) {
    recording.running = false;
    new (&recording.mutex) std::mutex();
  }
  Py_RETURN_NONE;
}

PyObject* address_at(PyObject*, PyObject* args) {
  PyObject* object;
  Py_ssize_t offset;
  if (!PyArg_ParseTuple(args, "On", &object, &offset)) return nullptr;
  return PyLong_FromVoidPtr(*reinterpret_cast<void**>(reinterpret_cast<char*>(object) + offset));
}

PyObject* scalar_type_name(PyObject*, PyObject* number) {
  return PyUnicode_FromString(c10::toString(static_cast<c10::ScalarType>(PyLong_AsLong(number))));
}

// mute(on): what this thread runs from now on is not recorded, until it is called as often with False.
PyObject* mute(PyObject*, PyObject* on) {
  WithGil::silent += PyObject_IsTrue(on) == 1 ? 1 : -1;
  Py_RETURN_NONE;
}

// What stands in for Dynamo's `set_eval_frame`. It has to be written in C: Dynamo puts its callback back when a Python
// function returns that was entered with it on.
PyObject* watched_set_eval_frame(PyObject* watch, PyObject* callback) {
  PyObject* before = PyTuple_GET_ITEM(watch, 1);
  PyObject* after = PyTuple_GET_ITEM(watch, 2);
  if (PyCallable_Check(callback)) {
    Owned seen(PyObject_CallNoArgs(before));
    if (!seen) return nullptr;
  }
  PyObject* prior = PyObject_CallOneArg(PyTuple_GET_ITEM(watch, 0), callback);
  if (prior != nullptr && !PyCallable_Check(callback)) {
    Owned seen(PyObject_CallNoArgs(after));
    if (!seen) Py_CLEAR(prior);
  }
  return prior;
}

PyMethodDef watched_definition = {"set_eval_frame", watched_set_eval_frame, METH_O, "Dynamo's, watched."};

// watch_eval_frame(real, before, after): a function that calls all three, as a region begins and ends.
PyObject* watch_eval_frame(PyObject*, PyObject* args) {
  PyObject *real, *before, *after;
  if (!PyArg_ParseTuple(args, "OOO", &real, &before, &after)) return nullptr;
  return PyCFunction_New(&watched_definition, args);
}

PyMethodDef module_methods[] = {
    {"watch_eval_frame", watch_eval_frame, METH_VARARGS, "A stand-in for Dynamo's set_eval_frame."},
    {"mute", mute, METH_O, "Whether what this thread runs is recorded."},
    {"scalar_type_name", scalar_type_name, METH_O, "What C++ calls the dtype of a number."},
    {"enter_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter_module)), METH_FASTCALL,
     "A global forward pre-hook."},
    {"leave_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave_module)), METH_FASTCALL,
     "A global forward hook."},
    {"after_fork", after_fork, METH_NOARGS, "Forget everything, in a forked child."},
    {"address_at", address_at, METH_VARARGS, "The address an object holds so many bytes into itself."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_observer", "The native engine.", -1, module_methods,
                                 nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace sightline

PyMODINIT_FUNC PyInit__observer() {
  using namespace sightline;
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  recording_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&recording_spec));
  if (recording_type == nullptr || PyModule_AddObject(module, "Recording", reinterpret_cast<PyObject*>(recording_type)) < 0) {
    return nullptr;
  }
  PyModule_AddIntConstant(module, "OBJECT_HEAD", static_cast<long>(sizeof(PyObject)));
  return module;
}
