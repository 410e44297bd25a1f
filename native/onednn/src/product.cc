// The FFI target `jaxnn_product`: the products of the gradients of a dense layer.

#include "product.h"

#include <array>
#include <cstring>
#include <exception>
#include <string>

#include "targets.h"

namespace ffi = xla::ffi;
namespace {

// [*members, summed, rows] and [*members, summed, columns] to [*members, rows, columns], or
// [*members, rows, summed] and [*members, columns, summed].
ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer left, ffi::AnyBuffer right,
                    ffi::Result<ffi::AnyBuffer> result, bool transposes_left) {
  const auto type = left.element_type();
  if ((type != ffi::F32 && type != ffi::BF16) || right.element_type() != type || result->element_type() != type)
    return ffi::Error::InvalidArgument("jaxnn_product: arrays must be of one dtype, float32 or bfloat16");
  const auto shape = left.dimensions(), other = right.dimensions();
  const size_t last = shape.size() - 1, summed = transposes_left ? last - 1 : last, kept = 2 * last - 1 - summed;
  if (shape.size() < 2 || other.size() != shape.size() || other[summed] != shape[summed])
    return ffi::Error::InvalidArgument("jaxnn_product: needs two matrices with one size in common");
  if (result->element_count() == 0) return ffi::Error::Success();
  if (left.element_count() == 0) {
    std::memset(result->untyped_data(), 0, result->size_bytes());
    return ffi::Error::Success();
  }
  const std::array<char*, 3> arrays{static_cast<char*>(left.untyped_data()), static_cast<char*>(right.untyped_data()),
                                    static_cast<char*>(result->untyped_data())};
  try {
    jaxnn::multiply(pool, {shape[summed], shape[kept], other[kept], transposes_left},
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
                 .Attr<bool>("transposes_left"));

// Whether this CPU's products in float32 are faster than those of XLA, transposed or not.
JAXNN_EXPORT bool jaxnn_has_own_product() { return jaxnn::own_product(jaxnn::effective_isa()) != nullptr; }
