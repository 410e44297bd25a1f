// Vectors of floats for kernels that are compiled for each kind of instructions, by the extensions of GCC and clang.

#pragma once

#include <cstdint>
#include <cstring>

#include "common/instructions.h"

#define JAXNN_UNROLL _Pragma("GCC unroll 32")
// Before a loop that the compiler vectorizes: no element that it writes is read by another iteration.
#ifdef __clang__
#define JAXNN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define JAXNN_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace jaxnn {

template <int kLanes>
struct Of {
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
  typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(float))));
};
template <int kLanes>
using Vector = typename Of<kLanes>::Vector;
template <int kLanes>
using Integers = typename Of<kLanes>::Integers;

// The first `count` lanes; the others are 0.
template <int kLanes>
JAXNN_INLINE Vector<kLanes> load(const float* from, int64_t count = kLanes) {
  Vector<kLanes> x{};
  if (count >= kLanes)
    std::memcpy(&x, from, sizeof x);
  else
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
  return x;
}

template <int kLanes>
JAXNN_INLINE void store(const Vector<kLanes>& x, float* to, int64_t count = kLanes) {
  if (count >= kLanes)
    std::memcpy(to, &x, sizeof x);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = x[i];
}

// The rational function of Eigen's and XLA's tanh, to 3 units in the last place.
template <typename V>
JAXNN_INLINE V tanh_of(V x) {
  // Where it is 1 exactly, so that saturated gates have no gradient: later if sums are fused with products.
  constexpr float kLimit = kFusesAtBaseline || sizeof(V) > 16 ? 7.99881172180175781f : 7.90531110763549805f;
  x = x > kLimit ? V{} + kLimit : x;
  x = x < -kLimit ? V{} - kLimit : x;
  const V y = x * x;
  V p = y * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * y + -8.60467152213735e-11f;
  p = p * y + 5.12229709037114e-08f;
  p = p * y + 1.48572235717979e-05f;
  p = p * y + 6.37261928875436e-04f;
  p = p * y + 4.89352455891786e-03f;
  V q = y * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * y + 2.26843463243900e-03f;
  q = q * y + 4.89352518554385e-03f;
  return x * p / q;
}

}  // namespace jaxnn
