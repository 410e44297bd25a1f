// Memory that a thread keeps from call to call.

#ifndef JAXNN_BUFFER_H_
#define JAXNN_BUFFER_H_

#include <cstdlib>
#include <memory>
#include <new>

namespace jaxnn {

// Memory of a thread, kept from call to call unless it is large.
class Buffer {
 public:
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
      data_.reset(static_cast<char*>(std::aligned_alloc(kPage, rounded)));
      if (!data_) throw std::bad_alloc();
      size_ = rounded;
    }
    return data_.get();
  }
  void trim() {
    if (size_ <= kKept) return;
    data_.reset();
    size_ = 0;
  }

 private:
  static constexpr size_t kPage = 4096, kKept = size_t{64} << 20;
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

}  // namespace jaxnn

#endif  // JAXNN_BUFFER_H_
