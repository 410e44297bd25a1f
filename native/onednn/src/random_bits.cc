// The FFI target `jaxnn_random_bits`: the 16 random bits of each element that dropout draws.

#include <algorithm>
#include <cstdint>

#include "targets.h"
#include "vectors.h"

namespace ffi = xla::ffi;
namespace {

constexpr int64_t kWork = 1 << 12;  // blocks that are worth a thread
constexpr int64_t kAtOnce = 256;    // blocks whose words stay in the cache

// Threefry-2x32-20 of (first, 0), (first + 1, 0), …: two words of each block.
//
// Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
JAXNN_VECTORIZED void threefry(const uint32_t* seed, uint32_t first, int64_t count, uint32_t* __restrict low,
                               uint32_t* __restrict high) {
  const uint32_t keys[3] = {seed[0], seed[1], seed[0] ^ seed[1] ^ 0x1BD11BDA};
  constexpr int kDistances[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = first + static_cast<uint32_t>(i) + keys[0], y = keys[1];
    JAXNN_UNROLL for (int group = 0; group < 5; ++group) {
      JAXNN_UNROLL for (const int distance : kDistances[group % 2]) {
        x += y;
        y = ((y << distance) | (y >> (32 - distance))) ^ x;
      }
      x += keys[(group + 1) % 3];
      y += keys[(group + 2) % 3] + static_cast<uint32_t>(group + 1);
    }
    low[i] = x;
    high[i] = y;
  }
}

// Writes the halves of the words of blocks, each to the quarter of its row of `width` elements, of which the last may be
// cut off.
JAXNN_VECTORIZED void spread(const uint32_t* __restrict low, const uint32_t* __restrict high, int64_t block,
                             int64_t count, int64_t width, uint16_t* __restrict bits) {
  const int64_t across = (width + 3) / 4;
  for (int64_t done = 0; done < count;) {
    const int64_t row = (block + done) / across, column = (block + done) % across;
    const int64_t wanted = std::min(count - done, across - column);
    uint16_t* const to = bits + row * width + column;
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32_t* const words = (quarter < 2 ? low : high) + done;
      const int shift = quarter % 2 * 16;
      const int64_t available = std::min(wanted, width - quarter * across - column);
      for (int64_t i = 0; i < available; ++i) to[quarter * across + i] = static_cast<uint16_t>(words[i] >> shift);
    }
    done += wanted;
  }
}

// Of a seed [*members, 2], to [*members, ..., width]: each block has an element in each quarter of the last axis.
ffi::Error random_bits(ffi::ThreadPool pool, ffi::Buffer<ffi::U32> seed, ffi::ResultBuffer<ffi::U16> result) {
  const int64_t total = static_cast<int64_t>(result->element_count()), members = seed.element_count() / 2;
  if (total == 0) return ffi::Error::Success();
  const int64_t width = result->dimensions().back(), across = (width + 3) / 4;
  if (members < 1 || seed.dimensions().back() != 2 || total % (members * width))
    return ffi::Error::InvalidArgument("jaxnn_random_bits: shapes do not fit");
  const int64_t rows = total / members / width, blocks = rows * across;
  return jaxnn::run_parts(pool, members, blocks / kWork, [&](int64_t member, int64_t part, int64_t parts) {
    const int64_t last = blocks * (part + 1) / parts;
    uint16_t* const bits = result->typed_data() + member * rows * width;
    uint32_t words[2][kAtOnce];
    for (int64_t block = blocks * part / parts; block < last;) {
      const int64_t count = std::min(kAtOnce, last - block);
      threefry(seed.typed_data() + 2 * member, static_cast<uint32_t>(block), count, words[0], words[1]);
      spread(words[0], words[1], block, count, width, bits);
      block += count;
    }
  });
}

}  // namespace

JAXNN_TARGET(jaxnn_random_bits, random_bits,
             ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::U32>>().Ret<ffi::Buffer<ffi::U16>>());
