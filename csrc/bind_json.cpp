// Python bindings of the scan of JSON texts.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "json_scan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::tuple scan(const nb::bytes& text, size_t depth, size_t parts, size_t values) {
  std::vector<std::string> keys;
  std::optional<quire::JsonRefused> refused;
  {
    nb::gil_scoped_release other_threads_run;
    try {
      keys = quire::scan_json({text.c_str(), text.size()}, {depth, parts, values});
    } catch (quire::JsonRefused& why) {
      refused = std::move(why);
    }
  }
  if (!refused) return nb::make_tuple(keys, "", nb::none());
  return nb::make_tuple(keys, refused->why, refused->key);
}

}  // namespace

void bind_json(nb::module_& m) {
  m.def(
      "scan_json", &scan, "text"_a, "depth"_a, "parts"_a, "values"_a,
      nb::sig("def scan_json(text: bytes, depth: int, parts: int, values: int) -> tuple[list[str], str, str | None]"),
      "The keys of the outermost object of a JSON text in UTF-8, or why it is refused, and the key that this is about: a "
      "key that repeats in an object, nesting over `depth`, more strings and brackets than `parts` or more values than "
      "`values`. Malformed text may pass. Releases the interpreter lock.");
}
