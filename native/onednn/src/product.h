// Products of two matrices, of which one may be transposed: those of a dense layer and its gradients.

#ifndef JAXNN_PRODUCT_H_
#define JAXNN_PRODUCT_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>

#include "own_product.h"
#include "pool.h"
#include "primitives.h"

namespace jaxnn {

// The product of [rows, summed] and [summed, columns], of which one may be there as its transpose: [rows, columns].
struct ProductSize {
  enum Transposed { kNone, kLeft, kRight };

  int64_t summed, rows, columns;
  Transposed transposed;

  // Of a row and of a column.
  std::array<int64_t, 2> left_strides() const {
    return transposed == kLeft ? std::array<int64_t, 2>{1, rows} : std::array<int64_t, 2>{summed, 1};
  }
  std::array<int64_t, 2> right_strides() const {
    return transposed == kRight ? std::array<int64_t, 2>{1, summed} : std::array<int64_t, 2>{columns, 1};
  }
};

// A product cut into blocks of `rows` by `columns`; those at the ends may be smaller.
struct Blocks {
  int64_t rows, columns;

  // `parts` or a multiple, of at most `most_rows`, and no more than the work is worth.
  Blocks(const ProductSize& size, int64_t parts, int64_t most_rows, int64_t row_unit, int64_t column_unit) {
    constexpr int64_t kWork = 1 << 19;  // multiplications worth a thread
    const auto over = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    parts = std::clamp<int64_t>(size.summed * size.rows * size.columns / kWork, 1, parts);
    int64_t by_rows = over(size.rows, most_rows), by_columns = 1;
    if (size.rows >= size.columns || by_rows >= parts) by_rows = over(by_rows, parts) * parts;
    else by_columns = over(parts, by_rows);
    rows = std::min(over(over(size.rows, by_rows), row_unit) * row_unit, size.rows);
    columns = std::min(over(over(size.columns, by_columns), column_unit) * column_unit, size.columns);
  }
};

// oneDNN's primitives, by whether a block is the last of its row and of its column.
struct ProductPlan {
  struct Block {
    Step step;
    dnnl::memory::desc left, right, result;
  };
  Block blocks[2][2];

  ProductPlan(const ProductSize& size, Type type, const Blocks& cut) {
    const OneThread alone;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const auto [left_row, left_column] = size.left_strides();
    const auto [right_row, right_column] = size.right_strides();
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j) {
        const int64_t rows = i ? (size.rows - 1) % cut.rows + 1 : cut.rows;
        const int64_t columns = j ? (size.columns - 1) % cut.columns + 1 : cut.columns;
        const dnnl::memory::desc left({rows, size.summed}, type, Dims{left_row, left_column});
        const dnnl::memory::desc right({size.summed, columns}, type, Dims{right_row, right_column});
        const dnnl::memory::desc result({rows, columns}, type, Dims{size.columns, 1});
        const dnnl::matmul::primitive_desc desc(cpu(), left, right, result, attributes);
        blocks[i][j] = Block{{dnnl::matmul(desc), desc.scratchpad_desc().get_size()}, left, right, result};
      }
  }
};

// Computes `members` products of one size, whose arrays follow each other in memory, on the pool. The first two arrays
// are not written to. Throws dnnl::error and std::bad_alloc.
template <typename Pool>
void multiply(Pool& pool, const ProductSize& size, Type type, const std::array<char*, 3>& arrays, int64_t members) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1), needed = threads / std::gcd(threads, members);
  const Isa isa = effective_isa();
  const OwnProduct* const own = type == Type::f32 && isa == Isa::kAvx2 ? own_product(isa) : nullptr;  // else slower
  // Several for each thread, since threads are not equally fast and start one after another; fewer of a transposed left
  // matrix, since each block copies its rows; and of members that fill the threads one. The order of oneDNN's sums
  // depends on the sizes of a block, which are the same on any number of threads.
  const int64_t each = needed == 1 ? 1 : size.transposed == ProductSize::kLeft ? 2 : 8;
  const int64_t worth = std::clamp<int64_t>(size.summed * size.rows * size.columns >> 24, 8, 64);
  const Blocks cut = own ? Blocks(size, each * needed, 192, own->tile_rows, own->tile_columns)
                         : Blocks(size, std::max<int64_t>(worth / members, 1), std::max(size.rows, size.columns), 16, 16);
  std::shared_ptr<const ProductPlan> plan;
  if (!own)
    plan = PlanCache::instance().find<ProductPlan>(
        {size.summed, size.rows, size.columns, size.transposed, static_cast<int64_t>(type), cut.rows, cut.columns},
        [&] { return std::make_shared<ProductPlan>(size, type, cut); });
  const auto [left_row, left_column] = size.left_strides();
  const auto [right_row, right_column] = size.right_strides();
  const int64_t across = (size.columns + cut.columns - 1) / cut.columns;
  const int64_t blocks = (size.rows + cut.rows - 1) / cut.rows * across, bytes = dnnl::memory::data_type_size(type);
  parallel_for(pool, members * blocks, [&](int64_t index) {
    const int64_t member = index / blocks, row = index % blocks / across * cut.rows;
    const int64_t column = index % across * cut.columns;
    const int64_t rows = std::min(cut.rows, size.rows - row), columns = std::min(cut.columns, size.columns - column);
    char* const left = arrays[0] + (member * size.summed * size.rows + row * left_row) * bytes;
    char* const right = arrays[1] + (member * size.summed * size.columns + column * right_column) * bytes;
    char* const result = arrays[2] + ((member * size.rows + row) * size.columns + column) * bytes;
    if (own) {
      own->multiply({reinterpret_cast<const float*>(left), left_row, left_column},
                    {reinterpret_cast<const float*>(right), right_row, right_column}, rows, columns, size.summed,
                    reinterpret_cast<float*>(result), size.columns, false);
      return;
    }
    const auto& block = plan->blocks[row + rows == size.rows][column + columns == size.columns];
    block.step.run({{DNNL_ARG_SRC, {block.left, cpu(), left}},
                    {DNNL_ARG_WEIGHTS, {block.right, cpu(), right}},
                    {DNNL_ARG_DST, {block.result, cpu(), result}}});
  });
}

}  // namespace jaxnn

#endif  // JAXNN_PRODUCT_H_
