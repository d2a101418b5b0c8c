// Who is called when an op begins and ends: functions that torch's `RecordFunction` calls.
#pragma once

#include "recording.h"

namespace sightline {

// Callbacks are plain functions, so each recording that runs has a slot of its own and with it functions of its own.
// Threads that work for the recording's thread inherit the functions. Slots are never freed: a callback may be about
// to use one.
constexpr size_t kSlots = 8;
extern Recording slots[kSlots];

uint64_t this_thread();

// Where this thread stands in a recording; null if it does not work for it.
ThreadState* state_of(size_t slot, Recording& recording);

// The number of the autograd node that is evaluated on this thread; -1 outside a backward pass, -2 for a node that
// has none, as those that accumulate into a leaf.
int64_t current_node();

// Whether this thread runs a part of a backward pass.
bool in_backward();

// Have the ops of this thread, and of those that work for it, recorded.
void listen(size_t slot);
// Also have the autograd nodes seen: a compiled one is one opaque op. Torch then reports every node, which costs more
// than most of them do, so that it is done only where there is compiled code.
void listen_to_nodes(size_t slot);
// Stop listening on this thread, also for recordings that were stopped elsewhere.
void stop_listening();

// Compiled code has ended; the number of its op.
int32_t end_region(Recording& recording, ThreadState& state, int64_t node, int64_t end);

}  // namespace sightline
