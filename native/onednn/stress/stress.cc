// Stress of the pool, attention, the convolutions, the LSTM and the products, under sanitizers: `make onednn-sanitize`.

#include <atomic>
#include <cstdio>
#include <deque>
#include <functional>
#include <stdexcept>
#include <thread>

#include "attention.h"
#include "convolution.h"
#include "lstm.h"
#include "product.h"

namespace {

// As XLA's: tasks wait in a queue; those left at the end are run before the threads are joined.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  template <typename F>
  void Schedule(F&& task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::forward<F>(task));
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

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Loops of all sizes, within loops that keep every thread busy, from several callers.
void stress_pool(int num_threads) {
  ThreadPool pool(num_threads);
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

// All forms of several shapes from several callers on one pool: with the same bits as alone.
void stress_convolutions() {
  const int64_t kBatch = 7, kMembers = 2;
  ThreadPool pool(4);
  const auto run = [&](jaxnn::Role missing, int64_t size, ThreadPool& on) {
    const jaxnn::Dims ones{1, 1};
    const int64_t out = size % 2 ? 24 : 32;  // oneDNN's and Winograd's
    const jaxnn::Geometry g{missing, 1, jaxnn::Type::f32, jaxnn::Type::f32,
                            {jaxnn::Dims{kBatch, size, size, 16}, jaxnn::Dims{3, 3, 16, out},
                             jaxnn::Dims{kBatch, size, size, out}}, ones, ones, ones, ones};
    std::array<std::vector<float>, 3> arrays;
    std::array<char*, 3> pointers;
    for (const auto role : {jaxnn::kInput, jaxnn::kKernel, jaxnn::kOutput}) {
      arrays[role].resize(kMembers * jaxnn::product(g.shapes[role]));
      for (size_t i = 0; i < arrays[role].size(); ++i) {  // with pixels that are large, and areas of zeros
        const float scale = i / 16 % 61 == 0 ? 1e6f : i / 16 % 23 < 9 ? 0 : 1;
        arrays[role][i] = scale * (static_cast<float>(i % 17) - 8);
      }
      pointers[role] = reinterpret_cast<char*>(arrays[role].data());
    }
    jaxnn::convolve(on, g, pointers, kMembers);
    return arrays[missing];
  };
  const auto roles = {jaxnn::kInput, jaxnn::kKernel, jaxnn::kOutput};
  std::map<std::pair<int64_t, int64_t>, std::vector<float>> alone;
  for (int64_t size = 12; size < 18; ++size)
    for (const auto role : roles) alone[{role, size}] = run(role, size, pool);
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int64_t round = 0; round < 12; ++round) {
        const int64_t size = 12 + (round + caller) % 6;
        for (const auto role : roles) check(run(role, size, pool) == alone[{role, size}], "the bits of every run");
      }
    });
  }
  for (auto& caller : callers) caller.join();
  for (int64_t size = 20; size < 300; ++size) {  // more than the cache holds; of small sizes without parts
    const jaxnn::Geometry g{jaxnn::kOutput, 1, jaxnn::Type::f32, jaxnn::Type::f32,
                            {jaxnn::Dims{1, size, 1}, jaxnn::Dims{1, 1, 1}, jaxnn::Dims{1, size, 1}},
                            {1}, {0}, {0}, {1}};
    const auto make = [&g] { return jaxnn::Planner(g).plan(1); };
    jaxnn::PlanCache::instance().find<jaxnn::Plan>(g.key(1), make);
  }
  check(jaxnn::PlanCache::instance().size() == jaxnn::PlanCache::kLimit, "the cache is full and no fuller");
}

// Forward and backward pass of several sizes, with each kind of instructions, on one pool: with the same bits as alone.
void stress_lstm() {
  ThreadPool pool(4), single(1);
  const bool avx2 = __builtin_cpu_supports("avx2"), avx512 = __builtin_cpu_supports("avx512dq");
  const auto run = [](ThreadPool& on, jaxnn::Isa isa, int64_t batch, int64_t features) {
    const int64_t members = 2, steps = 20, state = members * batch * features;
    const auto values = [](int64_t count) {
      std::vector<float> array(count);
      for (int64_t i = 0; i < count; ++i) array[i] = static_cast<float>(i % 17 - 8) / 64;
      return array;
    };
    const auto kernel = values(members * features * 4 * features), first = values(state), to = values(steps * state);
    auto gates = values(4 * steps * state), c = to, h = to, dc = first, dh = first;
    jaxnn::Lstm lstm{members,      steps,    batch,    features,  kernel.data(), gates.data(), first.data(),
                     first.data(), c.data(), h.data(), to.data(), to.data(),     dc.data(),    dh.data()};
    jaxnn::run_lstm(on, lstm, jaxnn::forward_part(isa));
    jaxnn::run_lstm(on, lstm, jaxnn::backward_part(isa));
    for (const auto* more : {&c, &h, &dc, &dh}) gates.insert(gates.end(), more->begin(), more->end());
    return gates;
  };
  for (const auto isa : {jaxnn::Isa::kPlain, jaxnn::Isa::kAvx2, jaxnn::Isa::kAvx512}) {
    if ((isa == jaxnn::Isa::kAvx2 && !avx2) || (isa == jaxnn::Isa::kAvx512 && !avx512)) continue;
    std::vector<std::thread> callers;
    for (int64_t caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&, caller] {
        for (const int64_t features : {1, 15, 65, 80})
          check(run(pool, isa, 5 + caller, features) == run(single, isa, 5 + caller, features), "the bits of one thread");
      });
    }
    for (auto& caller : callers) caller.join();
  }
}

// Products of several sizes, with blocks of rows or columns, from several callers: with the same bits as alone.
void stress_products() {
  const int64_t kMembers = 3;
  ThreadPool pool(4);
  const auto run = [&](int64_t rows) {
    const jaxnn::ProductSize size{300, rows, 150, static_cast<jaxnn::ProductSize::Transposed>(rows / 15 % 3)};
    std::array<std::vector<float>, 3> arrays{std::vector<float>(kMembers * size.summed * size.rows),
                                             std::vector<float>(kMembers * size.summed * size.columns),
                                             std::vector<float>(kMembers * size.rows * size.columns)};
    std::array<char*, 3> pointers;
    for (size_t k = 0; k < 3; ++k) {
      for (size_t i = 0; i < arrays[k].size(); ++i) arrays[k][i] = static_cast<float>(i % 17) - 8;
      pointers[k] = reinterpret_cast<char*>(arrays[k].data());
    }
    jaxnn::multiply(pool, size, jaxnn::Type::f32, pointers, kMembers);
    return arrays[2];
  };
  std::map<int64_t, std::vector<float>> alone;
  for (int64_t rows = 120; rows < 180; rows += 15) alone[rows] = run(rows);
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int64_t round = 0; round < 12; ++round) {
        const int64_t rows = 120 + (round + caller) % 4 * 15;
        check(run(rows) == alone[rows], "the bits of every product");
      }
    });
  }
  for (auto& caller : callers) caller.join();
}

// Attention, forward and backward, of grouped heads, several blocks of queries and rows without keys.
void stress_attention() {
  const jaxnn::Isa isa = jaxnn::effective_isa();
  if (jaxnn::attention_parts(isa) == nullptr) return;
  ThreadPool pool(4);
  jaxnn::Attention a{};
  a.batch = 3, a.queries = 130, a.keys = 77, a.heads = 4, a.key_heads = 2, a.features = 20, a.causal = true;
  const std::vector<int32_t> lengths{0, 40, 77};
  const size_t of_queries = a.batch * a.queries * a.heads * a.features;
  const size_t of_keys = a.batch * a.keys * a.key_heads * a.features;
  std::vector<float> query(of_queries, 0.1f), key(of_keys), value(of_keys, 0.3f), to_output(of_queries, 1.0f);
  for (size_t i = 0; i < of_keys; ++i) key[i] = static_cast<float>(i % 17) - 8;
  a.query = query.data(), a.key = key.data(), a.value = value.data(), a.lengths = lengths.data();
  a.to_output = to_output.data();
  std::vector<float> first;
  for (int round = 0; round < 4; ++round) {
    std::vector<float> output(of_queries), log_sums(a.batch * a.heads * a.queries), to_query(of_queries), to_key(of_keys),
        to_value(of_keys);
    a.output = output.data(), a.log_sums = log_sums.data();
    a.to_query = to_query.data(), a.to_key = to_key.data(), a.to_value = to_value.data();
    for (const bool backward : {false, true})
      jaxnn::attend(pool, a, *jaxnn::own_product(isa), *jaxnn::attention_parts(isa), backward);
    for (const auto* array : {&to_query, &to_key, &to_value}) output.insert(output.end(), array->begin(), array->end());
    if (round == 0) first = output;
    check(output == first, "the bits of attention");
  }
}

}  // namespace

int main() {
  for (const int num_threads : {0, 1, 2, 5}) stress_pool(num_threads);
  stress_convolutions();
  stress_lstm();
  stress_products();
  stress_attention();
  std::puts("passed");
}
