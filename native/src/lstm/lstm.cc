// All time steps of an LSTM, and of its backward pass: matrix products and gates in registers, rows apart. No -ffast-math:
// NaN stays NaN.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/buffer.h"
#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

template <int kLanes>
constexpr int kTileRows = kLanes == 16 ? 4 : 2;  // whose sums stay in registers

// Arrays in C order with the features last; the gates i, f, g, o follow each other in the last axis of four times the
// features. What is updated in place has the argument's values before and the result's after.
struct Lstm {
  int64_t members, steps, batch, features;
  const float* kernel;           // [members, features, 4 * features]
  float* gates;                  // [members, steps, batch, 4 * features]: products become gates, gates gradients
  const float *first_c, *first_h;  // [members, batch, features]; h not in the backward pass
  float *c, *h;                  // [members, steps, batch, features]; h not in the backward pass
  // The backward pass only: gradients by all states, and those by the last state, which become those by the first.
  const float *to_c, *to_h;      // [members, steps, batch, features]
  float *dc, *dh;                // [members, batch, features]
};

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

// Rows first…last-1 of a member, with its kernel in `panels` of padded_size(p) floats.
template <int kLanes>
JAXNN_INLINE void forward(const Lstm& p, int64_t member, int64_t first, int64_t last, float* panels) {
  pack<kLanes>(p, member, panels);
  for (int64_t step = 0; step < p.steps; ++step)
    for (int64_t feature = 0; feature < p.features; feature += kLanes)
      forward_tiles<kLanes, kTileRows<kLanes>>(p, member, step, first, last, feature, panels + feature * 4 * p.features);
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

template <int kLanes>
JAXNN_INLINE void backward(const Lstm& p, int64_t member, int64_t first, int64_t last, float* panels) {
  pack_transposed<kLanes>(p, member, panels);
  for (int64_t step = p.steps; step-- > 0;) {
    for (int64_t row = first; row < last; ++row) backward_gates<kLanes>(p, member, step, row);
    const float* panel = panels;
    for (int64_t feature = 0, width; feature < p.features; feature += width, panel += 4 * p.features * width) {
      width = width_at<kLanes>(p, feature);
      if (width > kLanes)
        backward_tiles<kLanes, kTileRows<kLanes>, 4>(p, member, step, first, last, feature, panel);
      else
        backward_tiles<kLanes, kTileRows<kLanes>, 1>(p, member, step, first, last, feature, panel);
    }
  }
}

int64_t padded_size(const Lstm& lstm) {
  constexpr int64_t kWidest = 16;
  return num_elements({4, lstm.features, (lstm.features + kWidest - 1) / kWidest * kWidest});
}

// Runs a pass on rows that no thread shares: no step waits for other threads.
void run(Pool& pool, const Lstm& lstm, bool is_backward) {
  constexpr int64_t kWork = 1 << 19;  // multiplications that are worth a thread
  if (lstm.members * lstm.batch * lstm.features == 0) return;
  const int64_t threads = pool.num_threads();
  const int64_t work = 4 * lstm.steps * lstm.batch * lstm.features * (lstm.features + 32);
  const int64_t wanted = std::min({threads / std::gcd(threads, lstm.members), lstm.batch, work / kWork});
  const int64_t parts = std::max<int64_t>(wanted, 1);
  parallel_for(pool, lstm.members * parts, [&](int64_t index) {
    thread_local Buffer buffer;
    const int64_t member = index / parts, first = lstm.batch * (index % parts) / parts;
    const int64_t last = lstm.batch * (index % parts + 1) / parts;
    float* const panels = buffer.reserve(padded_size(lstm));
    vectorized([=, &lstm](auto lanes) JAXNN_INLINED {
      constexpr int kLanes = decltype(lanes)::value;
      if (is_backward) backward<kLanes>(lstm, member, first, last, panels);
      else forward<kLanes>(lstm, member, first, last, panels);
    });
    buffer.trim();
  });
}

// Sizes from gates [members…, steps, batch, 4 * features]; the kernel, states and sequences must fit.
Lstm lstm_of(const Array& gates, const Array& kernel, std::initializer_list<const Array*> states,
             std::initializer_list<const Array*> sequences) {
  if (gates.shape.size() < 3) throw InvalidArgument("shapes do not fit");
  const Shape sizes = gates.shape.last(3);
  Lstm lstm{};
  lstm.members = num_elements(gates.members(3));
  lstm.steps = sizes[0], lstm.batch = sizes[1], lstm.features = sizes[2] / 4;
  bool fit = sizes[2] % 4 == 0 && kernel.has({lstm.members, 4, lstm.features, lstm.features});
  for (const Array* state : states) fit &= state->has({lstm.members, lstm.batch, lstm.features});
  for (const Array* sequence : sequences) fit &= sequence->has({lstm.members, lstm.steps, lstm.batch, lstm.features});
  if (!fit) throw InvalidArgument("shapes do not fit");
  lstm.kernel = kernel.as();
  return lstm;
}

// Copies the array unless XLA has given the result its memory.
float* in_place(const Array& from, const Array& to) {
  if (from.size != to.size) throw InvalidArgument("shapes do not fit");
  if (from.data != to.data) std::memcpy(to.data, from.data, from.size * sizeof(float));
  return to.as();
}

}  // namespace

void kernel::lstm(const Call& call) {
  const auto& [products, kernel, first_c, first_h, gates, c, h] = call.arrays<7>();
  Lstm lstm = lstm_of(products, kernel, {&first_c, &first_h}, {&c, &h});
  lstm.first_c = first_c.as(), lstm.first_h = first_h.as();
  lstm.gates = in_place(products, gates);
  lstm.c = c.as(), lstm.h = h.as();
  run(call.pool, lstm, false);
}

void kernel::lstm_backward(const Call& call) {
  const auto& [gates, kernel, first_c, c, to_c, to_h, last_dc, last_dh, dz, dc, dh] = call.arrays<11>();
  Lstm lstm = lstm_of(gates, kernel, {&first_c, &last_dc, &last_dh}, {&c, &to_c, &to_h});
  lstm.first_c = first_c.as(), lstm.c = c.as();
  lstm.to_c = to_c.as(), lstm.to_h = to_h.as();
  lstm.gates = in_place(gates, dz);
  lstm.dc = in_place(last_dc, dc), lstm.dh = in_place(last_dh, dh);
  run(call.pool, lstm, true);
}

}  // namespace jaxnn
