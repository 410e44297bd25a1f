#include "convolution/convolution.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/buffer.h"
#include "common/onednn.h"
#include "convolution/winograd.h"

namespace jaxnn {

// None is too small to be worth a thread; together they are a multiple of the threads. Those of a kernel's gradient,
// which are added, are as many on any number of threads, so that its bits are the same: enough for many threads, but
// each with enough positions for its sum to take little time, and not too many copies.
int64_t count_parts(const Geometry& g, int64_t members, int64_t threads, int64_t most) {
  constexpr int64_t kWork = 1 << 19, kCopies = int64_t{256} << 20;  // multiplications, bytes
  const Dims &out = g.shapes[kOutput], &kernel = g.shapes[kKernel];
  const int64_t outputs = num_elements(out), in = kernel[g.strides.size()];
  const int64_t products = outputs * in * num_elements(Shape(kernel).first(kernel.size() - 2));
  const int64_t work = products + 8 * (outputs + num_elements(g.shapes[kInput]));
  int64_t parts = threads / std::gcd(threads, members);
  if (g.missing == kKernel) {
    const int64_t positions = outputs / out.back();
    parts = std::max(std::clamp<int64_t>(positions >> 11, 2, 8), std::min<int64_t>(positions >> 13, 64)) / members;
    parts = std::min(parts, kCopies / (members * g.bytes_of(kKernel)));
  }
  return std::max<int64_t>(std::min({parts, most, work / kWork}), 1);
}

namespace {

// The tiling of what is computed, a convolution of the input or for its gradient one of the output, by tiles of `side`.
Tiling tiling(const Geometry& g, int64_t side) {
  const Dims &in = g.shapes[kInput], &out = g.shapes[kOutput];
  if (g.missing != kInput) return {side, in[0], in[1], in[2], in[3], out[1], out[2], out[3], g.low[0], g.low[1]};
  return {side, in[0], out[1], out[2], out[3], in[1], in[2], in[3], 2 - g.low[0], 2 - g.low[1]};
}

// The side of Winograd's tiles, or 0 if it cannot compute this, or if oneDNN is about as fast: with single pixels and large
// kernels.
int64_t winograd_side(const Geometry& g) {
  const Dims ones{1, 1}, &kernel = g.shapes[kKernel];
  if (g.type != Type::kFloat32 || g.result_type != Type::kFloat32 || g.groups > 1 || g.strides != ones ||
      g.dilation != ones || kernel[0] != 3 || kernel[1] != 3 || !fits_winograd(kernel[2], kernel[3]))
    return 0;
  const Tiling of2 = tiling(g, 2), of4 = tiling(g, 4);
  // Times of one thread in products of a pair of features, measured: those of a tile with its transformations, and that
  // of the kernel, which is transposed for the input's gradient.
  const int64_t once = g.missing == kInput ? 600 : 100;
  const int64_t time2 = 23 * of2.count() + once / 2, time4 = 69 * of4.count() + once;
  const int64_t direct = 9 * of2.batch * of2.out_height * of2.out_width;
  if (kHasOnednn && 10 * std::min(time2, time4) > 9 * direct) return 0;
  return time4 < time2 ? 4 : 2;
}

// As convolve_by_onednn. Parts are tiles, of a few images or one.
void convolve_by_winograd(Pool& pool, const Geometry& g, int64_t side, const std::array<char*, 3>& arrays,
                          int64_t members) {
  const Tiling t = tiling(g, side);
  const int64_t parts = count_parts(g, members, pool.num_threads(), t.count());
  const bool is_gradient = g.missing == kKernel, is_flipped = g.missing == kInput;
  const auto array = [&](Role role, int64_t member) {
    return reinterpret_cast<float*>(arrays[role] + member * g.bytes_of(role));
  };
  thread_local Buffer buffer;  // transformed kernels, or all but the first of the parts' gradients
  const int64_t size = is_gradient ? 9 * t.in * t.out : t.kernel_size(), copies = is_gradient ? parts - 1 : 1;
  float* const kept = buffer.reserve(num_elements({members, copies, size}));
  const auto gradient = [&](int64_t member, int64_t copy) {
    return copy ? kept + (member * copies + copy - 1) * size : array(kKernel, member);
  };
  if (!is_gradient) {
    const int64_t features = g.shapes[kKernel][2], blocks = features / Tiling::kFeatures;
    parallel_for(pool, members * blocks, [&](int64_t index) {
      const int64_t member = index / blocks, first = index % blocks * Tiling::kFeatures;
      winograd_transform(t, array(kKernel, member), is_flipped, first, first + Tiling::kFeatures, kept + member * size);
    });
  }
  parallel_for(pool, members * parts, [&](int64_t index) {
    thread_local Buffer buffer;
    float* const scratch = buffer.reserve(t.scratch_size());
    const int64_t member = index / parts, part = index % parts;
    const int64_t first = t.count() * part / parts, last = t.count() * (part + 1) / parts;
    float *const input = array(kInput, member), *const output = array(kOutput, member);
    if (is_gradient)
      winograd_kernel_gradient(t, input, output, first, last, gradient(member, part), scratch);
    else
      winograd_convolve(t, is_flipped ? output : input, kept + member * size, first, last, is_flipped ? input : output,
                        scratch);
    buffer.trim();
  });
  if (is_gradient) add_copies(pool, members, parts, size, gradient);
  buffer.trim();
}

}  // namespace

bool fits_winograd(int64_t in, int64_t out) {
  constexpr int64_t kMostKernel = 1 << 17;  // transformed, 9 or 18 MiB; larger ones are read from memory for each part
  if (kHasOnednn && instructions == Instructions::kBaseline) return false;
  return in % Tiling::kFeatures == 0 && out % Tiling::kFeatures == 0 && in <= kMostKernel && in * out <= kMostKernel;
}

// The attribute `missing` is a Role; the operands are the other two in the order of roles. With axes before the batch, or
// before a kernel's window, all arrays have them: their product is the number of members.
void kernel::convolution(const Call& call) {
  const auto& [first, second, result] = call.arrays<3>();
  const auto dims = [&](const char* name) {
    const Shape values = call.numbers(name);
    return Dims(values.begin(), values.end());
  };
  const int64_t missing = call.number("missing");
  Geometry g{static_cast<Role>(missing), call.number("groups"), first.type, result.type, {},
             dims("strides"), dims("low"), dims("high"), dims("dilation")};
  const size_t rank = g.strides.size() + 2;
  if (missing < kInput || missing > kOutput || rank < 3 || rank > 5)
    throw InvalidArgument("missing must be 0…2, with 1 to 3 spatial axes");
  if (second.type != g.type) throw InvalidArgument("arrays must be float32 or bfloat16, operands of one dtype");
  std::array<const Array*, 3> of_roles{&first, &second, &result};
  std::rotate(of_roles.begin() + missing, of_roles.end() - 1, of_roles.end());
  std::array<char*, 3> arrays;
  std::array<int64_t, 3> members;
  for (const auto role : {kInput, kKernel, kOutput}) {
    const Shape shape = of_roles[role]->shape;
    if (shape.size() < rank) throw InvalidArgument("an array has too few axes");
    members[role] = num_elements(of_roles[role]->members(rank));
    g.shapes[role].assign(shape.end() - rank, shape.end());
    arrays[role] = of_roles[role]->as<char>();
  }
  const Dims &in = g.shapes[kInput], &kernel = g.shapes[kKernel], &out = g.shapes[kOutput];
  bool fits = members[kInput] == members[kKernel] && members[kKernel] == members[kOutput] && in[0] == out[0] &&
              g.groups > 0 && in.back() == g.groups * kernel[rank - 2] && out.back() == kernel[rank - 1];
  for (size_t axis = 0; axis + 2 < rank && fits; ++axis) {
    fits = axis < g.low.size() && axis < g.high.size() && axis < g.dilation.size() && g.strides[axis] > 0;
    if (!fits) break;
    const int64_t free = in[axis + 1] + g.low[axis] + g.high[axis] - g.dilation[axis] * (kernel[axis] - 1) - 1;
    fits = out[axis + 1] == 0 || (free >= 0 && free / g.strides[axis] + 1 == out[axis + 1]);
  }
  if (!fits) throw InvalidArgument("shapes do not fit");
  if (result.size == 0) return;
  if (first.size == 0 || second.size == 0) {
    std::memset(result.data, 0, result.size * size_of(result.type));
    return;
  }
  if (const int64_t side = winograd_side(g)) return convolve_by_winograd(call.pool, g, side, arrays, members[0]);
  if constexpr (!kHasOnednn) throw InvalidArgument("needs oneDNN, without which this package was built");
  if constexpr (kHasOnednn) try {
      convolve_by_onednn(call.pool, g, arrays, members[0]);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string("oneDNN cannot compute this convolution: ") + error.what());
    }
}

}  // namespace jaxnn
