// Integer matrix tiles (AMX): products of sixteen rows of activations and one packed block.
//
// A tile multiplies signed bytes by unsigned ones exactly, as `dot4` does. Linux grants a process
// the tiles when it asks; where it does not, or where the CPU has none, `has_tiles` is false.
#pragma once

#include <cstdint>

#include "simd.h"

#if !defined(SLOTZERO_PLAIN) && defined(__AMX_INT8__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

constexpr int TILE_ROWS = 16;  // the same as PANEL in integer_rows.h

inline bool has_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

// Shapes the tiles of this thread: 0 and 1 are sums, 2 and 3 activations, 4 and 5 codes.
class TileShape {
 public:
  explicit TileShape(int64_t chunk) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 6; ++i) {
      config.bytes[i] = static_cast<uint16_t>(i == 2 || i == 3 ? chunk : 64);
      config.rows[i] = static_cast<uint8_t>(i < 4 ? TILE_ROWS : chunk / 4);
    }
    // The compiler's intrinsic does not say that all 64 bytes are read.
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileShape() { asm volatile("tilerelease" ::: "memory"); }
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;
};

// to [16, 16] = x [16, chunk] times codes [chunk / 4, 16, 4]. The intrinsics take literal numbers of
// tiles, and do not say that they read memory.
inline void even_tile_product(const int8_t* x, int64_t stride, const uint8_t* codes, int32_t* to) {
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_loadd(2, x, stride);
  _tile_loadd(4, codes, 64);
  _tile_dpbsud(0, 2, 4);
  _tile_stored(0, to, 64);
}

// The same with other tiles, so that two products can overlap.
inline void odd_tile_product(const int8_t* x, int64_t stride, const uint8_t* codes, int32_t* to) {
  asm volatile("" ::: "memory");
  _tile_zero(1);
  _tile_loadd(3, x, stride);
  _tile_loadd(5, codes, 64);
  _tile_dpbsud(1, 3, 5);
  _tile_stored(1, to, 64);
}

#endif
