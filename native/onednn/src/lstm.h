// All time steps of an LSTM, and of its backward pass: matrix products and gates in registers, rows apart.

#ifndef JAXNN_LSTM_H_
#define JAXNN_LSTM_H_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "buffer.h"
#include "pool.h"
#include "vectors.h"

namespace jaxnn {

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

// Rows first…last-1 of a member, with its kernel in `panels` of padded_size(lstm) floats.
using Part = void (*)(const Lstm& lstm, int64_t member, int64_t first, int64_t last, float* panels);
Part forward_part(Isa isa);
Part backward_part(Isa isa);

inline int64_t padded_size(const Lstm& lstm) {
  constexpr int64_t kWidest = 16;
  return 4 * lstm.features * ((lstm.features + kWidest - 1) / kWidest * kWidest);
}

// Runs `part` on rows that no thread shares: no step waits for other threads.
template <typename Pool>
void run_lstm(Pool& pool, const Lstm& lstm, Part part) {
  constexpr int64_t kWork = 1 << 19;  // multiplications that are worth a thread
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t work = 4 * lstm.steps * lstm.batch * lstm.features * (lstm.features + 32);
  const int64_t wanted = std::min({threads / std::gcd(threads, lstm.members), lstm.batch, work / kWork});
  const int64_t parts = std::max<int64_t>(wanted, 1);
  parallel_for(pool, lstm.members * parts, [&](int64_t index) {
    thread_local Buffer buffer;
    const int64_t member = index / parts, k = index % parts;
    float* const panels = reinterpret_cast<float*>(buffer.reserve(padded_size(lstm) * sizeof(float)));
    part(lstm, member, lstm.batch * k / parts, lstm.batch * (k + 1) / parts, panels);
    buffer.trim();
  });
}

}  // namespace jaxnn

#endif  // JAXNN_LSTM_H_
