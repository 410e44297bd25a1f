// The FFI target `jaxnn_threads`: the number of threads in the pool that XLA lends to a call.

#include "targets.h"

namespace ffi = xla::ffi;

static ffi::Error threads(ffi::ThreadPool pool, ffi::ResultBufferR0<ffi::S32> result) {
  *result->typed_data() = static_cast<int32_t>(pool.num_threads());
  return ffi::Error::Success();
}

JAXNN_TARGET(jaxnn_threads, threads, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::BufferR0<ffi::S32>>());
