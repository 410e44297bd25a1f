// A pool of threads, and parallel loops on it whose caller works too.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxnn {

class Pool {
 public:
  explicit Pool(int64_t num_threads) : num_threads_(std::max<int64_t>(num_threads, 1)) {}
  virtual ~Pool() = default;
  int64_t num_threads() const { return num_threads_; }  // with the caller
  virtual void schedule(std::function<void()> task) = 0;

 private:
  const int64_t num_threads_;
};

// Calls body(i) for each i in 0…count-1 and returns when all calls have returned. An exception of a call is thrown
// again in the caller; the other calls still run.
//
// The indices are claimed one by one, also by the caller, which waits only for those that others have claimed. So a pool
// whose threads are all busy, or wait in loops of their own, cannot block it. A task that starts after the end finds
// nothing to claim.
template <typename Body>
void parallel_for(Pool& pool, int64_t count, const Body& body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable finished;
    int64_t num_finished = 0;
    std::exception_ptr error;
  };
  const auto state = std::make_shared<State>();
  // The body lives as long as an index can be claimed: the caller stays for each.
  const auto work = [state, count, &body] {
    std::exception_ptr error;
    int64_t mine = 0;
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) {
      try {
        body(i);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (error && !state->error) state->error = std::move(error);
    if ((state->num_finished += mine) == count) state->finished.notify_one();
  };
  const int64_t helpers = std::min(count, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.schedule(work);
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->num_finished >= count; });
  if (state->error) std::rethrow_exception(state->error);
}

// Calls body(member, part, parts) for each part of each member: as many as there are threads, but at most `worthwhile`.
template <typename Body>
void for_each_part(Pool& pool, int64_t members, int64_t worthwhile, const Body& body) {
  const int64_t parts = std::clamp<int64_t>(worthwhile, 1, pool.num_threads());
  parallel_for(pool, members * parts, [&](int64_t index) { body(index / parts, index % parts, parts); });
}

}  // namespace jaxnn
