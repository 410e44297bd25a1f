// What each target includes: XLA's FFI, how the library exports its functions, and a loop over parts of members.

#ifndef JAXNN_TARGETS_H_
#define JAXNN_TARGETS_H_

#include <algorithm>
#include <cstdint>
#include <exception>

#include "pool.h"
#include "xla/ffi/api/ffi.h"

#define JAXNN_EXPORT extern "C" __attribute__((visibility("default")))
#define JAXNN_TARGET(name, function, binding)                 \
  JAXNN_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)

namespace jaxnn {

// Calls body(member, part, parts) for each part of each member: as many as there are threads, but at most `worthwhile`.
template <typename Body>
xla::ffi::Error run_parts(xla::ffi::ThreadPool& pool, int64_t members, int64_t worthwhile, const Body& body) try {
  const int64_t parts = std::clamp<int64_t>(worthwhile, 1, std::max<int64_t>(pool.num_threads(), 1));
  parallel_for(pool, members * parts, [&](int64_t index) { body(index / parts, index % parts, parts); });
  return xla::ffi::Error::Success();
} catch (const std::exception& error) {
  return xla::ffi::Error::Internal(error.what());
}

}  // namespace jaxnn

#endif  // JAXNN_TARGETS_H_
