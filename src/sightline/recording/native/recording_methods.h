// The methods of a recording's Python type by subject; `extension.cpp` has those that start and stop it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

namespace sightline {

std::vector<PyMethodDef> row_methods();
std::vector<PyMethodDef> value_methods();
std::vector<PyMethodDef> measurement_methods();

}  // namespace sightline
