// How often each token has come out, and which tokens are known at all: what the penalties look at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace quire {

// A hash table from token id to its number of outputs; a token of the prompt alone has 0. Linear probing over a power
// of two of entries, at most half full.
class TokenCounts {
 public:
  void see(int32_t token) { entry(token); }            // a prompt token
  void add(int32_t token) { ++entry(token).outputs; }  // an output token
  bool has(int32_t token) const { return !table_.empty() && table_[find(table_, token)].token == token; }
  size_t size() const { return used_; }
  size_t bytes() const { return table_.capacity() * sizeof(Entry); }
  // Most bytes ever held for `tokens` tokens, the moment of growing included.
  static size_t bound(size_t tokens) {
    size_t slots = kFirst;
    while (slots < 2 * tokens) slots *= 2;
    return (slots + slots / 2) * sizeof(Entry);
  }

  // f(token, outputs) for every known token, in no particular order.
  template <class F>
  void each(F f) const {
    for (const Entry& e : table_)
      if (e.token >= 0) f(e.token, e.outputs);
  }

 private:
  struct Entry {
    int32_t token = -1;
    uint32_t outputs = 0;
  };
  static constexpr size_t kFirst = 64;

  Entry& entry(int32_t token) {
    if (!table_.empty()) {
      Entry& known = table_[find(table_, token)];
      if (known.token == token) return known;
    }
    if (2 * (used_ + 1) > table_.size()) grow();
    Entry& e = table_[find(table_, token)];
    e.token = token;
    ++used_;
    return e;
  }
  static size_t find(const std::vector<Entry>& table, int32_t token) {
    const size_t mask = table.size() - 1;
    size_t i = (static_cast<uint32_t>(token) * 0x9E3779B1u >> 7) & mask;
    while (table[i].token >= 0 && table[i].token != token) i = (i + 1) & mask;
    return i;
  }
  void grow() {
    std::vector<Entry> larger(table_.empty() ? kFirst : 2 * table_.size());
    for (const Entry& e : table_)
      if (e.token >= 0) larger[find(larger, e.token)] = e;
    table_ = std::move(larger);
  }

  std::vector<Entry> table_;
  size_t used_ = 0;
};

}  // namespace quire
