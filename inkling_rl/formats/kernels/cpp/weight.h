// A stack of matrices in memory and its division into chunks of blocks, and blocks of 16 values across lanes.
#pragma once
#include "vectors.h"

extern "C" struct Weight {  // strides in elements; columns are dense
  const void* data;
  int64_t experts, rows, columns, expert_stride, row_stride, half;
};

namespace {

constexpr int64_t CHUNK = 4096;           // blocks: tens of microseconds, and the input fits the cache for a second look
constexpr int64_t AHEAD = 8192;           // bytes to prefetch in front of the blocks in hand
constexpr int64_t ONE_THREAD = 1 << 16;   // fewer values than this are not worth waking others

inline int64_t chunks_of(int64_t blocks) { return (blocks + CHUNK - 1) / CHUNK; }

// Walks the blocks of SIZE values of one expert, VL at a time, in the order of rows.
template <class T, int SIZE> class Blocks {
  const T* data;
  int64_t per_row, stride, row, column;
  alignas(64) T gathered[VL * SIZE];

 public:
  Blocks(const Weight& w, int64_t expert, int64_t first)
      : data((const T*)w.data + expert * w.expert_stride), per_row(w.columns / SIZE), stride(w.row_stride) {
    if (stride == w.columns) per_row = w.rows * per_row;  // rows without gaps are one long row
    row = first / per_row;
    column = first % per_row;
  }

  // The next `n` <= VL blocks, dense; blocks beyond n are zero.
  const T* next(int64_t n) {
    const T* here = data + row * stride + column * SIZE;
    if (n == VL && column + VL <= per_row) {
      column += VL;
      if (column == per_row) column = 0, ++row;
      // The order in which a transposition reads hides the stream from the hardware's prefetcher.
      for (size_t line = 0; line < sizeof gathered; line += 64) __builtin_prefetch((const char*)here + AHEAD + line);
      return here;
    }
    std::memset((void*)gathered, 0, sizeof gathered);
    for (int64_t b = 0; b < n; ++b) {
      std::memcpy((void*)(gathered + b * SIZE), data + row * stride + column * SIZE, SIZE * sizeof(T));
      if (++column == per_row) column = 0, ++row;
    }
    return gathered;
  }

  // The longest dense run of at most `n` blocks; its length in `n`.
  const T* run(int64_t& n) {
    const T* here = data + row * stride + column * SIZE;
    n = std::min(n, per_row - column);
    column += n;
    if (column == per_row) column = 0, ++row;
    return here;
  }
};

inline uint32_t magnitude(float x) { return bits_of(x) & ABS; }
inline uint32_t magnitude(bf16 x) { return (uint32_t)(x.bits & 0x7FFF) << 16; }

// Bits of the largest magnitude of n values, a NaN above all.
inline uint32_t largest_bits(const float* p, int64_t n) {
  vu top{};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) top = most(top, load_as<vu>(p + i) & ABS);
  uint32_t result = 0;
  for (int l = 0; l < VL; ++l) result = std::max(result, top[l]);
  for (; i < n; ++i) result = std::max(result, magnitude(p[i]));
  return result;
}
inline uint32_t largest_bits(const bf16* p, int64_t n) {
  vhh top{};
  int64_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) top = most(top, load_as<vhh>(p + i) & 0x7FFF);
  uint32_t result = 0;
  for (int l = 0; l < 2 * VL; ++l) result = std::max<uint32_t>(result, (uint32_t)top[l] << 16);
  for (; i < n; ++i) result = std::max(result, magnitude(p[i]));
  return result;
}

template <class T> int64_t count_non_finite(const T* p, int64_t n) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) found += magnitude(p[i]) >= EXPONENT;
  return found;
}

// Non-finite values among `blocks` blocks: a second look at a chunk that was seen to hold one.
template <class T, int SIZE> int64_t non_finite(const Weight& w, int64_t expert, int64_t first, int64_t blocks) {
  Blocks<T, SIZE> source(w, expert, first);
  int64_t found = 0;
  while (blocks) {
    int64_t n = blocks;
    const T* p = source.run(n);
    found += count_non_finite(p, n * SIZE);
    blocks -= n;
  }
  return found;
}

// VL blocks of 16 values: lane b is block b, x[i] its value i.
struct Lanes { vu x[16]; };

inline Lanes load_lanes(const bf16* p) {
  vu words[8];
  for (int r = 0; r < 8; ++r) words[r] = load_as<vu>((const char*)p + r * sizeof(vu));
  transpose(words);
  Lanes lanes;
  for (int j = 0; j < 8; ++j) {
    lanes.x[2 * j] = words[j] << 16;
    lanes.x[2 * j + 1] = words[j] & 0xFFFF0000u;
  }
  return lanes;
}

inline Lanes load_lanes(const float* p) {
  Lanes lanes;
  vu words[VL];
  for (int part = 0; part < 16 / VL; ++part) {
    for (int r = 0; r < VL; ++r) words[r] = load_as<vu>(p + r * 16 + part * VL);
    transpose(words);
    for (int r = 0; r < VL; ++r) lanes.x[part * VL + r] = words[r];
  }
  return lanes;
}

}  // namespace
