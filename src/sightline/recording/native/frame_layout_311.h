// The interpreter's frames in CPython 3.11. One such file for each version; `frames.h` includes that of this Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

namespace sightline {

using Frame = _PyInterpreterFrame;

inline PyCodeObject* code_of(const Frame* frame) { return frame->f_code; }

// Bytes from the start of the code to the instruction the frame is at: Python's `f_lasti`. In a frame that waits for
// another, that is the last one's inline cache.
inline int instruction_of(const Frame* frame) {
  return static_cast<int>(
      reinterpret_cast<const char*>(frame->prev_instr) -
      reinterpret_cast<const char*>(_PyCode_CODE(frame->f_code)));
}

// A frame that is being set up has run no instruction yet and is not shown by Python either.
inline bool is_shown(const Frame* frame) {
  return frame->owner == FRAME_OWNED_BY_GENERATOR ||
      frame->prev_instr >= _PyCode_CODE(frame->f_code) + frame->f_code->_co_firsttraceable;
}

inline const Frame* innermost_of(const PyThreadState* state) { return state->cframe->current_frame; }

inline PyObject* function_of(const Frame* frame) { return reinterpret_cast<PyObject*>(frame->f_func); }

// The local variable in a slot; null if it is not set.
inline PyObject* slot_of(const Frame* frame, int slot) { return frame->localsplus[slot]; }

// An object on the operand stack, counted from its bottom.
inline PyObject* operand(const Frame* frame, int depth) {
  return frame->localsplus[code_of(frame)->co_nlocalsplus + depth];
}

// A call's operands: a method and its object, or null and a function; then the arguments.
constexpr int call_callable(bool has_self) { return has_self ? 0 : 1; }
inline bool call_has_self(const Frame* frame, int depth) { return operand(frame, depth) != nullptr; }
// The function of a call that spreads arguments; a null is below it.
constexpr int kSpreadCallable = 1;

inline bool is_finalizing() { return _Py_IsFinalizing() != 0; }

}  // namespace sightline
