// API calls as the user wrote them, without standing in their way.
//
// The outermost op of a thread has been run by some call of the user's. If one of torch's own Python functions is on
// the stack, that is the call, and its arguments are its local variables. Otherwise the innermost frame stands at the
// instruction that called into C, and what it called, with which arguments, lies on that frame's operand stack. How
// deep the stack is at an instruction, Python works out from the bytecode, once for each place.
#pragma once

#include "recording.h"

namespace sightline {

void end_api_call(Recording& recording, ThreadState& state, Lock& lock);
void begin_api_call(
    Recording& recording, ThreadState& state, OpTraits& traits, const Arguments& given,
    c10::ArrayRef<const c10::IValue> values, int64_t entered, Lock& lock);
void end_api_op(
    Recording& recording, ThreadState& state, const OpenOp& op, c10::ArrayRef<c10::IValue> outputs, bool raised,
    int64_t end, Lock& lock);

}  // namespace sightline
