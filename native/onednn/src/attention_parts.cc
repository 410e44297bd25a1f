// The rows of scores of attention, once for each width of vectors. No -ffast-math: NaN stays NaN.

#include <cmath>
#include <limits>

#include "attention.h"

namespace jaxnn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// exp to 2 units in the last place, of Cephes: 2^n times a polynomial; 0 below the smallest normal number.
template <int kLanes>
JAXNN_INLINE Vector<kLanes> exp_of(Vector<kLanes> x) {
  typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));
  constexpr float kLowest = -87.33654f, kHighest = 88.37626f, kRound = 12582912.0f;  // 1.5 * 2^23
  const auto vanishes = x < kLowest;
  Vector<kLanes> from = vanishes ? Vector<kLanes>{} : x;
  from = from > kHighest ? Vector<kLanes>{} + kHighest : from;
  const Vector<kLanes> n = (from * 1.44269504088896341f + kRound) - kRound;
  const Vector<kLanes> r = from - n * 0.693359375f - n * -2.12194440e-4f;
  Vector<kLanes> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector<kLanes> scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return vanishes ? Vector<kLanes>{} : p * scale;
}

// The sum or, of a row's scores, the highest of all lanes, by halves.
template <int kLanes, bool kIsSum>
JAXNN_INLINE float reduced(Vector<kLanes> x) {
  if constexpr (kLanes == 1) {
    return x[0];
  } else {
    Vector<kLanes / 2> halves[2];
    std::memcpy(halves, &x, sizeof x);
    return reduced<kLanes / 2, kIsSum>(kIsSum                  ? halves[0] + halves[1]
                                       : halves[0] > halves[1] ? halves[0]
                                                               : halves[1]);
  }
}

// Sets what is behind `seen` in its last vector; returns the end of that.
template <int kLanes>
JAXNN_INLINE int64_t hide(float* row, int64_t seen, float value) {
  const int64_t end = (seen + kLanes - 1) / kLanes * kLanes;
  for (int64_t k = seen; k < end; ++k) row[k] = value;
  return end;
}

template <int kLanes>
JAXNN_INLINE void softmax(float* scores, int64_t seen, int64_t stride, float* log_sum) {
  const int64_t end = hide<kLanes>(scores, seen, -kInfinity);
  auto most = Vector<kLanes>{} - kInfinity;
  for (int64_t k = 0; k < end; k += kLanes) {
    const auto x = load<kLanes>(scores + k);
    most = x > most ? x : most;
  }
  float highest = reduced<kLanes, false>(most);
  if (highest == -kInfinity) highest = 0;
  Vector<kLanes> sums{};
  for (int64_t k = 0; k < end; k += kLanes) {
    const auto weights = exp_of<kLanes>(load<kLanes>(scores + k) - highest);
    sums += weights;
    store<kLanes>(weights, scores + k);
  }
  const float sum = reduced<kLanes, true>(sums), factor = sum == 0 ? 0 : 1 / sum;
  for (int64_t k = 0; k < end; k += kLanes) store<kLanes>(load<kLanes>(scores + k) * factor, scores + k);
  for (int64_t k = end; k < stride; ++k) scores[k] = 0;
  *log_sum = sum == 0 ? kInfinity : highest + std::log(sum);
}

template <int kLanes>
JAXNN_INLINE void backward(float* scores, float* gradients, int64_t seen, int64_t stride, float log_sum,
                           const float* output, const float* to_output, int64_t features) {
  Vector<kLanes> products{};
  for (int64_t k = 0; k < features; k += kLanes)
    products += load<kLanes>(output + k, features - k) * load<kLanes>(to_output + k, features - k);
  const float mean = reduced<kLanes, true>(products);
  const int64_t end = hide<kLanes>(scores, seen, -kInfinity);
  hide<kLanes>(gradients, seen, 0);
  for (int64_t k = 0; k < end; k += kLanes) {
    const auto weights = exp_of<kLanes>(load<kLanes>(scores + k) - log_sum);
    store<kLanes>(weights, scores + k);
    store<kLanes>(weights * (load<kLanes>(gradients + k) - mean), gradients + k);
  }
  for (int64_t k = end; k < stride; ++k) scores[k] = gradients[k] = 0;
}

#define JAXNN_ATTENTION(name, target, lanes)                                                                   \
  struct name {                                                                                                \
    target static void softmax(float* scores, int64_t seen, int64_t stride, float* log_sum) {                  \
      jaxnn::softmax<lanes>(scores, seen, stride, log_sum);                                                    \
    }                                                                                                          \
    target static void backward(float* scores, float* gradients, int64_t seen, int64_t stride, float log_sum,  \
                                const float* output, const float* to_output, int64_t features) {               \
      jaxnn::backward<lanes>(scores, gradients, seen, stride, log_sum, output, to_output, features);           \
    }                                                                                                          \
    static constexpr AttentionParts kAll{softmax, backward};                                                   \
  };

#ifdef __x86_64__
JAXNN_ATTENTION(Avx2, JAXNN_AVX2, 8)
JAXNN_ATTENTION(Avx512, JAXNN_AVX512, 16)
#endif

}  // namespace

const AttentionParts* attention_parts([[maybe_unused]] Isa isa) {
#ifdef __x86_64__
  if (isa == Isa::kAvx512) return &Avx512::kAll;
  if (isa == Isa::kAvx2) return &Avx2::kAll;
#endif
  return nullptr;
}

}  // namespace jaxnn
