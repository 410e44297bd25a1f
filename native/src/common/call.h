// What a kernel knows of a call: arrays, attributes and a pool of threads. Nothing of XLA.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/pool.h"

namespace jaxnn {

constexpr int kAbi = 1;  // raised when the arguments of a kernel change: jaxnn compares it with the one that it needs

enum class Type : char {
  kFloat32 = 'f', kBfloat16 = 'e', kInt32 = 'i', kUint32 = 'u', kUint16 = 'h', kUint8 = 'b', kBool = '?', kOther = 0
};

constexpr int64_t size_of(Type type) {  // bytes of an element
  return type == Type::kUint8 || type == Type::kBool ? 1 : type == Type::kBfloat16 || type == Type::kUint16 ? 2 : 4;
}

using Shape = std::span<const int64_t>;

// Arguments that a kernel cannot take.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The product of sizes. Throws InvalidArgument if one is negative, or if the product of those that are not 0, or its
// number of bytes, could not be an int64: then the product of any of them is one.
int64_t num_elements(Shape sizes);
inline int64_t num_elements(std::initializer_list<int64_t> sizes) { return num_elements({sizes.begin(), sizes.size()}); }

// An array in C order.
struct Array {
  Type type = Type::kOther;
  void* data = nullptr;
  Shape shape;
  int64_t size = 0;  // the number of elements

  template <typename T = float>
  T* as() const { return static_cast<T*>(data); }
  Shape members(size_t rank) const { return shape.first(shape.size() - rank); }  // the axes before the last `rank`
  bool has(std::initializer_list<int64_t> sizes) const { return size == num_elements(sizes); }
};

struct Attribute {
  std::string_view name;
  Shape values;  // one, of a scalar
};

struct Call {
  Pool& pool;
  std::span<const Array> operands, results;  // follow each other in memory
  std::span<const Attribute> attributes;

  // The operands and the results: `const auto& [x, y, sum] = call.arrays<3>();`
  template <size_t kCount>
  const Array (&arrays() const)[kCount] { return *reinterpret_cast<const Array(*)[kCount]>(operands.data()); }
  Shape numbers(std::string_view name) const;
  int64_t number(std::string_view name) const;
};

struct Kernel {
  const char* name;
  void (*compute)(const Call&);
  std::string_view operands, results;  // dtypes

  // Computes after a check of the dtypes. Throws InvalidArgument; std::bad_alloc and other exceptions of the kernel.
  void run(const Call& call) const;
};

namespace kernel {
#define JAXNN_KERNEL(name, operands, results) void name(const Call&);
#include "kernels.def"
#undef JAXNN_KERNEL
}  // namespace kernel

inline constexpr Kernel kKernels[] = {
#define JAXNN_KERNEL(name, operands, results) {"jaxnn_" #name, kernel::name, operands, results},
#include "kernels.def"
#undef JAXNN_KERNEL
};
inline constexpr size_t kMostArrays = 16, kMostAttributes = 8;  // of a kernel

}  // namespace jaxnn
