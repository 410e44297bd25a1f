// Convolutions of 3x3 windows by fewer products: for 2x2 outputs 16 instead of 36 for each pair of features.
//
// Winograd's F(2x2, 3x3) (Lavin & Gray 2016, arXiv:1509.09308). A tile of 4x4 inputs and the kernel are transformed,
// multiplied at 16 places as matrices of features, and transformed back; each of these maps is linear, so that the
// kernel's gradient has the same products. The input's gradient is the convolution by the flipped kernel.

#ifndef JAXNN_WINOGRAD_H_
#define JAXNN_WINOGRAD_H_

#include "vectors.h"

namespace jaxnn {

// Arrays have channels last, and features in multiples of kFeatures. Beyond the input there are zeros.
struct Tiling {
  static constexpr int64_t kFeatures = 16, kPlaces = 16;

  int64_t batch, height, width, in;       // of the input
  int64_t out_height, out_width, out;     // of the output
  int64_t top, left;                      // rows and columns of zeros before the input

  int64_t rows() const { return (out_height + 1) / 2; }
  int64_t columns() const { return (out_width + 1) / 2; }
  int64_t count() const { return batch * rows() * columns(); }
  int64_t kernel_size() const { return kPlaces * in * out; }  // floats, transformed
  int64_t scratch_size() const { return kPlaces * (kTiles * (in + out) + in * out) + in + out; }  // floats of a part

  static constexpr int kTiles = 48;  // transformed at once
};

// Kernels of one kind of instructions, of the tiles first…last-1.
struct Winograd {
  // Transforms the input features first…last-1 of a kernel [3, 3, in, out], for `flipped` the output features of the
  // convolution with it flipped: its `in` are then the tiling's `out`.
  void (*transform)(const Tiling&, const float* kernel, bool flipped, int64_t first, int64_t last, float* transformed);
  void (*convolve)(const Tiling&, const float* input, const float* transformed, int64_t first, int64_t last,
                   float* output, float* scratch);
  // Writes the gradient [3, 3, in, out].
  void (*kernel_gradient)(const Tiling&, const float* input, const float* output, int64_t first, int64_t last,
                          float* gradient, float* scratch);
};

const Winograd* winograd(Isa isa);  // nullptr for instructions that it is not compiled for

}  // namespace jaxnn

#endif  // JAXNN_WINOGRAD_H_
