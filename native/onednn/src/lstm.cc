// The FFI targets `jaxnn_lstm` and `jaxnn_lstm_backward`: all time steps of an LSTM.

#include "lstm.h"

#include <exception>

#include "primitives.h"
#include "targets.h"

namespace ffi = xla::ffi;
namespace {

using Array = ffi::Buffer<ffi::F32>;
using Result = ffi::Result<Array>;

// Sizes from gates [members…, steps, batch, 4 * features] and the kernel; the other arrays must fit.
bool fits(jaxnn::Lstm& lstm, const Array& gates, const Array& kernel, std::initializer_list<const Array*> states,
          std::initializer_list<const Array*> sequences) {
  const auto shape = gates.dimensions();
  if (shape.size() < 3) return false;
  const auto sizes = shape.last(3);
  lstm.steps = sizes[0], lstm.batch = sizes[1], lstm.features = sizes[2] / 4;
  lstm.members = 1;
  for (size_t axis = 0; axis + 3 < shape.size(); ++axis) lstm.members *= shape[axis];
  const size_t width = lstm.features, state = lstm.members * lstm.batch * width;
  const auto all = [](std::initializer_list<const Array*> arrays, size_t count) {
    return std::all_of(arrays.begin(), arrays.end(), [&](const Array* a) { return a->element_count() == count; });
  };
  return sizes[2] % 4 == 0 && kernel.element_count() == lstm.members * 4 * width * width && all(states, state) &&
         all(sequences, lstm.steps * state);
}

// Copies the array unless XLA has given the result its memory.
float* in_place(const Array& from, Result& to) {
  if (from.typed_data() != to->typed_data()) std::memcpy(to->typed_data(), from.typed_data(), from.size_bytes());
  return to->typed_data();
}

ffi::Error run(ffi::ThreadPool& pool, const jaxnn::Lstm& lstm, jaxnn::Part part) try {
  if (lstm.members * lstm.batch * lstm.features) jaxnn::run_lstm(pool, lstm, part);
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

ffi::Error forward(ffi::ThreadPool pool, Array products, Array kernel, Array first_c, Array first_h, Result gates,
                   Result c, Result h) {
  jaxnn::Lstm lstm{};
  if (!fits(lstm, products, kernel, {&first_c, &first_h}, {&*c, &*h}))
    return ffi::Error::InvalidArgument("jaxnn_lstm: shapes do not fit");
  lstm.kernel = kernel.typed_data();
  lstm.first_c = first_c.typed_data(), lstm.first_h = first_h.typed_data();
  lstm.gates = in_place(products, gates);
  lstm.c = c->typed_data(), lstm.h = h->typed_data();
  return run(pool, lstm, jaxnn::forward_part(jaxnn::effective_isa()));
}

ffi::Error backward(ffi::ThreadPool pool, Array gates, Array kernel, Array first_c, Array c, Array to_c, Array to_h,
                    Array last_dc, Array last_dh, Result dz, Result dc, Result dh) {
  jaxnn::Lstm lstm{};
  if (!fits(lstm, gates, kernel, {&first_c, &last_dc, &last_dh}, {&c, &to_c, &to_h}))
    return ffi::Error::InvalidArgument("jaxnn_lstm_backward: shapes do not fit");
  lstm.kernel = kernel.typed_data();
  lstm.first_c = first_c.typed_data(), lstm.c = c.typed_data();
  lstm.to_c = to_c.typed_data(), lstm.to_h = to_h.typed_data();
  lstm.gates = in_place(gates, dz);
  lstm.dc = in_place(last_dc, dc), lstm.dh = in_place(last_dh, dh);
  return run(pool, lstm, jaxnn::backward_part(jaxnn::effective_isa()));
}

}  // namespace

JAXNN_TARGET(jaxnn_lstm, forward,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Ret<Array>()
                 .Ret<Array>()
                 .Ret<Array>());

JAXNN_TARGET(jaxnn_lstm_backward, backward,
             ffi::Ffi::Bind()
                 .Ctx<ffi::ThreadPool>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Arg<Array>()
                 .Ret<Array>()
                 .Ret<Array>()
                 .Ret<Array>());
