#include "isa.h"

#include <stdexcept>

#include "counted.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quire {

namespace baseline {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

#if defined(__x86_64__)
namespace {

// Asked of the processor itself: what __builtin_cpu_supports reads is filled by a run-time library, and that of the
// wheels' compiler leaves it empty.
struct Processor {
  bool avx2 = false, avx512 = false;

  Processor() {
    unsigned a, b, c, d;
    const unsigned first = bit_FMA | bit_F16C | bit_OSXSAVE;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return;
    unsigned saved, high;  // registers that the system keeps for each thread
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = (saved & kYmm) == kYmm && (b & bit_AVX2);
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    avx512 = avx2 && (saved & kZmm) == kZmm && (b & wide) == wide && (c & bit_AVX512VNNI) &&
             __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVX512BF16);
  }

  static constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // of XCR0: SSE, AVX; with masks and upper halves
};

}  // namespace
#endif

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  const Processor here;
  if (here.avx512) names.push_back("avx512");
  if (here.avx2) names.push_back("avx2");
#endif
  names.push_back("baseline");
  return names;
}

namespace {

bool counting = false;

const Kernels& table_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512::table;
  if (isa == "avx2") return avx2::table;
#endif
  return baseline::table;
}

}  // namespace

void count_kernels(bool on) { counting = on; }

const Kernels& kernels_for(const std::string& name) {
  const std::vector<std::string> here = supported_isas();
  const std::string want = name.empty() ? here.front() : name;
  bool found = false;
  std::string all;
  for (const std::string& isa : here) {
    found |= isa == want;
    all += (all.empty() ? "" : ", ") + isa;
  }
  if (!found) throw std::invalid_argument("instruction set '" + want + "' cannot run here; choose one of: " + all);
  return counting ? counted(table_of(want)) : table_of(want);
}

}  // namespace quire
