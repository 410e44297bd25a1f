// The FFI target `jaxnn_convolution`: a convolution or a gradient of it, by oneDNN.

#include "convolution.h"

#include <cstring>
#include <exception>
#include <string>

#include "targets.h"

namespace ffi = xla::ffi;
namespace {

using Integers = ffi::Span<const int64_t>;

jaxnn::Type type_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return jaxnn::Type::f32;
    case ffi::BF16:
      return jaxnn::Type::bf16;
    default:
      return jaxnn::Type::undef;
  }
}

// `missing` is a Role; the operands are the other two in the order of roles. With axes before the batch, or before a
// kernel's window, all arrays have them: their product is the number of members.
ffi::Error convolution(ffi::ThreadPool pool, ffi::AnyBuffer first, ffi::AnyBuffer second,
                       ffi::Result<ffi::AnyBuffer> result, int64_t missing, int64_t groups, Integers strides,
                       Integers low, Integers high, Integers dilation) {
  const auto dims = [](Integers values) { return jaxnn::Dims(values.begin(), values.end()); };
  const size_t rank = strides.size() + 2;
  if (missing < jaxnn::kInput || missing > jaxnn::kOutput || rank < 3 || rank > 5)
    return ffi::Error::InvalidArgument("jaxnn_convolution: missing must be 0…2, with 1 to 3 spatial axes");
  jaxnn::Geometry g{static_cast<jaxnn::Role>(missing), groups, type_of(first), type_of(*result), {},
                    dims(strides), dims(low), dims(high), dims(dilation)};
  if (g.type == jaxnn::Type::undef || g.result_type == jaxnn::Type::undef || type_of(second) != g.type)
    return ffi::Error::InvalidArgument("jaxnn_convolution: arrays must be float32 or bfloat16, operands of one dtype");
  std::array<ffi::AnyBuffer, 3> buffers{first, second, *result};
  std::rotate(buffers.begin() + missing, buffers.end() - 1, buffers.end());
  std::array<char*, 3> arrays;
  int64_t members = 1;
  for (const auto role : {jaxnn::kInput, jaxnn::kKernel, jaxnn::kOutput}) {
    const auto shape = buffers[role].dimensions();
    if (shape.size() < rank) return ffi::Error::InvalidArgument("jaxnn_convolution: an array has too few axes");
    members = jaxnn::product({shape.begin(), shape.end() - rank});
    g.shapes[role].assign(shape.end() - rank, shape.end());
    arrays[role] = static_cast<char*>(buffers[role].untyped_data());
  }
  if (result->element_count() == 0) return ffi::Error::Success();
  if (first.element_count() == 0 || second.element_count() == 0) {
    std::memset(result->untyped_data(), 0, result->size_bytes());
    return ffi::Error::Success();
  }
  try {
    jaxnn::convolve(pool, g, arrays, members);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("oneDNN cannot compute this convolution: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

JAXNN_TARGET(jaxnn_convolution, convolution,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<ffi::AnyBuffer>()
                 .Arg<ffi::AnyBuffer>()
                 .Ret<ffi::AnyBuffer>()
                 .Attr<int64_t>("missing")
                 .Attr<int64_t>("groups")
                 .Attr<Integers>("strides")
                 .Attr<Integers>("low")
                 .Attr<Integers>("high")
                 .Attr<Integers>("dilation"));

// Whether this CPU multiplies in bfloat16 itself.
JAXNN_EXPORT bool jaxnn_has_bfloat16() {
  const auto has = [](dnnl::cpu_isa wanted) {
    const int bits = static_cast<int>(wanted);
    return (static_cast<int>(dnnl::get_effective_cpu_isa()) & bits) == bits;
  };
  return has(dnnl::cpu_isa::avx512_core_bf16) || has(dnnl::cpu_isa::avx2_vnni_2);
}

JAXNN_EXPORT int64_t jaxnn_num_plans() { return static_cast<int64_t>(jaxnn::PlanCache::instance().size()); }
