// AMX's tiles by the compiler's intrinsics, or, with DSQ_EMULATED_TILES, by AVX-512 on machines without them.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

// Of each tile, as ldtilecfg reads it.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#ifdef DSQ_EMULATED_TILES

namespace emulated {

struct Tiles {
  TileConfig config;
  alignas(64) uint32_t tile[8][16][16];
};
thread_local Tiles tiles;

// The tile, which must be configured, as in the hardware.
inline uint32_t (*configured(int t))[16] {
  if (tiles.config.palette != 1 || !tiles.config.rows[t]) __builtin_trap();
  return tiles.tile[t];
}

inline void load_config(const void* config) {
  if (tiles.config.palette) __builtin_trap();  // the thread's last task has not released them
  memset(&tiles, 0, sizeof tiles);
  memcpy(&tiles.config, config, sizeof tiles.config);
}
inline void release() { memset(&tiles, 0, sizeof tiles); }
inline void load(int t, const void* from, int64_t stride) {
  uint32_t(*const tile)[16] = configured(t);
  memset(tile, 0, sizeof tiles.tile[t]);
  for (int r = 0; r < tiles.config.rows[t]; r++)
    memcpy(tile[r], (const uint8_t*)from + r * stride, tiles.config.row_bytes[t]);
}
inline void store(int t, void* to, int64_t stride) {
  uint32_t(*const tile)[16] = configured(t);
  for (int r = 0; r < tiles.config.rows[t]; r++)
    memcpy((uint8_t*)to + r * stride, tile[r], tiles.config.row_bytes[t]);
}

inline __m512 lower(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
inline __m512 upper(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)); }

// TDPBF16PS of Intel's manual (SDM, volume 2): the even steps of a row and the odd ones are summed apart by fused
// multiply-adds, then together, then to c. Rounds to nearest even; subnormal operands and results are zero.
inline void dot_product(int c, int a, int b) {
  uint32_t(*const sums)[16] = configured(c);
  uint32_t(*left)[16] = configured(a);
  uint32_t(*const right)[16] = configured(b);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  asm volatile("" : "+r"(left) : : "memory");  // no arithmetic moves above the change of mode
  for (int m = 0; m < tiles.config.rows[c]; m++) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < tiles.config.row_bytes[a] / 4; k++) {
      const __m512i pair = _mm512_set1_epi32((int)left[m][k]), pairs = _mm512_loadu_si512(right[k]);
      even = _mm512_fmadd_ps(lower(pair), lower(pairs), even);
      odd = _mm512_fmadd_ps(upper(pair), upper(pairs), odd);
    }
    const __m512 sum = _mm512_loadu_ps((const float*)sums[m]);
    _mm512_storeu_ps((float*)sums[m], _mm512_add_ps(sum, _mm512_add_ps(even, odd)));
  }
  asm volatile("" : : "r"(sums) : "memory");
  _mm_setcsr(mode);
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dot_product

#endif
