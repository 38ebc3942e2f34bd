#include "spanning_group.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace quire {

namespace {

constexpr int kSpins = 2000;  // looks at the sockets before the thread sleeps
constexpr int kPollMs = 20;
constexpr size_t kPieces = 64;  // rows of one call
constexpr auto kReason = std::chrono::seconds(5);

bool again(ssize_t n) { return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR); }

}  // namespace

SpanningGroup::SpanningGroup(SharedRanks& ranks, int first, int size, int here, int count,
                             const std::vector<std::pair<int, int>>& peers)
    : ranks_(ranks), first_(first), here_(here), count_(count) {
  if (first < 0 || size < 1 || first + size > ranks.size() || here < first || count < 1 || here + count > first + size)
    throw std::invalid_argument("a group of ranks that are not there");
  for (const auto& [rank, fd] : peers) {
    if (rank < 0 || rank >= size || (first + rank >= here && first + rank < here + count))
      throw std::invalid_argument("peers: rank " + std::to_string(rank) + " is not on another node");
    peers_.push_back({rank, fd, 0, 0, {}});
  }
  shown_.resize(static_cast<size_t>(size));
}

bool SpanningGroup::exchange(int rank, const Shown& mine, const std::function<void(const std::vector<Shown>&)>& take) {
  ranks_.show(first_ + rank, mine);
  const auto since = std::chrono::steady_clock::now();
  if (!travel(mine)) return apart();
  ranks_.wait_more(static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - since).count()));
  if (!ranks_.meet(here_, count_)) return false;
  for (int other = 0; other < size(); ++other) shown_[static_cast<size_t>(other)] = ranks_.shown(first_ + other);
  const bool same = std::all_of(shown_.begin(), shown_.end(), [&](const Shown& s) { return s.rows == mine.rows; });
  if (same) take(shown_);
  // Nobody here takes rows of the next exchange before all have taken these.
  return ranks_.meet(here_, count_) && same;
}

// Sends rows to all peers, and receives theirs at the same time: a peer that sends, too, may wait until its own are taken.
bool SpanningGroup::travel(const Shown& mine) {
  const Head head{static_cast<uint64_t>(mine.data - ranks_.data()), mine.bytes, mine.read(), mine.rows, ++number_};
  const size_t whole = sizeof(Head) + mine.read() * static_cast<size_t>(mine.rows);
  for (Peer& peer : peers_) peer.sent = peer.received = 0;
  std::vector<pollfd> waits;
  for (int idle = 0;; ++idle) {
    bool moved = false;
    waits.clear();
    for (Peer& peer : peers_) {
      if (peer.sent < whole && !send(peer, head, mine, moved)) return false;
      if (!receive(peer, moved)) return false;
      const bool coming = peer.received < sizeof(Head) ||
                          peer.received < sizeof(Head) + peer.head.span * peer.head.rows;
      if (peer.sent < whole || coming)
        waits.push_back({peer.fd, static_cast<short>((coming ? POLLIN : 0) | (peer.sent < whole ? POLLOUT : 0)), 0});
    }
    if (waits.empty()) break;
    if (moved) idle = 0;
    if (idle < kSpins && !ranks_.crowded_) continue;
    if (ranks_.left()) return false;
    if (!moved) poll(waits.data(), waits.size(), kPollMs);
  }
  for (const Peer& peer : peers_) {
    const char* rows = ranks_.data() + peer.head.offset;
    ranks_.show(first_ + peer.rank, {rows, peer.head.span, peer.head.bytes, peer.head.rows, 0});
  }
  return true;
}

bool SpanningGroup::send(Peer& peer, const Head& head, const Shown& mine, bool& moved) {
  iovec pieces[kPieces + 1];
  const size_t span = mine.read();
  size_t count = 0, row = 0, skip = 0;
  if (peer.sent < sizeof(Head)) {
    const char* at = reinterpret_cast<const char*>(&head);
    pieces[count++] = {const_cast<char*>(at + peer.sent), sizeof(Head) - peer.sent};
  } else if (span) {
    row = (peer.sent - sizeof(Head)) / span, skip = (peer.sent - sizeof(Head)) % span;
  }
  const auto rows = static_cast<size_t>(mine.rows);
  if (mine.pitch == span && row < rows) {  // they lie together
    const size_t at = row * span + skip;
    pieces[count++] = {const_cast<char*>(mine.data + at), rows * span - at};
    row = rows;
  }
  for (; row < rows && count <= kPieces; ++row, skip = 0)
    pieces[count++] = {const_cast<char*>(mine.data + row * mine.pitch + skip), span - skip};
  msghdr message{};
  message.msg_iov = pieces, message.msg_iovlen = count;
  const ssize_t n = sendmsg(peer.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0) return again(n);
  peer.sent += static_cast<size_t>(n), moved = moved || n;
  return true;
}

bool SpanningGroup::receive(Peer& peer, bool& moved) {
  while (true) {
    char* to = reinterpret_cast<char*>(&peer.head) + peer.received;
    size_t most = sizeof(Head) - peer.received;
    if (peer.received >= sizeof(Head)) {
      const size_t at = peer.received - sizeof(Head);
      to = ranks_.data() + peer.head.offset + at;
      most = peer.head.span * peer.head.rows - at;
    }
    if (!most) return true;
    const ssize_t n = recv(peer.fd, to, most, MSG_DONTWAIT);
    if (n <= 0) return again(n);
    peer.received += static_cast<size_t>(n), moved = true;
    if (peer.received == sizeof(Head) && !fits(peer.head)) return false;
  }
}

// Whether rows are of this exchange, and lie in the memory behind the header.
bool SpanningGroup::fits(const Head& head) const {
  const size_t begin = SharedRanks::header_bytes();
  return head.number == number_ && head.rows >= 0 && head.offset >= begin && head.offset <= ranks_.bytes_ &&
         head.bytes <= head.span &&
         (!head.rows || head.span <= (ranks_.bytes_ - head.offset) / static_cast<size_t>(head.rows));
}

// A connection has ended, or has something else. Whoever watches the nodes says why in a moment.
bool SpanningGroup::apart() {
  const auto until = std::chrono::steady_clock::now() + kReason;
  while (!ranks_.left() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return false;
}

}  // namespace quire
