// What each target includes: XLA's FFI, and how the library exports its functions.

#ifndef JAXNN_TARGETS_H_
#define JAXNN_TARGETS_H_

#include "xla/ffi/api/ffi.h"

#define JAXNN_EXPORT extern "C" __attribute__((visibility("default")))
#define JAXNN_TARGET(name, function, binding)                 \
  JAXNN_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)

#endif  // JAXNN_TARGETS_H_
