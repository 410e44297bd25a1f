// oneDNN's product of a transposed matrix: the kernel gradient of a dense layer.

#ifndef JAXNN_TRANSPOSED_MATMUL_H_
#define JAXNN_TRANSPOSED_MATMUL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>

#include "pool.h"
#include "primitives.h"

namespace jaxnn {

// The product of [summed, rows], transposed, and [summed, columns]: [rows, columns].
struct ProductSize {
  int64_t summed, rows, columns;
};

// The primitives of a product that is cut into blocks of rows or of columns; the last block may be smaller.
struct ProductPlan {
  struct Block {
    Step step;
    dnnl::memory::desc left, right, result;
  };
  Block block, last;

  ProductPlan(const ProductSize& size, Type type, bool by_rows, int64_t length) {
    const OneThread alone;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const auto make = [&](int64_t length) {
      const int64_t rows = by_rows ? length : size.rows, columns = by_rows ? size.columns : length;
      const dnnl::memory::desc left({rows, size.summed}, type, Dims{1, size.rows});
      const dnnl::memory::desc right({size.summed, columns}, type, Dims{size.columns, 1});
      const dnnl::memory::desc result({rows, columns}, type, Dims{size.columns, 1});
      const dnnl::matmul::primitive_desc desc(cpu(), left, right, result, attributes);
      return Block{{dnnl::matmul(desc), desc.scratchpad_desc().get_size()}, left, right, result};
    };
    block = make(length);
    const int64_t remainder = (by_rows ? size.rows : size.columns) % length;
    last = remainder ? make(remainder) : block;
  }
};

// Computes `members` products of one size, whose arrays follow each other in memory, on the pool. The first two arrays
// are not written to. Throws dnnl::error and std::bad_alloc.
template <typename Pool>
void multiply_transposed(Pool& pool, const ProductSize& size, Type type, const std::array<char*, 3>& arrays,
                         int64_t members) {
  constexpr int64_t kWork = 1 << 19, kUnit = 16;  // multiplications worth a thread, and elements of a vector
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const bool by_rows = size.rows >= size.columns;
  const int64_t axis = by_rows ? size.rows : size.columns;
  const int64_t work = size.summed * size.rows * size.columns;
  const int64_t parts = std::max<int64_t>(std::min(threads / std::gcd(threads, members), work / kWork), 1);
  const int64_t length = std::min((axis + parts * kUnit - 1) / (parts * kUnit) * kUnit, axis);
  const auto plan = PlanCache::instance().find<ProductPlan>(
      {size.summed, size.rows, size.columns, static_cast<int64_t>(type), length},
      [&] { return std::make_shared<ProductPlan>(size, type, by_rows, length); });
  const int64_t blocks = (axis + length - 1) / length, bytes = dnnl::memory::data_type_size(type);
  parallel_for(pool, members * blocks, [&](int64_t index) {
    const int64_t member = index / blocks, first = index % blocks * length;
    const int64_t row = by_rows ? first : 0, column = by_rows ? 0 : first;
    const auto& block = axis - first < length ? plan->last : plan->block;
    const auto at = [&](int array, int64_t offset) { return arrays[array] + offset * bytes; };
    block.step.run(
        {{DNNL_ARG_SRC, {block.left, cpu(), at(0, member * size.summed * size.rows + row)}},
         {DNNL_ARG_WEIGHTS, {block.right, cpu(), at(1, member * size.summed * size.columns + column)}},
         {DNNL_ARG_DST, {block.result, cpu(), at(2, (member * size.rows + row) * size.columns + column)}}});
  });
}

}  // namespace jaxnn

#endif  // JAXNN_TRANSPOSED_MATMUL_H_
