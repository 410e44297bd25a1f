#include "common/instructions.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "common/onednn.h"

namespace jaxnn {
namespace {

Instructions of_cpu() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx2) return avx512 ? Instructions::kAvx512 : Instructions::kAvx2;
#endif
  return Instructions::kBaseline;
}

}  // namespace

const char* choose_instructions() {
  instructions = of_cpu();
  const char* const wanted = std::getenv("JAXNN_MAX_ISA");
  if (wanted == nullptr || *wanted == '\0') return nullptr;
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
  for (int kind = 0; kind < 3; ++kind) {
    if (std::strcmp(wanted, kNames[kind])) continue;
    instructions = std::min(instructions, Instructions{kind});
    return limit_onednn(Instructions{kind});
  }
  return "JAXNN_MAX_ISA in the environment must be baseline, avx2 or avx512";
}

}  // namespace jaxnn
