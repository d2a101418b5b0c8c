// The places that call torch, and the callables there.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace sightline {

// How a place in the code calls torch.
enum class SiteKind : uint8_t { kUnknown, kCall, kBinary, kUnary, kStore, kSpread, kSlice, kStoreSlice };

struct Site {
  SiteKind kind = SiteKind::kUnknown;
  int depth = 0;  // of the operand stack below the operands of the instruction
  int count = 0;  // arguments of a call
  int32_t callable = -1;  // of an operator: the operation it stands for
  int32_t mirrored = -1;  // the same where only the right operand is a tensor
  PyObject* names = nullptr;  // of keyword arguments, a tuple or null; pinned
  bool is_tuple = false;  // of a call with a spread: it certainly spreads a tuple
  int args_slot = -1, kwargs_slot = -1;  // the slots of the caller's own `*args` and `**kwargs`, if it spreads those
  bool has_keywords = false;  // of a call with a dict of keyword arguments
  bool truth = false;  // of a comparison: it also reads whether its result is true, when its operands are released
};

// The properties of a callable.
struct CallableTraits {
  int32_t info = -1;  // -1: calls of it are no API calls
  bool several = false;  // one call may run several ops, one after the other
  bool indexes = false;  // it reads or writes by an index
  bool returns_nothing = false;
  bool by_op = false;  // no function of torch's: the op names the call
  bool backward = false;
  bool partial = false;  // a `functools.partial`: its inner function is called
};

// The parameters of a torch function written in Python.
struct Parameter {
  int slot;  // among the frame's local variables
  PyObject* name;  // of one that may have been given another value since the call; else null
  PyObject* fallback;  // its default; Ellipsis: it has none
};

struct FunctionTraits : CallableTraits {
  std::vector<Parameter> parameters;
};

struct ApiTables {
  std::unordered_map<uint64_t, Site> sites;
  std::unordered_map<const void*, CallableTraits> callables;
  std::unordered_map<const void*, FunctionTraits> functions;
  std::unordered_map<uint64_t, CallableTraits> by_op;
  std::unordered_map<uint64_t, bool> follows;
};

}  // namespace sightline
