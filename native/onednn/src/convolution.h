// A convolution, its input gradient and its kernel gradient, of arrays with channels last: oneDNN's, or Winograd's.

#ifndef JAXNN_CONVOLUTION_H_
#define JAXNN_CONVOLUTION_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>

#include "buffer.h"
#include "pool.h"
#include "primitives.h"
#include "winograd.h"

namespace jaxnn {

enum Role : int64_t { kInput, kKernel, kOutput };

// One convolution, or a gradient of it: `missing` is computed from the other two.
struct Geometry {
  Role missing;
  int64_t groups;
  Type type, result_type;           // of operands and result; a kernel gradient is float32
  std::array<Dims, 3> shapes;       // [batch, *spatial, features] and [*window, in_features / groups, out_features]
  Dims strides, low, high, dilation;  // padding below and above; dilation 1 is none

  Type type_of(Role role) const { return role == missing ? result_type : type; }
  int64_t bytes_of(Role role) const {
    return product(shapes[role]) * static_cast<int64_t>(dnnl::memory::data_type_size(type_of(role)));
  }
  Dims key(int64_t num_parts) const {
    Dims key{num_parts, missing, groups, static_cast<int64_t>(type), static_cast<int64_t>(result_type)};
    for (const Dims* dims : {&shapes[0], &shapes[1], &shapes[2], &strides, &low, &high, &dilation})
      key.insert(key.end(), dims->begin(), dims->end());
    return key;
  }
};

// The primitives of a geometry whose batch is cut into parts of one or two sizes. Many threads may use one at once.
struct Plan {
  struct Part {
    Step step;
    dnnl::memory::desc input, output;
    int64_t rows;
  };
  std::vector<Part> sizes;
  int64_t num_parts, num_larger;     // the first parts have the first size
  dnnl::memory::desc kernel, plain;  // in the layout that oneDNN chose, and in that of the array
  Step reorder;                      // from one to the other; not used if they are equal

  const Part& part(int64_t index) const { return sizes[index < num_larger ? 0 : 1]; }
  int64_t first_row(int64_t index) const {
    const int64_t smaller = std::max<int64_t>(index - num_larger, 0);
    return (index - smaller) * sizes[0].rows + (smaller ? smaller * sizes[1].rows : 0);
  }
};

class Planner {
 public:
  explicit Planner(const Geometry& geometry) : g_(geometry), rank_(geometry.strides.size()) {
    attributes_.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  }

  std::shared_ptr<const Plan> plan(int64_t num_parts) const {
    const OneThread alone;
    const int64_t batch = g_.shapes[kInput][0];
    auto plan = std::make_shared<Plan>();
    plan->plain = kernel(false, g_.type_of(kKernel));
    // All parts use one layout of the kernel: with fewer parts, if oneDNN chooses by the number of rows.
    for (int64_t parts = num_parts;; --parts) {
      dnnl::memory::desc other;
      const int64_t remainder = batch % parts;
      plan->sizes = {part((batch + parts - 1) / parts, plan->kernel)};
      if (remainder) plan->sizes.push_back(part(batch / parts, other));
      plan->num_parts = parts;
      plan->num_larger = remainder ? remainder : parts;
      if (!remainder || other == plan->kernel) break;
    }
    if (plan->kernel != plan->plain) {
      const bool back = g_.missing == kKernel;
      const auto& from = back ? plan->kernel : plan->plain;
      const auto& to = back ? plan->plain : plan->kernel;
      const dnnl::reorder::primitive_desc desc(cpu(), from, cpu(), to, attributes_);
      plan->reorder = {dnnl::reorder(desc), desc.scratchpad_desc().get_size()};
    }
    return plan;
  }

 private:
  Plan::Part part(int64_t rows, dnnl::memory::desc& kernel_chosen) const {
    const auto type = [this](Role role) { return g_.type_of(role); };
    const auto input = features_last(kInput, rows, type(kInput)), output = features_last(kOutput, rows, type(kOutput));
    const auto any = kernel(true, type(kKernel));
    Dims dilation = g_.dilation;
    for (auto& factor : dilation) --factor;  // oneDNN's 0 is none
    const auto direct = dnnl::algorithm::convolution_direct;
    const auto made_forward = [&](const auto& input, const auto& kernel, const auto& output) {
      return dnnl::convolution_forward::primitive_desc(cpu(), dnnl::prop_kind::forward_training, direct, input, kernel,
                                                       output, g_.strides, dilation, g_.low, g_.high, attributes_);
    };
    const auto made = [&](auto primitive, const auto& desc) {
      kernel_chosen = g_.missing == kKernel ? desc.query_md(dnnl::query::diff_weights_md)
                                            : desc.query_md(dnnl::query::weights_md);
      return Plan::Part{{primitive, desc.scratchpad_desc().get_size()}, input, output, rows};
    };
    if (g_.missing == kOutput) {
      const auto desc = made_forward(input, any, output);
      return made(dnnl::convolution_forward(desc), desc);
    }
    // A gradient is described by the convolution it is of, whose result has the dtype of the operands.
    const auto forward = made_forward(features_last(kInput, rows, g_.type), kernel(true, g_.type),
                                      features_last(kOutput, rows, g_.type));
    if (g_.missing == kInput) {
      const dnnl::convolution_backward_data::primitive_desc desc(
          cpu(), direct, input, any, output, g_.strides, dilation, g_.low, g_.high, forward, attributes_);
      return made(dnnl::convolution_backward_data(desc), desc);
    }
    const dnnl::convolution_backward_weights::primitive_desc desc(
        cpu(), direct, input, any, output, g_.strides, dilation, g_.low, g_.high, forward, attributes_);
    return made(dnnl::convolution_backward_weights(desc), desc);
  }

  // The rows of an array [batch, *spatial, features], for oneDNN in the order batch, features, spatial.
  dnnl::memory::desc features_last(Role role, int64_t rows, Type type) const {
    const Dims& shape = g_.shapes[role];
    const int64_t features = shape.back();
    Dims dims{rows, features}, strides{product(shape) / shape[0], 1};
    for (size_t axis = 1; axis <= rank_; ++axis) {
      dims.push_back(shape[axis]);
      strides.push_back(product({shape.begin() + axis + 1, shape.end()}));
    }
    return {dims, type, strides};
  }

  // The kernel [*window, in_features / groups, groups * out], for oneDNN in the order groups, out, in, window.
  dnnl::memory::desc kernel(bool any, Type type) const {
    const Dims& shape = g_.shapes[kKernel];
    const int64_t in = shape[rank_], out = shape[rank_ + 1];
    Dims dims{out / g_.groups, in}, strides{1, out};
    for (size_t axis = 0; axis < rank_; ++axis) {
      dims.push_back(shape[axis]);
      strides.push_back(product({shape.begin() + axis + 1, shape.end()}));
    }
    if (g_.groups > 1) {
      dims.insert(dims.begin(), g_.groups);
      strides.insert(strides.begin(), out / g_.groups);
    }
    if (any) return {dims, type, dnnl::memory::format_tag::any};
    return {dims, type, strides};
  }

  const Geometry& g_;
  const size_t rank_;
  dnnl::primitive_attr attributes_;
};

// The number of parts of each of `members` batches, none too small to be worth a thread: together a multiple of the
// threads. Those of a kernel's gradient, which are added, are as many on fewer threads, so that its bits are the same
// there, if they have enough positions each; and not too many copies.
inline int64_t count_parts(const Geometry& g, int64_t members, int64_t threads, int64_t most) {
  constexpr int64_t kWork = 1 << 19, kCopies = int64_t{256} << 20;  // multiplications, bytes
  const Dims &out = g.shapes[kOutput], &kernel = g.shapes[kKernel];
  const int64_t outputs = product(out), in = kernel[g.strides.size()];
  const int64_t products = outputs * in * product({kernel.begin(), kernel.end() - 2});
  const int64_t work = products + 8 * (outputs + product(g.shapes[kInput]));
  int64_t parts = threads / std::gcd(threads, members);
  if (g.missing == kKernel) {
    parts = std::max(parts, std::clamp<int64_t>(outputs / out.back() >> 11, 2, 8) / members);
    parts = std::min(parts, kCopies / (members * g.bytes_of(kKernel)));
  }
  return std::max<int64_t>(std::min({parts, most, work / kWork}), 1);
}

// Adds the other gradients of a kernel to the first of each member: in order, so that the sum is the same in every run.
template <typename Pool, typename Copy>
void add_copies(Pool& pool, int64_t members, int64_t copies, int64_t size, const Copy& copy) {
  constexpr int64_t kChunk = 1 << 14;
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  if (copies == 1) return;
  parallel_for(pool, members * chunks, [&](int64_t index) {
    const int64_t member = index / chunks, first = index % chunks * kChunk, last = std::min(first + kChunk, size);
    float* const total = reinterpret_cast<float*>(copy(member, 0));
    for (int64_t k = 1; k < copies; ++k) {
      const float* const more = reinterpret_cast<const float*>(copy(member, k));
      for (int64_t i = first; i < last; ++i) total[i] += more[i];
    }
  });
}

// Computes `members` convolutions of one geometry, whose arrays follow each other in memory, on the pool.
template <typename Pool>
void convolve_by_onednn(Pool& pool, const Geometry& g, const std::array<char*, 3>& arrays, int64_t members) {
  const int64_t most = count_parts(g, members, std::max<int64_t>(pool.num_threads(), 1), g.shapes[kInput][0]);
  const auto plan = PlanCache::instance().find<Plan>(g.key(most), [&] { return Planner(g).plan(most); });
  const bool is_gradient = g.missing == kKernel, is_plain = plan->kernel == plan->plain;
  const int64_t parts = plan->num_parts, copies = is_gradient ? parts : 1;
  const size_t kernel_bytes = g.bytes_of(kKernel), chosen_bytes = plan->kernel.get_size();
  thread_local Buffer buffer;  // kernels in the chosen layout, or the parts' gradients
  char* const chosen = is_plain && copies == 1 ? nullptr : buffer.reserve(members * copies * chosen_bytes);
  const auto plain_kernel = [&](int64_t member) { return arrays[kKernel] + member * kernel_bytes; };
  const auto kernel = [&](int64_t member, int64_t copy) {
    return is_plain && copy == 0 ? plain_kernel(member) : chosen + (member * copies + copy) * chosen_bytes;
  };
  const auto reorder = [&](int64_t member) {
    const dnnl::memory plain(plan->plain, cpu(), plain_kernel(member)), other(plan->kernel, cpu(), kernel(member, 0));
    plan->reorder.run({{DNNL_ARG_FROM, is_gradient ? other : plain}, {DNNL_ARG_TO, is_gradient ? plain : other}});
  };

  if (!is_gradient && !is_plain) parallel_for(pool, members, reorder);
  parallel_for(pool, members * parts, [&](int64_t index) {
    const int64_t member = index / parts, copy = index % parts;
    const Plan::Part& part = plan->part(copy);
    const auto rows = [&](Role role) {
      const int64_t bytes = g.bytes_of(role);
      return arrays[role] + member * bytes + plan->first_row(copy) * (bytes / g.shapes[role][0]);
    };
    const int input = g.missing == kInput ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC;
    const int weights = is_gradient ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS;
    const int output = g.missing == kOutput ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST;
    part.step.run({{input, {part.input, cpu(), rows(kInput)}},
                   {weights, {plan->kernel, cpu(), kernel(member, is_gradient ? copy : 0)}},
                   {output, {part.output, cpu(), rows(kOutput)}}});
  });
  if (is_gradient) add_copies(pool, members, copies, chosen_bytes / sizeof(float), kernel);
  if (is_gradient && !is_plain) parallel_for(pool, members, reorder);
  buffer.trim();
}

// The tiling of what is computed, a convolution of the input or for its gradient one of the output, by tiles of `side`.
inline Tiling tiling(const Geometry& g, int64_t side) {
  const Dims &in = g.shapes[kInput], &out = g.shapes[kOutput];
  if (g.missing != kInput) return {side, in[0], in[1], in[2], in[3], out[1], out[2], out[3], g.low[0], g.low[1]};
  return {side, in[0], out[1], out[2], out[3], in[1], in[2], in[3], 2 - g.low[0], 2 - g.low[1]};
}

// The side of Winograd's tiles, or 0 if a direct sum is about as fast, as of single pixels and of large kernels.
inline int64_t winograd_side(const Geometry& g) {
  constexpr int64_t kMostKernel = 1 << 17;  // transformed, 9 or 18 MiB; larger ones are read from memory for each part
  const Dims ones{1, 1}, &kernel = g.shapes[kKernel];
  if (g.type != Type::f32 || g.result_type != Type::f32 || g.groups > 1 || g.strides != ones || g.dilation != ones)
    return 0;
  const Tiling of2 = tiling(g, 2), of4 = tiling(g, 4);
  if (kernel[0] != 3 || kernel[1] != 3 || of2.in % Tiling::kFeatures || of2.out % Tiling::kFeatures || of2.top < 0 ||
      of2.left < 0 || of2.in * of2.out > kMostKernel)
    return 0;
  // Times of one thread in products of a pair of features, measured: those of a tile with its transformations, and that
  // of the kernel, which is transposed for the input's gradient.
  const int64_t once = g.missing == kInput ? 600 : 100;
  const int64_t time2 = 23 * of2.count() + once / 2, time4 = 69 * of4.count() + once;
  const int64_t direct = 9 * of2.batch * of2.out_height * of2.out_width;
  return 10 * std::min(time2, time4) > 9 * direct ? 0 : time4 < time2 ? 4 : 2;
}

// As convolve_by_onednn. Parts are tiles, of a few images or one.
template <typename Pool>
void convolve_by_winograd(Pool& pool, const Geometry& g, int64_t side, const Winograd& kernels,
                          const std::array<char*, 3>& arrays, int64_t members) {
  const Tiling t = tiling(g, side);
  const int64_t parts = count_parts(g, members, std::max<int64_t>(pool.num_threads(), 1), t.count());
  const bool is_gradient = g.missing == kKernel, is_flipped = g.missing == kInput;
  const auto floats = [](char* bytes) { return reinterpret_cast<float*>(bytes); };
  const auto array = [&](Role role, int64_t member) { return floats(arrays[role] + member * g.bytes_of(role)); };
  thread_local Buffer buffer;  // transformed kernels, or all but the first of the parts' gradients
  const int64_t size = is_gradient ? 9 * t.in * t.out : t.kernel_size(), copies = is_gradient ? parts - 1 : 1;
  float* const kept = floats(buffer.reserve(members * copies * size * sizeof(float)));
  const auto gradient = [&](int64_t member, int64_t copy) {
    return copy ? kept + (member * copies + copy - 1) * size : array(kKernel, member);
  };
  if (!is_gradient) {
    const int64_t features = g.shapes[kKernel][2], blocks = features / Tiling::kFeatures;
    parallel_for(pool, members * blocks, [&](int64_t index) {
      const int64_t member = index / blocks, first = index % blocks * Tiling::kFeatures;
      kernels.transform(t, array(kKernel, member), is_flipped, first, first + Tiling::kFeatures, kept + member * size);
    });
  }
  parallel_for(pool, members * parts, [&](int64_t index) {
    thread_local Buffer buffer;
    float* const scratch = floats(buffer.reserve(t.scratch_size() * sizeof(float)));
    const int64_t member = index / parts, part = index % parts;
    const int64_t first = t.count() * part / parts, last = t.count() * (part + 1) / parts;
    float *const input = array(kInput, member), *const output = array(kOutput, member);
    if (is_gradient)
      kernels.kernel_gradient(t, input, output, first, last, gradient(member, part), scratch);
    else
      kernels.convolve(t, is_flipped ? output : input, kept + member * size, first, last, is_flipped ? input : output,
                       scratch);
    buffer.trim();
  });
  if (is_gradient) add_copies(pool, members, parts, size, gradient);
  buffer.trim();
}

// The arrays of the operands are not written to. Throws dnnl::error and std::bad_alloc.
template <typename Pool>
void convolve(Pool& pool, const Geometry& g, const std::array<char*, 3>& arrays, int64_t members) {
  const int64_t side = winograd_side(g);
  const Winograd* const kernels = side ? winograd(effective_isa(), side) : nullptr;
  if (kernels)
    convolve_by_winograd(pool, g, side, *kernels, arrays, members);
  else
    convolve_by_onednn(pool, g, arrays, members);
}

}  // namespace jaxnn

#endif  // JAXNN_CONVOLUTION_H_
