// The interpreter's frames in CPython 3.14. One such file for each version; `frames.h` includes that of this Python.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_frame.h>
#include <internal/pycore_interpframe.h>
#undef Py_BUILD_CORE

namespace sightline {

using Frame = _PyInterpreterFrame;

// References of frames have tags in their low bits, and some are small integers.
inline PyObject* untagged(_PyStackRef reference) {
  if ((reference.bits & 3) == 3) return nullptr;
  return reinterpret_cast<PyObject*>(reference.bits & ~static_cast<uintptr_t>(3));
}

inline PyCodeObject* code_of(const Frame* frame) {
  return reinterpret_cast<PyCodeObject*>(untagged(frame->f_executable));
}

inline const _Py_CODEUNIT* position_of(const Frame* frame) { return frame->instr_ptr; }

// Whether the interpreter made the frame for itself, around a call from C.
inline bool is_entry(const Frame* frame) { return frame->owner >= FRAME_OWNED_BY_INTERPRETER; }

inline const Frame* innermost_of(const PyThreadState* state) { return state->current_frame; }

inline PyObject* function_of(const Frame* frame) { return untagged(frame->f_funcobj); }

// The local variable in a slot, or an operand above them; null if it is not set.
inline PyObject* slot_of(const Frame* frame, int slot) { return untagged(frame->localsplus[slot]); }

// Where a call's null is, if it has one: below the function, or above it.
constexpr bool kNullIsBelow = false;

inline bool is_finalizing() { return Py_IsFinalizing() != 0; }

}  // namespace sightline
