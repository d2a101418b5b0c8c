// The calls into torch: the callable at an instruction, and its operands on the frame's stack.
#pragma once

#include "recording.h"

namespace sightline {

// The operands of a call: objects in order, and names for the last of them.
struct Operands {
  c10::SmallVector<PyObject*, 8> objects;
  PyObject* names = nullptr;
  PyObject* keywords = nullptr;
  PyObject* callable = nullptr;
  bool mirrored = false;  // the right operand is the tensor whose method is called
};

// The operands of the instruction a frame is at; false where they cannot be read.
bool operands_at(Recording& recording, const Frame* frame, const Site& site, Operands& into);
PyObject* tuple_of(const Operands& operands);
// Replace a `functools.partial` by the function it calls, with the arguments it adds.
void unwrap_partial(Operands& operands, Lock& lock);

// The local variable of a frame in a slot; null if it is not set.
PyObject* local(const Frame* frame, int slot);
// The argument that was passed for a parameter, which the function has rebound since.
PyObject* passed(const Frame* caller, const Site& site, const Parameter& parameter, PyObject* now, Lock& lock);

// The form and the values of a call; `maker` and `number` say how its operands are to be read.
void read_call(
    Recording& recording, const Operands& operands, const char* maker, int32_t number, ApiCall& api, Lock& lock);

const Site& site_of(Recording& recording, PyCodeObject* code, int32_t number, int instruction, Lock& lock);
const CallableTraits& callable_traits(Recording& recording, PyObject* callable, Lock& lock);
// The name of a call that no function of torch's stands behind: `float(x)`, `if x:`, `sum(list)`.
const CallableTraits& traits_by_op(Recording& recording, const OpTraits& op, PyObject* callable, Lock& lock);
const FunctionTraits& function_traits(Recording& recording, const Frame* frame, Lock& lock);

bool is_tensor(const Recording& recording, PyObject* object);

}  // namespace sightline
