// The FFI target `jaxnn_transposed_matmul`: the product of a transposed matrix and another, by oneDNN.

#include "transposed_matmul.h"

#include <array>
#include <cstring>
#include <exception>
#include <string>

#include "targets.h"

namespace ffi = xla::ffi;
namespace {

// [*members, summed, rows] and [*members, summed, columns] to [*members, rows, columns]
ffi::Error transposed_matmul(ffi::ThreadPool pool, ffi::AnyBuffer left, ffi::AnyBuffer right,
                             ffi::Result<ffi::AnyBuffer> result) {
  const auto type = left.element_type();
  if ((type != ffi::F32 && type != ffi::BF16) || right.element_type() != type || result->element_type() != type)
    return ffi::Error::InvalidArgument("jaxnn_transposed_matmul: arrays must be of one dtype, float32 or bfloat16");
  const auto shape = left.dimensions(), other = right.dimensions();
  if (shape.size() < 2 || other.size() != shape.size() || other[other.size() - 2] != shape[shape.size() - 2])
    return ffi::Error::InvalidArgument("jaxnn_transposed_matmul: needs [*members, summed, features] twice");
  if (result->element_count() == 0) return ffi::Error::Success();
  if (left.element_count() == 0) {
    std::memset(result->untyped_data(), 0, result->size_bytes());
    return ffi::Error::Success();
  }
  const std::array<char*, 3> arrays{static_cast<char*>(left.untyped_data()), static_cast<char*>(right.untyped_data()),
                                    static_cast<char*>(result->untyped_data())};
  try {
    jaxnn::multiply_transposed(pool, {shape[shape.size() - 2], shape.back(), other.back()},
                               type == ffi::F32 ? jaxnn::Type::f32 : jaxnn::Type::bf16, arrays,
                               jaxnn::product({shape.begin(), shape.end() - 2}));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("oneDNN cannot compute this product: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

JAXNN_TARGET(jaxnn_transposed_matmul, transposed_matmul,
             ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
