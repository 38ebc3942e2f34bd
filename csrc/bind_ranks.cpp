// Python bindings of what ranks meet in.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "shared_ranks.h"
#include "spanning_group.h"
#include "wire_heart.h"

namespace nb = nanobind;
using namespace nb::literals;
using quire::Command;
using quire::SharedRanks;

void bind_ranks(nb::module_& m) {
  using nogil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<quire::LocalGroup, quire::Group>(m, "LocalGroup", "Ranks in threads of this process.")
      .def(nb::init<int, bool>(), "size"_a, "uneven"_a = false)
      .def("leave", &quire::LocalGroup::leave, "End the wait of all other ranks: this one will not come.");

  nb::class_<SharedRanks>(m, "SharedRanks", "Ranks in processes of one host, over a file in memory that all map.")
      .def(nb::init<int, size_t, int, int, bool>(), "fd"_a, "bytes"_a, "size"_a, "rank"_a, "crowded"_a)
      .def_prop_ro_static("HEADER_BYTES", [](nb::handle) { return SharedRanks::header_bytes(); })
      .def_prop_ro("address", [](const SharedRanks& r) { return reinterpret_cast<uintptr_t>(r.data()); })
      .def_prop_ro("size", &SharedRanks::size)
      .def("leave", &SharedRanks::leave, "End the wait of all ranks, now and later: one will not come.")
      .def_prop_ro("left", &SharedRanks::left)
      .def("beats", &SharedRanks::beats, "rank"_a, "A number that rises while the process of a rank runs.")
      .def("worked", &SharedRanks::worked, "rank"_a,
           "Nanoseconds that a rank has spent in commands, without those in which it waited for others to finish.")
      .def("waited", &SharedRanks::waited, "rank"_a,
           "Those of them in which it waited for rows of the other ranks of its group.")
      .def("wait_more", &SharedRanks::wait_more, "nanoseconds"_a,
           "This rank has waited for rows, elsewhere than in a group of these ranks.")
      .def("say", &SharedRanks::say, "command"_a,
           "Give a command to all other ranks, which have finished the last one.")
      .def(
          "hear",
          [](SharedRanks& r) -> std::optional<Command> {
            Command command;
            nb::gil_scoped_release release;
            if (!r.hear(command)) return std::nullopt;
            return command;
          },
          "Wait for the next command; None when a rank has left.")
      .def("finish", &SharedRanks::finish, "result"_a, "This rank is done with the last command.")
      .def("finished", &SharedRanks::finished, "rank"_a, "result"_a, "worked"_a, "waited"_a,
           "A rank on another node is done with the last command; it has worked and waited so many nanoseconds in all.")
      .def("wait", &SharedRanks::wait, nogil(), "first"_a, "count"_a,
           "Wait until these ranks have finished the last command; False when one has left.")
      .def("result", &SharedRanks::result, "rank"_a)
      .def("begin_round", &SharedRanks::begin_round, "round"_a,
           "Have the leading ranks of all replicas come to this round, in which each gives a command to its own.")
      .def("await_round", &SharedRanks::await_round, nogil(), "round"_a,
           "Wait until there is a round behind this one, or for `rouse`; False when a rank has left.")
      .def_prop_ro("round", &SharedRanks::round, "The last round that was begun.")
      .def("rouse", &SharedRanks::rouse, "End the wait for a round.");

  nb::class_<quire::SharedGroup, quire::Group>(m, "SharedGroup", "Some of the ranks, which run a program together.")
      .def(nb::init<SharedRanks&, int, int, bool>(), nb::keep_alive<1, 2>(), "ranks"_a, "first"_a, "size"_a,
           "uneven"_a = false);
  nb::class_<quire::WireHeart>(m, "WireHeart", "Shows a process on another host that this one runs, over a socket.")
      .def(nb::init<int>(), "fd"_a)
      .def_prop_ro("beats", &quire::WireHeart::beats, "A number that rises while the other process runs.");
  nb::class_<quire::SpanningGroup, quire::Group>(m, "SpanningGroup",
                                                 "Some of the ranks, of which some are on other nodes.")
      .def(nb::init<SharedRanks&, int, int, int, int, const std::vector<std::pair<int, int>>&>(),
           nb::keep_alive<1, 2>(), "ranks"_a, "first"_a, "size"_a, "here"_a, "count"_a, "peers"_a);
}
