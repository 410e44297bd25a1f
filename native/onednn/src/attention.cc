// The FFI targets `jaxnn_attention` and `jaxnn_attention_backward`: softmax(query @ key) @ value.

#include "attention.h"

#include <exception>

#include "primitives.h"
#include "targets.h"

namespace ffi = xla::ffi;
namespace {

using Array = ffi::Buffer<ffi::F32>;
using Counts = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<Array>;

// Sizes from query [members…, batch, queries, heads, features] and key; the other arrays must fit.
ffi::Error run(ffi::ThreadPool& pool, jaxnn::Attention a, const Array& query, const Array& key, const Array& value,
               const Counts& lengths, size_t log_sums, bool backward) try {
  const auto shape = query.dimensions(), other = key.dimensions();
  if (shape.size() < 4 || other.size() != shape.size())
    return ffi::Error::InvalidArgument("jaxnn_attention: needs query and key [batch, time, heads, features]");
  const auto sizes = shape.last(3), of_keys = other.last(3);
  a.queries = sizes[0], a.heads = sizes[1], a.features = sizes[2], a.keys = of_keys[0], a.key_heads = of_keys[1];
  a.batch = jaxnn::product({shape.begin(), shape.end() - 3});
  const size_t of_queries = a.batch * a.heads * a.queries;
  if (of_keys[2] != a.features || a.key_heads == 0 || a.heads % a.key_heads || value.element_count() != key.element_count() ||
      key.element_count() != static_cast<size_t>(a.batch * a.keys * a.key_heads * a.features) || log_sums != of_queries ||
      lengths.element_count() != static_cast<size_t>(a.batch))
    return ffi::Error::InvalidArgument("jaxnn_attention: shapes do not fit");
  a.query = query.typed_data(), a.key = key.typed_data(), a.value = value.typed_data();
  a.lengths = lengths.typed_data();
  const jaxnn::Isa isa = jaxnn::effective_isa();
  if (jaxnn::attention_parts(isa) == nullptr)
    return ffi::Error::Internal("jaxnn_attention: needs a CPU with AVX2");
  if (query.element_count() && key.element_count())
    jaxnn::attend(pool, a, *jaxnn::own_product(isa), *jaxnn::attention_parts(isa), backward);
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

ffi::Error forward(ffi::ThreadPool pool, Array query, Array key, Array value, Counts lengths, Result output,
                   Result log_sums, int64_t causal) {
  jaxnn::Attention a{};
  a.causal = causal;
  a.output = output->typed_data(), a.log_sums = log_sums->typed_data();
  return run(pool, a, query, key, value, lengths, log_sums->element_count(), false);
}

ffi::Error backward(ffi::ThreadPool pool, Array query, Array key, Array value, Counts lengths, Array output,
                    Array log_sums, Array to_output, Result to_query, Result to_key, Result to_value, int64_t causal) {
  jaxnn::Attention a{};
  a.causal = causal;
  a.output = output.typed_data(), a.log_sums = log_sums.typed_data(), a.to_output = to_output.typed_data();
  a.to_query = to_query->typed_data(), a.to_key = to_key->typed_data(), a.to_value = to_value->typed_data();
  return run(pool, a, query, key, value, lengths, log_sums.element_count(), true);
}

// The pool, query, key, value and lengths, which both take.
auto inputs() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>().Arg<Array>().Arg<Counts>(); }

}  // namespace

JAXNN_TARGET(jaxnn_attention, forward, inputs().Ret<Array>().Ret<Array>().Attr<int64_t>("causal"));

JAXNN_TARGET(jaxnn_attention_backward, backward,
             inputs()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Ret<Array>()
                 .Ret<Array>()
                 .Ret<Array>()
                 .Attr<int64_t>("causal"));

// Whether this CPU has the instructions that it needs.
JAXNN_EXPORT bool jaxnn_has_attention() { return jaxnn::attention_parts(jaxnn::effective_isa()) != nullptr; }
