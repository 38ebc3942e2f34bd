// Ranks that run one program together, each with its own executor and weights, and meet at every collective op.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <vector>

#include "pool.h"

namespace quire {

// Rows that a rank shows to the others: `bytes` of each, `pitch` apart. They read `span` bytes of each, or those if it is 0.
struct Shown {
  const char* data = nullptr;
  size_t pitch = 0, bytes = 0;
  int rows = 0;
  size_t span = 0;

  size_t read() const { return span ? span : bytes; }
};

// What collectives are made of.
class Group {
 public:
  virtual ~Group() = default;
  virtual int size() const = 0;
  // Show rows to every rank, and call take() with what all of them show, in the order of ranks; the rows stay as they are
  // until all have taken. False, without taking, when a rank has left or, unless they are uneven, shows another number of
  // rows.
  virtual bool exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) = 0;
};

// Ranks in threads of one process.
class LocalGroup final : public Group {
 public:
  // `uneven`: each rank may show another number of rows.
  explicit LocalGroup(int size, bool uneven = false);
  int size() const override { return static_cast<int>(shown_.size()); }
  bool exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) override;
  // A rank that will not come: whoever waits for it, now or later, does so no longer.
  void leave();

 private:
  bool meet();

  std::vector<Shown> shown_;
  const bool uneven_;
  Gate gate_;
  std::atomic<int> arrived_{0};
  std::atomic<bool> left_{false};
};

}  // namespace quire
