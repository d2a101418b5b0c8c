// The numbers of a tensor in CPU memory, in one pass over it: see `sightline.recording.statistics.cpu`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sightline {

// All but the counts are over the finite elements; of complex numbers the parts count.
struct Reading {
  double least = 0, most = 0, mean = 0, deviation = 0, norm = 0;
  int64_t zeros = 0, nans = 0, infs = 0;
  int64_t lanes[4] = {};  // of the fingerprint
};

// Whether a tensor has numbers of its own that can be read: floating, strided, not empty, not a wrapper.
bool is_measurable(const at::TensorBase& tensor);

// Of a measurable tensor in CPU memory.
bool is_finite(const at::TensorBase& tensor);
Reading read_numbers(const at::TensorBase& tensor, bool fingerprint);

// Whether a finite number of one dtype is finite in another.
bool holds(c10::ScalarType wide, c10::ScalarType narrow);

}  // namespace sightline
