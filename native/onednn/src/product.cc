// The FFI target `jaxnn_product`: products of two matrices, of which one may be transposed.

#include "product.h"

#include <array>
#include <cstring>
#include <exception>
#include <string>

#include "targets.h"

namespace ffi = xla::ffi;
namespace {

// [*members, rows, summed] and [*members, summed, columns], each or its transpose, to [*members, rows, columns].
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer left, ffi::AnyBuffer right,
                    ffi::Result<ffi::AnyBuffer> result, int64_t transposed) {
  const auto type = left.element_type();
  if ((type != ffi::F32 && type != ffi::BF16) || right.element_type() != type || result->element_type() != type)
    return ffi::Error::InvalidArgument("jaxnn_product: arrays must be of one dtype, float32 or bfloat16");
  const auto shape = left.dimensions(), other = right.dimensions();
  const size_t rank = shape.size(), swapped = rank - 1 - (transposed == jaxnn::ProductSize::kLeft),
               summed = rank - 2 + (transposed == jaxnn::ProductSize::kRight);
  if (rank < 2 || other.size() != rank || other[summed] != shape[swapped])
    return ffi::Error::InvalidArgument("jaxnn_product: needs two matrices with one size in common");
  if (result->element_count() == 0) return ffi::Error::Success();
  if (left.element_count() == 0) {
    std::memset(result->untyped_data(), 0, result->size_bytes());
    return ffi::Error::Success();
  }
  const std::array<char*, 3> arrays{static_cast<char*>(left.untyped_data()), static_cast<char*>(right.untyped_data()),
                                    static_cast<char*>(result->untyped_data())};
  try {
    const auto which = static_cast<jaxnn::ProductSize::Transposed>(transposed);
    const jaxnn::ProductSize size{shape[swapped], shape[2 * rank - 3 - swapped], other[2 * rank - 3 - summed], which};
    jaxnn::multiply(pool, size,
                    type == ffi::F32 ? jaxnn::Type::f32 : jaxnn::Type::bf16, arrays,
                    jaxnn::product({shape.begin(), shape.end() - 2}));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("oneDNN cannot compute this product: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

JAXNN_TARGET(jaxnn_product, multiply,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<ffi::AnyBuffer>()
                 .Arg<ffi::AnyBuffer>()
                 .Ret<ffi::AnyBuffer>()
                 .Attr<int64_t>("transposed")  // 0: none, 1: the left one, 2: the right one
             );

// Whether on this CPU products in float32, with this number of rows, are faster than those of XLA, transposed or not:
// ours by AVX2 always, oneDNN's by AVX-512 for many rows.
JAXNN_EXPORT bool jaxnn_has_fast_products(int64_t rows) {
  const jaxnn::Isa isa = jaxnn::effective_isa();
  return isa == jaxnn::Isa::kAvx2 || (isa == jaxnn::Isa::kAvx512 && rows >= 256);
}
