#include "isa.h"

#include <stdexcept>
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

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    names.push_back("avx512");
  if (avx2) names.push_back("avx2");
#endif
  names.push_back("baseline");
  return names;
}

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
#if defined(__x86_64__)
  if (want == "avx512") return avx512::table;
  if (want == "avx2") return avx2::table;
#endif
  return baseline::table;
}

}  // namespace quire
