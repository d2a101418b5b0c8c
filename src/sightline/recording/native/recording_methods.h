// The methods of a recording's Python type, by what they are about; `extension.cpp` has those that steer it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

namespace sightline {

std::vector<PyMethodDef> row_methods();
std::vector<PyMethodDef> value_methods();
std::vector<PyMethodDef> measurement_methods();

}  // namespace sightline
