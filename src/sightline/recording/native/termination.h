#pragma once
// SIGTERM, an abort or a crash while a recording is written to disk: the process ends a moment later, so that its last
// batch is written.

#include <Python.h>

namespace sightline {

// delay_termination(seconds): from now on these end the process only after so long; counted.
PyObject* delay_termination(PyObject*, PyObject* seconds);
// restore_termination(): take one delay back; the last one leaves them as they were.
PyObject* restore_termination(PyObject*, PyObject*);
// has_crashed(): whether a thread has crashed and waits for the last batches.
PyObject* has_crashed(PyObject*, PyObject*);
// written_after_crash(): one recording has written its last batch.
PyObject* written_after_crash(PyObject*, PyObject*);

}  // namespace sightline
