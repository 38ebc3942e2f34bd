#include "fields.h"

#include <climits>
#include <stdexcept>

#include "op.h"

namespace quire {

void Fields::refuse(const std::string& field, const std::string& what) const {
  throw std::invalid_argument(kind_ + "." + field + ": " + what);
}

void Fields::require(bool right, const char* what) const {
  if (!right) throw std::invalid_argument(kind_ + ": " + what);
}

void Fields::check_all_read() const {
  for (const auto& [name, unused] : values_)
    if (!read_.count(name)) refuse(name, "this op has no such field");
}

const FieldValue& Fields::value(const std::string& name) {
  const auto found = values_.find(name);
  if (found == values_.end()) refuse(name, "missing");
  read_.insert(name);
  return found->second;
}

bool Fields::none(const std::string& name) const {
  const auto found = values_.find(name);
  return found != values_.end() && std::holds_alternative<std::monostate>(found->second);
}

const std::string& Fields::text(const std::string& name) {
  const std::string* found = std::get_if<std::string>(&value(name));
  if (!found) refuse(name, "must be a name");
  return *found;
}

const Buffer& Fields::buffer(const std::string& name) {
  const auto found = context_.buffer_names.find(text(name));
  if (found == context_.buffer_names.end()) refuse(name, "no buffer is named '" + text(name) + "'");
  return *found->second;
}

const Buffer* Fields::optional_buffer(const std::string& name) {
  return std::holds_alternative<std::monostate>(value(name)) ? nullptr : &buffer(name);
}

const Param& Fields::weight(const std::string& name) {
  const Param& found = context_.weights.at(text(name));
  if (found.layout == Param::Layout::vector) refuse(name, "'" + text(name) + "' is a vector");
  return found;
}

const Param& Fields::vector(const std::string& name) {
  const Param& found = context_.weights.at(text(name));
  if (found.layout != Param::Layout::vector) refuse(name, "'" + text(name) + "' is not a vector");
  return found;
}

const Param* Fields::optional_vector(const std::string& name) {
  return std::holds_alternative<std::monostate>(value(name)) ? nullptr : &vector(name);
}

const LowRank& Fields::low_rank(const std::string& name) { return context_.adapters.layout().at(text(name)); }

const LowRank* Fields::optional_low_rank(const std::string& name) {
  return std::holds_alternative<std::monostate>(value(name)) ? nullptr : &low_rank(name);
}

const KVLayer* Fields::optional_kv_layer(const std::string& name) {
  return std::holds_alternative<std::monostate>(value(name)) ? nullptr : &kv_layer(name);
}

const OwnParam* Fields::optional_own(const std::string& name) {
  return std::holds_alternative<std::monostate>(value(name)) ? nullptr : &context_.adapters.layout().own(text(name));
}

const KVLayer& Fields::kv_layer(const std::string& name) {
  const int layer = integer(name);
  if (layer < 0 || layer >= static_cast<int>(context_.kv_layers.size())) refuse(name, "no such layer");
  return context_.kv_layers[layer];
}

const Rope* Fields::optional_rope(const std::string& name) {
  if (std::holds_alternative<std::monostate>(value(name))) return nullptr;
  const int rope = integer(name);
  if (rope < 0 || rope >= static_cast<int>(context_.ropes.size())) refuse(name, "no such rope");
  return &context_.ropes[rope];
}

int Fields::integer(const std::string& name) {
  const int64_t* found = std::get_if<int64_t>(&value(name));
  if (!found || *found < INT_MIN || *found > INT_MAX) refuse(name, "must be an integer");
  return static_cast<int>(*found);
}

float Fields::number(const std::string& name) {
  const FieldValue& found = value(name);
  if (const double* real = std::get_if<double>(&found)) return static_cast<float>(*real);
  if (const int64_t* whole = std::get_if<int64_t>(&found)) return static_cast<float>(*whole);
  refuse(name, "must be a number");
}

bool Fields::flag(const std::string& name) {
  const bool* found = std::get_if<bool>(&value(name));
  if (!found) refuse(name, "must be true or false");
  return *found;
}

int Fields::choice(const std::string& name, const char* const* words, size_t count) {
  const std::string& given = text(name);
  for (size_t i = 0; i < count; ++i)
    if (given == words[i]) return static_cast<int>(i);
  refuse(name, "'" + given + "' is not known here");
}

// ---- kinds of ops -------------------------------------------------------------------------------------------------

namespace {

// Filled before main() by the static objects of the ops' files, in any order.
std::unordered_map<std::string, OpMaker>& makers() {
  static std::unordered_map<std::string, OpMaker> found;
  return found;
}

}  // namespace

bool register_op(const char* kind, OpMaker maker) { return makers().emplace(kind, maker).second; }

std::unique_ptr<Op> make_op(const std::string& kind, const FieldMap& values, Context& context) {
  const auto found = makers().find(kind);
  if (found == makers().end()) throw std::invalid_argument("no op of kind '" + kind + "' is known here");
  Fields fields(kind, values, context);
  std::unique_ptr<Op> op = found->second(fields, context);
  fields.check_all_read();
  return op;
}

}  // namespace quire
