// The interpreter's frames in CPython 3.13. One such file for each version; `frames.h` includes that of this Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

namespace sightline {

using Frame = _PyInterpreterFrame;

inline PyCodeObject* code_of(const Frame* frame) {
  return reinterpret_cast<PyCodeObject*>(frame->f_executable);
}

// Bytes from the start of the code to the instruction the frame is at: Python's `f_lasti`.
inline int instruction_of(const Frame* frame) {
  return static_cast<int>(
      reinterpret_cast<const char*>(frame->instr_ptr) -
      reinterpret_cast<const char*>(_PyCode_CODE(code_of(frame))));
}

// A frame that is being set up has run no instruction yet and is not shown by Python either.
inline bool is_shown(const Frame* frame) {
  if (frame->owner == FRAME_OWNED_BY_CSTACK) return false;
  return frame->owner == FRAME_OWNED_BY_GENERATOR ||
      frame->instr_ptr >= _PyCode_CODE(code_of(frame)) + code_of(frame)->_co_firsttraceable;
}

inline const Frame* innermost_of(const PyThreadState* state) { return state->current_frame; }

inline PyObject* function_of(const Frame* frame) { return frame->f_funcobj; }

// The local variable in a slot; null if it is not set.
inline PyObject* slot_of(const Frame* frame, int slot) { return frame->localsplus[slot]; }

// An object on the operand stack, counted from its bottom.
inline PyObject* operand(const Frame* frame, int depth) {
  return slot_of(frame, code_of(frame)->co_nlocalsplus + depth);
}

// A call's operands: a function, its object or null; then the arguments.
constexpr int call_callable(bool) { return 0; }
inline bool call_has_self(const Frame* frame, int depth) { return operand(frame, depth + 1) != nullptr; }
// The function of a call that spreads arguments; a null is above it.
constexpr int kSpreadCallable = 0;

inline bool is_finalizing() { return Py_IsFinalizing() != 0; }

}  // namespace sightline
