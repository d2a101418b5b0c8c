#include "termination.h"

#include <csignal>
#include <fcntl.h>
#include <poll.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

namespace sightline {
namespace {

// A handler in Python would run only when the main thread comes back from C, which a program that hangs never does:
// SIGTERM would no longer end it. Here the handler writes a byte, and a thread that needs no interpreter ends the
// process. Until then the thread that writes batches goes on as it does anyway.
int delayed_by = 0;  // recordings; counted under the GIL, as all of this is but the handler and the thread
volatile sig_atomic_t write_end = -1;  // of the pipe that the thread waits at; -1 where there is none
volatile pid_t owner = 0;
volatile sig_atomic_t has_come = 0;
std::thread* waiting = nullptr;  // the thread; a forked child has only its memory

void end_process() {
  ::signal(SIGTERM, SIG_DFL);
  ::kill(getpid(), SIGTERM);
}

void on_termination(int) {
  // A forked child has the handler and not the thread.
  if (getpid() != owner) {
    end_process();
    return;
  }
  has_come = 1;
  const char byte = 1;
  if (::write(write_end, &byte, 1) != 1) end_process();
}

// Ends the process some time after a byte has come; ends itself when the other end of the pipe is closed.
void wait_for_termination(int read_end, int milliseconds) {
  char byte;
  const ssize_t count = ::read(read_end, &byte, 1);
  if (count == 1) {
    ::poll(nullptr, 0, milliseconds);
    end_process();
  }
  ::close(read_end);
}

// A crash, or an abort, would lose the batch that is being recorded. The thread it happens on waits here while the
// thread that writes batches takes the last. That one needs the GIL: if the crash came while it was held, as in a call
// of a C function, this thread gives it up, for it will never run Python again. All of it is bounded in time, and a
// crash in here is one in a handler, which ends the process at once.
constexpr int kCrashes[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int kPoll = 2;  // milliseconds
volatile sig_atomic_t crash_delay = 0;  // milliseconds
volatile sig_atomic_t crashed = 0;
volatile sig_atomic_t written = 0;  // recordings whose last batch was taken after the crash

void on_crash(int number) {
  if (getpid() == owner) {
    if (!crashed) {
      crashed = 1;
      if (PyGILState_Check()) PyEval_SaveThread();
    }
    for (int waited = 0; waited < crash_delay && written < delayed_by; waited += kPoll) ::poll(nullptr, 0, kPoll);
  }
  ::signal(number, SIG_DFL);
  ::raise(number);
}

// A pipe that a started program does not inherit.
bool open_pipe(int* ends) {
#if defined(__linux__)
  return ::pipe2(ends, O_CLOEXEC) == 0;
#else
  return ::pipe(ends) == 0 && ::fcntl(ends[0], F_SETFD, FD_CLOEXEC) == 0 && ::fcntl(ends[1], F_SETFD, FD_CLOEXEC) == 0;
#endif
}

bool has_handler(int number, void (*handler)(int)) {
  struct sigaction current {};
  return sigaction(number, nullptr, &current) == 0 && current.sa_handler == handler;
}

void handle(int number, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigaction(number, &action, nullptr);
}

}  // namespace

PyObject* delay_termination(PyObject*, PyObject* seconds) {
  const double wait = PyFloat_AsDouble(seconds);
  if (PyErr_Occurred()) return nullptr;
  if (owner != getpid()) {  // the counts and descriptors are a parent's
    delayed_by = 0;
    write_end = -1;
    waiting = nullptr;
  }
  if (delayed_by++ > 0) Py_RETURN_NONE;
  owner = getpid();
  const int milliseconds = static_cast<int>(wait * 1000);
  crashed = 0;
  written = 0;
  crash_delay = milliseconds;
  for (const int number : kCrashes) {
    if (has_handler(number, SIG_DFL)) handle(number, on_crash);
  }
  int ends[2];
  if (!has_handler(SIGTERM, SIG_DFL) || !open_pipe(ends)) Py_RETURN_NONE;
  has_come = 0;
  write_end = ends[1];
  // All signals are blocked in the thread: the program's own go to its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    waiting = new std::thread(wait_for_termination, ends[0], milliseconds);
  } catch (const std::system_error&) {  // no thread to be had: SIGTERM stays as it is
    ::close(ends[0]);
    ::close(ends[1]);
    write_end = -1;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (write_end < 0) Py_RETURN_NONE;
  handle(SIGTERM, on_termination);
  Py_RETURN_NONE;
}

PyObject* has_crashed(PyObject*, PyObject*) { return PyBool_FromLong(crashed); }

PyObject* written_after_crash(PyObject*, PyObject*) {
  written = written + 1;
  Py_RETURN_NONE;
}

PyObject* restore_termination(PyObject*, PyObject*) {
  if (owner != getpid() || delayed_by == 0 || --delayed_by > 0) Py_RETURN_NONE;
  if (has_handler(SIGTERM, on_termination)) ::signal(SIGTERM, SIG_DFL);
  for (const int number : kCrashes) {
    if (has_handler(number, on_crash)) ::signal(number, SIG_DFL);
  }
  if (write_end >= 0) ::close(write_end);
  write_end = -1;
  if (has_come) end_process();  // all is written: a program that ends by itself now would hide the signal
  if (waiting != nullptr) {  // it finds the pipe closed, and ends: nothing of ours is left open
    waiting->join();
    delete std::exchange(waiting, nullptr);
  }
  Py_RETURN_NONE;
}

}  // namespace sightline
