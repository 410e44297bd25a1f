// Softmax(query @ key) @ value, whose scores exist for a few queries at a time, and its backward pass: Dao et al.,
// FlashAttention, 2022 (arXiv:2205.14135), without its blocks of keys. No -ffast-math: NaN stays NaN.

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/buffer.h"
#include "common/call.h"
#include "common/vectors.h"
#include "product/own_product.h"

namespace jaxnn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// exp to 2 units in the last place, of Cephes: 2^n times a polynomial; 0 below the smallest normal number.
template <int kLanes>
JAXNN_INLINE Vector<kLanes> exp_of(Vector<kLanes> x) {
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
  const Integers<kLanes> bits = (__builtin_convertvector(n, Integers<kLanes>) + 127) << 23;
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

// Scores to weights, zeros behind, and the logarithm of the sum of the exponentials of the scores.
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

// Scores to weights, and gradients by the weights to those by the scores, zeros behind.
template <int kLanes>
JAXNN_INLINE void softmax_gradient(float* scores, float* gradients, int64_t seen, int64_t stride, float log_sum,
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

// Arrays in C order. Query heads attend in groups of one size, each to a key head of its own.
struct Attention {
  int64_t batch, queries, keys, heads, key_heads, features;
  bool causal;                                     // query t sees keys 0…t
  const float *query, *key, *value;                // [batch, queries, heads, features], [batch, keys, key_heads, features]
  const int32_t* lengths;                          // [batch]: the keys that are seen
  float *output, *log_sums;                        // as the query; [batch, heads, queries]: +inf if no key is seen
  const float* to_output;                          // the backward pass only: the gradients
  float *to_query, *to_key, *to_value;
};

// A key head of one row of the batch, with the query heads that attend to it.
class AttentionHead {
 public:
  AttentionHead(const Attention& a, int64_t index)
      : a_(a), row_(index / a.key_heads), key_head_(index % a.key_heads) {
    const int64_t blocks = std::max<int64_t>((a.queries + kQueries - 1) / kQueries, 1);
    block_ = (a.queries + blocks - 1) / blocks;
    stride_ = (a.keys + 15) / 16 * 16;
  }

  void forward() {
    thread_local Buffer buffer;
    float* const scores = buffer.reserve(num_elements({block_, stride_}));
    for_each_block([&](int64_t head, int64_t first, int64_t count, int64_t seen) {
      multiply(rows_of(a_.query, head, first), keys_across(a_.key), count, seen, a_.features, scores, stride_, false);
      float* const output = a_.output + query_at(head, first);
      for (int64_t i = 0; i < count; ++i)
        vectorized([row = scores + i * stride_, seen = seen_by(first + i), stride = stride_,
                    to = &log_sum(head, first + i)](auto lanes) JAXNN_INLINED {
          softmax<decltype(lanes)::value>(row, seen, stride, to);
        });
      multiply({scores, stride_, 1}, keys_down(a_.value), count, a_.features, seen, output, query_step(), false);
    });
    buffer.trim();
  }

  void backward() {
    thread_local Buffer buffer;
    float* const weights = buffer.reserve(num_elements({2, block_, stride_}));
    float* const gradients = weights + block_ * stride_;
    for (int64_t k = 0; k < a_.keys; ++k)
      for (float* to : {a_.to_key, a_.to_value}) std::fill_n(to + key_at() + k * key_step(), a_.features, 0.0f);
    for_each_block([&](int64_t head, int64_t first, int64_t count, int64_t seen) {
      const Matrix to_output = rows_of(a_.to_output, head, first), query = rows_of(a_.query, head, first);
      multiply(query, keys_across(a_.key), count, seen, a_.features, weights, stride_, false);
      multiply(to_output, keys_across(a_.value), count, seen, a_.features, gradients, stride_, false);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = query_at(head, first + i);
        vectorized([row = weights + i * stride_, by_row = gradients + i * stride_, seen = seen_by(first + i),
                    stride = stride_, sum = log_sum(head, first + i), output = a_.output + at, to = a_.to_output + at,
                    features = a_.features](auto lanes) JAXNN_INLINED {
          softmax_gradient<decltype(lanes)::value>(row, by_row, seen, stride, sum, output, to, features);
        });
      }
      const int64_t features = a_.features;
      multiply({weights, 1, stride_}, to_output, seen, features, count, a_.to_value + key_at(), key_step(), true);
      multiply({gradients, 1, stride_}, query, seen, features, count, a_.to_key + key_at(), key_step(), true);
      multiply({gradients, stride_, 1}, keys_down(a_.key), count, features, seen, a_.to_query + query_at(head, first),
               query_step(), false);
    });
    buffer.trim();
  }

 private:
  static constexpr int64_t kQueries = 96;  // at a time

  template <typename Body>
  void for_each_block(const Body& body) {
    const int64_t group = a_.heads / a_.key_heads;
    for (int64_t head = key_head_ * group; head < (key_head_ + 1) * group; ++head)
      for (int64_t first = 0; first < a_.queries; first += block_) {
        const int64_t count = std::min(block_, a_.queries - first);
        body(head, first, count, seen_by(first + count - 1));
      }
  }

  void multiply(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns, int64_t summed, float* result,
                int64_t stride, bool adds) {
    if (rows == 0 || columns == 0) return;
    if (summed > 0) return jaxnn::multiply(left, right, rows, columns, summed, result, stride, adds);
    for (int64_t i = 0; i < rows && !adds; ++i) std::fill_n(result + i * stride, columns, 0.0f);
  }

  int64_t seen_by(int64_t query) const {
    const int64_t length = std::clamp<int64_t>(a_.lengths[row_], 0, a_.keys);
    return a_.causal ? std::min(query + 1, length) : length;
  }
  int64_t query_step() const { return a_.heads * a_.features; }
  int64_t key_step() const { return a_.key_heads * a_.features; }
  int64_t query_at(int64_t head, int64_t query) const {
    return (row_ * a_.queries + query) * query_step() + head * a_.features;
  }
  int64_t key_at() const { return row_ * a_.keys * key_step() + key_head_ * a_.features; }
  float& log_sum(int64_t head, int64_t query) const {
    return a_.log_sums[(row_ * a_.heads + head) * a_.queries + query];
  }
  Matrix rows_of(const float* array, int64_t head, int64_t first) const {
    return {array + query_at(head, first), query_step(), 1};
  }
  Matrix keys_down(const float* array) const { return {array + key_at(), key_step(), 1}; }
  Matrix keys_across(const float* array) const { return {array + key_at(), 1, key_step()}; }

  const Attention& a_;
  const int64_t row_, key_head_;
  int64_t block_, stride_;
};

// Sizes from query [members…, batch, queries, heads, features] and key; the other arrays must fit.
Attention attention_of(const Array& query, const Array& key, const Array& value, const Array& lengths,
                       const Array& log_sums, int64_t causal) {
  const size_t rank = query.shape.size();
  if (rank < 4 || key.shape.size() != rank) throw InvalidArgument("needs query and key [batch, time, heads, features]");
  const Shape sizes = query.shape.last(3), of_keys = key.shape.last(3);
  Attention a{};
  a.queries = sizes[0], a.heads = sizes[1], a.features = sizes[2], a.keys = of_keys[0], a.key_heads = of_keys[1];
  a.batch = num_elements(query.members(3));
  if (of_keys[2] != a.features || a.key_heads == 0 || a.heads % a.key_heads || value.size != key.size ||
      !key.has({a.batch, a.keys, a.key_heads, a.features}) || !log_sums.has({a.batch, a.heads, a.queries}) ||
      !lengths.has({a.batch}))
    throw InvalidArgument("shapes do not fit");
  a.causal = causal;
  a.query = query.as(), a.key = key.as(), a.value = value.as();
  a.lengths = lengths.as<const int32_t>(), a.log_sums = log_sums.as();
  return a;
}

// Calls compute(head) for each head that keys have, on one thread.
template <typename Compute>
void for_each_head(Pool& pool, const Attention& a, const Compute& compute) {
  parallel_for(pool, a.batch * a.key_heads, [&](int64_t index) { compute(AttentionHead(a, index)); });
}

}  // namespace

void kernel::attention(const Call& call) {
  const auto& [query, key, value, lengths, output, log_sums] = call.arrays<6>();
  Attention a = attention_of(query, key, value, lengths, log_sums, call.number("causal"));
  if (output.size != query.size) throw InvalidArgument("shapes do not fit");
  a.output = output.as();
  for_each_head(call.pool, a, [](AttentionHead head) { head.forward(); });
}

void kernel::attention_backward(const Call& call) {
  const auto& [query, key, value, lengths, output, log_sums, to_output, to_query, to_key, to_value] = call.arrays<10>();
  Attention a = attention_of(query, key, value, lengths, log_sums, call.number("causal"));
  if (output.size != query.size || to_output.size != query.size || to_query.size != query.size ||
      to_key.size != key.size || to_value.size != key.size)
    throw InvalidArgument("shapes do not fit");
  a.output = output.as(), a.to_output = to_output.as();
  a.to_query = to_query.as(), a.to_key = to_key.as(), a.to_value = to_value.as();
  for_each_head(call.pool, a, [](AttentionHead head) { head.backward(); });
}

}  // namespace jaxnn
