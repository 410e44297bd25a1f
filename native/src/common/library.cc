// What the library exports beside the kernels, for `jaxnn_native/__init__.py`.

#include "common/call.h"
#include "common/instructions.h"
#include "common/onednn.h"
#include "convolution/convolution.h"

#define JAXNN_EXPORT extern "C" __attribute__((visibility("default")))

JAXNN_EXPORT const char* jaxnn_load() { return jaxnn::choose_instructions(); }

JAXNN_EXPORT int jaxnn_abi() { return jaxnn::kAbi; }

// The name of a kernel, or nullptr behind the last one.
JAXNN_EXPORT const char* jaxnn_target(int64_t index) {
  return index < static_cast<int64_t>(std::size(jaxnn::kKernels)) ? jaxnn::kKernels[index].name : nullptr;
}

JAXNN_EXPORT const char* jaxnn_instructions() {
#ifdef __aarch64__
  return "NEON";
#else
  constexpr const char* kNames[] = {"baseline", "AVX2", "AVX-512"};
  return kNames[static_cast<int>(jaxnn::instructions)];
#endif
}

JAXNN_EXPORT bool jaxnn_has_onednn() { return jaxnn::kHasOnednn; }

JAXNN_EXPORT bool jaxnn_has_bfloat16() { return jaxnn::has_bfloat16(); }

JAXNN_EXPORT int64_t jaxnn_num_plans() { return jaxnn::num_plans(); }

// Whether products in float32, with this number of rows, are faster than those of XLA, transposed or not: ours by AVX2
// always, oneDNN's by AVX-512 for many rows.
JAXNN_EXPORT bool jaxnn_has_fast_products(int64_t rows) {
  const auto isa = jaxnn::instructions;
  return isa == jaxnn::Instructions::kAvx2 || (isa == jaxnn::Instructions::kAvx512 && rows >= 256);
}

// Of windows of 3x3, without strides, dilation and groups, in float32.
JAXNN_EXPORT bool jaxnn_fits_winograd(int64_t in, int64_t out) { return jaxnn::fits_winograd(in, out); }
