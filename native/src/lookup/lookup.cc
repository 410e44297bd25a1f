// Sums of rows of a table, and the table's gradient.
//
// The ids of a group of rows are [*members, groups, width]. A negative id counts from the end of the table. Sums are in
// the order of the ids, whatever the number of threads.

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "common/buffer.h"
#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

constexpr int64_t kWork = 1 << 15;  // elements that are worth a thread
constexpr int32_t kNone = std::numeric_limits<int32_t>::min();  // an id that counts for nothing

struct Sizes {
  int64_t members = 1, groups, width, rows, features;
};

Sizes sizes_of(Shape ids, Shape table, Shape sums) {
  const size_t rank = ids.size();
  Sizes sizes;
  bool fits = rank >= 2 && table.size() == rank && sums.size() == rank;
  for (size_t axis = 0; fits && axis + 2 < rank; ++axis) {
    fits = ids[axis] == table[axis] && ids[axis] == sums[axis];
    sizes.members *= ids[axis];
  }
  if (!fits || sums[rank - 2] != ids[rank - 2] || sums[rank - 1] != table[rank - 1])
    throw InvalidArgument("shapes do not fit");
  sizes.groups = ids[rank - 2], sizes.width = ids[rank - 1];
  sizes.rows = table[rank - 2], sizes.features = table[rank - 1];
  return sizes;
}

// The row of an id, or -1 if the table has none.
int64_t row_of(int64_t id, int64_t rows) {
  const int64_t row = id < 0 ? id + rows : id;
  return row < rows ? std::max<int64_t>(row, -1) : -1;
}

JAXNN_INLINE void add(float* to, const float* from, int64_t count) {
  JAXNN_INDEPENDENT for (int64_t k = 0; k < count; ++k) to[k] += from[k];
}

}  // namespace

// The sums [*members, groups, features] of rows of table [*members, rows, features]; an id beyond it gives NaN.
void kernel::lookup_sums(const Call& call) {
  const auto& [table, ids, result] = call.arrays<3>();
  const Sizes s = sizes_of(ids.shape, table.shape, result.shape);
  const int64_t work = num_elements({s.groups, s.width, s.features});
  for_each_part(call.pool, s.members, work / kWork, [&](int64_t member, int64_t part, int64_t parts) {
    const float* const rows = table.as() + member * s.rows * s.features;
    const int32_t* const all = ids.as<int32_t>() + member * s.groups * s.width;
    float* const sums = result.as() + member * s.groups * s.features;
    vectorized([=](auto) JAXNN_INLINED {
      for (int64_t group = part * s.groups / parts; group < (part + 1) * s.groups / parts; ++group) {
        const int32_t* id = all + group * s.width;
        float* sum = sums + group * s.features;
        std::fill_n(sum, s.features, 0.0f);
        for (int64_t i = 0; i < s.width; ++i) {
          const int64_t at = row_of(id[i], s.rows);
          if (at >= 0) add(sum, rows + at * s.features, s.features);
          else if (id[i] != kNone) std::fill_n(sum, s.features, std::numeric_limits<float>::quiet_NaN());
        }
      }
    });
  });
}

// The gradient [*members, rows, features] of a table from that of sums [*members, groups, features].
void kernel::lookup_gradient(const Call& call) {
  const auto& [ids, sums, result] = call.arrays<3>();
  const Sizes s = sizes_of(ids.shape, result.shape, sums.shape);
  const int64_t work = num_elements({s.rows + s.groups * s.width, s.features});
  for_each_part(call.pool, s.members, work / kWork, [&](int64_t member, int64_t part, int64_t parts) {
    const int64_t num_ids = s.groups * s.width;
    const int32_t* id = ids.as<int32_t>() + member * num_ids;
    const float* sum = sums.as() + member * s.groups * s.features;
    float* rows = result.as() + member * s.rows * s.features;
    // Parts are ranges of rows, with as many rows and ids together, since a few rows may have most of the ids.
    constexpr int64_t kRanges = 4096;
    std::array<int64_t, kRanges> counts{};
    int64_t shift = 0, total = s.rows;
    while (s.rows >> shift >= kRanges) ++shift;
    for (int64_t i = 0; i < num_ids; ++i)
      if (const int64_t at = row_of(id[i], s.rows); at >= 0) ++counts[at >> shift], ++total;
    int64_t range = 0, done = 0;
    const auto end_of = [&](int64_t index) {
      for (; range << shift < s.rows && done < index * total / parts; ++range)
        done += std::min(int64_t{1} << shift, s.rows - (range << shift)) + counts[range];
      return std::min(range << shift, s.rows);
    };
    const int64_t first = end_of(part), last = end_of(part + 1);
    thread_local Buffer kept_ends, kept_groups;
    // At first the number of ids of each row, then where they start, at last where they end.
    int64_t* const ends = kept_ends.reserve<int64_t>(last - first);
    std::fill_n(ends, last - first, 0);
    for (int64_t i = 0; i < num_ids; ++i)
      if (const int64_t at = row_of(id[i], s.rows); first <= at && at < last) ++ends[at - first];
    int64_t num_mine = 0;
    for (int64_t at = 0; at < last - first; ++at) num_mine += std::exchange(ends[at], num_mine);
    int64_t* const groups = kept_groups.reserve<int64_t>(num_mine);
    for (int64_t group = 0; group < s.groups; ++group)
      for (int64_t i = 0; i < s.width; ++i, ++id)
        if (const int64_t at = row_of(*id, s.rows); first <= at && at < last) groups[ends[at - first]++] = group;
    // Each row is written once, when it is in the cache; zeros of rows without ids together.
    vectorized([=](auto) JAXNN_INLINED {
      int64_t next = 0, zeroed = first;
      for (int64_t at = first; at < last; ++at) {
        const int64_t end = ends[at - first];
        if (next == end) continue;
        std::fill_n(rows + zeroed * s.features, (at + 1 - zeroed) * s.features, 0.0f);
        for (zeroed = at + 1; next < end; ++next)
          add(rows + at * s.features, sum + groups[next] * s.features, s.features);
      }
      std::fill_n(rows + zeroed * s.features, (last - zeroed) * s.features, 0.0f);
    });
    kept_ends.trim(), kept_groups.trim();
  });
}

}  // namespace jaxnn
