// The numbers of a request's SamplingParams (src/quire/types.py), under the same names.
//
// A line is a field of the record, and it is read from Python's SamplingParams by its name: a new one needs nothing
// more than the code that heeds it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// X(type, name, value unless asked for)
#define QUIRE_SAMPLING_PARAMS(X)              \
  X(double, temperature, 1.0)                 \
  X(int, top_k, 0) /* below 1 is off */       \
  X(double, top_p, 1.0)                       \
  X(double, min_p, 0.0)                       \
  X(double, typical_p, 1.0)                   \
  X(double, top_n_sigma, -1.0) /* 0 is off */ \
  X(double, xtc_probability, 0.0)             \
  X(double, xtc_threshold, 0.1)               \
  X(int, min_keep, 0)                         \
  X(double, dynatemp_range, 0.0)              \
  X(double, dynatemp_exponent, 1.0)           \
  X(int, mirostat, 0)                         \
  X(double, mirostat_tau, 5.0)                \
  X(double, mirostat_eta, 0.1)                \
  X(double, repetition_penalty, 1.0)          \
  X(double, frequency_penalty, 0.0)           \
  X(double, presence_penalty, 0.0)            \
  X(int, repeat_last_n, -1) /* all */         \
  X(double, dry_multiplier, 0.0)              \
  X(double, dry_base, 1.75)                   \
  X(int, dry_allowed_length, 2)               \
  X(int, dry_penalty_last_n, -1) /* all */    \
  X(double, guidance_scale, 1.0)              \
  X(double, watermark_delta, 0.0)             \
  X(double, watermark_gamma, 0.25)            \
  X(int, watermark_key, 15485863)             \
  X(int, min_tokens, 0)                       \
  X(int, logprobs, -1) /* -1 for none at all */

// In the order of SAMPLERS in src/quire/types.py. Mirostat is asked for by its parameter.
enum class ChainStep : int32_t { penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, mirostat };
constexpr size_t kMostSteps = 16;  // of a chain

struct SamplingParams {
#define QUIRE_FIELD(type, name, value) type name = value;
  QUIRE_SAMPLING_PARAMS(QUIRE_FIELD)
#undef QUIRE_FIELD

  bool penalized() const {
    return (repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0) && repeat_last_n != 0;
  }
  bool dry() const { return dry_multiplier != 0.0 && dry_penalty_last_n != 0; }
  // Whether steps are asked for that the truncations of RowSampler do not have.
  bool beyond_truncation() const {
    return typical_p < 1.0 || top_n_sigma > 0.0 || xtc_probability > 0.0 || min_keep > 1 || dynatemp_range > 0.0 ||
           mirostat != 0;
  }
};

}  // namespace quire
