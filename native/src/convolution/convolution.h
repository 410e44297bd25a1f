// A convolution, its input gradient and its kernel gradient, of arrays with channels last: oneDNN's, or Winograd's.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/call.h"

namespace jaxnn {

using Dims = std::vector<int64_t>;

enum Role : int64_t { kInput, kKernel, kOutput };

// One convolution, or a gradient of it: `missing` is computed from the other two.
struct Geometry {
  Role missing;
  int64_t groups;
  Type type, result_type;           // of operands and result; a kernel gradient is float32
  std::array<Dims, 3> shapes;       // [batch, *spatial, features] and [*window, in_features / groups, out_features]
  Dims strides, low, high, dilation;  // padding below and above; dilation 1 is none

  Type type_of(Role role) const { return role == missing ? result_type : type; }
  int64_t bytes_of(Role role) const { return num_elements(shapes[role]) * size_of(type_of(role)); }
};

// The number of parts of each of `members` batches, at most `most`.
int64_t count_parts(const Geometry& g, int64_t members, int64_t threads, int64_t most);

// Adds the other gradients of a kernel to the first of each member: in order, so that the sum is the same in every run.
template <typename Copy>
void add_copies(Pool& pool, int64_t members, int64_t copies, int64_t size, const Copy& copy) {
  constexpr int64_t kChunk = 1 << 14;
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  if (copies == 1) return;
  parallel_for(pool, members * chunks, [&](int64_t index) {
    const int64_t member = index / chunks, first = index % chunks * kChunk, last = std::min(first + kChunk, size);
    float* const total = copy(member, 0);
    for (int64_t k = 1; k < copies; ++k) {
      const float* const more = copy(member, k);
      for (int64_t i = first; i < last; ++i) total[i] += more[i];
    }
  });
}

// Computes `members` convolutions of one geometry, whose arrays follow each other in memory, on the pool. Operands are not
// written to. Throws dnnl::error and std::bad_alloc.
void convolve_by_onednn(Pool& pool, const Geometry& g, const std::array<char*, 3>& arrays, int64_t members);

// Whether Winograd's convolutions of windows of 3x3, in float32, without strides, dilation or groups, are compiled and
// worthwhile for kernels of these features.
bool fits_winograd(int64_t in, int64_t out);

}  // namespace jaxnn
