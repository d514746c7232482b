// What this processor and its operating system can do.
//
// Asked of the processor itself, because compilers know different names of features.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace raycore {

// Whether all of these bits are set.
constexpr bool has_bits(uint64_t number, uint64_t bits) {
  return (number & bits) == bits;
}

constexpr uint64_t bit(int index) {
  return uint64_t(1) << index;
}

class Processor {
 public:
  bool has_avx2 = false, has_avx512 = false, has_avx_vnni = false, has_vnni = false, has_bf16 = false;
  bool is_zen4 = false;

  // See `cpuid` and `xgetbv` in Intel's Software Developer's Manual, volume 2.
  Processor() {
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid_count(0, 0, &eax, &ebx, &ecx, &edx)) return;
    const bool is_amd = ebx == 0x68747541 && edx == 0x69746e65 && ecx == 0x444d4163;  // AuthenticAMD
    if (!__get_cpuid_count(1, 0, &eax, &ebx, &ecx, &edx)) return;
    const uint32_t family = (eax >> 8 & 15) + (eax >> 20 & 255);
    const uint64_t fma = bit(12), f16c = bit(29), saves_state = bit(27);
    if (!has_bits(ecx, fma | f16c | saves_state)) return;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const uint64_t saved = uint64_t(high) << 32 | low;  // which registers the operating system saves
    const uint64_t ymm = bit(1) | bit(2), zmm = bit(5) | bit(6) | bit(7), tiles = bit(17) | bit(18);
    if (!has_bits(saved, ymm) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
    const uint64_t avx2 = bit(5), f = bit(16), dq = bit(17), bw = bit(30), vl = bit(31), vnni = bit(11);
    const uint64_t amx_bf16 = bit(22), amx_tile = bit(24), avx_vnni = bit(4), bf16 = bit(5);
    has_avx2 = has_bits(ebx, avx2);
    has_avx512 = has_avx2 && has_bits(ebx, f | dq | bw | vl) && has_bits(saved, zmm);
    has_vnni = has_avx512 && has_bits(ecx, vnni);
    const bool has_subleaf = eax >= 1;
    has_tiles_ = has_bits(edx, amx_bf16 | amx_tile) && has_bits(saved, tiles);
    if (!has_subleaf || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return;
    has_avx_vnni = has_avx2 && has_bits(eax, avx_vnni);
    has_bf16 = has_vnni && has_bits(eax, bf16);
    is_zen4 = is_amd && family == 0x19 && has_bf16;
  }

  // Whether AMX may be used. Linux allows it to a process that asks for it.
  bool has_amx() const {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return has_bf16 && has_tiles_ && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }

 private:
  bool has_tiles_ = false;
};

}  // namespace raycore
#endif
