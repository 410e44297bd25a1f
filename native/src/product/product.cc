#include "product/product.h"

#include <cstring>
#include <numeric>

#include "common/onednn.h"
#include "product/own_product.h"

namespace jaxnn {
namespace {

void multiply_all(Pool& pool, const ProductSize& size, const std::array<char*, 3>& arrays, int64_t members) {
  const int64_t threads = pool.num_threads(), needed = threads / std::gcd(threads, members);
  // Several blocks for each thread, since threads are not equally fast and start one after another; fewer of a transposed
  // left matrix, since each block copies its rows; and of members that fill the threads one.
  const int64_t each = needed == 1 ? 1 : size.transposed == ProductSize::kLeft ? 2 : 8;
  const TileSize tile = tile_size();
  const auto [left_row, left_column] = size.left_strides();
  const auto [right_row, right_column] = size.right_strides();
  for_each_block(pool, size, Blocks(size, each * needed, 192, tile.rows, tile.columns), sizeof(float), arrays, members,
                 [&, a = left_row, b = left_column, c = right_row, d = right_column](
                     char* left, char* right, char* result, int64_t rows, int64_t columns) {
    multiply({reinterpret_cast<const float*>(left), a, b}, {reinterpret_cast<const float*>(right), c, d}, rows, columns,
             size.summed, reinterpret_cast<float*>(result), size.columns, false);
  });
}

}  // namespace

// [*members, rows, summed] and [*members, summed, columns], each or its transpose, to [*members, rows, columns].
// The attribute `transposed` is 0: none, 1: the left one, 2: the right one.
void kernel::product(const Call& call) {
  const auto& [left, right, result] = call.arrays<3>();
  const int64_t transposed = call.number("transposed");
  if (right.type != left.type || result.type != left.type)
    throw InvalidArgument("arrays must be of one dtype, float32 or bfloat16");
  const Shape shape = left.shape, other = right.shape;
  const size_t rank = shape.size(), swapped = rank - 1 - (transposed == ProductSize::kLeft),
               summed = rank - 2 + (transposed == ProductSize::kRight);
  if (rank < 2 || other.size() != rank || other[summed] != shape[swapped])
    throw InvalidArgument("needs two matrices with one size in common");
  const ProductSize size{shape[swapped], shape[2 * rank - 3 - swapped], other[2 * rank - 3 - summed],
                         static_cast<ProductSize::Transposed>(transposed)};
  const int64_t members = num_elements(left.members(2));
  if (num_elements(right.members(2)) != members || !result.has({members, size.rows, size.columns}))
    throw InvalidArgument("shapes do not fit");
  if (result.size == 0) return;
  if (left.size == 0) {
    std::memset(result.data, 0, result.size * size_of(result.type));
    return;
  }
  const std::array<char*, 3> arrays{left.as<char>(), right.as<char>(), result.as<char>()};
  const bool is_own = left.type == Type::kFloat32 && (!kHasOnednn || instructions == Instructions::kAvx2);  // else slower
  if (!is_own && !kHasOnednn) throw InvalidArgument("bfloat16 needs oneDNN, without which this package was built");
  if (is_own) return multiply_all(call.pool, size, arrays, members);
  if constexpr (kHasOnednn) multiply_by_onednn(call.pool, size, left.type, arrays, members);
}

}  // namespace jaxnn
