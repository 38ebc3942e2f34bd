// Fields of an op by name, as Python declares them; a field of a nested record is named "shape.heads".
//
// Every field is read exactly by the kind of op that it belongs to: what is missing, of another type or left over is
// refused with the op's kind and the field's name.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>

#include "context.h"

namespace quire {

using FieldValue = std::variant<std::monostate, bool, int64_t, double, std::string>;
using FieldMap = std::unordered_map<std::string, FieldValue>;

class Fields {
 public:
  Fields(const std::string& kind, const FieldMap& values, const Context& context)
      : kind_(kind), values_(values), context_(context) {}

  // ---- what names refer to --------------------------------------------------------------------------------------
  const Buffer& buffer(const std::string& name);
  const Buffer* optional_buffer(const std::string& name);  // null for None
  const Param& weight(const std::string& name);            // packed, or a table
  const Param& vector(const std::string& name);
  const Param* optional_vector(const std::string& name);
  const LowRank& low_rank(const std::string& name);
  const LowRank* optional_low_rank(const std::string& name);
  const OwnParam* optional_own(const std::string& name);
  const KVLayer& kv_layer(const std::string& name);
  const Rope* optional_rope(const std::string& name);

  // ---- values ---------------------------------------------------------------------------------------------------
  int integer(const std::string& name);
  float number(const std::string& name);
  bool flag(const std::string& name);
  // Which of these words it is, by number.
  template <size_t N>
  int choice(const std::string& name, const char* const (&words)[N]) {
    return choice(name, words, N);
  }
  bool none(const std::string& name) const;  // does not count as reading it
  // A nested record of this class.
  void record(const std::string& name, const char* cls) { choice(name, &cls, 1); }
  // A field that says nothing to the op.
  void skip(const std::string& name) { value(name); }

  // Throws with the op's kind, and `what` when `right` is false.
  void require(bool right, const char* what) const;
  // Throws when a field was not read.
  void check_all_read() const;

 private:
  int choice(const std::string& name, const char* const* words, size_t count);
  const FieldValue& value(const std::string& name);
  const std::string& text(const std::string& name);
  [[noreturn]] void refuse(const std::string& field, const std::string& what) const;

  const std::string& kind_;
  const FieldMap& values_;
  const Context& context_;
  std::set<std::string> read_;
};

}  // namespace quire
