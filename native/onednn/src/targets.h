// What each target includes: XLA's FFI, and handlers that the library exports.

#ifndef JAXNN_TARGETS_H_
#define JAXNN_TARGETS_H_

#include "xla/ffi/api/ffi.h"

#define JAXNN_TARGET(name, function, binding)                             \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name( \
      XLA_FFI_CallFrame* call_frame);                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)

#endif  // JAXNN_TARGETS_H_
