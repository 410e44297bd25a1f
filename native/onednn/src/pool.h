// A parallel loop on XLA's thread pool, whose caller works too.

#ifndef JAXNN_POOL_H_
#define JAXNN_POOL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxnn {

// Calls body(i) for each i in 0…count-1 and returns when all calls have returned. An exception of a call is thrown
// again in the caller; the other calls still run.
//
// Pool has num_threads() and Schedule(function), as xla::ffi::ThreadPool. The indices are claimed one by one, also by
// the caller, which waits only for those that others have claimed. So a pool of which all threads are busy, or wait in
// loops of their own, cannot block it. A task that starts after the end finds nothing to claim.
template <typename Pool, typename Body>
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
  const int64_t helpers = std::min(count - 1, std::max<int64_t>(pool.num_threads() - 1, 0));
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(work)>(work));
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->num_finished >= count; });
  if (state->error) std::rethrow_exception(state->error);
}

}  // namespace jaxnn

#endif  // JAXNN_POOL_H_
