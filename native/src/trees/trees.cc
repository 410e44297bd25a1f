// Grows the trees of a gradient boosting: the same trees as jaxnn/trees/_growth.py, bit for bit.
//
// The places of rows are kept in the order of nodes, so that a histogram reads the rows of its node alone. Sums are integers, in any
// order the same; floats are computed by the operations of the other implementation, without contraction.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "common/call.h"
#include "common/vectors.h"

namespace jaxnn {
namespace {

constexpr int kBins = 256, kWords = kBins / 32, kMissing = kBins - 1, kLanes = 16, kBlock = 8;
constexpr int64_t kAhead = 16;  // rows that are fetched into the cache before they are summed
constexpr int64_t kChunk = 1 << 14;  // rows, or elements of a histogram, that are worth another thread
constexpr float kNever = -std::numeric_limits<float>::infinity();

// A gradient and a Hessian, or sums of them, in fixed point.
typedef int64_t Sums __attribute__((vector_size(16)));
enum { kGradient, kHessian };

inline int64_t* integers(Sums* sums) { return reinterpret_cast<int64_t*>(sums); }
inline bool is_zero(const Sums& sums) { return (sums[kGradient] | sums[kHessian]) == 0; }

struct Settings {
  int64_t max_depth, num_leaves, num_bins, num_categories;  // num_leaves is 0: by level
  Shape categorical;
  float units[2], learning_rate, l1, l2, min_child_weight, min_gain, largest_step;

  // The number nearest to a sum: units are powers of two.
  template <typename Real = float>
  Real gradient(Sums sums) const { return Real(sums[int(kGradient)]) * units[kGradient]; }
  template <typename Real = float>
  Real hessian(Sums sums) const { return Real(sums[int(kHessian)]) * units[kHessian]; }
};

struct Split {
  double gain = kNever;  // of a node's best, as a float32
  int column = 0;
  int last = 0;  // the last bin on the left in the order of the column, of the first and those with rows
  bool with_missing = false;
  Sums left{};
};

struct Node {
  int64_t begin = 0, end = 0;  // of its rows
  int buffer = 0;              // that holds them
  int depth = 0, histogram = 0, left = -1;
  Sums sums{};
  Split split;
};

struct Member {
  const uint8_t* bins;               // [rows, columns]
  const float *gradients, *hessians;  // [rows]
  const bool* may_split;             // [columns]
  int64_t columns, rows;
  Settings settings;
  int32_t* column;      // [nodes], and so on, as in Tree
  uint32_t* left_bins;  // [nodes, 8]
  int32_t* left;
  float *value, *gain, *weight;
  int32_t* leaf;  // [rows]
};

// Reused from tree to tree: pages that the system must provide anew take as long as the sums.
struct Buffers {
  std::vector<int32_t> rows[2];
  std::vector<Sums> pairs;
  std::vector<uint8_t> is_left;
  std::vector<std::vector<Sums>> histograms;
  std::vector<Split> splits;
};

template <typename Real>
inline Real shrunk(Real gradient, Real l1) { return gradient - std::min(std::max(gradient, -l1), l1); }

template <typename Real>
inline Real curvature(Real hessian, const Settings& s) { return std::max(hessian + s.l2, Real(1e-30)); }

// By how much the best leaf lowers the loss; plain: l1 is 0, and steps have no bound.
template <bool kIsPlain = false, typename Real>
inline Real score(Real gradient, Real hessian, const Settings& s) {
  const Real bend = curvature(hessian, s);
  if (kIsPlain) return gradient * gradient / bend / 2;
  const Real size = shrunk<Real>(gradient, s.l1), limit = s.largest_step * bend;
  const Real share = std::abs(size) > limit ? limit / std::abs(size) : Real(1);  // of the best step
  return size * size * (share * (2 - share)) / bend / 2;
}

inline float leaf_value(float gradient, float hessian, const Settings& s) {
  if (hessian <= 0 || hessian < s.min_child_weight) return 0;
  const float value = -shrunk(gradient, s.l1) / curvature(hessian, s);
  return std::min(std::max(value, -s.largest_step), s.largest_step);
}

// Candidates of a split: the sums on their left without missing values, and floats of both sides.
struct Sides {
  alignas(64) Sums lefts[kBins];
  alignas(64) float left[kBins][2], right[kBins][2];
  alignas(64) float scores[kBins];
  Sums missing;  // on the left
};

// Converts the candidates, with the missing values on their left; returns their number, a multiple of kLanes.
int convert(Sides& sides, int count, Sums missing, Sums total, const float* units) {
  return vectorized([=, &sides](auto) JAXNN_INLINED {
    constexpr int kSums = 4;  // at once
    typedef int64_t Ints __attribute__((vector_size(16 * kSums)));
    typedef float Floats __attribute__((vector_size(8 * kSums)));
    const int padded = (count + kLanes - 1) / kLanes * kLanes;
    Ints more, all;
    Floats unit;
    sides.missing = missing;
    for (int i = 0; i < 2 * kSums; ++i) more[i] = missing[i % 2], all[i] = total[i % 2], unit[i] = units[i % 2];
    for (int i = count; i < padded; ++i) sides.lefts[i] = -missing;  // no split
    for (int i = 0; i < padded; i += kSums) {
      const Ints left = reinterpret_cast<const Ints&>(sides.lefts[i]) + more;
      reinterpret_cast<Floats&>(sides.left[i]) = __builtin_convertvector(left, Floats) * unit;
      reinterpret_cast<Floats&>(sides.right[i]) = __builtin_convertvector(all - left, Floats) * unit;
    }
    return padded;
  });
}

struct Best {
  double gain;
  int at;
};

// Scores of the candidates in float32, of those that no rounding could allow -inf; returns a bound that the score of
// the best candidate reaches. Scores are sums of positive terms, each of fewer than 16 roundings if l1, which is
// subtracted, is 0. NaN reaches all bounds.
template <bool kIsPlain>
JAXNN_INLINE float score_all(Sides& sides, int count, const Settings& s) {
  constexpr float kSmall = 0x1p-22f, kMargin = 0x1p-18f, kLeast = 1e-30f, kMost = 1e37f;
  const float safe = s.min_child_weight * (1 + kSmall), loose = s.min_child_weight * (1 - kSmall);
  float most[kLanes];
  for (int j = 0; j < kLanes; ++j) most[j] = 0;
  for (int i = 0; i < count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const float left = sides.left[i + j][kHessian], right = sides.right[i + j][kHessian];
      const float least = std::min(left, right);
      const float both = score<kIsPlain>(sides.left[i + j][kGradient], left, s) +
                         score<kIsPlain>(sides.right[i + j][kGradient], right, s);
      sides.scores[i + j] = ((least > 0) & (least >= loose)) ? both : kNever;
      most[j] = ((least > 0) & (least >= safe) & (both > most[j])) ? both : most[j];
    }
  }
  const float largest = *std::max_element(most, most + kLanes);
  // Squares of float32 may overflow or underflow.
  return s.l1 == 0 && largest > kLeast && largest < kMost ? largest * (1 - kMargin) : std::numeric_limits<float>::lowest();
}

float score_all(Sides& sides, int count, const Settings& s) {
  return vectorized([=, &sides](auto) JAXNN_INLINED {
    const bool is_plain = s.l1 == 0 && s.largest_step == std::numeric_limits<float>::infinity();
    return is_plain ? score_all<true>(sides, count, s) : score_all<false>(sides, count, s);
  });
}

// The largest gain, and the first of the candidates that have it; count is a multiple of kLanes. Gains are differences of
// scores, and may be much smaller: those that may be the largest are computed in float64.
Best largest_gain(Sides& sides, int count, Sums total, const Settings& s) {
  const float bound = score_all(sides, count, s);
  Best best{kNever, 0};
  for (int i = 0; i < count; ++i) {
    if (sides.scores[i] < bound) continue;
    const Sums left = sides.lefts[i] + sides.missing, right = total - left;
    const double least = std::min(s.hessian<double>(left), s.hessian<double>(right));
    if (!(least > 0 && least >= s.min_child_weight)) continue;
    const double gain = score(s.gradient<double>(left), s.hessian<double>(left), s) +
                        score(s.gradient<double>(right), s.hessian<double>(right), s);
    if (gain > best.gain) best = {gain, i};
  }
  return best;
}

// Bins in the order in which a split separates them: categories by their mean gradient.
void ordered_bins(const Sums* histogram, bool is_categorical, const Settings& s, int* order) {
  const int num_values = s.num_bins - 1;
  std::iota(order, order + num_values, 0);
  if (!is_categorical) return;
  const int most = std::min<int64_t>(s.num_categories, num_values);
  double mean[kBins];
  for (int bin = 0; bin < most; ++bin) {
    const double hessian = s.hessian<double>(histogram[bin]);
    mean[bin] = hessian > 0 ? s.gradient<double>(histogram[bin]) / (hessian + 10) : -kNever;
  }
  std::stable_sort(order, order + most, [&](int a, int b) { return mean[a] < mean[b]; });
}

// The sums of all bins up to the first and to each with rows; returns their number. A split after a bin without rows is
// that before it, but missing values may be alone before the first.
int left_sums(const Sums* bins, int count, Sums* lefts) {
  Sums left = lefts[0] = bins[0];
  int number = 1;
#pragma GCC unroll 8
  for (int i = 1; i < count; ++i) {
    lefts[number] = left += bins[i];
    number += !is_zero(bins[i]);
  }
  return number;
}

// The best split of a node by one column; its gain is without what the node had before.
Split best_split(const Sums* histogram, Sums total, bool is_categorical, const Settings& s) {
  const int num_values = s.num_bins - 1;
  Sides sides;
  int count;
  if (is_categorical) {
    int order[kBins];
    Sums ordered[kBins] = {};
    ordered_bins(histogram, true, s, order);
    for (int i = 0; i < num_values; ++i) ordered[i] = histogram[order[i]];
    count = left_sums(ordered, num_values, sides.lefts);
  } else {
    count = left_sums(histogram, num_values, sides.lefts);
  }
  Best best = largest_gain(sides, convert(sides, count, Sums{}, total, s.units), total, s);
  Split found;
  const Sums missing = histogram[num_values];
  if (!is_zero(missing)) {
    const Best with = largest_gain(sides, convert(sides, count, missing, total, s.units), total, s);
    found.with_missing = with.gain > best.gain || (with.gain == best.gain && with.at < best.at);
    if (found.with_missing) best = with;
  }
  found.gain = best.gain;
  found.last = best.at;
  found.left = sides.lefts[best.at];
  if (found.with_missing) found.left += missing;
  return found;
}

// Gradients and Hessians in their units, of which one that is NaN makes all of them 0.
void round_pairs(const float* gradients, const float* hessians, int64_t rows, const float* units, int64_t* pairs) {
  return vectorized([=](auto) JAXNN_INLINED {
    // Units are powers of two: products with their inverses are exact.
    const float gradient_units = 1 / units[kGradient], hessian_units = 1 / units[kHessian];
    JAXNN_INDEPENDENT for (int64_t row = 0; row < rows; ++row) {
      const float gradient = std::nearbyint(gradients[row] * gradient_units);
      const float hessian = std::nearbyint(hessians[row] * hessian_units);
      pairs[2 * row + kGradient] = static_cast<int64_t>(gradient == gradient ? gradient : 0);
      pairs[2 * row + kHessian] = static_cast<int64_t>(hessian == hessian ? hessian : 0);
    }
  });
}

// A left child takes the place of its parent, of whose sums the other child has the rest.
void subtract(const int64_t* small, int64_t* left, int64_t* right, int count, bool small_is_left) {
  vectorized([=, to_small = small_is_left ? left : right, to_rest = small_is_left ? right : left](auto) JAXNN_INLINED {
    JAXNN_INDEPENDENT for (int i = 0; i < count; ++i) {
      const int64_t part = small[i], rest = left[i] - part;
      to_small[i] = part;
      to_rest[i] = rest;
    }
  });
}

class Grower {
 public:
  Grower(const Member& member, Buffers& buffers, Pool* pool)
      : m_(member), s_(member.settings), buffers_(buffers), pool_(pool) {
    is_categorical_.resize(m_.columns);
    for (int64_t column : s_.categorical) is_categorical_[column] = true;
    for (auto& rows : buffers_.rows) rows.resize(m_.rows);
    buffers_.pairs.resize(m_.rows);
    buffers_.is_left.resize(m_.rows);
    nodes_.resize(s_.num_leaves ? 2 * s_.num_leaves - 1 : (int64_t{2} << s_.max_depth) - 1);
  }

  void grow() {
    std::fill_n(m_.left_bins, nodes_.size() * kWords, 0);
    std::iota(buffers_.rows[0].begin(), buffers_.rows[0].end(), 0);
    std::vector<Sums> totals((m_.rows + kChunk - 1) / kChunk);
    spread(m_.rows, totals.size(), [&](int64_t index) {
      const int64_t first = index * kChunk, count = std::min(kChunk, m_.rows - first);
      Sums* const pairs = buffers_.pairs.data() + first;
      round_pairs(m_.gradients + first, m_.hessians + first, count, s_.units, reinterpret_cast<int64_t*>(pairs));
      totals[index] = std::accumulate(pairs, pairs + count, Sums{});
    });
    nodes_[0].end = m_.rows;
    nodes_[0].sums = std::accumulate(totals.begin(), totals.end(), Sums{});
    std::vector<int> known{0}, lefts{0};  // leaves; left children without a histogram
    const int64_t rounds = s_.num_leaves ? s_.num_leaves - 1 : s_.max_depth;
    for (int64_t round = 0; round < rounds && !known.empty(); ++round) {
      find_splits(lefts);
      std::vector<int> chosen;
      if (!s_.num_leaves) {
        for (int node : known)
          if (nodes_[node].split.gain > s_.min_gain) chosen.push_back(node);
        known.clear();
      } else {
        auto best = std::max_element(known.begin(), known.end(), [&](int a, int b) {
          return nodes_[a].split.gain < nodes_[b].split.gain || (nodes_[a].split.gain == nodes_[b].split.gain && a > b);
        });
        if (nodes_[*best].split.gain > s_.min_gain) {
          chosen.push_back(*best);
          known.erase(best);
        }
      }
      if (chosen.empty()) break;
      lefts.clear();
      for (int node : chosen) {
        const int left = s_.num_leaves ? 2 * round + 1 : 2 * node + 1;
        nodes_[node].left = left;
        if (has_last_children(nodes_[node])) continue;
        lefts.push_back(left);
        known.push_back(left);
        known.push_back(left + 1);
      }
      move_rows(chosen);
    }
    write();
  }

 private:
  // Not a template: a body in a function of its own keeps its registers.
  void spread(int64_t work, int64_t count, const std::function<void(int64_t)>& body) {
    if (work > kChunk && pool_) return parallel_for(*pool_, count, body);
    for (int64_t i = 0; i < count; ++i) body(i);
  }

  // Sums the histograms of these left children and their right ones, and finds the best split of each.
  void find_splits(const std::vector<int>& lefts) {
    const size_t size = m_.columns * s_.num_bins;
    std::vector<int> nodes;
    int64_t work = 0;
    for (int left : lefts) {
      nodes.push_back(left);
      if (left > 0) nodes.push_back(left + 1);
      if (left > 0) nodes_[left + 1].histogram = num_histograms_++;
      const int64_t rows = left ? std::min(count(left), count(left + 1)) : count(left);
      work += (rows + 2 * s_.num_bins) * m_.columns;
    }
    if (static_cast<int>(buffers_.histograms.size()) < num_histograms_) buffers_.histograms.resize(num_histograms_);
    for (int i = 0; i < num_histograms_; ++i)
      if (buffers_.histograms[i].size() < size) buffers_.histograms[i].resize(size);
    buffers_.splits.resize(m_.columns * nodes_.size());
    // A few columns are divided further, for more threads.
    const int64_t wide = (m_.columns + kBlock - 1) / kBlock * lefts.size();
    const int64_t block = pool_ && wide < 2 * pool_->num_threads() ? kBlock / 2 : kBlock;
    const int64_t blocks = (m_.columns + block - 1) / block;
    spread(work, blocks * lefts.size(), [&](int64_t index) {
      const int64_t first = index / lefts.size() * block;
      find_split(lefts[index % lefts.size()], first, std::min(block, m_.columns - first));
    });
    for (int node : nodes) {
      Split& best = nodes_[node].split;
      for (int64_t column = 0; column < m_.columns; ++column) {
        const Split& split = buffers_.splits[column * nodes_.size() + node];
        if (m_.may_split[column] && split.gain > best.gain) (best = split).column = column;
      }
      const Sums sums = nodes_[node].sums;
      best.gain = static_cast<float>(best.gain - score(s_.gradient<double>(sums), s_.hessian<double>(sums), s_));
    }
  }

  // For a left child without a histogram and the right one, by some columns.
  void find_split(int left, int64_t first, int64_t columns) {
    const bool is_root = left == 0, small_is_left = is_root || count(left) <= count(left + 1);
    alignas(64) Sums found[kBlock][kBins] = {};
    sum(small_is_left ? left : left + 1, first, columns, found);
    for (int64_t column = first; column < first + columns; ++column) {
      Sums *of_left = histogram(left, column), *of_right = is_root ? nullptr : histogram(left + 1, column);
      Sums* const small = found[column - first];
      if (is_root) std::copy(small, small + s_.num_bins, of_left);
      else subtract(integers(small), integers(of_left), integers(of_right), 2 * s_.num_bins, small_is_left);
      for (int node = left; node <= left + !is_root; ++node) {
        Split& split = buffers_.splits[column * nodes_.size() + node];
        split = Split();
        if (m_.may_split[column])
          split = best_split(histogram(node, column), nodes_[node].sums, is_categorical_[column], s_);
      }
    }
  }

  // Several columns at once read each row's place and sums once.
  void sum(int node, int64_t first, int64_t columns, Sums (*histogram)[kBins]) const {
    int64_t k = 0;
    for (; k + 8 <= columns; k += 8) add<8>(node, first + k, histogram + k);
    for (; k + 4 <= columns; k += 4) add<4>(node, first + k, histogram + k);
    for (; k < columns; ++k) add<1>(node, first + k, histogram + k);
    for (int k = 0; k < columns; ++k)
      for (int bin = s_.num_bins; bin < kBins; ++bin) histogram[k][s_.num_bins - 1] += histogram[k][bin];
  }

  template <int kColumns>
  void add(int node, int64_t first, Sums (*histogram)[kBins]) const {
    const uint8_t* bins = m_.bins + first;
    const int32_t* rows = buffers_.rows[nodes_[node].buffer].data();
    const Sums* pairs = buffers_.pairs.data();
    const int64_t end = nodes_[node].end, columns = m_.columns;
    for (int64_t i = nodes_[node].begin; i < end; ++i) {
      const int64_t row = rows[i], ahead = rows[std::min(i + kAhead, end - 1)];
      __builtin_prefetch(pairs + ahead);
      __builtin_prefetch(bins + ahead * columns);
      const Sums pair = pairs[row];
      for (int k = 0; k < kColumns; ++k) {
        Sums& bin = *reinterpret_cast<Sums*>(integers(histogram[k]) + size_t{2} * bins[row * columns + k]);
        bin += pair;
      }
    }
  }

  bool has_last_children(const Node& node) const { return node.depth + 1 == s_.max_depth; }

  // Moves the rows of nodes to their children, in the other buffer; those of the last children are not needed again.
  void move_rows(const std::vector<int>& chosen) {
    struct Chunk {
      int node;
      int64_t begin, end, left, right;  // of its rows; where they go
    };
    std::vector<Chunk> chunks;
    int64_t work = 0;
    const int64_t size = pool_ ? kChunk : m_.rows;
    for (int node : chosen) {
      write_left_bins(nodes_[node], m_.left_bins + node * kWords);
      for (int64_t begin = nodes_[node].begin; begin < nodes_[node].end; begin += size)
        chunks.push_back({node, begin, std::min(begin + size, nodes_[node].end), 0, 0});
      work += count(node);
    }
    const auto is_whole = [&](const Chunk& chunk) {
      return chunk.begin == nodes_[chunk.node].begin && chunk.end == nodes_[chunk.node].end;
    };
    spread(work, chunks.size(), [&](int64_t index) {
      Chunk& chunk = chunks[index];
      const int from = nodes_[chunk.node].buffer;
      const int64_t columns = m_.columns;
      const uint8_t* bins = m_.bins + nodes_[chunk.node].split.column;
      const int32_t* rows = buffers_.rows[from].data();
      uint8_t goes_left[kBins];
      for (int bin = 0; bin < kBins; ++bin)
        goes_left[bin] = m_.left_bins[chunk.node * kWords + bin / 32] >> (bin % 32) & 1;
      if (has_last_children(nodes_[chunk.node])) {
        const int32_t right = nodes_[chunk.node].left + 1;
        for (int64_t i = chunk.begin; i < chunk.end; ++i) m_.leaf[rows[i]] = right - goes_left[bins[rows[i] * columns]];
        return;
      }
      if (is_whole(chunk)) {  // rows of the right child from behind: their order is of no importance
        int64_t left = chunk.begin, right = chunk.end - 1;
        for (int64_t i = chunk.begin; i < chunk.end; ++i) {
          const int64_t is_left = goes_left[bins[rows[i] * columns]];
          move_row(from, i, is_left, left, right);
          left += is_left;
          right -= 1 - is_left;
        }
        chunk.left = left - chunk.begin;
        return;
      }
      uint8_t* is_left = buffers_.is_left.data();
      int64_t left = 0;
      for (int64_t i = chunk.begin; i < chunk.end; ++i) left += is_left[i] = goes_left[bins[rows[i] * columns]];
      chunk.left = left;
    });
    for (size_t first = 0, last; first < chunks.size(); first = last) {
      Node& node = nodes_[chunks[first].node];
      int64_t middle = node.begin, left = node.begin;
      for (last = first; last < chunks.size() && chunks[last].node == chunks[first].node; ++last)
        middle += chunks[last].left;
      int64_t right = middle;
      for (size_t i = first; i < last; ++i) {
        const int64_t moved = chunks[i].left;
        chunks[i].left = left;
        chunks[i].right = right;
        left += moved;
        right += chunks[i].end - chunks[i].begin - moved;
      }
      set_children(node, middle);
    }
    spread(work, chunks.size(), [&](int64_t index) {
      const Chunk& chunk = chunks[index];
      if (has_last_children(nodes_[chunk.node]) || is_whole(chunk)) return;
      int64_t left = chunk.left, right = chunk.right;
      for (int64_t i = chunk.begin; i < chunk.end; ++i) {
        const int64_t is_left = buffers_.is_left[i];
        move_row(nodes_[chunk.node].buffer, i, is_left, left, right);
        left += is_left;
        right += 1 - is_left;
      }
    });
  }

  void move_row(int from, int64_t at, int64_t is_left, int64_t left, int64_t right) {
    const int64_t to = right ^ ((left ^ right) & -is_left);  // a branch would often be mispredicted
    buffers_.rows[1 - from].data()[to] = buffers_.rows[from].data()[at];
  }

  void set_children(const Node& node, int64_t middle) {
    Node &left = nodes_[node.left], &right = nodes_[node.left + 1];
    left = right = Node();
    left.begin = node.begin;
    left.end = right.begin = middle;
    right.end = has_last_children(node) ? middle : node.end;
    left.buffer = right.buffer = 1 - node.buffer;
    left.depth = right.depth = node.depth + 1;
    left.histogram = node.histogram;
    left.sums = node.split.left;
    right.sums = node.sums - left.sums;
  }

  void write_left_bins(const Node& node, uint32_t* words) {
    int order[kBins];
    const Split& split = node.split;
    const Sums* sums = histogram_of(node, split.column);
    ordered_bins(sums, is_categorical_[split.column], s_, order);
    int last = 0;
    for (int left = split.last; left > 0;) left -= !is_zero(sums[order[++last]]);
    for (int i = 0; i <= last; ++i) words[order[i] / 32] |= uint32_t{1} << (order[i] % 32);
    // Without missing values in training, they go with most rows.
    const int64_t left = split.left[kHessian], right = node.sums[kHessian] - left;
    const bool goes_left = sums[s_.num_bins - 1][kHessian] ? split.with_missing : left >= right;
    if (goes_left) words[kMissing / 32] |= uint32_t{1} << (kMissing % 32);
  }

  void write() {
    for (size_t id = 0; id < nodes_.size(); ++id) {
      const Node& node = nodes_[id];
      const bool is_split = node.left >= 0;
      const float hessian = s_.hessian(node.sums);
      m_.column[id] = is_split ? node.split.column : -1;
      m_.left[id] = is_split ? node.left : id;
      m_.value[id] = s_.learning_rate * leaf_value(s_.gradient(node.sums), hessian, s_);
      m_.gain[id] = is_split ? node.split.gain : 0.0f;
      m_.weight[id] = hessian;
    }
    spread(m_.rows, nodes_.size(), [&](int64_t id) {
      if (nodes_[id].left >= 0) return;
      const int32_t* rows = buffers_.rows[nodes_[id].buffer].data();
      for (int64_t i = nodes_[id].begin; i < nodes_[id].end; ++i) m_.leaf[rows[i]] = id;
    });
  }

  int64_t count(int node) const { return nodes_[node].end - nodes_[node].begin; }
  Sums* histogram_of(const Node& node, int64_t column) {
    return buffers_.histograms[node.histogram].data() + column * s_.num_bins;
  }
  Sums* histogram(int node, int64_t column) { return histogram_of(nodes_[node], column); }

  const Member& m_;
  const Settings& s_;
  Buffers& buffers_;
  Pool* const pool_;  // nullptr: one thread
  std::vector<Node> nodes_;
  std::vector<uint8_t> is_categorical_;
  int num_histograms_ = 1;
};

// The part of a member of an operand, whose leading axes each are of size 1 or that of `members` (jax.ffi's "expand_dims").
template <typename T>
const T* part_of(const Array& operand, size_t rank, int64_t member, Shape members) {
  const Shape leading = operand.members(rank);
  int64_t offset = 0, stride = num_elements(operand.shape.last(rank));
  for (size_t i = leading.size(); i-- > 0; member /= members[i]) {
    if (leading[i] > 1) offset += member % members[i] * stride;
    stride *= leading[i];
  }
  return operand.as<const T>() + offset;
}

// Whether the last axes of an array are these, and the leading ones those of `members`, or of an operand each that or 1.
bool fits(const Array& array, Shape members, std::initializer_list<int64_t> last, bool is_operand) {
  if (array.shape.size() != members.size() + last.size()) return false;
  for (size_t i = 0; i < members.size(); ++i)
    if (array.shape[i] != members[i] && !(is_operand && array.shape[i] == 1)) return false;
  return std::equal(last.begin(), last.end(), array.shape.end() - last.size());
}

}  // namespace

// Of bins [rows, columns], gradients and Hessians [rows], their units [2], columns that may split and numbers of Growth
// [6], to columns [nodes], left bins [nodes, 8], left children, values, gains and weights [nodes] and leaves [rows].
void kernel::grow_trees(const Call& call) {
  constexpr int64_t kMostNodes = int64_t{1} << 31;
  const auto& [bins, gradients, hessians, units, may_split, numbers, column, left_bins, left, value, gain, weight, leaf] =
      call.arrays<13>();
  const int64_t max_depth = call.number("max_depth"), num_leaves = call.number("num_leaves");
  const int64_t num_bins = call.number("num_bins"), num_categories = call.number("num_categories");
  const Shape categorical = call.numbers("categorical");
  if (leaf.shape.empty() || bins.shape.empty()) throw InvalidArgument("shapes do not fit");
  const Shape members = leaf.members(1);
  const int64_t rows = leaf.shape.back(), columns = bins.shape.back(), count = num_elements(members);
  for (const int64_t index : categorical)
    if (index < 0 || index >= columns) throw InvalidArgument("a categorical column is not in the table");
  if (num_bins < 2 || num_bins > kBins) throw InvalidArgument("2 to 256 bins");
  if (num_leaves < 0 || num_leaves > kMostNodes / 2 || max_depth < 0 || (!num_leaves && max_depth > 30))
    throw InvalidArgument("max_depth must be 0…30 by level, and num_leaves 0…2^30");
  const int64_t nodes = num_leaves ? 2 * num_leaves - 1 : (int64_t{2} << max_depth) - 1;
  bool fit = fits(bins, members, {rows, columns}, true) && fits(gradients, members, {rows}, true) &&
             fits(hessians, members, {rows}, true) && fits(units, members, {2}, true) &&
             fits(may_split, members, {columns}, true) && fits(numbers, members, {6}, true) &&
             fits(left_bins, members, {nodes, kWords}, false);
  for (const Array* array : {&column, &left, &value, &gain, &weight}) fit &= fits(*array, members, {nodes}, false);
  if (!fit) throw InvalidArgument("shapes do not fit");
  const auto grow = [&](int64_t index, Pool* pool) {
    thread_local Buffers buffers;
    const auto* const unit = part_of<float>(units, 1, index, members);
    const auto* const number = part_of<float>(numbers, 1, index, members);
    const Member member{
        part_of<uint8_t>(bins, 2, index, members), part_of<float>(gradients, 1, index, members),
        part_of<float>(hessians, 1, index, members), part_of<bool>(may_split, 1, index, members), columns, rows,
        Settings{max_depth, num_leaves, num_bins, num_categories, categorical, {unit[0], unit[1]}, number[0], number[1],
                 number[2], number[3], number[4], number[5]},
        column.as<int32_t>() + index * nodes, left_bins.as<uint32_t>() + index * nodes * kWords,
        left.as<int32_t>() + index * nodes, value.as() + index * nodes, gain.as() + index * nodes,
        weight.as() + index * nodes, leaf.as<int32_t>() + index * rows};
    Grower(member, buffers, pool).grow();
  };
  if (count > 1 && count >= call.pool.num_threads())
    parallel_for(call.pool, count, [&](int64_t index) { grow(index, nullptr); });  // each on one thread
  else
    for (int64_t index = 0; index < count; ++index) grow(index, &call.pool);
}

}  // namespace jaxnn
