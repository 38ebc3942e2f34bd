#include "shared_ranks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "sizes.h"

namespace quire {

namespace {

constexpr auto kBeat = std::chrono::milliseconds(50);

uint64_t nanoseconds_since(std::chrono::steady_clock::time_point begin) {
  return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
}

}  // namespace

// All zeros at first. No two ranks write to one cache line, where they meet aside.
struct alignas(kAlignment) SharedRanks::Line {
  std::atomic<uint64_t> beats, worked, waited;
  std::atomic<uint32_t> finished;  // number of the last command that the rank is done with
  std::atomic<int32_t> result;
  struct {
    size_t offset, pitch, bytes;
    int rows;
  } shown;
  alignas(kAlignment) std::atomic<int> arrived;  // of the group whose first rank this is
  SharedGate met;
};

struct SharedRanks::Header {
  alignas(kAlignment) std::atomic<bool> left;
  alignas(kAlignment) std::atomic<uint32_t> number;  // of the command
  Command command;
  SharedGate said;
  alignas(kAlignment) SharedGate done;
  Line lines[kMost];
};

// A thread that shows that its process runs, also while the others compute or wait.
class SharedRanks::Heart {
 public:
  explicit Heart(std::atomic<uint64_t>& beats)
      : thread_([this, &beats] {
          std::unique_lock<std::mutex> lock(mutex_);
          do beats.fetch_add(1, std::memory_order_relaxed);
          while (!ended_.wait_for(lock, kBeat, [this] { return stop_; }));
        }) {}
  ~Heart() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool stop_ = false;
  std::thread thread_;
};

SharedRanks::SharedRanks(int fd, size_t bytes, int size, int rank, bool crowded)
    : bytes_(bytes), size_(size), rank_(rank), crowded_(crowded) {
  if (size < 1 || size > kMost || rank < -1 || rank >= size || bytes < header_bytes())
    throw std::invalid_argument("rank: " + std::to_string(rank) + " of " + std::to_string(size) + " ranks, at most " +
                                std::to_string(kMost) + ", in " + std::to_string(bytes) + " bytes");
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (map == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory of ranks");
  data_ = static_cast<char*>(map);
  if (rank >= 0) heart_ = ThreadOwner<Heart>(new Heart(line(rank).beats));
}

SharedRanks::~SharedRanks() {
  heart_.reset();
  munmap(data_, bytes_);
}

size_t SharedRanks::header_bytes() { return align_up(sizeof(Header), 4096); }
SharedRanks::Header& SharedRanks::header() const { return *reinterpret_cast<Header*>(data_); }
SharedRanks::Line& SharedRanks::line(int rank) const { return header().lines[rank]; }
bool SharedRanks::left() const { return header().left.load(); }
uint64_t SharedRanks::beats(int rank) const { return line(rank).beats.load(std::memory_order_relaxed); }
uint64_t SharedRanks::worked(int rank) const { return line(rank).worked.load(std::memory_order_relaxed); }
uint64_t SharedRanks::waited(int rank) const { return line(rank).waited.load(std::memory_order_relaxed); }
int32_t SharedRanks::result(int rank) const { return line(rank).result.load(std::memory_order_acquire); }

void SharedRanks::leave() {
  header().left.store(true);
  header().said.open();
  header().done.open();
  for (int rank = 0; rank < size_; ++rank) line(rank).met.open();
}

void SharedRanks::say(const Command& command) {
  began_ = std::chrono::steady_clock::now();
  header().command = command;
  header().number.fetch_add(1, std::memory_order_release);
  header().said.open();
}

bool SharedRanks::hear(Command& command) {
  for (;;) {
    const uint32_t before = header().said.value();
    if (left()) return false;
    if (header().number.load(std::memory_order_acquire) != heard_) break;
    header().said.wait_while(before, !crowded_);
  }
  ++heard_;
  command = header().command;
  began_ = std::chrono::steady_clock::now();
  return true;
}

void SharedRanks::finish(int32_t result) {
  line(rank_).worked.fetch_add(nanoseconds_since(began_), std::memory_order_relaxed);
  line(rank_).result.store(result, std::memory_order_relaxed);
  line(rank_).finished.store(header().number.load(std::memory_order_relaxed), std::memory_order_release);
  header().done.open();
}

void SharedRanks::wait_more(uint64_t nanoseconds) {
  line(rank_).waited.fetch_add(nanoseconds, std::memory_order_relaxed);
}

void SharedRanks::finished(int rank, int32_t result, uint64_t worked, uint64_t waited) {
  line(rank).worked.store(worked, std::memory_order_relaxed);
  line(rank).waited.store(waited, std::memory_order_relaxed);
  line(rank).result.store(result, std::memory_order_relaxed);
  line(rank).finished.store(header().number.load(std::memory_order_relaxed), std::memory_order_release);
  header().done.open();
}

bool SharedRanks::wait(int first, int count) {
  const uint32_t number = header().number.load(std::memory_order_relaxed);
  const auto since = std::chrono::steady_clock::now();
  for (;;) {
    const uint32_t before = header().done.value();
    if (left()) return false;
    int rank = first;
    while (rank < first + count && line(rank).finished.load(std::memory_order_acquire) == number) ++rank;
    if (rank == first + count) break;
    header().done.wait_while(before, !crowded_);
  }
  if (rank_ >= 0) began_ += std::chrono::steady_clock::now() - since;
  return true;
}

void SharedRanks::begin_round(uint32_t round) {
  auto& number = header().number;
  uint32_t seen = number.load(std::memory_order_relaxed);
  while (static_cast<int32_t>(round - seen) > 0 &&
         !number.compare_exchange_weak(seen, round, std::memory_order_release)) {
  }
  header().said.open();
}

bool SharedRanks::await_round(uint32_t round) {
  const uint32_t before = header().said.value();
  if (!left() && this->round() == round) header().said.wait_while(before, false);
  return !left();
}

uint32_t SharedRanks::round() const { return header().number.load(std::memory_order_acquire); }
void SharedRanks::rouse() { header().said.open(); }

bool SharedRanks::meet(int first, int count) {
  Line& at = line(first);
  const uint32_t before = at.met.value();
  if (left()) return false;
  if (at.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < count) {
    const auto since = std::chrono::steady_clock::now();
    at.met.wait_while(before, !crowded_);
    wait_more(nanoseconds_since(since));
  } else {
    at.arrived.store(0, std::memory_order_relaxed);
    at.met.open();
  }
  return !left();
}

void SharedRanks::show(int rank, const Shown& rows) {
  line(rank).shown = {static_cast<size_t>(rows.data - data_), rows.pitch, rows.bytes, rows.rows};
}

Shown SharedRanks::shown(int rank) const {
  const auto& found = line(rank).shown;
  return {data_ + found.offset, found.pitch, found.bytes, found.rows, 0};
}

SharedGroup::SharedGroup(SharedRanks& ranks, int first, int size, bool uneven)
    : ranks_(ranks), first_(first), uneven_(uneven) {
  if (first < 0 || size < 1 || first + size > ranks.size())
    throw std::invalid_argument("a group of ranks that are not there");
  shown_.resize(static_cast<size_t>(size));
}

bool SharedGroup::exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) {
  ranks_.show(first_ + rank, mine);
  if (!ranks_.meet(first_, size())) return false;
  for (int other = 0; other < size(); ++other) shown_[static_cast<size_t>(other)] = ranks_.shown(first_ + other);
  const bool same = uneven_ ||
                    std::all_of(shown_.begin(), shown_.end(), [&](const Shown& s) { return s.rows == mine.rows; });
  if (same) take(shown_);
  return ranks_.meet(first_, size()) && same;
}

}  // namespace quire
