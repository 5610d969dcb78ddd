// MXFP8 with the ceiling scale: VL blocks at a time for the scales, block by block for the codes. The arithmetic is that of
// reference/mxfp8.py.
#pragma once
#include "weight.h"

namespace {

// Largest magnitude of each of VL blocks of 32 values, as bits.
inline vu block_maxima(const bf16* p) {
  vhh part[VL];
  for (int b = 0; b < VL; ++b) {
    part[b] = load_as<vhh>(p + 32 * b) & 0x7FFF;
    if (VL == 8) part[b] = most(part[b], (vhh)(load_as<vhh>(p + 32 * b + 16) & 0x7FFF));
  }
  for (int count = VL; count > 1; count /= 2)
    for (int i = 0; i < count; i += 2) {
      const vu a = (vu)part[i], b = (vu)part[i + 1];
      part[i / 2] = most((vhh)evens(a, b), (vhh)odds(a, b));
    }
  const vu pair = (vu)part[0];
  return most(pair << 16, pair & 0xFFFF0000u);
}
inline vu block_maxima(const float* p) {
  vu part[VL];
  for (int b = 0; b < VL; ++b) {
    part[b] = vu{};
    for (int i = 0; i < 32; i += VL) part[b] = most(part[b], load_as<vu>(p + 32 * b + i) & ABS);
  }
  for (int count = VL; count > 1; count /= 2)
    for (int i = 0; i < count; i += 2) part[i / 2] = most(evens(part[i], part[i + 1]), odds(part[i], part[i + 1]));
  return part[0];
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
    vb bytes{};
    if (given) std::memcpy(&bytes, given + done, n);
    else bytes = __builtin_convertvector(ceiling_scales(top), vb);
    std::memcpy(scales + done, &bytes, n);
    // Multiplying by the mirrored power is exact; a NaN scale (byte 255) mirrors into itself.
    store_as(inverse, powers((254 - __builtin_convertvector(bytes, vu)) & 0xFF));
    for (int64_t b = 0; b < n; ++b) {
      uint8_t* to = codes + 32 * (done + b);
      if (inverse[b] == inverse[b]) encode_block(p + 32 * b, inverse[b], to);
      else std::memset(to, 0x7F, 32);
    }
  }
  return any((vu)(highest >= EXPONENT)) ? non_finite<T, 32>(w, expert, first, blocks) : 0;
}

template <class T> __attribute__((noinline)) void dequantize_mxfp8(
    const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out) {
  alignas(64) float scale[VL];
  for (int64_t done = 0; done < blocks; done += VL) {
    const int64_t n = std::min<int64_t>(VL, blocks - done);
    vb bytes{};
    std::memcpy(&bytes, scales + done, n);
    store_as(scale, powers(__builtin_convertvector(bytes, vu)));
    for (int64_t b = 0; b < n; ++b)
      for (int64_t i = 32 * (done + b); i < 32 * (done + b + 1); i += VL)
        store_values(out + i, as_stored(T{}, e4m3_values(__builtin_convertvector(load_as<vb>(codes + i), vu)) * scale[b]));
  }
}

}  // namespace
