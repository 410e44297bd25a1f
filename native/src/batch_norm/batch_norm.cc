// The sums of batch normalization and of its gradient.
//
// Arrays are [*members, rows, channels]. Blocks of rows, which do not depend on the number of threads, are read once: a
// block's deviations are summed while it is in the cache. Blocks are merged in their order.

#include <algorithm>
#include <vector>

#include "common/buffer.h"
#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

struct Blocks {
  int64_t members = 1, rows, channels, folded, size, count;

  explicit Blocks(Shape shape) {
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

bool is_array_of(Shape shape, Shape of_channels) {
  const size_t rank = shape.size();
  if (rank < 2 || of_channels.size() != rank - 1 || of_channels[rank - 2] != shape[rank - 1]) return false;
  return std::equal(shape.begin(), shape.end() - 2, of_channels.begin()) && shape[rank - 2] > 0 && shape[rank - 1] > 0;
}

// Calls body(element, lane) for `count` elements, whose lanes follow each other.
template <typename Body>
JAXNN_INLINE void for_each_element(int64_t count, int64_t lanes, const Body& body) {
  for (int64_t first = 0; first < count; first += lanes) {
    const int64_t width = std::min(lanes, count - first);
    JAXNN_INDEPENDENT for (int64_t j = 0; j < width; ++j) body(first + j, j);
  }
}

void add(const float* x, int64_t count, int64_t lanes, float* sums) {
  vectorized([=](auto) JAXNN_INLINED {
    for_each_element(count, lanes, [=](int64_t i, int64_t j) JAXNN_INLINED { sums[j] += x[i]; });
  });
}

void add_deviations(const float* x, const float* mean, int64_t count, int64_t lanes, float* sums, float* squares) {
  vectorized([=](auto) JAXNN_INLINED {
    for_each_element(count, lanes, [=](int64_t i, int64_t j) JAXNN_INLINED {
      const float deviation = x[i] - mean[j];
      sums[j] += deviation;
      squares[j] += deviation * deviation;
    });
  });
}

void add_products(const float* grad, const float* x, const float* mean, int64_t count, int64_t lanes, float* sums,
                  float* products) {
  vectorized([=](auto) JAXNN_INLINED {
    for_each_element(count, lanes, [=](int64_t i, int64_t j) JAXNN_INLINED {
      sums[j] += grad[i];
      products[j] += grad[i] * (x[i] - mean[j]);
    });
  });
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
void add_means(const float* part, int64_t channels, double weight, double* means) {
  vectorized([=](auto) JAXNN_INLINED {
    JAXNN_INDEPENDENT
    for (int64_t j = 0; j < channels; ++j) means[j] += weight * (double(part[j]) + part[channels + j]);
  });
}
void add_variances(const float* part, const double* means, int64_t channels, double weight, double* variances) {
  vectorized([=](auto) JAXNN_INLINED {
    JAXNN_INDEPENDENT for (int64_t j = 0; j < channels; ++j) {
      const double rounding = part[channels + j], beside = part[j] + rounding - means[j];
      variances[j] += weight * (std::max(part[2 * channels + j] - rounding * rounding, 0.0) + beside * beside);
    }
  });
}
void add_to_double(const float* part, int64_t count, double* sums) {
  vectorized([=](auto) JAXNN_INLINED {
    JAXNN_INDEPENDENT for (int64_t j = 0; j < count; ++j) sums[j] += part[j];
  });
}

// Calls compute(block's index, its first element, its elements, two sums and a scratch of all lanes), where sums are 0.
template <typename Compute>
void for_each_block(Pool& pool, const Blocks& b, const Compute& compute) {
  parallel_for(pool, b.members * b.count, [&](int64_t index) {
    thread_local Buffer kept;
    float* const lanes = kept.reserve(3 * b.num_lanes());
    std::fill_n(lanes, 3 * b.num_lanes(), 0.0f);
    const int64_t block = index % b.count;
    compute(index, (index / b.count * b.rows + block * b.size) * b.channels, b.rows_of(block) * b.channels, lanes,
            lanes + b.num_lanes(), lanes + 2 * b.num_lanes());
  });
}

}  // namespace

void kernel::moments(const Call& call) {
  const auto& [x, mean, variance] = call.arrays<3>();
  if (!is_array_of(x.shape, mean.shape) || !is_array_of(x.shape, variance.shape))
    throw InvalidArgument("shapes do not fit");
  const Blocks b(x.shape);
  std::vector<float> parts(3 * b.members * b.count * b.channels);
  for_each_block(call.pool, b, [&](int64_t index, int64_t first, int64_t count, float* sums, float* squares,
                                               float* means) {
    float* const part = parts.data() + 3 * index * b.channels;
    const float share = 1 / static_cast<float>(b.rows_of(index % b.count));
    add(x.as() + first, count, b.num_lanes(), sums);
    fold(b, sums, share, part);
    unfold(b, part, means);
    std::fill_n(sums, b.num_lanes(), 0.0f);
    add_deviations(x.as() + first, means, count, b.num_lanes(), sums, squares);
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
    std::copy(means.begin(), means.end(), mean.as() + member * b.channels);
    std::copy(variances.begin(), variances.end(), variance.as() + member * b.channels);
  }
}

// The sums over rows of grad, and of grad * (x - mean), with mean [*members, channels].
void kernel::channel_sums(const Call& call) {
  const auto& [grad, x, mean, sums, products] = call.arrays<5>();
  const Shape shape = x.shape;
  if (!std::equal(shape.begin(), shape.end(), grad.shape.begin(), grad.shape.end()) ||
      !is_array_of(shape, mean.shape) || !is_array_of(shape, sums.shape) || !is_array_of(shape, products.shape))
    throw InvalidArgument("shapes do not fit");
  const Blocks b(shape);
  std::vector<float> parts(2 * b.members * b.count * b.channels);
  for_each_block(call.pool, b, [&](int64_t index, int64_t first, int64_t count, float* total, float* product,
                                   float* means) {
    unfold(b, mean.as() + index / b.count * b.channels, means);
    add_products(grad.as() + first, x.as() + first, means, count, b.num_lanes(), total, product);
    float* const part = parts.data() + 2 * index * b.channels;
    fold(b, total, 1, part);
    fold(b, product, 1, part + b.channels);
  });
  std::vector<double> merged(2 * b.channels);
  for (int64_t member = 0; member < b.members; ++member) {
    std::fill(merged.begin(), merged.end(), 0);
    for (int64_t i = 0; i < b.count; ++i)
      add_to_double(parts.data() + 2 * (member * b.count + i) * b.channels, 2 * b.channels, merged.data());
    std::copy_n(merged.begin(), b.channels, sums.as() + member * b.channels);
    std::copy_n(merged.begin() + b.channels, b.channels, products.as() + member * b.channels);
  }
}

}  // namespace jaxnn
