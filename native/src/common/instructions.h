// One way to choose instructions at run time: a body is compiled for each kind, and runs with those of this process.

#pragma once

#include <type_traits>

#define JAXNN_INLINED __attribute__((always_inline))  // a lambda: it has none of the instructions of its function
#define JAXNN_INLINE inline JAXNN_INLINED

namespace jaxnn {

enum class Instructions { kBaseline, kAvx2, kAvx512 };

// The instructions of this process, which is set before any kernel runs.
inline Instructions instructions = Instructions::kBaseline;

// Sets `instructions` to the widest of this CPU; if JAXNN_MAX_ISA in the environment is baseline, avx2 or avx512, to none
// wider, also for oneDNN. Returns nullptr or what is wrong.
const char* choose_instructions();

#if defined(__aarch64__)
constexpr bool kFusesAtBaseline = true;  // sums with products
#else
constexpr bool kFusesAtBaseline = false;
#endif

template <int kLanes>
using Lanes = std::integral_constant<int, kLanes>;

// Calls body(lanes) in a function of its own, with instructions for vectors of kLanes floats. The body must be
// JAXNN_INLINED, and with all that it calls in loops. It is copied there, so that the compiler knows that nothing else
// writes to what it captures.
template <int kLanes, typename Body>
struct Compiled {
  static_assert(kLanes == 4);
  __attribute__((noinline)) static auto call(const Body& given) {
    const Body body = given;
    return body(Lanes<kLanes>());
  }
};
#ifdef __x86_64__
template <typename Body>
struct Compiled<8, Body> {
  __attribute__((noinline, target("avx2,fma,bmi,bmi2"))) static auto call(const Body& given) {
    const Body body = given;
    return body(Lanes<8>());
  }
};
template <typename Body>
struct Compiled<16, Body> {
  __attribute__((noinline, target("avx512f,avx512vl,avx512dq,avx512bw,avx512cd,avx2,fma,bmi,bmi2")))
  static auto call(const Body& given) {
    const Body body = given;
    return body(Lanes<16>());
  }
};
#endif

template <int kLanes, typename Body>
JAXNN_INLINE auto compiled(const Body& body) { return Compiled<kLanes, Body>::call(body); }

// The number of floats in a vector of this process.
inline int num_lanes() { return 4 << static_cast<int>(instructions); }

// Calls body(lanes) with the instructions of this process; decltype(lanes)::value is num_lanes(), as a constant.
template <typename Body>
JAXNN_INLINE auto vectorized(const Body& body) {
#ifdef __x86_64__
  if (instructions == Instructions::kAvx512) return compiled<16>(body);
  if (instructions == Instructions::kAvx2) return compiled<8>(body);
#endif
  return compiled<4>(body);
}

}  // namespace jaxnn
