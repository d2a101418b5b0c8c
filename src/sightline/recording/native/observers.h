// Notifies Python's observers of events: see `sightline.recording.observers`.
#pragma once

#include "recording.h"

namespace sightline {

// A module call as observers see it, without its arguments.
struct CallEvent {
  int32_t module, id;
  int phase;
  size_t depth;  // how many calls are open around it
  int32_t form;
};

inline int phase_of(const OpenCall& call) { return call.bits & ((1 << kFlagShift) - 1); }

void notify_op(
    Recording& recording, const ThreadState& state, const OpenOp& op, c10::ArrayRef<c10::IValue> outputs,
    int32_t result_form, int phase, bool raised, bool nonfinite, Lock& lock);
// The API call that `state` has just closed.
void notify_api_call(Recording& recording, ThreadState& state, int32_t id, Lock& lock);
void notify_enter(Recording& recording, const CallEvent& call, PyObject* args, PyObject* kwargs, Lock& lock);
// Without a result it has raised.
void notify_leave(
    Recording& recording, const CallEvent& call, PyObject* args, PyObject* kwargs, PyObject* result, Lock& lock);

}  // namespace sightline
