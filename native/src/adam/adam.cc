// An update of Adam and of the parameters, which reads and writes each array once.

#include <array>
#include <cmath>

#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

constexpr int64_t kWork = 1 << 15;  // elements that are worth a thread
constexpr int64_t kLine = 16;       // floats of a cache line, which threads do not share

// The numbers of a member, in the order of the operand.
struct Numbers {
  float decay_mu, part_mu, decay_nu, part_nu;  // of the old moments, and of the gradient
  float rate, factor_nu;                       // with the bias corrections: rate / (1 - b1^t) and 1 / (1 - b2^t)
  float eps, eps_root;
  float shrink;  // the learning rate times the weight decay
};

// A result may be at the place of its operand, but no two overlap otherwise.
JAXNN_INLINE void update(const Numbers& n, int64_t count, const float* gradient, const float* mu, const float* nu,
                         const float* param, float* new_mu, float* new_nu, float* new_param) {
  JAXNN_INDEPENDENT for (int64_t i = 0; i < count; ++i) {
    const float first = n.decay_mu * mu[i] + n.part_mu * gradient[i];
    const float second = n.decay_nu * nu[i] + n.part_nu * (gradient[i] * gradient[i]);
    const float step = n.rate * first / (std::sqrt(second * n.factor_nu + n.eps_root) + n.eps);
    new_mu[i] = first;
    new_nu[i] = second;
    new_param[i] = param[i] - (step + (n.shrink == 0 ? 0 : n.shrink * param[i]));  // an infinite one stays so
  }
}

}  // namespace

// Arrays are [*members, ...], numbers [*members, 9].
void kernel::adam(const Call& call) {
  constexpr int64_t kNumbers = sizeof(Numbers) / sizeof(float);
  const auto& [gradient, mu, nu, numbers, param, new_param, new_mu, new_nu] = call.arrays<8>();
  const int64_t total = param.size;
  if (total == 0) return;
  const int64_t members = numbers.size / kNumbers;
  bool fit = numbers.size >= kNumbers && numbers.shape.back() == kNumbers && total % members == 0;
  for (const Array* array : {&gradient, &mu, &nu, &new_param, &new_mu, &new_nu}) fit &= array->size == total;
  if (!fit) throw InvalidArgument("shapes do not fit");
  const int64_t size = total / members;
  const auto* const of_members = numbers.as<const Numbers>();
  const std::array<float*, 7> a{gradient.as(), mu.as(), nu.as(), param.as(), new_mu.as(), new_nu.as(), new_param.as()};
  for_each_part(call.pool, members, size / kWork, [&](int64_t member, int64_t part, int64_t parts) {
    const auto cut = [&](int64_t number) {
      return member * size + (number == parts ? size : size * number / parts / kLine * kLine);
    };
    const int64_t first = cut(part), count = cut(part + 1) - first;
    vectorized([=, n = of_members[member]](auto) JAXNN_INLINED {
      const auto at = [&](int index) JAXNN_INLINED { return a[index] + first; };
      update(n, count, at(0), at(1), at(2), at(3), at(4), at(5), at(6));
    });
  });
}

}  // namespace jaxnn
