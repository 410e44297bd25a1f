// The number of threads in the pool that XLA lends to a call.

#include "common/call.h"

namespace jaxnn {

void kernel::threads(const Call& call) {
  if (!call.results[0].has({1})) throw InvalidArgument("needs one result");
  *call.results[0].as<int32_t>() = static_cast<int32_t>(call.pool.num_threads());
}

}  // namespace jaxnn
