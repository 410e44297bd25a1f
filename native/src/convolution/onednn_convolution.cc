#include "common/onednn.h"

#ifdef JAXNN_ONEDNN

#include "convolution/convolution.h"

namespace jaxnn {
namespace {

Dims key_of(const Geometry& g, int64_t num_parts) {
  Dims key{num_parts, g.missing, g.groups, static_cast<int64_t>(g.type), static_cast<int64_t>(g.result_type)};
  for (const Dims* dims : {&g.shapes[0], &g.shapes[1], &g.shapes[2], &g.strides, &g.low, &g.high, &g.dilation})
    key.insert(key.end(), dims->begin(), dims->end());
  return key;
}

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
    plan->plain = kernel(false, dnnl_type(g_.type_of(kKernel)));
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
    const auto type = [this](Role role) { return dnnl_type(g_.type_of(role)); };
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
    const auto operands = dnnl_type(g_.type);
    const auto forward = made_forward(features_last(kInput, rows, operands), kernel(true, operands),
                                      features_last(kOutput, rows, operands));
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
  dnnl::memory::desc features_last(Role role, int64_t rows, dnnl::memory::data_type type) const {
    const Dims& shape = g_.shapes[role];
    const int64_t features = shape.back();
    Dims dims{rows, features}, strides{num_elements(shape) / shape[0], 1};
    for (size_t axis = 1; axis <= rank_; ++axis) {
      dims.push_back(shape[axis]);
      strides.push_back(num_elements(Shape(shape).subspan(axis + 1)));
    }
    return {dims, type, strides};
  }

  // The kernel [*window, in_features / groups, groups * out], for oneDNN in the order groups, out, in, window.
  dnnl::memory::desc kernel(bool any, dnnl::memory::data_type type) const {
    const Dims& shape = g_.shapes[kKernel];
    const int64_t in = shape[rank_], out = shape[rank_ + 1];
    Dims dims{out / g_.groups, in}, strides{1, out};
    for (size_t axis = 0; axis < rank_; ++axis) {
      dims.push_back(shape[axis]);
      strides.push_back(num_elements(Shape(shape).subspan(axis + 1)));
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

}  // namespace

void convolve_by_onednn(Pool& pool, const Geometry& g, const std::array<char*, 3>& arrays, int64_t members) {
  const int64_t most = count_parts(g, members, pool.num_threads(), g.shapes[kInput][0]);
  const auto plan = PlanCache::instance().find<Plan>(key_of(g, most), [&] { return Planner(g).plan(most); });
  const bool is_gradient = g.missing == kKernel, is_plain = plan->kernel == plan->plain;
  const int64_t parts = plan->num_parts, copies = is_gradient ? parts : 1;
  const int64_t kernel_bytes = g.bytes_of(kKernel), chosen_bytes = plan->kernel.get_size();
  thread_local Buffer buffer;  // kernels in the chosen layout, or the parts' gradients
  const bool needs_buffer = !is_plain || copies > 1;
  char* const chosen = needs_buffer ? buffer.reserve<char>(num_elements({members, copies, chosen_bytes})) : nullptr;
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
  if (is_gradient)
    add_copies(pool, members, copies, chosen_bytes / sizeof(float), [&](int64_t member, int64_t copy) {
      return reinterpret_cast<float*>(kernel(member, copy));
    });
  if (is_gradient && !is_plain) parallel_for(pool, members, reorder);
  buffer.trim();
}

}  // namespace jaxnn

#endif  // JAXNN_ONEDNN
