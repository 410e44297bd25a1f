// The FFI targets `jaxnn_moments` and `jaxnn_channel_sums`: the sums of batch normalization and of its gradient.
//
// Arrays are [*members, rows, channels]. Blocks of rows, which do not depend on the number of threads, are read once: a
// block's deviations are summed while it is in the cache. Blocks are merged in their order.

#include <algorithm>
#include <exception>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "targets.h"
#include "vectors.h"

namespace ffi = xla::ffi;
namespace {

struct Blocks {
  int64_t members = 1, rows, channels, folded, size, count;

  explicit Blocks(ffi::Span<const int64_t> shape) {
    constexpr int64_t kLanes = 64, kElements = 1 << 14, kRows = 64;  // of a block at least, as merging takes time too
    const size_t rank = shape.size();
    for (size_t axis = 0; axis + 2 < rank; ++axis) members *= shape[axis];
    rows = shape[rank - 2], channels = shape[rank - 1];
    folded = std::max<int64_t>(kLanes / channels, 1);  // rows that are added side by side, if channels are few
    size = std::max<int64_t>(kElements / (folded * channels), (kRows + folded - 1) / folded) * folded;
    count = (rows + size - 1) / size;
  }
  int64_t num_lanes() const { return folded * channels; }
  int64_t rows_of(int64_t block) const { return std::min(size, rows - block * size); }
};

bool is_array_of(ffi::Span<const int64_t> shape, ffi::Span<const int64_t> of_channels) {
  const size_t rank = shape.size();
  if (rank < 2 || of_channels.size() != rank - 1 || of_channels[rank - 2] != shape[rank - 1]) return false;
  return std::equal(shape.begin(), shape.end() - 2, of_channels.begin()) && shape[rank - 2] > 0 && shape[rank - 1] > 0;
}

JAXNN_VECTORIZED void add(const float* __restrict x, int64_t count, int64_t lanes, float* __restrict sums) {
  for (; count > 0; count -= lanes, x += lanes)
    for (int64_t j = 0; j < std::min(lanes, count); ++j) sums[j] += x[j];
}

JAXNN_VECTORIZED void add_deviations(const float* __restrict x, const float* __restrict mean, int64_t count,
                                     int64_t lanes, float* __restrict sums, float* __restrict squares) {
  for (; count > 0; count -= lanes, x += lanes)
    for (int64_t j = 0; j < std::min(lanes, count); ++j) {
      const float deviation = x[j] - mean[j];
      sums[j] += deviation;
      squares[j] += deviation * deviation;
    }
}

JAXNN_VECTORIZED void add_products(const float* __restrict grad, const float* __restrict x,
                                   const float* __restrict mean, int64_t count, int64_t lanes, float* __restrict sums,
                                   float* __restrict products) {
  for (; count > 0; count -= lanes, grad += lanes, x += lanes)
    for (int64_t j = 0; j < std::min(lanes, count); ++j) {
      sums[j] += grad[j];
      products[j] += grad[j] * (x[j] - mean[j]);
    }
}

// The sums of a channel's lanes, times `factor`; and a channel's value for each of its lanes.
void fold(const Blocks& b, const float* lanes, float factor, float* channels) {
  std::copy_n(lanes, b.channels, channels);
  for (int64_t i = 1; i < b.folded; ++i)
    for (int64_t j = 0; j < b.channels; ++j) channels[j] += lanes[i * b.channels + j];
  for (int64_t j = 0; j < b.channels; ++j) channels[j] *= factor;
}
void unfold(const Blocks& b, const float* channels, float* lanes) {
  for (int64_t i = 0; i < b.folded; ++i) std::copy_n(channels, b.channels, lanes + i * b.channels);
}

// Adds a block's contribution to each channel's mean, and then to its variance, by the mean of all blocks. A block has
// the share `weight` of the rows; its part has a mean but for rounding, the mean of deviations from that, and of their
// squares.
JAXNN_VECTORIZED void add_means(const float* __restrict part, int64_t channels, double weight,
                                double* __restrict means) {
  for (int64_t j = 0; j < channels; ++j) means[j] += weight * (double(part[j]) + part[channels + j]);
}
JAXNN_VECTORIZED void add_variances(const float* __restrict part, const double* __restrict means, int64_t channels,
                                    double weight, double* __restrict variances) {
  for (int64_t j = 0; j < channels; ++j) {
    const double rounding = part[channels + j], beside = part[j] + rounding - means[j];
    variances[j] += weight * (std::max(part[2 * channels + j] - rounding * rounding, 0.0) + beside * beside);
  }
}
JAXNN_VECTORIZED void add_to_double(const float* __restrict part, int64_t count, double* __restrict sums) {
  for (int64_t j = 0; j < count; ++j) sums[j] += part[j];
}

// Calls compute(block's index, its first element, its elements, two sums and a scratch of all lanes), where sums are 0.
template <typename Compute>
void for_each_block(ffi::ThreadPool& pool, const Blocks& b, const Compute& compute) {
  jaxnn::parallel_for(pool, b.members * b.count, [&](int64_t index) {
    thread_local jaxnn::Buffer kept;
    float* const lanes = reinterpret_cast<float*>(kept.reserve(3 * b.num_lanes() * sizeof(float)));
    std::fill_n(lanes, 3 * b.num_lanes(), 0.0f);
    const int64_t block = index % b.count;
    compute(index, (index / b.count * b.rows + block * b.size) * b.channels, b.rows_of(block) * b.channels, lanes,
            lanes + b.num_lanes(), lanes + 2 * b.num_lanes());
  });
}

ffi::Error moments(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> mean,
                   ffi::ResultBuffer<ffi::F32> variance) try {
  if (!is_array_of(x.dimensions(), mean->dimensions()) || !is_array_of(x.dimensions(), variance->dimensions()))
    return ffi::Error::InvalidArgument("jaxnn_moments: shapes do not fit");
  const Blocks b(x.dimensions());
  std::vector<float> parts(3 * b.members * b.count * b.channels);
  for_each_block(pool, b, [&](int64_t index, int64_t first, int64_t count, float* sums, float* squares, float* means) {
    float* const part = parts.data() + 3 * index * b.channels;
    const float share = 1 / static_cast<float>(b.rows_of(index % b.count));
    add(x.typed_data() + first, count, b.num_lanes(), sums);
    fold(b, sums, share, part);
    unfold(b, part, means);
    std::fill_n(sums, b.num_lanes(), 0.0f);
    add_deviations(x.typed_data() + first, means, count, b.num_lanes(), sums, squares);
    fold(b, sums, share, part + b.channels);
    fold(b, squares, share, part + 2 * b.channels);
  });
  // Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
  std::vector<double> means(b.channels), variances(b.channels);
  for (int64_t member = 0; member < b.members; ++member) {
    std::fill(means.begin(), means.end(), 0), std::fill(variances.begin(), variances.end(), 0);
    const auto part = [&](int64_t block) { return parts.data() + 3 * (member * b.count + block) * b.channels; };
    const auto weight = [&](int64_t block) { return double(b.rows_of(block)) / double(b.rows); };
    for (int64_t i = 0; i < b.count; ++i) add_means(part(i), b.channels, weight(i), means.data());
    for (int64_t i = 0; i < b.count; ++i)
      add_variances(part(i), means.data(), b.channels, weight(i), variances.data());
    std::copy(means.begin(), means.end(), mean->typed_data() + member * b.channels);
    std::copy(variances.begin(), variances.end(), variance->typed_data() + member * b.channels);
  }
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

// The sums over rows of grad, and of grad * (x - mean), with mean [*members, channels].
ffi::Error channel_sums(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> grad, ffi::Buffer<ffi::F32> x,
                        ffi::Buffer<ffi::F32> mean, ffi::ResultBuffer<ffi::F32> sums,
                        ffi::ResultBuffer<ffi::F32> products) try {
  const auto shape = x.dimensions(), other = grad.dimensions();
  if (!std::equal(shape.begin(), shape.end(), other.begin(), other.end()) || !is_array_of(shape, mean.dimensions()) ||
      !is_array_of(shape, sums->dimensions()) || !is_array_of(shape, products->dimensions()))
    return ffi::Error::InvalidArgument("jaxnn_channel_sums: shapes do not fit");
  const Blocks b(shape);
  std::vector<float> parts(2 * b.members * b.count * b.channels);
  for_each_block(pool, b, [&](int64_t index, int64_t first, int64_t count, float* total, float* product, float* means) {
    unfold(b, mean.typed_data() + index / b.count * b.channels, means);
    add_products(grad.typed_data() + first, x.typed_data() + first, means, count, b.num_lanes(), total, product);
    float* const part = parts.data() + 2 * index * b.channels;
    fold(b, total, 1, part);
    fold(b, product, 1, part + b.channels);
  });
  std::vector<double> merged(2 * b.channels);
  for (int64_t member = 0; member < b.members; ++member) {
    std::fill(merged.begin(), merged.end(), 0);
    for (int64_t i = 0; i < b.count; ++i)
      add_to_double(parts.data() + 2 * (member * b.count + i) * b.channels, 2 * b.channels, merged.data());
    std::copy_n(merged.begin(), b.channels, sums->typed_data() + member * b.channels);
    std::copy_n(merged.begin() + b.channels, b.channels, products->typed_data() + member * b.channels);
  }
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

}  // namespace

JAXNN_TARGET(jaxnn_moments, moments,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>());

JAXNN_TARGET(jaxnn_channel_sums, channel_sums,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>());
