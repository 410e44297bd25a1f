// The 16 random bits of each element that dropout draws.

#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

constexpr int64_t kWork = 1 << 12;  // blocks that are worth a thread
constexpr int64_t kAtOnce = 256;    // blocks whose words stay in the cache

// Threefry-2x32-20 of (first, 0), (first + 1, 0), …: two words of each block.
//
// Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
JAXNN_INLINE void threefry(const uint32_t* seed, uint32_t first, int64_t count, uint32_t* low, uint32_t* high) {
  const uint32_t keys[3] = {seed[0], seed[1], seed[0] ^ seed[1] ^ 0x1BD11BDA};
  constexpr int kDistances[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  JAXNN_INDEPENDENT for (int64_t i = 0; i < count; ++i) {
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
JAXNN_INLINE void spread(const uint32_t* low, const uint32_t* high, int64_t block, int64_t count, int64_t width,
                         uint16_t* bits) {
  const int64_t across = (width + 3) / 4;
  for (int64_t done = 0; done < count;) {
    const int64_t row = (block + done) / across, column = (block + done) % across;
    const int64_t wanted = std::min(count - done, across - column);
    uint16_t* const to = bits + row * width + column;
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32_t* const words = (quarter < 2 ? low : high) + done;
      const int shift = quarter % 2 * 16;
      const int64_t available = std::min(wanted, width - quarter * across - column);
      JAXNN_INDEPENDENT
      for (int64_t i = 0; i < available; ++i) to[quarter * across + i] = static_cast<uint16_t>(words[i] >> shift);
    }
    done += wanted;
  }
}

}  // namespace

// Of a seed [*members, 2], to [*members, ..., width]: each block has an element in each quarter of the last axis.
void kernel::random_bits(const Call& call) {
  const auto& [seed, result] = call.arrays<2>();
  const int64_t total = result.size, members = seed.size / 2;
  if (total == 0) return;
  const int64_t width = result.shape.empty() ? 1 : result.shape.back(), across = (width + 3) / 4;
  if (members < 1 || seed.shape.empty() || seed.shape.back() != 2 || total % members || total / members % width)
    throw InvalidArgument("shapes do not fit");
  const int64_t rows = total / members / width, blocks = rows * across;
  for_each_part(call.pool, members, blocks / kWork, [&](int64_t member, int64_t part, int64_t parts) {
    const int64_t first = blocks * part / parts, last = blocks * (part + 1) / parts;
    const uint32_t* const of_member = seed.as<uint32_t>() + 2 * member;
    uint16_t* const bits = result.as<uint16_t>() + member * rows * width;
    vectorized([=](auto) JAXNN_INLINED {
      uint32_t words[2][kAtOnce];
      for (int64_t block = first; block < last;) {
        const int64_t count = std::min(kAtOnce, last - block);
        threefry(of_member, static_cast<uint32_t>(block), count, words[0], words[1]);
        spread(words[0], words[1], block, count, width, bits);
        block += count;
      }
    });
  });
}

}  // namespace jaxnn
