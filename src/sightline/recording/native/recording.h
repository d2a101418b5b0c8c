// One recording: its tables of ops, tensors, code and arguments, and the state of each thread.
//
// Everything here is guarded by `mutex`. Python describes each thing that is seen for the first time
// (`CallbackSession`), which needs the GIL. The GIL is never awaited while the mutex is held: a thread that holds the
// GIL may be waiting for the mutex.
#pragma once

#include "arguments.h"
#include "call_sites.h"
#include "frames.h"
#include "measurements.h"
#include "rows.h"
#include "values.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);  // of libtorch_python; its header needs pybind11

namespace sightline {

using Lock = std::unique_lock<std::mutex>;

inline int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A Python object that is released (`Py_DECREF`) at the end of a scope.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  ~Owned() { Py_XDECREF(object_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// The properties of an operator in a recording.
struct OpTraits {
  std::string name, overload;
  int32_t number = -1;  // among the operations of the recording
  bool seen = false;  // it is recorded: not one of a profiler's own, nor a mark that is no operator
  bool leaf = false;  // ops inside it are internals of its kernel
  uint64_t kernels = 0;  // of one written in terms of others: a bit for each backend where it has a kernel all the same
  bool constant = false;  // its input was just made from Python data
  bool python = false;  // its kernel may be written in Python
  bool dispatches = false;  // its kernel was seen to call operators: torch need not report those
  bool autocast_cpu = false, autocast_cuda = false;  // autocast dispatches it a second time, inside itself
  int aliases = -1;  // the argument its result may be a view of
  uint64_t mutates = 0;  // a bit for each argument it changes in place
  size_t arguments = 0, returns = 0;  // how many it has
  Measured measured;
  bool truth = false;  // it reads whether a tensor is true
  bool reads_number = false;  // `item`: torch also reads sizes that way, before the op they are for
};

// A live frame of a call in progress, and its stack: only the frames that it called are walked.
struct StackAnchor {
  const Frame* frame = nullptr;
  const Frame* previous = nullptr;  // the frame that called it: addresses of frames are used again
  const PyFrameObject* object = nullptr;  // of the block's own caller, which may return before the block ends
  int32_t stack = -1;
  int32_t call = -1;  // the innermost module call that is open here
  bool optimizer = false;
  int outer_phase = 0;  // the phase to restore when the call ends
  const PyCodeObject* closure = nullptr;  // of the function an optimizer was given to compute the loss; only compared

  // Whether a frame is that of the anchor; no frame is that of the empty stack.
  bool is(const Frame* at) const {
    if (at == nullptr || frame == nullptr) return at == frame;
    return object != nullptr ? at->frame_obj == object : at == frame && at->previous == previous;
  }
};

using Ids = c10::SmallVectorImpl<int32_t>;

struct OpenCall {
  size_t anchor;  // its position among the anchors
  int32_t id, module, parent, bits, input_form;
  PyObject* object;  // the module, borrowed: it is running
  PyObject* args;  // the tuple its inputs were read from, borrowed
  int64_t start, spent;
  c10::SmallVector<int32_t, 4> inputs;
};

struct OpenOp {
  const at::RecordFunction* event;
  OpTraits* traits;
  bool leaf;
  int32_t id, form, alias_value;
  int exceptions;
  const void* alias_storage;
  int64_t start;
  c10::SmallVector<int32_t, 6> inputs;
  c10::SmallVector<c10::TensorImpl*, 2> changed;
  // For observers and the check: torch has released them when the op ends.
  c10::SmallVector<c10::IValue, 6> given;
};

// A frame and the instruction it is at.
struct Place {
  const Frame* frame;
  PyCodeObject* code;
  int instruction;
};

// An API call in progress: it began with the first op inside it, and ends when something else begins.
struct ApiCall {
  int32_t id = -1;
  int32_t info, form, result, stack;
  int64_t start, end;
  const Frame* frame;  // of the torch function, or of the code that called one written in C
  int instruction;
  bool python = false, backward = false, several = false, returns_nothing = false;
  c10::SmallVector<Place, 4> inside;  // where the frames inside a torch function were at the last op
  int task = -1, inner_task = -1;  // of a backward pass: autograd's number of it, and of one that it has started
  // The call into C that the last op was part of; it is the API call itself unless that is a function of torch's.
  const OpTraits* first;
  PyObject* subject;  // of an indexing call; only its address is used
  const void* tensor;  // the first tensor of the last op; only its address is used
  bool indexes;  // it is written as an index
  bool began;  // an op has taken the subject
  bool read_number;  // its last op has read a size that is one of its arguments
  std::vector<int32_t> inputs, outputs;
  PyObject* given = nullptr;  // its arguments for observers, owned
  // Its results for observers. Not owned: torch copies a result that has a second owner.
  std::vector<WeakTensor> results;
  std::vector<int32_t> result_metadata;  // of each result: it may be gone when observers are notified
  int32_t call;
  int bits;
  int64_t spent, spent_at_end;
};

// Compiled code that is running: nothing inside it is recorded.
struct Region {
  int32_t id = -1, info = -1, form = -1, stack = -1;
  int64_t start = 0;
  const at::RecordFunction* node = nullptr;  // of a compiled backward pass
  std::vector<int32_t> inputs;
  int64_t spent = 0;  // excluded time of the thread before it
};

struct ThreadState {
  int32_t number = 0;
  bool own = false;  // the recording was started on it
  std::vector<StackAnchor> anchors;
  std::vector<OpenCall> calls;
  std::vector<OpenOp> ops;
  std::vector<std::pair<const at::RecordFunction*, int64_t>> nodes;  // autograd nodes being evaluated
  ApiCall api;
  Region region;
  int phase = 0;
  int64_t spent = 0;  // our own time
  int32_t stack = -1;  // of the outermost open op
  int64_t node = -1;  // the autograd node it belongs to
  int task = -1;  // autograd's number of the backward pass it runs in

  bool in_backward() const { return node != -1 || task >= 0; }

  StackAnchor& top() { return anchors.back(); }
};

class Recording {
 public:
  // A call is inside. While one is, nothing of the recording is freed.
  class Visit {
   public:
    explicit Visit(Recording& recording) : recording_(recording) { recording_.visitors.fetch_add(1); }
    ~Visit() { recording_.visitors.fetch_sub(1); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    Recording& recording_;
  };


  std::mutex mutex;
  std::atomic<bool> running{false};
  std::atomic<int> visitors{0};  // calls that are inside: Python may stop the recording during a callback
  uint64_t serial = 0;
  bool left = false;  // it is over, and waits for its last visitor
  PyObject* base = nullptr;  // the frame of the block's caller, held
  PyObject* session = nullptr;  // borrowed: it owns the recording, and lives while that runs; null: a free slot
  bool wants_api = false, wants_aten = false;
  bool observes_ops = false, observes_api = false, observes_calls = false;  // whether observers are notified
  int64_t begin = 0;
  at::CallbackHandle handle = 0, node_handle = 0;
  uint64_t owner = 0;  // the thread it was started on
  int32_t next_id = 0;
  Stacks stacks;
  Values values;
  OpRows ops;
  CallRows calls;
  PythonTypes types;
  ApiTables api;
  Measurements measurements;
  ska::flat_hash_map<uint64_t, int32_t> forms;
  std::unordered_map<uint64_t, std::unique_ptr<ThreadState>> threads;
  int32_t no_form = -1;  // of nothing
  int32_t one_tensor = -1;  // of a single tensor
  int32_t raised_stack = -1;  // of the last op that raised
  int32_t last_region = -1;  // the op that stands for compiled code
  int64_t unrecorded_calls = 0;  // module calls on threads that nothing records
  std::string unrecorded_module;  // the class of the first of them
  std::atomic<int> faults{0};  // of our own, that could not be passed on to Python
  Py_ssize_t kwargs_slot = -1;

  bool in_backward = false;  // of the op that is being read
  bool unexplained = false;  // only module calls are recorded: tensors between modules have no producer

  OpTraits* traits_of(const at::RecordFunction& event, Lock& lock);
  int32_t module_of(PyObject* module, Lock& lock);
  int32_t value_of(const at::TensorBase& tensor, Lock& lock);
  int32_t metadata_of(const at::TensorBase& tensor, Lock& lock);
  int32_t new_version(const at::TensorBase& tensor, int32_t op, int32_t previous, Lock& lock);
  int32_t add_version(const at::TensorBase& tensor, const KnownTensor& before, Lock& lock);
  int32_t output(const at::TensorBase& tensor, int32_t op, const OpenOp* from, Lock& lock);
  // Some callers hand over their whole stack: the arguments of the op come last.
  static c10::ArrayRef<const c10::IValue> arguments_of(const OpTraits& traits, const at::RecordFunction& event) {
    const auto all = event.inputs();
    return all.size() > traits.arguments ? all.slice(all.size() - traits.arguments) : all;
  }
  static c10::ArrayRef<c10::IValue> results_of(const OpTraits& traits, const at::RecordFunction& event) {
    const c10::ArrayRef<c10::IValue> all(event.outputs());
    return all.size() > traits.returns ? all.slice(all.size() - traits.returns) : all;
  }
  int32_t form_of(const OpTraits& traits, const Arguments& read, c10::ArrayRef<const c10::IValue> given, Lock& lock);
  int32_t result_form(const OpTraits& traits, c10::ArrayRef<c10::IValue> outputs, bool api, Lock& lock);
  void learn_type(PyTypeObject* type, Lock& lock);
  const CodeTraits* traits_of(PyCodeObject* code, Lock& lock);
  using Path = c10::SmallVector<const Frame*, 32>;
  void pop_anchor(ThreadState& state);
  void path_to_anchor(ThreadState& state, const Frame* frame, Path& path, Lock& lock);
  int32_t stack_of(ThreadState& state, const Frame* frame, Lock& lock);
  void read_python(PyObject* args, PyObject* kwargs, Ids& ids, int32_t& form, Lock& lock);
  void close_call(ThreadState& state, const Ids& outputs, int32_t form, int flags, int64_t end);
  void drop_anchor(ThreadState& state);
  // The C++ tensor of a Python object; null if it is not a tensor.
  const at::TensorBase* tensor_in(PyObject* object) const;
  void fault();
  void clear();

 private:
  struct KnownModule {
    PyObject* ref;  // a weak reference: the address alone may mean another module by now
    int32_t number;
  };
  ska::flat_hash_map<const void*, std::unique_ptr<OpTraits>> traits_;
  ska::flat_hash_map<PyObject*, KnownModule> modules_;
};

// The GIL, and silence: nothing that Python does for us is recorded.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) { ++silent; }
  ~WithGil() {
    --silent;
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  static thread_local int silent;

 private:
  PyGILState_STATE state_;
};

// While it lives, nothing that is active on this thread sees its work: autograd, autocast, modes of functions and of
// the dispatcher, subclasses, the transforms of torch.func, torch.jit.trace, profilers. Python's `torchapi.unobserved`.
class Unobserved {
 public:
  Unobserved()
      : keys_(c10::impl::tls_local_dispatch_key_set()),
        functions_(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
        tracing_(torch::jit::tracer::getTracingState()) {
    static const c10::DispatchKeySet unseen = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::autocast_dispatch_keyset | c10::functorch_transforms_ks | c10::python_ks |
        c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::PythonTLSSnapshot});
    c10::impl::LocalDispatchKeySet ours = keys_;
    ours.included_ = c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
    ours.excluded_ = unseen;
    c10::impl::_force_tls_local_dispatch_key_set(ours);
    if (tracing_) torch::jit::tracer::setTracingState(nullptr);  // which sets a key of its own
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    // Torch's profiler with stacks takes our functions for a part of the op. A debugger may stop in them.
    PyThreadState* thread = PyGILState_GetThisThreadState();
    if (thread != nullptr && thread->c_profilefunc != nullptr && thread->c_tracefunc == nullptr && PyGILState_Check()) {
      PyThreadState_EnterTracing(profiled_ = thread);
    }
  }
  ~Unobserved() {
    if (profiled_ != nullptr) PyThreadState_LeaveTracing(profiled_);
    at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_);
    if (tracing_) torch::jit::tracer::setTracingState(tracing_);
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
  }
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;

 private:
  const at::RecordFunctionGuard profilers_{false};
  const c10::impl::LocalDispatchKeySet keys_;
  const at::impl::TorchFunctionDisabledState functions_;
  const std::shared_ptr<torch::jit::tracer::TracingState> tracing_;
  PyThreadState* profiled_ = nullptr;
};

// Unlock the mutex, ask Python, lock it again. False if the interpreter is finalizing.
template <class Ask>
bool ask(Lock& lock, Ask ask_python) {
  lock.unlock();
  bool answered = false;
  if (!is_finalizing()) {
    WithGil gil;
    const Unobserved unobserved;
    // The op's own exception, if one is in flight, is set aside while Python answers.
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    ask_python();
    PyErr_Restore(type, error, traceback);
    answered = true;
  }
  lock.lock();
  return answered;
}

}  // namespace sightline
