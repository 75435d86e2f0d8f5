// LruCache: a bounded cache that evicts the least recently used entry.
#ifndef QSHARD_KERNELS_CUDA_GEMM_LRU_CACHE_H_
#define QSHARD_KERNELS_CUDA_GEMM_LRU_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <utility>

namespace qshard {

struct CacheCounts {
  int64_t hits = 0, misses = 0;
};

// Not thread-safe.
template <class Key, class Value>
class LruCache {
 public:
  explicit LruCache(size_t capacity) : capacity_(capacity) {}

  // Returns the value of `key` and makes it the most recently used, or null on a miss.
  const Value* Find(const Key& key) {
    const auto found = entries_.find(key);
    ++(found == entries_.end() ? counts_.misses : counts_.hits);
    if (found == entries_.end()) return nullptr;
    order_.splice(order_.begin(), order_, found->second.place);
    return &found->second.value;
  }

  // Adds an entry for a new key. Has no effect if it throws.
  void Insert(const Key& key, Value value) {
    order_.push_front(key);
    try {
      entries_.emplace(key, Entry{std::move(value), order_.begin()});
    } catch (...) {
      order_.pop_front();
      throw;
    }
    if (entries_.size() <= capacity_) return;
    entries_.erase(order_.back());
    order_.pop_back();
  }

  const CacheCounts& counts() const { return counts_; }

 private:
  struct Entry {
    Value value;
    typename std::list<Key>::iterator place;
  };

  size_t capacity_;
  std::list<Key> order_;  // most recently used key first
  std::map<Key, Entry> entries_;
  CacheCounts counts_;
};

}  // namespace qshard

#endif  // QSHARD_KERNELS_CUDA_GEMM_LRU_CACHE_H_
