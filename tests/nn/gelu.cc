// GELU by its approximation with tanh, x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, and its gradient: Hendrycks & Gimpel
// 2016, "Gaussian Error Linear Units" (arXiv:1606.08415).

#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

constexpr int64_t kWork = 1 << 14;  // elements that are worth a thread
constexpr int64_t kLine = 16;       // floats of a cache line, which threads do not share
constexpr float kScale = 0.7978845608f, kCubic = 0.044715f;

// Beyond 10 the tanh is 1: bounded, squares do not overflow, and a gradient is no product of 0 and infinity.
template <typename V>
JAXNN_INLINE V bounded(V x) {
  x = x > 10.0f ? V{} + 10.0f : x;
  return x < -10.0f ? V{} - 10.0f : x;
}

template <typename V>
JAXNN_INLINE V gelu_of(V x) {
  const V b = bounded(x);
  return 0.5f * x * (1.0f + tanh_of(kScale * b * (1.0f + kCubic * b * b)));
}

template <typename V>
JAXNN_INLINE V gradient_of(V x) {
  const V b = bounded(x), square = kCubic * b * b, t = tanh_of(kScale * b * (1.0f + square));
  return 0.5f * (1.0f + t) + (0.5f * kScale) * b * (1.0f - t * t) * (1.0f + 3.0f * square);
}

// Calls body(lanes, first, last) for parts of `size` elements.
template <typename Body>
void for_each_range(Pool& pool, int64_t size, const Body& body) {
  for_each_part(pool, 1, size / kWork, [&](int64_t, int64_t part, int64_t parts) {
    const auto cut = [&](int64_t number) { return number == parts ? size : size * number / parts / kLine * kLine; };
    const int64_t first = cut(part), last = cut(part + 1);
    vectorized([=, copy = body](auto lanes) JAXNN_INLINED { copy(lanes, first, last); });
  });
}

}  // namespace

// Of x [...], to an array of its shape.
void kernel::gelu(const Call& call) {
  const auto& [x, result] = call.arrays<2>();
  if (result.size != x.size) throw InvalidArgument("shapes do not fit");
  for_each_range(call.pool, x.size, [x = x.as(), y = result.as()](auto lanes, int64_t first, int64_t last) JAXNN_INLINED {
    constexpr int kLanes = decltype(lanes)::value;
    for (int64_t i = first; i < last; i += kLanes) store<kLanes>(gelu_of(load<kLanes>(x + i, last - i)), y + i, last - i);
  });
}

// Of x and the gradient by the result, to the gradient by x.
void kernel::gelu_backward(const Call& call) {
  const auto& [x, cotangent, result] = call.arrays<3>();
  if (result.size != x.size || cotangent.size != x.size) throw InvalidArgument("shapes do not fit");
  for_each_range(call.pool, x.size, [x = x.as(), by = cotangent.as(), to = result.as()](
                                        auto lanes, int64_t first, int64_t last) JAXNN_INLINED {
    constexpr int kLanes = decltype(lanes)::value;
    for (int64_t i = first; i < last; i += kLanes)
      store<kLanes>(load<kLanes>(by + i, last - i) * gradient_of(load<kLanes>(x + i, last - i)), to + i, last - i);
  });
}

}  // namespace jaxnn
