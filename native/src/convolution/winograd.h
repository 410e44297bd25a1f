// Convolutions of 3x3 windows by fewer products than a direct sum: for each pair of features and 4x4 outputs 36 instead
// of 144, or for 2x2 outputs 16 instead of 36.
//
// Winograd's F(4x4, 3x3) and F(2x2, 3x3) (Lavin & Gray 2016, arXiv:1509.09308). Tiles of the input and the kernel are
// transformed, multiplied at each place as matrices of features, and transformed back; each of these maps is linear, so
// that the kernel's gradient has the same products. The input's gradient is the convolution by the flipped kernel.
//
// The outputs of a tile are rounded by its largest input. Windows of inputs below an eighth of it are computed apart, by
// direct sums, so that the error of each output is within 1e-6 of its own window's largest input times the kernel's sum,
// and that of an element of the kernel's gradient within 1e-6 of the sum of the absolute products of its inputs and
// gradients, unless all of them meet in tiles, of inputs in a range of 2^12, that have larger products for other elements.

#pragma once

#include <cstdint>

namespace jaxnn {

// Arrays have channels last, and features in multiples of kFeatures. Beyond the input there are zeros.
struct Tiling {
  static constexpr int64_t kFeatures = 16;
  static constexpr int kTiles = 24;  // transformed at once

  int64_t side;                        // of a tile of outputs: 2 or 4
  int64_t batch, height, width, in;    // of the input
  int64_t out_height, out_width, out;  // of the output
  int64_t top, left;                   // rows and columns of zeros before the input

  int64_t rows() const { return (out_height + side - 1) / side; }
  int64_t columns() const { return (out_width + side - 1) / side; }
  int64_t count() const { return batch * rows() * columns(); }
  int64_t places() const { return (side + 2) * (side + 2); }
  int64_t kernel_places() const { return places() + 9; }
  int64_t kernel_size() const { return kernel_places() * in * out; }  // floats, transformed
  int64_t scratch_size() const {  // floats of a thread
    const int64_t windows = kTiles * (9 * in + out) + (side * side + 9) * out;  // that are computed apart
    return places() * kTiles * (in + out) + kernel_places() * in * out + windows + in;
  }
};

// Transforms the input features first…last-1 of a kernel [3, 3, in, out], or if `flipped` those of the flipped kernel,
// whose features are exchanged: `in` is then the tiling's `out`.
void winograd_transform(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last,
                        float* transformed);
// Of the tiles first…last-1.
void winograd_convolve(const Tiling& g, const float* input, const float* transformed, int64_t first, int64_t last,
                       float* output, float* scratch);
// Writes the gradient [3, 3, in, out] of the tiles first…last-1.
void winograd_kernel_gradient(const Tiling& g, const float* input, const float* output, int64_t first, int64_t last,
                              float* gradient, float* scratch);

}  // namespace jaxnn
