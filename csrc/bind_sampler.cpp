// Python bindings of the sampler.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "executor.h"
#include "isa.h"
#include "race.h"
#include "sampler.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::Executor;
using quire::Logprobs;
using quire::SamplerSizes;
using quire::SlotParams;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Distributions = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Guesses = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using View = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>;

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

int thread_count(int threads) {
  if (threads < 1 || threads > 1024)
    throw std::invalid_argument("threads: " + std::to_string(threads) + " is not in [1, 1024]");
  return threads;
}

// How drafts are judged other than by the sample, with the arrays that it refers to.
struct BoundJudging {
  quire::Acceptance acceptance;
  double epsilon;
  std::optional<Logits> proposals;
  std::optional<Ids> lines;
};

quire::Acceptance acceptance_of(const std::string& name) {
  require(name == "rejection" || name == "typical", "acceptance: expected rejection or typical");
  return name == "rejection" ? quire::Acceptance::rejection : quire::Acceptance::typical;
}

// A sampler with threads of its own, or with those of an executor.
class BoundSampler {
 public:
  BoundSampler(const SamplerSizes& sizes, const std::string& isa, int threads)
      : own_(thread_count(threads) > 1 ? new quire::ThreadPool(threads) : nullptr),
        sampler_(sizes, quire::kernels_for(isa), own_.get()) {}
  BoundSampler(const SamplerSizes& sizes, Executor& e) : sampler_(sizes, e.kernels(), &e.pool()) {}

  quire::Sampler& sampler() { return sampler_; }

  int sample(Logits logits, Ids slots, Ids positions, std::optional<Bits> masks, std::optional<Ids> lines,
             std::optional<Logits> maxima, std::optional<Ids> drafts, std::optional<Ids> places,
             const BoundJudging* judging, std::optional<Distributions> distributions, std::optional<Guesses> guesses,
             std::optional<Distributions> chances, std::optional<Ids> guides) {
    require(static_cast<int>(logits.shape(1)) == sampler_.vocab(), "logits: the row length is not the vocabulary size");
    const size_t rows = places ? places->shape(0) : logits.shape(0);
    require(slots.shape(0) == rows, "slots: as many slots as rows of logits are needed");
    require(positions.shape(0) == rows, "positions: as many positions as rows of logits are needed");
    quire::SampleTask task{logits.data(), slots.data(), positions.data(), static_cast<int>(rows)};
    if (places) {
      for (size_t i = 0; i < rows; ++i)
        require(places->data()[i] >= 0 && places->data()[i] < static_cast<int64_t>(logits.shape(0)),
                "places: a row of the logits does not exist");
      task.places = places->data();
    }
    if (guides) {
      require(guides->shape(0) == rows, "guides: expected the number of a row of logits, or -1, for every row");
      for (size_t i = 0; i < rows; ++i)
        require(guides->data()[i] >= -1 && guides->data()[i] < static_cast<int64_t>(logits.shape(0)),
                "guides: a row of the logits does not exist");
      task.guides = guides->data();
    }
    if (masks) {
      require(masks->shape(1) == (logits.shape(1) + 31) / 32, "bitmask: expected lines of ceil(vocab / 32) words");
      require(lines && lines->shape(0) == rows, "bitmask: expected the number of a line per row of logits");
      for (size_t i = 0; i < lines->shape(0); ++i)
        require(lines->data()[i] >= -1 && lines->data()[i] < static_cast<int64_t>(masks->shape(0)),
                "bitmask: a row names a line that does not exist");
      task.masks = reinterpret_cast<const uint32_t*>(masks->data());
      task.lines = lines->data();
    }
    task.maxima = maxima_for(logits, maxima);
    if (drafts) {
      require(drafts->shape(0) == rows, "drafts: expected one per row of logits");
      task.drafts = drafts->data();
    }
    if (judging) task.judging = judging_of(*judging, slots.shape(0));
    if (distributions) {
      require(distributions->shape(0) == slots.shape(0) && distributions->shape(1) == logits.shape(1),
              "distributions: expected a row of the vocabulary size for every row");
      task.distributions = distributions->data();
    }
    if (guesses) {
      require(guesses->shape(0) == slots.shape(0) && guesses->shape(1) <= quire::SampleTask::kMostGuesses,
              "guesses: expected a line of up to 64 for every row");
      require(chances && chances->shape(0) == guesses->shape(0) && chances->shape(1) == guesses->shape(1),
              "chances: expected as many as guesses");
      task.guess_count = static_cast<int>(guesses->shape(1));
      task.guesses = guesses->data();
      task.chances = chances->data();
    }
    nb::gil_scoped_release release;
    return sampler_.sample(task);
  }

  void commit(Ids slots, Ids tokens) {
    require(slots.shape(0) == tokens.shape(0), "slots: expected one per token");
    sampler_.commit(slots.data(), tokens.data(), slots.shape(0));
  }

  // (logprob and rank of the token, ids and logprobs of the most likely ones)
  static nb::tuple to_tuple(const Logprobs& p) {
    nb::list ids, values;
    for (int i = 0; i < p.count; ++i) {
      ids.append(p.ids[i]);
      values.append(p.values[i]);
    }
    return nb::make_tuple(p.chosen, p.rank, ids, values);
  }

  double surprise(int slot) const {
    require(slot >= 0 && slot < sampler_.max_slots() && sampler_.used(slot), "slot: is not in use");
    return sampler_.surprise(slot);
  }

  nb::object logprobs(int row) const {
    require(row >= 0 && row < sampler_.max_rows(), "row: out of range");
    return to_tuple(sampler_.logprobs()[row]);
  }

  nb::object score(Logits logits, Ids targets, int count, std::optional<Logits> maxima) {
    require(static_cast<int>(logits.shape(1)) == sampler_.vocab(), "logits: the row length is not the vocabulary size");
    require(targets.shape(0) == logits.shape(0), "target_token_ids: as many as rows of logits are needed");
    std::vector<Logprobs> out(targets.shape(0), Logprobs(std::clamp(count, 0, sampler_.max_logprobs())));
    const quire::ScoreTask task{logits.data(), maxima_for(logits, maxima), targets.data(), static_cast<int>(out.size()),
                                count};
    bool finite;
    {
      nb::gil_scoped_release release;
      finite = sampler_.score(task, out.data());
    }
    if (!finite) return nb::none();
    nb::list rows;
    for (const Logprobs& p : out) rows.append(to_tuple(p));
    return rows;
  }

 private:
  quire::Judging judging_of(const BoundJudging& judging, size_t rows) const {
    quire::Judging found{judging.acceptance, judging.epsilon};
    if (judging.lines) {
      require(judging.proposals && static_cast<int>(judging.proposals->shape(1)) == sampler_.vocab(),
              "proposals: expected rows of the vocabulary size");
      require(judging.lines->shape(0) == rows, "proposals: expected the number of a line for every row");
      for (size_t i = 0; i < rows; ++i)
        require(judging.lines->data()[i] >= -1 &&
                    judging.lines->data()[i] < static_cast<int64_t>(judging.proposals->shape(0)),
                "proposals: a row names a line that does not exist");
      found.proposals = judging.proposals->data();
      found.lines = judging.lines->data();
    }
    return found;
  }

  static const float* maxima_for(const Logits& logits, const std::optional<Logits>& maxima) {
    if (!maxima) return nullptr;
    const int columns = quire::maxima_of(static_cast<int>(logits.shape(1)));
    require(maxima->shape(0) == logits.shape(0) && static_cast<int>(maxima->shape(1)) == columns,
            "maxima: one row of ceil(vocab / 64) numbers for every row of logits is needed");
    return maxima->data();
  }

  quire::ThreadOwner<quire::ThreadPool> own_;
  quire::Sampler sampler_;
};

View view_of(nb::handle self, const std::vector<int32_t>& values) { return View(values.data(), {values.size()}, self); }

template <class T>
void read(nb::handle params, const char* name, T* field) {
  const nb::object value = params.attr(name);
  if (!value.is_none()) *field = nb::cast<T>(value);
}

void bind_slot_params(nb::module_& m) {
  nb::class_<SlotParams>(m, "SlotParams")
      .def(
          "__init__",
          [](SlotParams* self, nb::handle params) {
            new (self) SlotParams();
#define QUIRE_READ(type, name, value) read(params, #name, &self->name);
            QUIRE_SAMPLING_PARAMS(QUIRE_READ)
#undef QUIRE_READ
          },
          "params"_a, "The numbers of a SamplingParams, by name.")
      .def_rw("seed", &SlotParams::seed)
      .def_rw("sample_index", &SlotParams::sample_index)
      .def_rw("prompt_len", &SlotParams::prompt_len)
      .def_rw("restricted", &SlotParams::restricted)
      .def_rw("allowed", &SlotParams::allowed)
      .def_rw("banned", &SlotParams::banned)
      .def_rw("stop_ids", &SlotParams::stop_ids)
      .def_rw("bias_ids", &SlotParams::bias_ids)
      .def_rw("bias_values", &SlotParams::bias_values)
      .def_rw("bad_tokens", &SlotParams::bad_tokens)
      .def_rw("bad_ends", &SlotParams::bad_ends)
      .def_rw("breakers", &SlotParams::breakers)
      .def_rw("ordered", &SlotParams::ordered)
      .def_rw("order", &SlotParams::order)
      .def_rw("surprise", &SlotParams::surprise)
      .def_prop_ro("needs_tokens", &SlotParams::needs_tokens);
}

void bind_judging(nb::module_& m) {
  nb::class_<BoundJudging>(m, "Judging")
      .def(
          "__init__",
          [](BoundJudging* self, const std::string& acceptance, double epsilon, std::optional<Logits> proposals,
             std::optional<Ids> lines) {
            new (self) BoundJudging{acceptance_of(acceptance), epsilon, std::move(proposals), std::move(lines)};
          },
          "acceptance"_a, "epsilon"_a, "proposals"_a.noconvert().none(), "lines"_a.noconvert().none());
}

void bind_noise(nb::module_& m) {
  m.def("philox4x32", &quire::philox4x32, "counter"_a, "key0"_a, "key1"_a, "Philox4x32-10 of a counter and a key.");
  m.def(
      "race_times",
      [](uint64_t seed, uint32_t sample, uint32_t position, int vocab) {
        const quire::Place place{seed, sample, position};
        auto* times = new float[static_cast<size_t>(vocab)];
        nb::capsule owner(times, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        for (int token = 0; token < vocab; ++token) {
          const auto span = static_cast<uint32_t>(token / quire::kSpan),
                     at = static_cast<uint32_t>(token % quire::kSpan);
          const quire::Philox4 of_span = place.words(quire::Draw::span, span);
          const float first = quire::exponential(of_span[0]) * (1.0f / quire::kSpan);
          const quire::Philox4 own = place.words(quire::Draw::token,
                                                 span * quire::kBlocksOfSpan + at % quire::kBlocksOfSpan);
          times[token] = of_span[1] >> 26 == at ? first : first + quire::exponential(own[at / quire::kBlocksOfSpan]);
        }
        return nb::ndarray<nb::numpy, float, nb::ndim<1>>(times, {static_cast<size_t>(vocab)}, owner);
      },
      "seed"_a, "sample_index"_a, "position"_a, "vocab"_a,
      "The time of each token in the draw at a position: the least time divided by a weight wins.");
}

}  // namespace

void bind_sampler(nb::module_& m) {
  bind_slot_params(m);
  nb::class_<SamplerSizes>(m, "SamplerSizes")
      .def(
          "__init__",
          [](SamplerSizes* self, int vocab, int max_slots, int max_rows, int max_logprobs) {
            new (self) SamplerSizes{vocab, max_slots, max_rows, max_logprobs};
          },
          "vocab"_a, "max_slots"_a, "max_rows"_a, "max_logprobs"_a);
  bind_judging(m);
  nb::class_<BoundSampler>(m, "Sampler")
      .def(nb::init<const SamplerSizes&, const std::string&, int>(), "sizes"_a, "isa"_a, "threads"_a)
      .def(nb::init<const SamplerSizes&, Executor&>(), nb::keep_alive<1, 3>(), "sizes"_a, "executor"_a)
      .def(
          "add",
          [](BoundSampler& s, int slot, const SlotParams& params, Ids tokens) {
            s.sampler().add(slot, params, tokens.data(), tokens.shape(0));
          },
          "slot"_a, "params"_a, "tokens"_a.noconvert())
      .def(
          "drop", [](BoundSampler& s, int slot) { s.sampler().drop(slot); }, "slot"_a)
      .def("sample", &BoundSampler::sample, "logits"_a.noconvert(), "slots"_a.noconvert(), "positions"_a.noconvert(),
           "masks"_a.noconvert().none(), "lines"_a.noconvert().none(), "maxima"_a.noconvert().none(),
           "drafts"_a.noconvert().none(), "places"_a.noconvert().none() = nb::none(), "judging"_a.none() = nb::none(),
           "distributions"_a.noconvert().none() = nb::none(), "guesses"_a.noconvert().none() = nb::none(),
           "chances"_a.noconvert().none() = nb::none(), "guides"_a.noconvert().none() = nb::none())
      .def("commit", &BoundSampler::commit, "slots"_a.noconvert(), "tokens"_a.noconvert())
      .def("logprobs", &BoundSampler::logprobs, "row"_a)
      .def("surprise", &BoundSampler::surprise, "slot"_a)
      .def("score", &BoundSampler::score, "logits"_a.noconvert(), "target_token_ids"_a.noconvert(), "count"_a,
           "maxima"_a.noconvert().none())
      .def(
          "tokens", [](nb::handle self) { return view_of(self, nb::cast<BoundSampler&>(self).sampler().tokens()); },
          "The last step's tokens, -1 where a row failed: a view of [max_rows], rewritten by the next sample().")
      .def(
          "status", [](nb::handle self) { return view_of(self, nb::cast<BoundSampler&>(self).sampler().status()); },
          "The last step's outcome: 0 sampled, 1 NaN or inf in the logits, 2 no token left. A view like tokens().")
      .def("memory", [](BoundSampler& s) { return s.sampler().memory(); })
      .def_static("bound", &quire::Sampler::bound, "sizes"_a, "threads"_a, "max_len"_a, "named"_a);
  bind_noise(m);
}
