// Vectors of floats, and attributes, for kernels that are compiled once for each kind of instructions.

#ifndef JAXNN_VECTORS_H_
#define JAXNN_VECTORS_H_

#include <cstdint>
#include <cstring>

#define JAXNN_INLINED __attribute__((always_inline))  // a lambda: it has none of the attributes of its function
#define JAXNN_INLINE inline JAXNN_INLINED
#define JAXNN_UNROLL _Pragma("GCC unroll 32")
#define JAXNN_AVX2 __attribute__((target("avx2,fma")))
#define JAXNN_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,fma")))
// A function that the compiler vectorizes, for each kind; the CPU's is chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAXNN_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAXNN_VECTORIZED
#endif

namespace jaxnn {

// The instructions that a kernel is compiled for.
enum class Isa { kPlain, kAvx2, kAvx512 };

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

}  // namespace jaxnn

#endif  // JAXNN_VECTORS_H_
