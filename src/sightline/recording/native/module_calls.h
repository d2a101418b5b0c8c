// The global hooks of module calls, as C functions.
#pragma once

#include "recording.h"

namespace sightline {

PyObject* enter_module(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* leave_module(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace sightline
