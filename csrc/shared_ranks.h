// Ranks in processes of one host. All of them map one file in memory: a line for each rank, the command that the leading
// rank gave last, and what the caller places behind, such as activations, which ranks read of each other in place.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "group.h"

namespace quire {

// A command, and what it is about; the meaning is the caller's.
using Command = std::array<int32_t, 10>;

class SharedRanks {
 public:
  static constexpr int kMost = 64;

  // Maps `bytes` of a file of zeros, or of one that other ranks have mapped. `rank` is this process's, -1 for one that is
  // none and passes on what a leading rank on another node says. `crowded`: there are more threads than processors, so
  // waiting threads sleep at once. Throws std::system_error, and std::invalid_argument for a rank that cannot be.
  SharedRanks(int fd, size_t bytes, int size, int rank, bool crowded);
  ~SharedRanks();
  SharedRanks(const SharedRanks&) = delete;
  SharedRanks& operator=(const SharedRanks&) = delete;

  static size_t header_bytes();  // what the caller places begins there
  char* data() const { return data_; }
  int size() const { return size_; }

  // End the wait of all ranks, now and later: one will not come.
  void leave();
  bool left() const;
  // A number that rises while the process of a rank runs; it stands still in one that was stopped or has ended.
  uint64_t beats(int rank) const;
  // Nanoseconds that a rank has spent in commands, without those in which it waited for others to finish.
  uint64_t worked(int rank) const;
  // Those of them in which it waited for rows of the other ranks of its group.
  uint64_t waited(int rank) const;
  // This rank has waited for rows, elsewhere than in a group of these ranks.
  void wait_more(uint64_t nanoseconds);

  // The leading rank gives a command once all have finished the last one.
  void say(const Command& command);
  // Waits for a command that this rank did not hear yet; false when a rank has left.
  bool hear(Command& command);
  // This rank is done with the last command, with a result.
  void finish(int32_t result);
  // The same of a rank on another node, which has worked and waited so long in all.
  void finished(int rank, int32_t result, uint64_t worked, uint64_t waited);
  // Waits until ranks first … first + count - 1 have finished the last command; false when a rank has left.
  bool wait(int first, int count);
  int32_t result(int rank) const;

  // Rounds, in which each of several leading ranks gives one command to its own: one of them begins a round, and the
  // others come to it.
  void begin_round(uint32_t round);
  // Waits for the round behind this one, or until `rouse`; false when a rank has left.
  bool await_round(uint32_t round);
  uint32_t round() const;
  void rouse();

 private:
  friend class SharedGroup;
  friend class SpanningGroup;
  struct Line;
  struct Header;
  class Heart;
  bool meet(int first, int count);
  // The rows that a rank shows, which are in this memory.
  void show(int rank, const Shown& rows);
  Shown shown(int rank) const;
  Header& header() const;
  Line& line(int rank) const;

  char* data_ = nullptr;
  const size_t bytes_;
  const int size_, rank_;
  const bool crowded_;
  uint32_t heard_ = 0;
  std::chrono::steady_clock::time_point began_{};  // of the last command, later by what was waited in it
  ThreadOwner<Heart> heart_;
};

// Some of the ranks, which run a program together. The rows that they show are in the memory that they share.
class SharedGroup final : public Group {
 public:
  // Ranks first … first + size - 1 of `ranks`, which outlives the group. `uneven`: each may show another number of rows.
  SharedGroup(SharedRanks& ranks, int first, int size, bool uneven = false);
  int size() const override { return static_cast<int>(shown_.size()); }
  bool exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) override;

 private:
  SharedRanks& ranks_;
  const int first_;
  const bool uneven_;
  std::vector<Shown> shown_;
};

}  // namespace quire
