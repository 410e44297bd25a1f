// Attention whose scores exist for a few queries at a time, and its backward pass: Dao et al., FlashAttention, 2022
// (arXiv:2205.14135), without its blocks of keys.

#ifndef JAXNN_ATTENTION_H_
#define JAXNN_ATTENTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "buffer.h"
#include "own_product.h"
#include "pool.h"

namespace jaxnn {

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

// What is compiled for each kind of instructions. Rows of scores are `stride` apart, `seen` of each are of seen keys.
struct AttentionParts {
  // Scores to weights, zeros behind, and the logarithm of the sum of the exponentials of the scores.
  void (*softmax)(float* scores, int64_t seen, int64_t stride, float* log_sum);
  // Scores to weights, and gradients by the weights to those by the scores, zeros behind.
  void (*backward)(float* scores, float* gradients, int64_t seen, int64_t stride, float log_sum, const float* output,
                   const float* to_output, int64_t features);
};
const AttentionParts* attention_parts(Isa isa);  // nullptr where `own_product` is

// A key head of one row of the batch, with the query heads that attend to it.
class AttentionHead {
 public:
  AttentionHead(const Attention& a, const OwnProduct& product, const AttentionParts& parts, int64_t index)
      : a_(a), product_(product), parts_(parts), row_(index / a.key_heads), key_head_(index % a.key_heads) {
    const int64_t blocks = (a.queries + kQueries - 1) / kQueries;
    block_ = (a.queries + blocks - 1) / blocks;
    stride_ = (a.keys + 15) / 16 * 16;
  }

  void forward() {
    thread_local Buffer buffer;
    float* const scores = reinterpret_cast<float*>(buffer.reserve(block_ * stride_ * sizeof(float)));
    for_each_block([&](int64_t head, int64_t first, int64_t count, int64_t seen) {
      multiply(rows_of(a_.query, head, first), keys_across(a_.key), count, seen, a_.features, scores, stride_, false);
      float* const output = a_.output + query_at(head, first);
      for (int64_t i = 0; i < count; ++i)
        parts_.softmax(scores + i * stride_, seen_by(first + i), stride_, &log_sum(head, first + i));
      multiply({scores, stride_, 1}, keys_down(a_.value), count, a_.features, seen, output, query_step(), false);
    });
    buffer.trim();
  }

  void backward() {
    thread_local Buffer buffer;
    float* const weights = reinterpret_cast<float*>(buffer.reserve(2 * block_ * stride_ * sizeof(float)));
    float* const gradients = weights + block_ * stride_;
    for (int64_t k = 0; k < a_.keys; ++k)
      for (float* to : {a_.to_key, a_.to_value}) std::fill_n(to + key_at() + k * key_step(), a_.features, 0.0f);
    for_each_block([&](int64_t head, int64_t first, int64_t count, int64_t seen) {
      const Matrix to_output = rows_of(a_.to_output, head, first), query = rows_of(a_.query, head, first);
      multiply(query, keys_across(a_.key), count, seen, a_.features, weights, stride_, false);
      multiply(to_output, keys_across(a_.value), count, seen, a_.features, gradients, stride_, false);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = query_at(head, first + i);
        parts_.backward(weights + i * stride_, gradients + i * stride_, seen_by(first + i), stride_,
                        log_sum(head, first + i), a_.output + at, a_.to_output + at, a_.features);
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
    if (summed > 0) return product_.multiply(left, right, rows, columns, summed, result, stride, adds);
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
  const OwnProduct& product_;
  const AttentionParts& parts_;
  const int64_t row_, key_head_;
  int64_t block_, stride_;
};

// Computes all heads on the pool, each on one thread. Throws std::bad_alloc.
template <typename Pool>
void attend(Pool& pool, const Attention& a, const OwnProduct& product, const AttentionParts& parts, bool backward) {
  parallel_for(pool, a.batch * a.key_heads, [&](int64_t index) {
    AttentionHead head(a, product, parts, index);
    backward ? head.backward() : head.forward();
  });
}

}  // namespace jaxnn

#endif  // JAXNN_ATTENTION_H_
