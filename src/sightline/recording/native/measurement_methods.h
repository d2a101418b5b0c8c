// What Python asks of the measurements of a recording: methods of its type.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

namespace sightline {

std::vector<PyMethodDef> measurement_methods();

}  // namespace sightline
