// Marlin's layouts on the CPU. Plain C interface, no torch headers. What the functions do is said by their namesakes in
// reference/marlin.py, and the bytes are equal.
//
// The unit of work is a strip: 64 output channels of one expert, over all k. Words are made by masks and shifts on
// vectors whose lanes are rows, so that a vector of results is a run of the output; reads walk along 64 stored rows.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef uint64_t Longs4 __attribute__((vector_size(32)));
typedef uint16_t Shorts16 __attribute__((vector_size(32)));

constexpr uint32_t EVEN_BYTES = 0x00FF00FF, LOWER_HALF = 0xFFFF;
constexpr uint64_t EVEN_BYTES_64 = 0x00FF00FF00FF00FF;

// The stored side: rows of `shards` shards alternate, `rows` of each, `bytes` long, all strides in bytes.
struct Source {
  const uint8_t* data;
  int64_t expert_stride, row_stride, shards, rows, bytes;
};

inline uint32_t load(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

template <class V> inline void store(uint32_t* out, V v) { std::memcpy(out, &v, sizeof v); }

inline Words8 load8(const uint8_t* const* rows, int64_t at) {
  return Words8{load(rows[0] + at), load(rows[1] + at), load(rows[2] + at), load(rows[3] + at),
                load(rows[4] + at), load(rows[5] + at), load(rows[6] + at), load(rows[7] + at)};
}

inline Longs4 load_longs(const uint8_t* const* rows, int64_t at) {
  uint64_t r[4];
  for (int64_t j = 0; j < 4; ++j) std::memcpy(&r[j], rows[16 * j] + at, 8);
  return Longs4{r[0], r[1], r[2], r[3]};
}

// Bytes h0 (lower half) and h1 of 16 codes: low nibbles of both to the bytes of the lower half, high ones to the upper.
inline Longs4 sort_nibbles(Longs4 v) {
  return (v & 0xF0F0F0F00F0F0F0Fu) | ((v >> 28) & 0xF0F0F0F0u) | ((v << 28) & 0x0F0F0F0F00000000u);
}

// Exchanges the two middle 16-bit pieces of each lane.
inline Longs4 swap_middle(Longs4 v) {
  const Shorts16 s = (Shorts16)v;
  return (Longs4)__builtin_shufflevector(s, s, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}

// Words x0 y0 x1 y1 and x2 y2 x3 y3 of the bytes of x and y.
template <class V> inline void zip_bytes(V x, V y, V& first, V& second) {
  const V even = (x & EVEN_BYTES) | ((y << 8) & ~EVEN_BYTES), odd = ((x >> 8) & EVEN_BYTES) | (y & ~EVEN_BYTES);
  first = (even & LOWER_HALF) | (odd << 16);
  second = (even >> 16) | (odd & ~LOWER_HALF);
}

// Byte b of x[a] becomes byte a of w[b].
template <class V> inline void transpose4(const V x[4], V w[4]) {
  V a[2], b[2];
  zip_bytes(x[0], x[2], a[0], a[1]);
  zip_bytes(x[1], x[3], b[0], b[1]);
  zip_bytes(a[0], b[0], w[0], w[1]);
  zip_bytes(a[1], b[1], w[2], w[3]);
}

// Pointers to the stored rows of 64 engine rows, `zeros` where the engine pads.
void rows_of_strip(const Source& s, int64_t expert, int64_t strip, int64_t padded_rows, const uint8_t* zeros,
                   const uint8_t* rows[64]) {
  for (int64_t r = 0; r < 64; ++r) {
    const int64_t n = 64 * strip + r, shard = n / padded_rows, row = n % padded_rows;
    rows[r] = row < s.rows ? s.data + expert * s.expert_stride + (row * s.shards + shard) * s.row_stride : zeros;
  }
}

// One tile of 16 k of NVFP4: 128 words. A lane holds 8 bytes of one row, the lanes are rows 16 j + i (a) and 8 further (b).
void pack_tile4(const uint8_t* const rows[64], int64_t at, uint32_t* out) {
  for (int64_t i = 0; i < 8; ++i) {
    const Longs4 a = sort_nibbles(load_longs(rows + i, at)), b = sort_nibbles(load_longs(rows + 8 + i, at));
    // 16-bit pieces: low nibbles of word q, ..., high nibbles of word q, ...; q 0 and 2 in `even`, 1 and 3 in `odd`.
    const Longs4 even = (a & EVEN_BYTES_64) | ((b << 8) & ~EVEN_BYTES_64);
    const Longs4 odd = ((a >> 8) & EVEN_BYTES_64) | (b & ~EVEN_BYTES_64);
    const Words8 w02 = (Words8)swap_middle(even), w13 = (Words8)swap_middle(odd);
    store(out + 16 * i, __builtin_shufflevector(w02, w13, 0, 2, 4, 6, 8, 10, 12, 14));
    store(out + 16 * i + 8, __builtin_shufflevector(w02, w13, 1, 3, 5, 7, 9, 11, 13, 15));
  }
}

// One tile of 16 k of MXFP8: 256 words. Lanes are (j, half), rows 16 j + 8 half + i.
void pack_tile8(const uint8_t* const rows[64], int64_t at, uint32_t* out) {
  for (int64_t i = 0; i < 8; ++i) {
    const uint8_t* r[8];
    for (int64_t lane = 0; lane < 8; ++lane) r[lane] = rows[8 * lane + i];
    Words8 w[4];
    zip_bytes(load8(r, at), load8(r, at + 8), w[0], w[1]);
    zip_bytes(load8(r, at + 4), load8(r, at + 12), w[2], w[3]);
    for (int64_t q = 0; q < 4; ++q) store(out + 32 * i + 8 * q, w[q]);
  }
}

// A byte c of 8 and more to c + 0x78, a lower one to 0, for four E4M3 bytes below 0x7F.
template <class V> inline V without_shift(V words) {
  const V moved = words + 0x78787878u;
  return moved & (((moved >> 7) & 0x01010101u) * 0xFFu);
}

// One row of 64 scale bytes at a time from `group` on: engine column 4 m + x is row m / 2 + 8 (4 (m % 2) + {0, 2, 1, 3}[x]).
void scale_columns(const uint8_t* const rows[64], int64_t group, const uint8_t* table, uint8_t* out) {
  constexpr int ORDER[4] = {0, 2, 1, 3};
  for (int64_t c = 0; c < 64; ++c) {
    const int64_t m = c / 4, byte = rows[m / 2 + 8 * (4 * (m % 2) + ORDER[c % 4])][group];
    out[c] = table ? table[byte] : (uint8_t)byte;
  }
}

// Four groups at once, vectors of eight runs of four columns.
void scale_columns4(const uint8_t* const rows[64], int64_t group, bool map, uint8_t* out, int64_t stride) {
  constexpr int ORDER[4] = {0, 2, 1, 3};
  for (int64_t half = 0; half < 2; ++half) {
    Words8 x[4], w[4];
    for (int64_t k = 0; k < 4; ++k) {
      const uint8_t* r[8];
      for (int64_t lane = 0; lane < 8; ++lane) {
        const int64_t m = 8 * half + lane;
        r[lane] = rows[m / 2 + 8 * (4 * (m % 2) + ORDER[k])];
      }
      x[k] = load8(r, group);
    }
    transpose4(x, w);
    for (int64_t g = 0; g < 4; ++g) {
      const Words8 v = map ? without_shift(w[g]) : w[g];
      std::memcpy(out + g * stride + 32 * half, &v, 32);
    }
  }
}

// Fresh memory costs a fault per 4 KiB page, more time than the work itself: ask for large pages.
void prefer_large_pages(void* out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t PAGE = 2 << 20;
  const int64_t start = ((int64_t)out + PAGE - 1) / PAGE * PAGE, end = ((int64_t)out + bytes) / PAGE * PAGE;
  if (end > start) madvise((void*)start, end - start, MADV_HUGEPAGE);  // a refusal changes nothing but time
#endif
}

template <class F> void for_strips(int64_t experts, int64_t strips, int64_t threads, F work) {
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
  for (int64_t i = 0; i < experts * strips; ++i) work(i / strips, i % strips);
}

}  // namespace

extern "C" {

// `out` has `tiles_k` rows of words for each expert.
void marlin_pack_weight(const Source* source, int64_t experts, int64_t bits, int64_t padded_rows, int64_t tiles_k,
                        uint32_t* out, int64_t threads) {
  const Source& s = *source;
  const std::vector<uint8_t> zeros(s.bytes);
  const int64_t strips = s.shards * padded_rows / 64, per_tile = 2 * bits, words = 32 * bits;
  const int64_t stored = s.bytes / per_tile, width = strips * words;
  prefer_large_pages(out, experts * tiles_k * width * sizeof *out);
  for_strips(experts, strips, threads, [&](int64_t expert, int64_t strip) {
    const uint8_t* rows[64];
    rows_of_strip(s, expert, strip, padded_rows, zeros.data(), rows);
    uint32_t* at = out + expert * tiles_k * width + strip * words;
    for (int64_t kt = 0; kt < tiles_k; ++kt, at += width) {
      if (kt >= stored)
        std::memset(at, 0, words * sizeof *at);
      else if (bits == 4)
        pack_tile4(rows, kt * per_tile, at);
      else
        pack_tile8(rows, kt * per_tile, at);
    }
  });
}

// `table` maps bytes, or is null where they stay; `shifted` says that it is not that of shift 0.
void marlin_permute_scales(const Source* source, int64_t experts, int64_t padded_rows, int64_t groups,
                           const uint8_t* table, int64_t shifted, uint8_t* out, int64_t threads) {
  const Source& s = *source;
  const std::vector<uint8_t> zeros(s.bytes);
  const int64_t strips = s.shards * padded_rows / 64, width = 64 * strips;
  for_strips(experts, strips, threads, [&](int64_t expert, int64_t strip) {
    const uint8_t* rows[64];
    rows_of_strip(s, expert, strip, padded_rows, zeros.data(), rows);
    uint8_t* base = out + expert * groups * width + 64 * strip;
    int64_t group = 0;
    if (!shifted)
      for (; group + 4 <= s.bytes; group += 4) scale_columns4(rows, group, table, base + group * width, width);
    for (; group < s.bytes; ++group) scale_columns(rows, group, table, base + group * width);
    for (; group < groups; ++group) std::memset(base + group * width, 0, 64);
  });
}

}  // extern "C"
