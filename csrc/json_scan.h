// What JSON leaves open and a server has to refuse: keys that repeat, deep nesting, more values than it has room for.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace quire {

// The limits of a text. `parts` are its strings, keys and brackets, closing ones too; `values` are its commas, and one.
struct JsonLimits {
  size_t depth = 0, parts = 0, values = 0;
};

// What a text is refused for: what is wrong, and the key that it is wrong about, if it is about one.
struct JsonRefused {
  std::string why;
  std::optional<std::string> key;
};

// The keys of the outermost object of a text in UTF-8. Keys are compared with their escapes resolved. Throws JsonRefused.
// Time is O(n log n) in the bytes, whatever they are: a table of hashes could be made slow. Malformed text may pass, with
// any keys.
std::vector<std::string> scan_json(std::string_view text, const JsonLimits& limits);

}  // namespace quire
