#pragma once
// SIGTERM while a recording is written to disk: the process ends a moment later, so that its last batch is written.

#include <Python.h>

namespace sightline {

// delay_termination(seconds): from now on SIGTERM ends the process only after so long; counted.
PyObject* delay_termination(PyObject*, PyObject* seconds);
// restore_termination(): take one delay back; the last one leaves SIGTERM as it was.
PyObject* restore_termination(PyObject*, PyObject*);

}  // namespace sightline
