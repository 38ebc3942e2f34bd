#include "wire_heart.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>

namespace quire {

namespace {

constexpr int kBeatMs = 200;

}  // namespace

WireHeart::WireHeart(int fd) : fd_(fd), thread_([this] { beat(); }) {}

WireHeart::~WireHeart() {
  stop_.store(true);
  shutdown(fd_, SHUT_RDWR);  // ends the wait
  thread_.join();
}

void WireHeart::beat() {
  using clock = std::chrono::steady_clock;
  char bytes[64] = {1};
  for (auto next = clock::now(); !stop_.load(); next += std::chrono::milliseconds(kBeatMs)) {
    send(fd_, bytes, 1, MSG_DONTWAIT | MSG_NOSIGNAL);  // one that does not arrive is one that is not seen
    for (auto now = clock::now(); now < next + std::chrono::milliseconds(kBeatMs) && !stop_.load();
         now = clock::now()) {
      const auto left = next + std::chrono::milliseconds(kBeatMs) - now;
      pollfd wait{fd_, POLLIN, 0};
      const int ready = poll(&wait, 1,
                             1 + static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count()));
      if (ready <= 0) continue;
      const ssize_t n = recv(fd_, bytes + 1, sizeof(bytes) - 1, MSG_DONTWAIT);
      if (n > 0) beats_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
      if (n == 0) return;  // it has ended
      if (n < 0 && errno != EAGAIN && errno != EINTR) return;
    }
    if (clock::now() > next + std::chrono::seconds(2)) next = clock::now();  // this process was stopped
  }
}

}  // namespace quire
