// `stats=` and `check=` on the results of an op, as it ends.
#pragma once

#include "recording.h"

namespace sightline {

// The tensors that an op returned, and those it changed in place, with their values.
struct Results {
  c10::SmallVector<std::pair<const at::TensorBase*, int32_t>, 4> returned;
  c10::SmallVector<std::pair<at::TensorBase, int32_t>, 2> changed;
};

// Measure the results of an op; whether to notify Python: one is not finite.
bool measure_op(Recording& recording, const ThreadState& state, const OpenOp& op, const Results& results, Lock& lock);

// Whether an argument of a module comes from no op, and its statistics are requested.
bool has_new_inputs(const Recording& recording, const OpenCall& call);

using Tensors = c10::SmallVector<at::Tensor, 8>;

// Take the statistics of a module's parameters and buffers when it is first called, if requested. With the GIL.
// `held` keeps them meanwhile, and is freed without the mutex.
void measure_parameters(Recording& recording, PyObject* module, int32_t number, Tensors& held, Lock& lock);

// Whether Python must examine the results of a module: results of compiled code, which are not measured yet, or, for
// the check, the alarm of a device.
bool is_checkpoint(const Recording& recording, const Ids& outputs);

}  // namespace sightline
