// The FFI target `jaxnn_adam`: an update of Adam and of the parameters, which reads and writes each array once.

#include <cmath>

#include "targets.h"
#include "vectors.h"

namespace ffi = xla::ffi;
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
JAXNN_VECTORIZED void update(const Numbers n, int64_t count, const float* gradient, const float* mu, const float* nu,
                             const float* param, float* new_mu, float* new_nu, float* new_param) {
  _Pragma("GCC ivdep") for (int64_t i = 0; i < count; ++i) {
    const float first = n.decay_mu * mu[i] + n.part_mu * gradient[i];
    const float second = n.decay_nu * nu[i] + n.part_nu * (gradient[i] * gradient[i]);
    const float step = n.rate * first / (std::sqrt(second * n.factor_nu + n.eps_root) + n.eps);
    new_mu[i] = first;
    new_nu[i] = second;
    new_param[i] = param[i] - (step + (n.shrink == 0 ? 0 : n.shrink * param[i]));  // an infinite one stays so
  }
}

// Arrays are [*members, ...], numbers [*members, 9].
ffi::Error adam(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gradient, ffi::Buffer<ffi::F32> mu,
                ffi::Buffer<ffi::F32> nu, ffi::Buffer<ffi::F32> numbers, ffi::Buffer<ffi::F32> param,
                ffi::ResultBuffer<ffi::F32> new_param, ffi::ResultBuffer<ffi::F32> new_mu,
                ffi::ResultBuffer<ffi::F32> new_nu) {
  constexpr int64_t kNumbers = sizeof(Numbers) / sizeof(float);
  const int64_t total = static_cast<int64_t>(param.element_count());
  if (total == 0) return ffi::Error::Success();
  const int64_t members = static_cast<int64_t>(numbers.element_count()) / kNumbers;
  for (const size_t count : {gradient.element_count(), mu.element_count(), nu.element_count(),
                             new_param->element_count(), new_mu->element_count(), new_nu->element_count()})
    if (static_cast<int64_t>(count) != total || numbers.dimensions().back() != kNumbers || total % members)
      return ffi::Error::InvalidArgument("jaxnn_adam: shapes do not fit");
  const int64_t size = total / members;
  return jaxnn::run_parts(pool, members, size / kWork, [&](int64_t member, int64_t part, int64_t parts) {
    const auto cut = [&](int64_t number) {
      return member * size + (number == parts ? size : size * number / parts / kLine * kLine);
    };
    const int64_t first = cut(part), count = cut(part + 1) - first;
    const auto at = [first = first](const auto& buffer) { return buffer.typed_data() + first; };
    update(reinterpret_cast<const Numbers*>(numbers.typed_data())[member], count, at(gradient), at(mu), at(nu),
           at(param), at(*new_mu), at(*new_nu), at(*new_param));
  });
}

}  // namespace

JAXNN_TARGET(jaxnn_adam, adam,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>());
