// What kernels of oneDNN share: primitives that run on one thread, and a cache of them.

#ifndef JAXNN_PRIMITIVES_H_
#define JAXNN_PRIMITIVES_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef JAXNN_OPENMP
#include <omp.h>
#endif

#include "buffer.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "vectors.h"

namespace jaxnn {

using Dims = std::vector<int64_t>;
using Type = dnnl::memory::data_type;

inline int64_t product(const Dims& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
}

// While one exists, oneDNN creates and runs primitives on the calling thread alone: a team of OpenMP would compete
// with XLA's threads. In a build without OpenMP nothing is to do.
class OneThread {
#ifdef JAXNN_OPENMP
 public:
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }

 private:
  const int before_ = omp_get_max_threads();
#else
 public:
  OneThread() {}
#endif
};

// The widest instructions of this CPU that oneDNN may use too: ONEDNN_MAX_CPU_ISA.
inline Isa effective_isa() {
  const int bits = static_cast<int>(dnnl::get_effective_cpu_isa());
  const auto has = [bits](dnnl::cpu_isa wanted) { return (bits & static_cast<int>(wanted)) == static_cast<int>(wanted); };
  return has(dnnl::cpu_isa::avx512_core) ? Isa::kAvx512 : has(dnnl::cpu_isa::avx2) ? Isa::kAvx2 : Isa::kPlain;
}

inline const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// A primitive with the memory that it needs besides its arguments.
struct Step {
  dnnl::primitive primitive;
  size_t scratch_bytes = 0;

  void run(std::unordered_map<int, dnnl::memory> arguments) const {
    thread_local Buffer scratch;
    thread_local dnnl::stream stream(cpu());
    const OneThread alone;
    const Dims size{static_cast<int64_t>(scratch_bytes)};
    const dnnl::memory::desc desc(size, Type::u8, Dims{1});
    if (scratch_bytes) arguments.insert({DNNL_ARG_SCRATCHPAD, {desc, cpu(), scratch.reserve(scratch_bytes)}});
    primitive.execute(stream, arguments);
    stream.wait();
    scratch.trim();
  }
};

// The plans used last. Plans in use outlive their removal.
class PlanCache {
 public:
  static constexpr size_t kLimit = 256;

  static PlanCache& instance() {
    static PlanCache* const cache = new PlanCache;  // never destroyed: threads of XLA may outlive the main one
    return *cache;
  }

  // The plan of `key`, which is made by `make` unless it is held. Keys of different operations differ in length.
  template <typename Plan, typename Make>
  std::shared_ptr<const Plan> find(Dims key, const Make& make) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = places_.find(key);
      if (found != places_.end()) {
        entries_.splice(entries_.begin(), entries_, found->second);
        return std::static_pointer_cast<const Plan>(found->second->second);
      }
    }
    std::shared_ptr<const Plan> plan = make();  // takes milliseconds: without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [place, is_new] = places_.try_emplace(key);
    if (!is_new) return std::static_pointer_cast<const Plan>(place->second->second);
    entries_.emplace_front(std::move(key), plan);
    place->second = entries_.begin();
    if (entries_.size() > kLimit) {
      places_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return plan;
  }

  size_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_.size();
  }

 private:
  using Entry = std::pair<Dims, std::shared_ptr<const void>>;
  std::mutex mutex_;
  std::list<Entry> entries_;
  std::map<Dims, std::list<Entry>::iterator> places_;
};

}  // namespace jaxnn

#endif  // JAXNN_PRIMITIVES_H_
