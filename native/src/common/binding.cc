// How XLA calls the kernels: the only file that knows XLA.

#include <array>
#include <exception>
#include <functional>
#include <utility>

#include "common/call.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace {

class XlaPool final : public jaxnn::Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& threads) : Pool(threads.num_threads()), threads_(threads) {}
  void schedule(std::function<void()> task) override { threads_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& threads_;
};

jaxnn::Type type_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return jaxnn::Type::kFloat32;
    case ffi::BF16: return jaxnn::Type::kBfloat16;
    case ffi::S32: return jaxnn::Type::kInt32;
    case ffi::U32: return jaxnn::Type::kUint32;
    case ffi::U16: return jaxnn::Type::kUint16;
    case ffi::U8: return jaxnn::Type::kUint8;
    case ffi::PRED: return jaxnn::Type::kBool;
    default: return jaxnn::Type::kOther;
  }
}

jaxnn::Array array_of(const ffi::AnyBuffer& buffer) {
  const jaxnn::Shape shape(buffer.dimensions().begin(), buffer.dimensions().size());
  return {type_of(buffer.element_type()), buffer.untyped_data(), shape, jaxnn::num_elements(shape)};
}

ffi::Error run(const jaxnn::Kernel& kernel, ffi::ThreadPool& threads, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results, const ffi::Dictionary& dictionary) try {
  if (operands.size() + results.size() > jaxnn::kMostArrays || dictionary.size() > jaxnn::kMostAttributes)
    throw jaxnn::InvalidArgument("too many arguments");
  std::array<jaxnn::Array, jaxnn::kMostArrays> arrays;
  for (size_t i = 0; i < operands.size(); ++i) arrays[i] = array_of(*operands.get<ffi::AnyBuffer>(i));
  for (size_t i = 0; i < results.size(); ++i)
    arrays[operands.size() + i] = array_of(**results.get<ffi::AnyBuffer>(i));
  std::array<jaxnn::Attribute, jaxnn::kMostAttributes> attributes;
  std::array<int64_t, jaxnn::kMostAttributes> scalars;
  size_t count = 0;
  for (auto it = dictionary.begin(); it != dictionary.end(); ++it, ++count) {
    if (dictionary.isa<int64_t>(it)) {
      scalars[count] = *dictionary.get<int64_t>(*it);
      attributes[count] = {*it, {&scalars[count], 1}};
    } else {
      const auto values = *dictionary.get<ffi::Span<const int64_t>>(*it);
      attributes[count] = {*it, {values.begin(), values.size()}};
    }
  }
  XlaPool pool(threads);
  kernel.run({pool, {arrays.data(), operands.size()}, {arrays.data() + operands.size(), results.size()},
              {attributes.data(), count}});
  return ffi::Error::Success();
} catch (const jaxnn::InvalidArgument& error) {
  return ffi::Error::InvalidArgument(std::string(kernel.name) + ": " + error.what());
} catch (const std::exception& error) {
  return ffi::Error::Internal(std::string(kernel.name) + ": " + error.what());
}

constexpr const jaxnn::Kernel& find(std::string_view name) {
  for (const auto& kernel : jaxnn::kKernels)
    if (kernel.name == name) return kernel;
  throw name;  // does not compile
}

}  // namespace

#define JAXNN_KERNEL(name, ...)                                                                                \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxnn_##name(XLA_FFI_CallFrame*);            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                               \
      jaxnn_##name,                                                                                            \
      +[](ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary all) { \
        constexpr const jaxnn::Kernel& kernel = find("jaxnn_" #name);                                          \
        return run(kernel, pool, operands, results, all);                                                      \
      },                                                                                                       \
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
#include "kernels.def"
