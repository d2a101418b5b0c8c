// The CRC-32 of zlib, several times as fast: captured tensors are gigabytes.
#pragma once

#include <Python.h>

namespace sightline {

// crc32(bytes): the number that `zlib.crc32` gives.
PyObject* crc32(PyObject*, PyObject* bytes);

}  // namespace sightline
