#include "json_scan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <utility>

namespace quire {
namespace {

struct Key {
  std::string_view name;
  size_t at;  // of its quote
};

struct Bracket {
  bool object;
  size_t keys;  // known where it opened
};

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

void put_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr std::array<uint32_t, 4> kLead{0, 0xC0, 0xE0, 0xF0};
  out += static_cast<char>(kLead[more] | code >> 6 * more);
  for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
}

// The four hexadecimal digits at `at`.
std::optional<uint32_t> code_unit(std::string_view text, size_t at) {
  if (at + 4 > text.size()) return {};
  uint32_t code = 0;
  for (const char c : text.substr(at, 4)) {
    const char lower = static_cast<char>(c | 0x20);
    if (c >= '0' && c <= '9')
      code = code * 16 + static_cast<uint32_t>(c - '0');
    else if (lower >= 'a' && lower <= 'f')
      code = code * 16 + static_cast<uint32_t>(lower - 'a' + 10);
    else
      return {};
  }
  return code;
}

// The character of the \u before `at`, which moves behind it; none for half of a surrogate pair.
std::optional<uint32_t> character(std::string_view text, size_t& at) {
  const auto first = code_unit(text, at);
  if (!first) return {};
  at += 4;
  if (*first < 0xD800 || *first > 0xDFFF) return first;
  if (*first > 0xDBFF || text.substr(at, 2) != "\\u") return {};
  const auto second = code_unit(text, at + 2);
  if (!second || *second < 0xDC00 || *second > 0xDFFF) return {};
  at += 6;
  return 0x10000 + ((*first - 0xD800) << 10) + (*second - 0xDC00);
}

// A string between its quotes with its escapes resolved; none if one is wrong.
std::optional<std::string> resolve(std::string_view quoted) {
  constexpr std::string_view kLetters = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
  std::string out;
  for (size_t at = 0; at < quoted.size();) {
    const char c = quoted[at++];
    if (c != '\\') {
      out += c;
      continue;
    }
    if (at == quoted.size()) return {};
    const char letter = quoted[at++];
    if (const size_t known = kLetters.find(letter); known != kLetters.npos) {
      out += kMeant[known];
      continue;
    }
    const auto code = letter == 'u' ? character(quoted, at) : std::nullopt;
    if (!code) return {};
    put_utf8(out, *code);
  }
  return out;
}

class Scan {
 public:
  Scan(std::string_view text, const JsonLimits& limits) : text_(text), limits_(limits) {}

  std::vector<std::string> run() {
    for (size_t at = 0; at < text_.size();) {
      const char c = text_[at];
      if (c == '"')
        at = string(at);
      else {
        if (c == '{' || c == '[')
          open(c == '{');
        else if (c == '}' || c == ']')
          close();
        else if (c == ',' && ++values_ > limits_.values)
          refuse("more than " + std::to_string(limits_.values) + " values");
        ++at;
      }
    }
    return std::move(top_);
  }

 private:
  [[noreturn]] static void refuse(std::string why, std::optional<std::string> key = {}) {
    throw JsonRefused{std::move(why), std::move(key)};
  }

  void count_part() {
    if (++parts_ > limits_.parts)
      refuse("more than " + std::to_string(limits_.parts) + " keys, strings, objects and arrays");
  }

  // Returns the place behind the string, or the end of the text if it is not closed.
  size_t string(size_t start) {
    count_part();
    size_t end = start + 1;
    bool escaped = false;
    while (end < text_.size() && text_[end] != '"') {
      escaped |= text_[end] == '\\';
      end += text_[end] == '\\' ? 2 : 1;
    }
    if (end >= text_.size()) return text_.size();
    size_t next = end + 1;
    while (next < text_.size() && is_space(text_[next])) ++next;
    const bool key = next < text_.size() && text_[next] == ':';
    if (key && !open_.empty() && open_.back().object) add_key(start, end, escaped);
    return end + 1;
  }

  void add_key(size_t start, size_t end, bool escaped) {
    std::string_view name = text_.substr(start + 1, end - start - 1);
    if (escaped) {
      auto resolved = resolve(name);
      if (!resolved) refuse("the key at byte " + std::to_string(start) + " is not a valid string");
      name = resolved_.emplace_back(std::move(*resolved));
    }
    keys_.push_back({name, start});
  }

  void open(bool object) {
    count_part();
    if (open_.size() == limits_.depth) refuse("nested more than " + std::to_string(limits_.depth) + " levels deep");
    open_.push_back({object, keys_.size()});
  }

  void close() {
    count_part();
    if (open_.empty()) return;
    const auto first = keys_.begin() + static_cast<std::ptrdiff_t>(open_.back().keys);
    if (open_.size() == 1)
      for (auto key = first; key != keys_.end(); ++key) top_.emplace_back(key->name);
    check_unique(first);
    keys_.erase(first, keys_.end());
    open_.pop_back();
  }

  void check_unique(std::vector<Key>::iterator first) {
    const auto before = [](const Key& a, const Key& b) { return a.name != b.name ? a.name < b.name : a.at < b.at; };
    std::sort(first, keys_.end(), before);
    const auto alike = [](const Key& a, const Key& b) { return a.name == b.name; };
    const auto found = std::adjacent_find(first, keys_.end(), alike);
    if (found == keys_.end()) return;
    refuse("occurs twice in one object (byte " + std::to_string(found[1].at) + ")", std::string(found->name));
  }

  std::string_view text_;
  JsonLimits limits_;
  size_t parts_ = 0, values_ = 1;
  std::vector<Bracket> open_;
  std::vector<Key> keys_;             // of the objects that are open, the outermost first
  std::deque<std::string> resolved_;  // keys that had escapes
  std::vector<std::string> top_;
};

}  // namespace

std::vector<std::string> scan_json(std::string_view text, const JsonLimits& limits) { return Scan(text, limits).run(); }

}  // namespace quire
