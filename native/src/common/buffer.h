// Memory that a thread keeps from call to call.

#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "common/call.h"

namespace jaxnn {

// Memory of a thread, kept from call to call unless it is large.
class Buffer {
 public:
  // Memory for `count` elements, whose values are undefined. Throws std::bad_alloc, and InvalidArgument as `product`.
  template <typename T = float>
  T* reserve(int64_t count) {
    const size_t bytes = static_cast<size_t>(num_elements({count})) * sizeof(T);
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
      data_.reset(std::aligned_alloc(kPage, rounded));
      if (!data_) throw std::bad_alloc();
      size_ = rounded;
    }
    return static_cast<T*>(data_.get());
  }
  void trim() {
    if (size_ <= kKept) return;
    data_.reset();
    size_ = 0;
  }

 private:
  static constexpr size_t kPage = 4096, kKept = size_t{64} << 20;
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

}  // namespace jaxnn
