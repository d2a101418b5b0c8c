// The Python frames of the running thread, read without the GIL, and the stacks they make, each stored once.
//
// torch's bindings release the GIL before an op runs, so the observer's callbacks run without it. The frames of
// one's own thread can still be read: no other thread changes them while this thread is inside a call. CPython's
// `PyUnstable_InterpreterFrame_GetCode` counts a reference, which needs the GIL, so that the layout itself is read
// (`Py_BUILD_CORE`). It differs between versions: `frame_layout_….h` has that of each. A code object is pinned, under
// the GIL, when it is first met.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX >= 0x030F0000 || PY_VERSION_HEX < 0x030B0000
#error "the frames of this Python version have a layout the native engine does not know"
#elif PY_VERSION_HEX >= 0x030E0000
#include "frame_layout_314.h"
#elif PY_VERSION_HEX >= 0x030D0000
#include "frame_layout_313.h"
#elif PY_VERSION_HEX >= 0x030C0000
#include "frame_layout_312.h"
#else
#include "frame_layout_311.h"
#endif

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace sightline {

// Bytes from the start of the code to the instruction the frame is at: Python's `f_lasti`.
inline int instruction_of(const Frame* frame) {
  return static_cast<int>(
      reinterpret_cast<const char*>(position_of(frame)) -
      reinterpret_cast<const char*>(_PyCode_CODE(code_of(frame))));
}

// A frame that is being set up has run no instruction yet and is not shown by Python either.
inline bool is_shown(const Frame* frame) {
  if (is_entry(frame)) return false;
  return frame->owner == FRAME_OWNED_BY_GENERATOR ||
      position_of(frame) >= _PyCode_CODE(code_of(frame)) + code_of(frame)->_co_firsttraceable;
}

// An object on the operand stack, counted from its bottom.
inline PyObject* operand(const Frame* frame, int depth) {
  return slot_of(frame, code_of(frame)->co_nlocalsplus + depth);
}

// The operands of a call, from its depth on: the function and its object or null, in the order of this Python, then
// the arguments. Where the null is below, a method and its object stand in the places of null and function.
constexpr int call_callable(bool has_self) { return kNullIsBelow && !has_self ? 1 : 0; }
inline bool call_has_self(const Frame* frame, int depth) {
  return operand(frame, kNullIsBelow ? depth : depth + 1) != nullptr;
}
// The function of a call that spreads arguments, next to a null.
constexpr int kSpreadCallable = kNullIsBelow ? 1 : 0;

inline const Frame* next_shown(const Frame* frame) {
  while (frame != nullptr && !is_shown(frame)) frame = frame->previous;
  return frame;
}

inline const Frame* caller_of(const Frame* frame) { return next_shown(frame->previous); }

// The innermost Python frame of this thread; null on a thread Python has never seen, as autograd's workers are.
inline const Frame* current_frame() {
  PyThreadState* state = PyGILState_GetThisThreadState();
  return state == nullptr ? nullptr : next_shown(innermost_of(state));
}

inline const Frame* frame_of(PyObject* object) {
  return reinterpret_cast<PyFrameObject*>(object)->f_frame;
}

// The traits of a code object, requested from Python once.
struct CodeTraits {
  int32_t number;  // position in the recording's list of codes
  bool hidden;  // torch's own frames around a module call: left out of stacks
  bool api;  // a torch function written in Python, which counts as one API call
  bool engine;  // torch's function that calls autograd's engine
};

// The trie of frames: a stack is the number of its innermost node, -1 the empty stack.
class Stacks {
 public:
  struct Node {
    int32_t parent;
    int32_t code;
    int32_t instruction;
  };

  std::vector<Node> nodes;
  std::unordered_map<const void*, CodeTraits> codes;  // keys are pinned while the recording lives

  int32_t child(int32_t parent, int32_t code, int32_t instruction) {
    const Key key{parent, code, instruction};
    const auto [found, is_new] = index_.emplace(key, static_cast<int32_t>(nodes.size()));
    if (is_new) nodes.push_back({parent, code, instruction});
    return found->second;
  }

 private:
  struct Key {
    int32_t parent, code, instruction;
    bool operator==(const Key& other) const {
      return parent == other.parent && code == other.code && instruction == other.instruction;
    }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      uint64_t mixed = (static_cast<uint64_t>(static_cast<uint32_t>(key.parent)) << 32) ^
          (static_cast<uint64_t>(static_cast<uint32_t>(key.code)) << 16) ^ static_cast<uint32_t>(key.instruction);
      mixed *= 0x9E3779B97F4A7C15ull;
      return mixed ^ (mixed >> 29);
    }
  };
  ska::flat_hash_map<Key, int32_t, KeyHash> index_;
};

}  // namespace sightline
