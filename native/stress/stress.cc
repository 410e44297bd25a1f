// Calls every kernel without XLA, on one thread and on many, with all kinds of instructions, sizes that are 0 or odd, and
// sizes that do not fit: `make native-sanitize` runs it under sanitizers. It fails if bits depend on the number of threads,
// or if a kernel has no case; a line for each kernel says whether bits depend on the instructions.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>

#include "common/call.h"
#include "common/instructions.h"
#include "common/onednn.h"

namespace {

using jaxnn::Array;
using jaxnn::Instructions;
using jaxnn::Type;
using Dims = std::vector<int64_t>;
using Values = std::function<double(int64_t)>;

// As XLA's: tasks wait in a queue; those left at the end are run before the threads are joined.
class Threads final : public jaxnn::Pool {
 public:
  explicit Threads(int num_threads) : Pool(num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Threads() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void schedule(std::function<void()> task) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

void check(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

// Loops of all sizes, within loops that keep every thread busy, from several callers.
void stress_pool(int num_threads) {
  Threads pool(num_threads);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool] {
      for (int64_t round = 0; round < 200; ++round) {
        const int64_t count = round % 9;
        std::atomic<int64_t> sum{0};
        std::vector<int64_t> plain(count);  // of one call each: no atomics
        jaxnn::parallel_for(pool, count, [&](int64_t i) {
          plain[i] = i;
          jaxnn::parallel_for(pool, 3, [&](int64_t k) { sum += k; });
        });
        check(sum == 3 * count, "every nested call ran");
        for (int64_t i = 0; i < count; ++i) check(plain[i] == i, "every call ran");
      }
      bool thrown = false;
      try {
        jaxnn::parallel_for(pool, 5, [](int64_t i) {
          if (i == 3) throw std::runtime_error("3");
        });
      } catch (const std::runtime_error&) {
        thrown = true;
      }
      check(thrown, "an exception reaches the caller");
    });
  }
  for (auto& caller : callers) caller.join();
}

double plain(int64_t i) { return static_cast<double>(i % 17 - 8) / 7; }
// Pixels of 16 features that are large, and areas of zeros.
double image(int64_t i) { return plain(i) * (i / 16 % 61 == 0 ? 1e6 : i / 16 % 23 < 9 ? 0 : 1); }

struct Spec {
  Dims shape;
  Values values = plain;
};

struct Case {
  std::string kernel;
  std::vector<Spec> operands;
  std::vector<Dims> results;
  std::map<std::string, Dims> attributes = {};
  bool is_bfloat16 = false;  // where float32 would do too
  bool needs_onednn = false;
};

const jaxnn::Kernel& kernel_of(const Case& given) {
  for (const auto& kernel : jaxnn::kKernels)
    if (kernel.name == "jaxnn_" + given.kernel) return kernel;
  check(false, "no kernel " + given.kernel);
  std::abort();
}

void write(Type type, int64_t i, double value, char* to) {
  const auto put = [&](auto number) { std::memcpy(to + i * sizeof number, &number, sizeof number); };
  const auto single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof bits);
  switch (type) {
    case Type::kFloat32: return put(single);
    case Type::kBfloat16: return put(static_cast<uint16_t>(bits >> 16));
    case Type::kUint16: return put(static_cast<uint16_t>(value));
    case Type::kUint8: return put(static_cast<uint8_t>(value));
    case Type::kBool: return put(value != 0);
    default: return put(static_cast<int32_t>(value));
  }
}

using Bytes = std::vector<char>;

// The results, which are filled with NaN before. Arrays are as long as they have to be, so that a sanitizer sees more.
std::vector<Bytes> run(const Case& given, jaxnn::Pool& pool) {
  const jaxnn::Kernel& kernel = kernel_of(given);
  const auto types = std::string(kernel.operands) + std::string(kernel.results);
  std::vector<Bytes> memory;
  std::vector<Array> arrays;
  const auto add = [&](const Dims& shape, const Values& values) {
    const char letter = types.at(arrays.size());
    const Type type = letter != 'g' ? Type{letter} : given.is_bfloat16 ? Type::kBfloat16 : Type::kFloat32;
    const int64_t size = jaxnn::num_elements(shape);
    memory.emplace_back(size * jaxnn::size_of(type));
    for (int64_t i = 0; i < size; ++i) write(type, i, values(i), memory.back().data());
    arrays.push_back({type, memory.back().data(), shape, size});
  };
  for (const auto& [shape, values] : given.operands) add(shape, values);
  for (const auto& shape : given.results) add(shape, [](int64_t) { return std::nan(""); });
  std::vector<jaxnn::Attribute> attributes;
  for (const auto& [name, values] : given.attributes) attributes.push_back({name, values});
  const size_t count = given.operands.size();
  kernel.run({pool, {arrays.data(), count}, {arrays.data() + count, given.results.size()}, attributes});
  return {memory.begin() + count, memory.end()};
}

bool is_rejected(const Case& given, jaxnn::Pool& pool) {
  try {
    run(given, pool);
  } catch (const jaxnn::InvalidArgument&) {
    return true;
  }
  return false;
}

// Of two kinds of instructions: float32 that differ by rounding, compared with the largest, or with 0.01 if all are tiny.
void check_near(const Bytes& one, const Bytes& other, const std::string& what) {
  const auto at = [](const Bytes& bytes, size_t i) {
    float value;
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    return value;
  };
  float most = 0, difference = 0;
  for (size_t i = 0; i < one.size() / 4; ++i) {
    check(std::isfinite(at(one, i)) == std::isfinite(at(other, i)), "finite results of " + what);
    if (!std::isfinite(at(one, i))) continue;
    most = std::max(most, std::abs(at(one, i)));
    difference = std::max(difference, std::abs(at(one, i) - at(other, i)));
  }
  check(difference <= 1e-4f * std::max(most, 0.01f), what + " with other instructions: " + std::to_string(difference));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto positive = [](int64_t i) { return 0.5 + static_cast<double>(i % 5); };
  const auto small = [](int64_t i) { return plain(i) / 8; };
  const auto few = [](int64_t most) { return [most](int64_t i) { return static_cast<double>(i * 7 % most); }; };
  const auto numbers = [](std::vector<double> of) { return [of](int64_t i) { return of[i % of.size()]; }; };
  for (const int64_t size : {0, 1, 37, 70001}) {
    const Dims shape{3, size};
    const Spec rates{{3, 9}, numbers({.9, .1, .99, .01, .1, 1, 1e-8, 0, .01})};
    all.push_back({"adam", {{shape}, {shape}, {shape, positive}, rates, {shape}}, {shape, shape, shape}});
    all.push_back({"random_bits", {{{3, 2}, few(1000)}}, {{3, 5, size}}});
    const int64_t features = size % 40;
    const Dims table{2, 53, features}, sums{2, size % 999, features}, ids{2, size % 999, 3};
    const auto rows = [](int64_t i) { return static_cast<double>(i * 31 % 120 - 60); };  // some are not in the table
    all.push_back({"lookup_sums", {{table}, {ids, rows}}, {sums}});
    all.push_back({"lookup_gradient", {{ids, rows}, {sums}}, {table}});
  }
  for (const auto& [rows, channels] : {std::pair<int64_t, int64_t>{1, 1}, {700, 3}, {65, 130}, {5000, 16}}) {
    const Dims x{2, rows, channels}, mean{2, channels};
    all.push_back({"moments", {{x}}, {mean, mean}});
    all.push_back({"channel_sums", {{x}, {x, image}, {mean}}, {mean, mean}});
  }
  for (const Dims& sizes : {Dims{130, 77, 20}, {1, 1, 1}, {5, 0, 3}, {0, 5, 3}, {97, 200, 64}}) {
    const Dims query{3, sizes[0], 4, sizes[2]}, key{3, sizes[1], 2, sizes[2]}, sums{3, 4, sizes[0]};
    const Spec lengths{{3}, numbers({0, 40, 1000})}, queries{query, small};
    for (const int64_t causal : {0, 1}) {
      all.push_back({"attention", {queries, {key}, {key}, lengths}, {query, sums}, {{"causal", {causal}}}});
      all.push_back({"attention_backward", {queries, {key}, {key}, lengths, {query}, {sums, positive}, {query}},
                     {query, key, key}, {{"causal", {causal}}}});
    }
  }
  for (const auto& [steps, features] : {std::pair<int64_t, int64_t>{0, 5}, {3, 0}, {3, 1}, {9, 15}, {9, 65}, {20, 80}}) {
    const Dims gates{2, steps, 7, 4 * features}, kernel{2, features, 4 * features}, state{2, 7, features};
    const Dims states{2, steps, 7, features};
    all.push_back({"lstm", {{gates}, {kernel, small}, {state}, {state}}, {gates, states, states}});
    all.push_back({"lstm_backward",
                   {{gates, small}, {kernel, small}, {state}, {states}, {states}, {states}, {state}, {state}},
                   {gates, state, state}});
  }
  for (const Dims& sizes : {Dims{300, 135, 150}, {1, 1, 1}, {0, 5, 5}, {5, 0, 5}, {17, 33, 1}, {70, 300, 61}})
    for (const int64_t transposed : {0, 1, 2})
      for (const bool is_bfloat16 : {false, true}) {
        const Dims left = transposed == 1 ? Dims{3, sizes[0], sizes[1]} : Dims{3, sizes[1], sizes[0]};
        const Dims right = transposed == 2 ? Dims{3, sizes[2], sizes[0]} : Dims{3, sizes[0], sizes[2]};
        all.push_back({"product", {{left}, {right}}, {{3, sizes[1], sizes[2]}}, {{"transposed", {transposed}}},
                       is_bfloat16, is_bfloat16});
      }
  const auto convolution = [&](Dims in, Dims kernel, Dims out, Dims strides, Dims pad, Dims dilation, int64_t groups,
                               bool is_winograd, bool is_bfloat16 = false) {
    for (const int64_t missing : {0, 1, 2}) {
      const Dims shapes[] = {in, kernel, out};
      if (is_bfloat16 && missing == 1) continue;  // its result is float32
      all.push_back({"convolution", {{shapes[missing == 0], image}, {shapes[missing == 2 ? 1 : 2]}}, {shapes[missing]},
                     {{"missing", {missing}}, {"groups", {groups}}, {"strides", strides}, {"low", pad}, {"high", pad},
                      {"dilation", dilation}}, is_bfloat16, !is_winograd});
    }
  };
  for (const int64_t size : {1, 12, 13, 17, 30})
    for (const int64_t pad : {0, 1, 3})
      if (const int64_t out = size + 2 * pad - 2; out > 0)
        convolution({2, 7, size, size, 16}, {2, 3, 3, 16, 32}, {2, 7, out, out, 32}, {1, 1}, {pad, pad}, {1, 1}, 1, true);
  convolution({64, 20, 20, 16}, {3, 3, 16, 16}, {64, 20, 20, 16}, {1, 1}, {1, 1}, {1, 1}, 1, true);
  convolution({0, 9, 9, 16}, {3, 3, 16, 16}, {0, 9, 9, 16}, {1, 1}, {1, 1}, {1, 1}, 1, true);
  for (const bool is_bfloat16 : {false, true}) {
    convolution({7, 15, 15, 16}, {3, 3, 8, 24}, {7, 8, 8, 24}, {2, 2}, {1, 1}, {1, 1}, 2, false, is_bfloat16);
    convolution({2, 5, 300, 3}, {2, 5, 3, 5}, {2, 5, 296, 5}, {1}, {2}, {2}, 1, false, is_bfloat16);
  }
  for (const int64_t rows : {0, 1, 900, 40000})
    for (const int64_t leaves : {0, 5}) {
      const int64_t nodes = leaves ? 2 * leaves - 1 : 15;
      const Dims of_rows{2, rows}, of_nodes{2, nodes};
      all.push_back({"grow_trees", {{{1, rows, 9}, few(63)}, {of_rows}, {of_rows, positive},
                                    {{1, 2}, numbers({0x1p-20, 0x1p-20})}, {{1, 9}, few(3)},
                                    {{1, 6}, numbers({.1, 0, 1, 1e-3, 0, std::numeric_limits<double>::infinity()})}},
                     {of_nodes, {2, nodes, 8}, of_nodes, of_nodes, of_nodes, of_nodes, of_rows},
                     {{"max_depth", {3}}, {"num_leaves", {leaves}}, {"num_bins", {64}}, {"num_categories", {5}},
                      {"categorical", {1}}}});
    }
  all.push_back({"threads", {}, {{}}});
  return all;
}

// Sizes that do not fit, of each array in turn, are rejected, or nothing outside of the arrays is touched.
void stress_shapes(const Case& given, jaxnn::Pool& pool) {
  for (size_t i = 0; i < given.operands.size() + given.results.size(); ++i) {
    Case other = given;
    Dims& shape = i < given.operands.size() ? other.operands[i].shape : other.results[i - given.operands.size()];
    if (shape.empty() || shape.back() == 0) continue;
    --shape.back();
    is_rejected(other, pool);
    shape.clear();
    is_rejected(other, pool);
    shape = {int64_t{1} << 40, 0, int64_t{1} << 40};
    check(is_rejected(other, pool), "a shape whose size is no int64 is rejected by " + given.kernel);
  }
  Case fewer = given;
  fewer.results.pop_back();
  check(is_rejected(fewer, pool), "too few results of " + given.kernel);
}

}  // namespace

int main() {
  for (const int num_threads : {0, 1, 2, 5}) stress_pool(num_threads);
  Threads one(1), three(3), five(5);
  check(jaxnn::choose_instructions() == nullptr, "instructions");
  const Instructions widest = jaxnn::instructions;
  std::map<std::string, std::vector<std::vector<Bytes>>> of_kinds;
  std::set<std::string> depends;
  std::map<std::string, int> counts;
  const auto all = cases();
  for (int kind = 0; kind <= static_cast<int>(widest); ++kind) {
    jaxnn::instructions = Instructions{kind};
    std::vector<std::vector<Bytes>> alone;
    for (const Case& given : all) {
      counts[given.kernel] += kind == 0;
      if (given.needs_onednn && !jaxnn::kHasOnednn) {
        bool is_empty = jaxnn::num_elements(given.results[0]) == 0;
        for (const Spec& operand : given.operands) is_empty |= jaxnn::num_elements(operand.shape) == 0;
        check(is_rejected(given, one) || is_empty, given.kernel + " without oneDNN");
        alone.emplace_back();
        continue;
      }
      if (given.is_bfloat16 && !jaxnn::has_bfloat16()) {
        alone.emplace_back();
        continue;
      }
      alone.push_back(run(given, one));
      auto& of_kind = of_kinds[given.kernel];
      if (kind == 0) of_kind.push_back(alone.back());
      stress_shapes(given, one);
    }
    // From several callers on one pool.
    std::vector<std::thread> callers;
    for (const auto* pool : {&three, &five, &five})
      callers.emplace_back([&, pool] {
        for (size_t i = 0; i < all.size(); ++i)
          if (!alone[i].empty() && all[i].kernel != "threads")
            check(run(all[i], *const_cast<Threads*>(pool)) == alone[i],
                  "bits of " + all[i].kernel + " case " + std::to_string(i) + " on many threads");
      });
    for (auto& caller : callers) caller.join();
    std::map<std::string, size_t> next;
    for (size_t i = 0; i < all.size(); ++i) {
      if (alone[i].empty()) continue;
      const auto& first = of_kinds[all[i].kernel][next[all[i].kernel]++];
      if (alone[i] != first) depends.insert(all[i].kernel);
      for (size_t k = 0; k < first.size(); ++k)
        if (kernel_of(all[i]).results[k] == 'f' || (kernel_of(all[i]).results[k] == 'g' && !all[i].is_bfloat16))
          check_near(alone[i][k], first[k], all[i].kernel + " case " + std::to_string(i));
    }
  }
  for (const jaxnn::Kernel& kernel : jaxnn::kKernels) {
    const std::string name = std::string(kernel.name).substr(6);
    check(counts[name] > 0, name + " is registered, but has no case here");
    double total = 0;  // to compare machines
    for (const auto& results : of_kinds[name])
      for (size_t k = 0; k < results.size(); ++k)
        if (kernel.results[k] == 'f' || kernel.results[k] == 'g')
          for (size_t at = 0; at + 4 <= results[k].size(); at += 4) {
            float value;
            std::memcpy(&value, results[k].data() + at, 4);
            if (std::isfinite(value) && std::abs(value) < 1e4) total += std::abs(value);
          }
    std::printf("%-20s %3d cases, bits independent of threads, %s instructions, magnitudes %.4g\n", name.c_str(),
                counts[name], depends.count(name) ? "dependent on" : "independent of", total);
  }
  constexpr int64_t kLarge = int64_t{1} << 40;
  for (const Dims& sizes : {Dims{kLarge, kLarge}, {0, kLarge, kLarge}, {-1}, {3, -5}}) {
    bool thrown = false;
    try {
      jaxnn::num_elements(sizes);
    } catch (const jaxnn::InvalidArgument&) {
      thrown = true;
    }
    check(thrown, "sizes whose product is no int64 are rejected");
  }
  if (jaxnn::kHasOnednn) {  // more shapes than the cache holds
    for (int64_t size = 20; size < 300; ++size)
      run({"convolution", {{{1, size, 1}}, {{1, 1, 1}}}, {{1, size, 1}},
           {{"missing", {2}}, {"groups", {1}}, {"strides", {1}}, {"low", {0}}, {"high", {0}}, {"dilation", {1}}}}, one);
    check(jaxnn::num_plans() == 256, "the cache is full and no fuller");
  }
  std::puts("passed");
}
