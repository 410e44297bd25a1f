// The rows of an LSTM that one thread computes, once for each width of vectors. No -ffast-math: NaN stays NaN.

#include "lstm.h"

namespace jaxnn {
namespace {

// The rational function of Eigen's and XLA's tanh, to 3 units in the last place.
template <typename V>
JAXNN_INLINE V tanh_of(V x) {
  // Where it is 1 exactly, so that saturated gates have no gradient: later if sums are fused with products.
  constexpr float kLimit = sizeof(V) > 16 ? 7.99881172180175781f : 7.90531110763549805f;
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

template <typename V>
JAXNN_INLINE V sigmoid_of(V x) {
  return tanh_of(x * 0.5f) * 0.5f + 0.5f;
}

// Adds to sums[r][c] the products of row r, `depth` long, and columns of a panel [depth, kColumns, kLanes].
template <int kLanes, int kRows, int kColumns>
JAXNN_INLINE void multiply(Vector<kLanes> (&sums)[kRows][kColumns], const float* rows, int64_t stride,
                           const float* panel, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k, panel += kColumns * kLanes) {
    Vector<kLanes> columns[kColumns];
    JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) columns[c] = load<kLanes>(panel + c * kLanes);
    JAXNN_UNROLL for (int r = 0; r < kRows; ++r) {
      const float x = rows[r * stride + k];
      JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) sums[r][c] += x * columns[c];
    }
  }
}

// One step of kRows rows from `row` and kLanes features from `feature`.
template <int kLanes, int kRows>
JAXNN_INLINE void forward_tile(const Lstm& p, int64_t member, int64_t step, int64_t row, int64_t feature,
                               const float* panel) {
  const int64_t features = p.features, count = features - feature, size = p.batch * features;
  const int64_t at = (member * p.steps + step) * size + row * features, first = member * size + row * features;
  const float* const before_c = step ? p.c + at - size : p.first_c + first;
  const float* const before_h = step ? p.h + at - size : p.first_h + first;
  float* const gates = p.gates + 4 * at + feature;
  Vector<kLanes> z[kRows][4];
  JAXNN_UNROLL for (int r = 0; r < kRows; ++r)
    JAXNN_UNROLL for (int g = 0; g < 4; ++g) z[r][g] = load<kLanes>(gates + (4 * r + g) * features, count);
  multiply<kLanes, kRows, 4>(z, before_h, features, panel, features);
  JAXNN_UNROLL for (int r = 0; r < kRows; ++r) {
    const int64_t offset = r * features + feature;
    const auto i = sigmoid_of(z[r][0]), f = sigmoid_of(z[r][1]), g = tanh_of(z[r][2]), o = sigmoid_of(z[r][3]);
    const auto c = f * load<kLanes>(before_c + offset, count) + i * g;
    float* const to = gates + 4 * r * features;
    store<kLanes>(i, to, count);
    store<kLanes>(f, to + features, count);
    store<kLanes>(g, to + 2 * features, count);
    store<kLanes>(o, to + 3 * features, count);
    store<kLanes>(c, p.c + at + offset, count);
    store<kLanes>(o * tanh_of(c), p.h + at + offset, count);
  }
}

// The member's kernel as panels [features, 4, kLanes].
template <int kLanes>
JAXNN_INLINE void pack(const Lstm& p, int64_t member, float* panels) {
  const float* const kernel = p.kernel + member * p.features * 4 * p.features;
  for (int64_t feature = 0; feature < p.features; feature += kLanes)
    for (int64_t row = 0; row < 4 * p.features; ++row, panels += kLanes)  // of [features, 4]
      store<kLanes>(load<kLanes>(kernel + row * p.features + feature, p.features - feature), panels, kLanes);
}

// Tiles of kRows rows, then of half as many.
template <int kLanes, int kRows>
JAXNN_INLINE void forward_tiles(const Lstm& p, int64_t member, int64_t step, int64_t row, int64_t last, int64_t feature,
                                const float* panel) {
  for (; row + kRows <= last; row += kRows) forward_tile<kLanes, kRows>(p, member, step, row, feature, panel);
  if constexpr (kRows > 1) forward_tiles<kLanes, kRows / 2>(p, member, step, row, last, feature, panel);
}

template <int kLanes, int kRows>
JAXNN_INLINE void forward(const Lstm& p, int64_t member, int64_t first, int64_t last, float* panels) {
  pack<kLanes>(p, member, panels);
  for (int64_t step = 0; step < p.steps; ++step)
    for (int64_t feature = 0; feature < p.features; feature += kLanes)
      forward_tiles<kLanes, kRows>(p, member, step, first, last, feature, panels + feature * 4 * p.features);
}

// The gradients by the gates' arguments, in place of the gates, and by the cell before.
template <int kLanes>
JAXNN_INLINE void backward_gates(const Lstm& p, int64_t member, int64_t step, int64_t row) {
  const int64_t features = p.features, size = p.batch * features;
  const int64_t at = (member * p.steps + step) * size + row * features, first = member * size + row * features;
  const float* const before_c = step ? p.c + at - size : p.first_c + first;
  for (int64_t feature = 0; feature < features; feature += kLanes) {
    const int64_t count = features - feature;
    float* const gates = p.gates + 4 * at + feature;
    const auto i = load<kLanes>(gates, count), f = load<kLanes>(gates + features, count);
    const auto g = load<kLanes>(gates + 2 * features, count), o = load<kLanes>(gates + 3 * features, count);
    const auto tanh_c = tanh_of(load<kLanes>(p.c + at + feature, count));
    const auto dh = load<kLanes>(p.dh + first + feature, count) + load<kLanes>(p.to_h + at + feature, count);
    const auto dc = load<kLanes>(p.dc + first + feature, count) + load<kLanes>(p.to_c + at + feature, count) +
                    dh * o * (1.0f - tanh_c * tanh_c);
    store<kLanes>(dc * g * i * (1.0f - i), gates, count);
    store<kLanes>(dc * load<kLanes>(before_c + feature, count) * f * (1.0f - f), gates + features, count);
    store<kLanes>(dc * i * (1.0f - g * g), gates + 2 * features, count);
    store<kLanes>(dh * tanh_c * o * (1.0f - o), gates + 3 * features, count);
    store<kLanes>(dc * f, p.dc + first + feature, count);
  }
}

// The gradients by the output before, of kRows rows and kColumns * kLanes features.
template <int kLanes, int kRows, int kColumns>
JAXNN_INLINE void backward_tile(const Lstm& p, int64_t member, int64_t step, int64_t row, int64_t feature,
                                const float* panel) {
  const int64_t features = p.features, to = (member * p.batch + row) * features + feature;
  const float* const gates = p.gates + 4 * ((member * p.steps + step) * p.batch + row) * features;
  Vector<kLanes> dh[kRows][kColumns] = {};
  multiply<kLanes, kRows, kColumns>(dh, gates, 4 * features, panel, 4 * features);
  JAXNN_UNROLL for (int r = 0; r < kRows; ++r)
    JAXNN_UNROLL for (int c = 0; c < kColumns; ++c)
      store<kLanes>(dh[r][c], p.dh + to + r * features + c * kLanes, features - feature - c * kLanes);
}

template <int kLanes, int kRows, int kColumns>
JAXNN_INLINE void backward_tiles(const Lstm& p, int64_t member, int64_t step, int64_t row, int64_t last,
                                 int64_t feature, const float* panel) {
  for (; row + kRows <= last; row += kRows)
    backward_tile<kLanes, kRows, kColumns>(p, member, step, row, feature, panel);
  if constexpr (kRows > 1) backward_tiles<kLanes, kRows / 2, kColumns>(p, member, step, row, last, feature, panel);
}

// The number of features in the panel of the transposed kernel that starts at `feature`.
template <int kLanes>
JAXNN_INLINE int64_t width_at(const Lstm& p, int64_t feature) {
  return p.features - feature > 3 * kLanes ? 4 * kLanes : kLanes;
}

// The transposed kernel as panels [4 * features, width].
template <int kLanes>
JAXNN_INLINE void pack_transposed(const Lstm& p, int64_t member, float* panel) {
  constexpr int64_t kBlock = 16;  // of a cache line
  const int64_t depth = 4 * p.features;
  const float* const kernel = p.kernel + member * p.features * depth;
  for (int64_t feature = 0, width; feature < p.features; feature += width, panel += depth * width) {
    width = width_at<kLanes>(p, feature);
    for (int64_t start = 0; start < depth; start += kBlock)
      for (int64_t i = 0; i < width; ++i)
        for (int64_t k = start; k < std::min(start + kBlock, depth); ++k)
          panel[k * width + i] = feature + i < p.features ? kernel[(feature + i) * depth + k] : 0;
  }
}

template <int kLanes, int kRows>
JAXNN_INLINE void backward(const Lstm& p, int64_t member, int64_t first, int64_t last, float* panels) {
  pack_transposed<kLanes>(p, member, panels);
  for (int64_t step = p.steps; step-- > 0;) {
    for (int64_t row = first; row < last; ++row) backward_gates<kLanes>(p, member, step, row);
    const float* panel = panels;
    for (int64_t feature = 0, width; feature < p.features; feature += width, panel += 4 * p.features * width) {
      width = width_at<kLanes>(p, feature);
      if (width > kLanes)
        backward_tiles<kLanes, kRows, 4>(p, member, step, first, last, feature, panel);
      else
        backward_tiles<kLanes, kRows, 1>(p, member, step, first, last, feature, panel);
    }
  }
}

#define JAXNN_PARTS(suffix, target, lanes, rows)                                                    \
  target void forward_##suffix(const Lstm& lstm, int64_t m, int64_t first, int64_t last, float* panels) {  \
    forward<lanes, rows>(lstm, m, first, last, panels);                                             \
  }                                                                                                 \
  target void backward_##suffix(const Lstm& lstm, int64_t m, int64_t first, int64_t last, float* panels) { \
    backward<lanes, rows>(lstm, m, first, last, panels);                                            \
  }

JAXNN_PARTS(plain, , 4, 2)
#ifdef __x86_64__
JAXNN_PARTS(avx2, JAXNN_AVX2, 8, 2)
JAXNN_PARTS(avx512, JAXNN_AVX512, 16, 4)
#endif

}  // namespace

Part forward_part([[maybe_unused]] Isa isa) {
#ifdef __x86_64__
  if (isa == Isa::kAvx512) return forward_avx512;
  if (isa == Isa::kAvx2) return forward_avx2;
#endif
  return forward_plain;
}

Part backward_part([[maybe_unused]] Isa isa) {
#ifdef __x86_64__
  if (isa == Isa::kAvx512) return backward_avx512;
  if (isa == Isa::kAvx2) return backward_avx2;
#endif
  return backward_plain;
}

}  // namespace jaxnn
