// What kernels of oneDNN share: primitives that run on one thread, and a cache of them. Without oneDNN, nothing.

#pragma once

#include <cstdint>

#include "common/instructions.h"

#ifdef JAXNN_ONEDNN
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef JAXNN_OPENMP
#include <omp.h>
#endif

#include "common/buffer.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace jaxnn {

constexpr bool kHasOnednn = true;

using Dims = std::vector<int64_t>;

inline dnnl::memory::data_type dnnl_type(Type type) {
  return type == Type::kFloat32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
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
    const dnnl::memory::desc desc(size, dnnl::memory::data_type::u8, Dims{1});
    if (scratch_bytes) arguments.insert({DNNL_ARG_SCRATCHPAD, {desc, cpu(), scratch.reserve<char>(scratch_bytes)}});
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

// Whether this CPU multiplies in bfloat16 itself; otherwise oneDNN emulates it.
inline bool has_bfloat16() {
  const auto has = [](dnnl::cpu_isa wanted) {
    const int bits = static_cast<int>(wanted);
    return (static_cast<int>(dnnl::get_effective_cpu_isa()) & bits) == bits;
  };
  return has(dnnl::cpu_isa::avx512_core_bf16) || has(dnnl::cpu_isa::avx2_vnni_2);
}

inline int64_t num_plans() { return static_cast<int64_t>(PlanCache::instance().size()); }

// Before oneDNN is used. Returns nullptr or what is wrong.
inline const char* limit_onednn([[maybe_unused]] Instructions most) {
#ifdef __x86_64__
  const auto isa = most == Instructions::kAvx512 ? dnnl::cpu_isa::avx512_core
                   : most == Instructions::kAvx2 ? dnnl::cpu_isa::avx2
                                                 : dnnl::cpu_isa::sse41;
  if (dnnl::set_max_cpu_isa(isa) != dnnl::status::success) return "oneDNN in this process ignores JAXNN_MAX_ISA";
#endif
  return nullptr;
}

}  // namespace jaxnn

#else

namespace jaxnn {

constexpr bool kHasOnednn = false;
inline bool has_bfloat16() { return false; }
inline int64_t num_plans() { return 0; }
inline const char* limit_onednn(Instructions) { return nullptr; }

}  // namespace jaxnn

#endif  // JAXNN_ONEDNN
