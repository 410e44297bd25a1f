#include "common/call.h"

#include <algorithm>
#include <limits>

namespace jaxnn {
namespace {

void check_types(std::span<const Array> arrays, std::string_view wanted, const std::string& which) {
  if (arrays.size() != wanted.size()) throw InvalidArgument("needs " + std::to_string(wanted.size()) + " " + which + "s");
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Type type = arrays[i].type;
    const bool fits = wanted[i] == 'g' ? type == Type::kFloat32 || type == Type::kBfloat16 : type == Type{wanted[i]};
    if (!fits) throw InvalidArgument("the dtype of " + which + " " + std::to_string(i) + " is none that it takes");
  }
}

}  // namespace

int64_t num_elements(Shape sizes) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 8;  // bytes of an element
  int64_t total = 1;
  bool is_empty = false;
  for (const int64_t size : sizes) {
    is_empty |= size == 0;
    if (size < 0 || __builtin_mul_overflow(total, std::max<int64_t>(size, 1), &total) || total > kMost)
      throw InvalidArgument("the sizes of an array are too large");
  }
  return is_empty ? 0 : total;
}

Shape Call::numbers(std::string_view name) const {
  for (const Attribute& attribute : attributes)
    if (attribute.name == name) return attribute.values;
  throw InvalidArgument("the attribute " + std::string(name) + " is missing");
}

int64_t Call::number(std::string_view name) const {
  const Shape values = numbers(name);
  if (values.size() != 1) throw InvalidArgument("the attribute " + std::string(name) + " is not one number");
  return values[0];
}

void Kernel::run(const Call& call) const {
  check_types(call.operands, operands, "operand");
  check_types(call.results, results, "result");
  compute(call);
}

}  // namespace jaxnn
