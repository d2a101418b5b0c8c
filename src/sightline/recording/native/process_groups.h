// Arguments of collectives besides tensors: a process group and a reduction, objects of classes that torch registers.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <string_view>

namespace sightline {

// The object inside a value of a registered class; null for anything else.
template <class Held>
const Held* held_object(const c10::IValue& value, std::string_view name) {
  if (!value.isObject()) return nullptr;
  const c10::ivalue::Object& object = value.toObjectRef();
  if (object.slots().empty() || !object.slots()[0].isCapsule() || object.name() != name) return nullptr;
  return static_cast<const Held*>(object.slots()[0].toCapsule().get());  // the value holds it
}

// The name of a process group, which is that of `torch.distributed`; null for anything else.
inline const std::string* group_name(const c10::IValue& value) {
  const auto* group = held_object<c10d::ProcessGroup>(value, "__torch__.torch.classes.c10d.ProcessGroup");
  return group == nullptr ? nullptr : &group->getGroupName();
}

// The name of a reduction; null for anything else.
inline const char* reduction_name(const c10::IValue& value) {
  static constexpr std::array kNames = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused"};
  const auto* reduction = held_object<c10d::ReduceOp>(value, "__torch__.torch.classes.c10d.ReduceOp");
  if (reduction == nullptr) return nullptr;
  const auto number = static_cast<size_t>(reduction->op_);
  return number < kNames.size() ? kNames[number] : "?";
}

}  // namespace sightline
