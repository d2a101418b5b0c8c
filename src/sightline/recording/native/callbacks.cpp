// A callback never throws: torch would print a warning and go on without it. It never waits for a device, and waits
// for the GIL only where something is met for the first time, or an observer is notified.
#include "callbacks.h"

#include "api_calls.h"
#include "measure_op.h"
#include "observers.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace sightline {

Recording slots[kSlots];

namespace {

struct StateCache {
  uint64_t serial = 0;
  ThreadState* state = nullptr;
};
thread_local StateCache caches[kSlots];

bool is_inherited(const Recording& recording) {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.handle_ == recording.handle) return true;
  }
  return false;
}

}  // namespace

uint64_t this_thread() { return at::RecordFunction::currentThreadId(); }

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
    state->anchors.push_back(StackAnchor{});
    found = recording.threads.emplace(thread, std::move(state)).first;
  }
  cache = {recording.serial, found->second.get()};
  return cache.state;
}

int64_t current_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return -1;
  const uint64_t number = node->sequence_nr();
  return number > uint64_t{1} << 62 ? -2 : static_cast<int64_t>(number);
}

// Callbacks that are queued for the end of a backward pass, as by DistributedDataParallel, run in no node.
bool in_backward() { return current_node() != -1 || torch::autograd::get_current_graph_task_id() >= 0; }

int32_t end_region(Recording& recording, ThreadState& state, int64_t node, int64_t end) {
  const Region region = std::move(state.region);
  state.region = Region{};
  recording.last_region = region.id;
  recording.ops.write(
      {.sequence = static_cast<int64_t>(at::sequence_number::peek()), .node = node,
       .start = region.start - recording.begin, .duration = end - region.start - (state.spent - region.spent),
       .id = region.id, .info = region.info, .form = region.form, .result = recording.no_form, .stack = region.stack,
       .call = state.top().call,
       .bits = state.number << kThreadShift | (node == -1 ? state.phase : static_cast<int>(kBackward))},
      region.inputs, c10::ArrayRef<int32_t>());
  return region.id;
}

namespace {

// The op inside which torch reports nothing to a recording on this thread, because we disabled its callback.
struct Silence {
  const at::RecordFunction* op = nullptr;
  at::CallbackHandle handle = 0;

  void begin(const at::RecordFunction& inside, at::CallbackHandle callback) {
    op = &inside;
    handle = callback;
    at::disableCallback(handle);
  }

  void end() {
    op = nullptr;
    at::reenableCallback(handle);
  }
};
thread_local Silence silences[kSlots];

// The keys an op is dispatched by: those of its tensors, and those switched on or off on this thread.
c10::DispatchKeySet keys_of(const Arguments& given) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_;
  for (const at::TensorBase* tensor : given.tensors) keys = keys | tensor->key_set();
  return keys - local.excluded_;
}

// Some dispatch an op a second time inside itself; then the inner one runs.
bool is_dispatched_again(const OpTraits& traits, c10::DispatchKeySet keys) {
  static const c10::DispatchKeySet wrappers{
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize};
  if (keys.has_any(wrappers)) return true;
  return (traits.autocast_cpu && keys.has(c10::DispatchKey::AutocastCPU)) ||
      (traits.autocast_cuda && keys.has(c10::DispatchKey::AutocastCUDA));
}

// Whether ops inside an op are internals of its kernel.
bool is_leaf(const OpTraits& traits, c10::DispatchKeySet keys) {
  if (traits.leaf || traits.kernels == 0) return traits.leaf;
  return traits.kernels >> static_cast<uint8_t>(keys.highestBackendKey()) & 1;
}

void begin_op(
    Recording& recording, ThreadState& state, const at::RecordFunction& event, Lock& lock, Storages::Dead& dead) {
  const int64_t entered = now();
  // Torch hides its own intermediate steps from every mode: copying Python data into a tensor.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return;
  OpTraits* traits = recording.traits_of(event, lock);
  if (traits == nullptr || !traits->seen) return;
  recording.values.memory.examine(entered - recording.begin, dead);
  const bool outermost = state.ops.empty();
  const auto given = Recording::arguments_of(*traits, event);
  Arguments arguments;
  for (const c10::IValue& value : given) read(value, arguments);
  if (outermost) {
    state.node = current_node();
    state.task = torch::autograd::get_current_graph_task_id();
    recording.in_backward = state.in_backward();
    if (recording.wants_api) {
      begin_api_call(recording, state, *traits, arguments, given, entered, lock);
    } else {
      state.stack = recording.stack_of(state, current_frame(), lock);
    }
  }
  const c10::DispatchKeySet keys = keys_of(arguments);
  const bool leaf = recording.wants_aten ? is_leaf(*traits, keys) && !is_dispatched_again(*traits, keys) : true;
  OpenOp op;  // not among the open ones until all callbacks have run: Python may stop the recording in one
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
              {.storage = reinterpret_cast<int64_t>(storage), .offset = 0, .id = id, .meta = metadata,
               .kind = kKindConstant, .flags = static_cast<int16_t>(tensor->requires_grad() ? kRequiresGrad : 0)});
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
  // Python of the user's (a dispatch mode, a subclass, a custom op) may start or stop a recording inside.
  if (leaf && traits->dispatches && !traits->python && !keys.has(c10::DispatchKey::Python)) {
    silences[&recording - slots].begin(event, recording.handle);
  }
  if ((recording.observes_ops || recording.measurements.on()) && op.id >= 0) op.given.assign(given.begin(), given.end());
  op.start = now();
  state.spent += op.start - entered;
  state.ops.push_back(std::move(op));
}

// An op that has ended, and the tensors it had. Releasing the last reference to a tensor may need the GIL for its Python object,
// and a thread that has the GIL may be waiting for the mutex: it is released after the mutex is unlocked.
struct EndedOp {
  OpenOp op;
  Results results;
};

void end_op(
    Recording& recording, ThreadState& state, const at::RecordFunction& event, int64_t end, EndedOp& ended, Lock& lock) {
  if (state.ops.empty() || state.ops.back().event != &event) return;
  recording.values.memory.time = end - recording.begin;
  // Callbacks into Python may run ops: from now on this one is not among the open ones.
  ended.op = std::move(state.ops.back());
  state.ops.pop_back();
  const OpenOp& op = ended.op;
  // Some builds of torch have a C++ runtime of their own, whose exceptions ours does not count: then a result that
  // was never set reports.
  const bool unset = op.traits->returns > 0 && event.outputs().empty();
  const bool raised = unset || std::uncaught_exceptions() > op.exceptions;
  const auto outputs = Recording::results_of(*op.traits, event);
  c10::SmallVector<int32_t, 4> ids;
  if (op.id >= 0) {
    const OpTraits& traits = *op.traits;
    Results& results = ended.results;
    if (!raised) {
      for (c10::TensorImpl* impl : op.changed) {
        const auto found = recording.values.known.find(impl);
        if (found == recording.values.known.end()) continue;
        auto alive = found->second.ref.lock();
        if (!alive) continue;
        at::TensorBase tensor{std::move(alive)};
        const int32_t value = recording.new_version(tensor, op.id, found->second.value, lock);
        results.changed.emplace_back(std::move(tensor), value);
      }
      Arguments returned;
      for (const c10::IValue& value : outputs) read(value, returned);
      for (const at::TensorBase* tensor : returned.tensors) {
        ids.push_back(recording.output(*tensor, op.id, &op, lock));
        results.returned.emplace_back(tensor, ids.back());
      }
      for (const auto& [tensor, value] : results.changed) {
        if (std::find(ids.begin(), ids.end(), value) == ids.end()) ids.push_back(value);
      }
    }
    const int phase = state.in_backward() ? kBackward : state.phase;
    const int flags = (raised ? kRaised : 0) | (traits.mutates != 0 ? kMutates : 0);
    const int32_t result = raised ? recording.no_form : recording.result_form(traits, outputs, false, lock);
    recording.ops.write(
        {.sequence = static_cast<int64_t>(at::sequence_number::peek()), .node = state.node,
         .start = op.start - recording.begin, .duration = end - op.start, .id = op.id, .info = traits.number,
         .form = op.form, .result = result, .stack = state.stack, .call = state.top().call, .parent = state.api.id,
         .bits = state.number << kThreadShift | flags << kFlagShift | phase},
        op.inputs, ids);
    if (raised) recording.raised_stack = state.stack;
    const bool nonfinite = recording.measurements.on() && !raised && measure_op(recording, state, op, results, lock);
    if (recording.observes_ops || nonfinite) notify_op(recording, state, op, outputs, result, phase, raised, nonfinite, lock);
  }
  if (state.ops.empty() && state.api.id >= 0) end_api_op(recording, state, op, outputs, raised, end, lock);
  state.spent += now() - end;
}

// The compiled backward of a region is one opaque op, which runs its own kernels.
void begin_compiled_backward(Recording& recording, ThreadState& state, Lock& lock) {
  int32_t info = -1;
  ask(lock, [&] {
    Owned answer(PyObject_CallMethod(recording.session, "compiled_backward", nullptr));
    if (answer) info = static_cast<int32_t>(PyLong_AsLong(answer.get()));
    if (PyErr_Occurred()) recording.fault();
  });
  state.region = {recording.next_id++, info, recording.no_form, recording.stack_of(state, current_frame(), lock), now(),
                  state.nodes.back().first, {}, state.spent};
}

template <size_t Slot>
std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& event) noexcept {
  Recording& recording = slots[Slot];
  const Recording::Visit visit(recording);
  if (!recording.running.load(std::memory_order_acquire) || WithGil::silent != 0) return nullptr;
  Storages::Dead dead;  // freed after the mutex is given up
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
      begin_op(recording, *state, event, lock, dead);
    } else {
      state->ops.back().traits->dispatches = true;
    }
  } catch (...) {
    recording.faults.fetch_add(1);
  }
  return nullptr;
}

template <size_t Slot>
void on_end(const at::RecordFunction& event, at::ObserverContext*) noexcept {
  // The recording may have been stopped meanwhile: torch must not stay silenced.
  if (silences[Slot].op == &event) silences[Slot].end();
  Recording& recording = slots[Slot];
  const Recording::Visit visit(recording);
  if (!recording.running.load(std::memory_order_acquire) || WithGil::silent != 0) return;
  const int64_t end = now();
  try {
    EndedOp ended;
    Lock lock(recording.mutex);
    ThreadState* state = state_of(Slot, recording);
    if (state == nullptr) return;
    if (event.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      if (state->nodes.empty() || state->nodes.back().first != &event) return;
      if (state->region.id >= 0 && state->region.node == &event) {
        const auto node = static_cast<long long>(state->nodes.back().second);
        const int32_t stack = state->region.stack, info = state->region.info;
        const int32_t op = end_region(recording, *state, node, end);
        ask(lock, [&] {
          Owned answer(PyObject_CallMethod(recording.session, "note_region", "iiiL", op, info, stack, node));
          if (PyErr_Occurred()) recording.fault();
        });
      }
      state->nodes.pop_back();
    } else {
      end_op(recording, *state, event, end, ended, lock);
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

}  // namespace

void listen(size_t slot) {
  const auto [start, end] = callbacks_of(slot, std::make_index_sequence<kSlots>());
  slots[slot].handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(start, end).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

void listen_to_nodes(size_t slot) {
  Recording& recording = slots[slot];
  if (recording.node_handle != 0 || recording.handle == 0) return;
  const auto [start, end] = callbacks_of(slot, std::make_index_sequence<kSlots>());
  recording.node_handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(start, end).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

void stop_listening() {
  for (Silence& silence : silences) {
    if (silence.op != nullptr) silence.end();  // stopped inside an op: torch was silenced there
  }
  std::vector<at::CallbackHandle> stale;
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const auto ours = callbacks_of(slot, std::make_index_sequence<kSlots>());
      const Recording& recording = slots[slot];
      const bool current =
          recording.running && (recording.handle == entry.handle_ || recording.node_handle == entry.handle_);
      if (entry.callback_.start() == ours.first && !current) stale.push_back(entry.handle_);
    }
  }
  for (const at::CallbackHandle handle : stale) at::removeCallback(handle);
}

}  // namespace sightline
