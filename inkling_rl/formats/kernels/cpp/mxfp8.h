// MXFP8 with the ceiling scale: VL blocks at a time for the scales, block by block for the codes. The arithmetic is that of
// reference/mxfp8.py.
#pragma once
#include "weight.h"

namespace {

inline vu larger(vu a, vu b) { return most(a, b); }
inline vu larger_halves(vu a, vu b) { return (vu)most((vhh)a, (vhh)b); }

// Lane b of the result folds the lanes of part[b].
template <vu (*FOLD)(vu, vu), int N> inline vu fold(const vu (&part)[N]) {
  if constexpr (N == 1) {
    return part[0];
  } else {
    vu next[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i)
      next[i] = FOLD(evens(part[2 * i], part[2 * i + 1]), odds(part[2 * i], part[2 * i + 1]));
    return fold<FOLD>(next);
  }
}

// Largest magnitude of each of VL blocks of 32 values, as bits.
inline vu block_maxima(const bf16* p) {
  vu part[VL];
#pragma GCC unroll 16
  for (int b = 0; b < VL; ++b) {
    part[b] = load_as<vu>(p + 32 * b) & 0x7FFF7FFFu;
    if (VL == 8) part[b] = larger_halves(part[b], load_as<vu>(p + 32 * b + 16) & 0x7FFF7FFFu);
  }
  const vu pair = fold<larger_halves>(part);
  return most(pair << 16, pair & 0xFFFF0000u);
}
inline vu block_maxima(const float* p) {
  vu part[VL];
#pragma GCC unroll 16
  for (int b = 0; b < VL; ++b) {
    part[b] = load_as<vu>(p + 32 * b) & ABS;
    for (int i = VL; i < 32; i += VL) part[b] = most(part[b], load_as<vu>(p + 32 * b + i) & ABS);
  }
  return fold<larger>(part);
}

inline vu ceiling_scales(vu top) {
  const vi scale = (vi)(top >> 23) - 8 + (vi)((vu)((top & 0x7FFFFF) > 0x600000) & 1);  // 1.75 is the largest that stays
  const vi positive = scale > 0 ? scale : vi{};
  return (vu)(positive < 254 ? positive : vi{} + 254);
}

inline vu powers(vu byte) {  // bits of 2^(byte - 127); byte 0 is a subnormal, 255 a NaN
  const vu normal = byte == 0 ? splat(0x00400000u) : byte << 23;
  return byte == 255 ? splat(0x7FC00000u) : normal;
}

inline uint32_t power(uint8_t byte) { return byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : (uint32_t)byte << 23; }

// Codes of VL scaled values in the low bytes of the lanes.
inline vu e4m3_codes(vu x, float inverse) {
  const vu y = (vu)((vf)x * inverse);
  const vu byte = e4m3(least(y & ABS, splat(bits_of(448.0f)))).byte | ((y >> 24) & 0x80);
  return byte;
}

inline void encode_block(const bf16* p, float inverse, uint8_t* codes) {
  for (int i = 0; i < 16; i += VL) {
    const vu words = load_as<vu>(p + 2 * i);
    const vu pairs = e4m3_codes(words << 16, inverse) | e4m3_codes(words & 0xFFFF0000u, inverse) << 8;
    store_as(codes + 2 * i, __builtin_convertvector(pairs, vh));
  }
}
inline void encode_block(const float* p, float inverse, uint8_t* codes) {
  for (int i = 0; i < 32; i += VL)
    store_as(codes + i, __builtin_convertvector(e4m3_codes(load_as<vu>(p + i), inverse), vb));
}

// `blocks` blocks of one expert from block `first` on; the outputs point at that block. Returns values that are not finite.
template <class T> __attribute__((noinline)) int64_t quantize_mxfp8(
    const Weight& w, int64_t expert, int64_t first, int64_t blocks, const uint8_t* given, uint8_t* codes, uint8_t* scales) {
  Blocks<T, 32> source(w, expert, first);
  vu highest{};
  alignas(64) float inverse[VL];
  for (int64_t done = 0; done < blocks; done += VL) {
    const int64_t n = std::min<int64_t>(VL, blocks - done);
    const T* p = source.next(n);
    const vu top = block_maxima(p);
    highest = most(highest, top);
    const vu scale = given ? load_bytes(given + done, n) : ceiling_scales(top);
    store_bytes(scales + done, scale, n);
    // Multiplying by the mirrored power is exact; a NaN scale (byte 255) mirrors into itself.
    store_as(inverse, powers((254 - scale) & 0xFF));
    for (int64_t b = 0; b < n; ++b) {
      uint8_t* to = codes + 32 * (done + b);
      if (inverse[b] == inverse[b]) encode_block(p + 32 * b, inverse[b], to);
      else std::memset(to, 0x7F, 32);
    }
  }
  return any((vu)(highest >= EXPONENT)) ? non_finite<T, 32>(w, expert, first, blocks) : 0;
}

// Values of VL codes. A half-precision number with the code's bits is the value times 2^-8, subnormals included.
inline vf code_values(const uint8_t* codes) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
  const vh code = __builtin_convertvector(load_as<vb>(codes), vh);
  const vh half = (code & 0x80) << 8 | (code & 0x7F) << 7;
#if defined(__AVX512F__)
  const vf value = (vf)_mm512_cvtph_ps((__m256i)half) * 256.0f;
#else
  const vf value = (vf)_mm256_cvtph_ps((__m128i)half) * 256.0f;
#endif
  return (vf)(((vu)value & ABS) == bits_of(480.0f) ? splat(0x7FC00000u) : (vu)value);  // what would be 480 is NaN
#else
  return e4m3_values(load_bytes(codes, VL));
#endif
}

template <class T> __attribute__((noinline)) void dequantize_mxfp8(
    const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out) {
  // From this scale on every result is a multiple of 2^-133, bfloat16's smallest: its four significant bits fit as they are.
  constexpr uint8_t EXACT = 3;
  for (int64_t block = 0; block < blocks; ++block) {
    const float scale = float_of(power(scales[block]));
    const bool exact = scales[block] >= EXACT;
#pragma GCC unroll 4
    for (int64_t i = 32 * block; i < 32 * block + 32; i += VL) {
      const vf value = code_values(codes + i) * scale;
      store_values(out + i, exact ? as_truncated(T{}, value) : as_stored(T{}, value));
    }
  }
}

}  // namespace
