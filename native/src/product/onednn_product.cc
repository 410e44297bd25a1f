#include "common/onednn.h"

#ifdef JAXNN_ONEDNN

#include "product/product.h"

namespace jaxnn {
namespace {

// Primitives, by whether a block is the last of its row and of its column.
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
        const dnnl::memory::desc left({rows, size.summed}, dnnl_type(type), Dims{left_row, left_column});
        const dnnl::memory::desc right({size.summed, columns}, dnnl_type(type), Dims{right_row, right_column});
        const dnnl::memory::desc result({rows, columns}, dnnl_type(type), Dims{size.columns, 1});
        const dnnl::matmul::primitive_desc desc(cpu(), left, right, result, attributes);
        blocks[i][j] = Block{{dnnl::matmul(desc), desc.scratchpad_desc().get_size()}, left, right, result};
      }
  }
};

}  // namespace

void multiply_by_onednn(Pool& pool, const ProductSize& size, Type type, const std::array<char*, 3>& arrays,
                        int64_t members) {
  // The order of oneDNN's sums depends on the sizes of a block, which are the same on any number of threads.
  const int64_t worth = std::clamp<int64_t>(size.summed * size.rows * size.columns >> 24, 8, 64);
  const Blocks cut(size, std::max<int64_t>(worth / members, 1), std::max(size.rows, size.columns), 16, 16);
  const auto plan = PlanCache::instance().find<ProductPlan>(
      {size.summed, size.rows, size.columns, size.transposed, static_cast<int64_t>(type), cut.rows, cut.columns},
      [&] { return std::make_shared<ProductPlan>(size, type, cut); });
  const int64_t last_rows = (size.rows - 1) % cut.rows + 1, last_columns = (size.columns - 1) % cut.columns + 1;
  for_each_block(pool, size, cut, size_of(type), arrays, members,
                 [&](char* left, char* right, char* result, int64_t rows, int64_t columns) {
    const auto& block = plan->blocks[rows == last_rows][columns == last_columns];
    block.step.run({{DNNL_ARG_SRC, {block.left, cpu(), left}},
                    {DNNL_ARG_WEIGHTS, {block.right, cpu(), right}},
                    {DNNL_ARG_DST, {block.result, cpu(), result}}});
  });
}

}  // namespace jaxnn

#endif  // JAXNN_ONEDNN
