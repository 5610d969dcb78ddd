// NVFP4 with Four Over Six: one block per lane. The arithmetic is that of reference/nvfp4.py, operation by operation; what is
// cheaper here is equal to the bit, and why is said beside it.
#pragma once
#include "weight.h"

namespace {

struct Anchor {
  float amax, denominator, encode, decode;
  // Levels of a block are powers of two times ((1 * s) * amax) / denominator or ((1.5 * s) * amax) / denominator, exactly,
  // as long as no product leaves the normal range: 2^-10 * 2^-100 / 2688 does not, nor does 6 * 448 * 2^115.
  bool levels_scale;

  Anchor(float a, int64_t d) : amax(a), denominator((float)d) {
    const float ratio = denominator / amax;
    encode = ratio > FLOAT_MAX ? FLOAT_MAX : ratio;
    decode = 1.0f / encode;
    levels_scale = amax >= 0x1p-100f && amax <= 0x1p115f;
  }
};

struct Counts { int64_t non_finite, saturated, orphaned; };

// E2M1 of magnitudes: `sum` is the value plus 2^23 of its steps (1/2 below 2, 1 below 4, else 2), rounded to nearest even by the
// addition; 6 more steps make bits + (bits >> 22) end in the code.
struct E2M1 { vf sum, magic; };
inline E2M1 e2m1(vf magnitude) {
  const vu a = least((vu)magnitude, splat(bits_of(6.0f)));
  const vu magic = (most(a, splat(bits_of(1.0f))) & EXPONENT) + ((22u << 23) + 6);
  return {(vf)a + (vf)magic, (vf)magic};
}
inline vu e2m1_code(vf sum) { return (vu)sum + ((vu)sum >> 22); }  // in the low four bits; others are noise

inline vf inverse_step(vf scale, const Anchor& anchor) {
  const vf inverse = 1.0f / (scale * anchor.decode);
  return inverse > FLOAT_MAX ? splat(FLOAT_MAX) : inverse;
}

// One of the two scales tried: the sums of all values (their codes) and the error, added in order.
template <bool LEVELS_SCALE> inline vf attempt(const vf (&a)[16], vf scale, const Anchor& anchor, vf (&sums)[16]) {
  const vf inverse = inverse_step(scale, anchor);
  const vf level1 = (scale * anchor.amax) / anchor.denominator;
  const vf level15 = ((1.5f * scale) * anchor.amax) / anchor.denominator;
  vf error{};
  for (int i = 0; i < 16; ++i) {
    const E2M1 coded = e2m1(a[i] * inverse);
    sums[i] = coded.sum;
    const vf q = coded.sum - coded.magic;
    vf value;
    if (LEVELS_SCALE) {
      const vf level = ((vu)q & 0x400000) != 0 ? level15 : level1;  // 1.5, 3 and 6 have that bit
      value = (vf)((vu)q & EXPONENT) * level;
    } else {
      value = ((q * scale) * anchor.amax) / anchor.denominator;
    }
    error = error + (vf)((vu)(value - a[i]) & ABS);
  }
  return error;
}

// Codes of 16 values per lane to 8 bytes per lane: `low` has values 0-7, `high` 8-15.
struct Packed {
  vu low{}, high{};
  inline void put(int i, vu code, vu sign_source) {  // code in the low four bits, sign in the highest
    const int at = 4 * (i & 7);
    vu& word = i < 8 ? low : high;
    word |= ((code << at) & (7u << at)) | ((sign_source >> (28 - at)) & (8u << at));
  }
  inline void store(uint8_t* codes, uint8_t* scales, vu scale, int64_t n) {
    const vu keep = (vu)(scale != 0);  // a block whose scale byte is 0 stores codes 0
    const vu first = zip_low(low & keep, high & keep), second = zip_high(low & keep, high & keep);
    const vb bytes = __builtin_convertvector(scale, vb);
    if (n == VL) {
      store_as(codes, first);
      store_as(codes + sizeof first, second);
      store_as(scales, bytes);
      return;
    }
    uint8_t whole[8 * VL];
    store_as(whole, first);
    store_as(whole + sizeof first, second);
    std::memcpy(codes, whole, 8 * n);
    std::memcpy(scales, &bytes, n);
  }
};

template <bool LEVELS_SCALE> inline vu choose(const Lanes& lanes, vf base, const Anchor& anchor, Packed& packed) {
  vf a[16], sums6[16], sums4[16];
  for (int i = 0; i < 16; ++i) a[i] = (vf)(lanes.x[i] & ABS);
  const vu limit = splat(bits_of(448.0f));
  const E4M3 scale6 = e4m3(least((vu)base, limit)), scale4 = e4m3(least((vu)(base * 1.5f), limit));
  const vf error6 = attempt<LEVELS_SCALE>(a, scale6.value, anchor, sums6);
  const vf error4 = attempt<LEVELS_SCALE>(a, scale4.value, anchor, sums4);
  const vi four = error4 < error6;
  for (int i = 0; i < 16; ++i) packed.put(i, e2m1_code(four ? sums4[i] : sums6[i]), lanes.x[i]);
  return four ? scale4.byte : scale6.byte;
}

// Given scales may be any byte: negative ones turn signs, NaN gives codes 0, as the reference's comparisons do.
inline void keep_scales(const Lanes& lanes, vu scale, const Anchor& anchor, Packed& packed) {
  const vf inverse = inverse_step(e4m3_values(scale), anchor);
  for (int i = 0; i < 16; ++i) {
    const vf y = (vf)lanes.x[i] * inverse;
    const vu a = (vu)y & ABS;
    packed.put(i, e2m1_code(e2m1((vf)(a > EXPONENT ? vu{} : a)).sum), (vu)y);
  }
}

inline vu load_bytes(const uint8_t* p, int64_t n) {
  vb bytes{};
  std::memcpy(&bytes, p, n);
  return __builtin_convertvector(bytes, vu);
}

// `blocks` blocks of one expert from block `first` on; the outputs point at that block.
template <class T, bool GIVEN> __attribute__((noinline)) Counts quantize_nvfp4(
    const Weight& w, int64_t expert, int64_t first, int64_t blocks, float amax, int64_t denominator,
    const uint8_t* given, uint8_t* codes, uint8_t* scales) {
  const Anchor anchor(amax, denominator);
  Blocks<T, 16> source(w, expert, first);
  vu saturated{}, orphaned{}, highest{};
  for (int64_t done = 0; done < blocks; done += VL) {
    const int64_t n = std::min<int64_t>(VL, blocks - done);
    const Lanes lanes = load_lanes(source.next(n));
    vu top{};
    for (int i = 0; i < 16; ++i) top = most(top, lanes.x[i] & ABS);
    const vf base = ((vf)top / 6.0f) * anchor.encode;
    highest = most(highest, top);
    saturated -= (vu)(base > 448.0f);
    if (amax == 0) orphaned -= (vu)(top != 0);
    Packed packed;
    vu scale;
    if (GIVEN) {
      scale = load_bytes(given + done, n);
      keep_scales(lanes, scale, anchor, packed);
    } else if (anchor.levels_scale) {
      scale = choose<true>(lanes, base, anchor, packed);
    } else {
      scale = choose<false>(lanes, base, anchor, packed);
    }
    packed.store(codes + 8 * done, scales + done, scale, n);
  }
  const bool damaged = any((vu)(highest >= EXPONENT));
  return {damaged ? non_finite<T, 16>(w, expert, first, blocks) : 0, count(saturated), count(orphaned)};
}

// Values are looked up among the 16 of their block: each is made and rounded once per block.
template <class T> __attribute__((noinline)) void dequantize_nvfp4(
    const uint8_t* codes, const uint8_t* scales, float amax, int64_t denominator, int64_t blocks, T* out) {
  static const float e2m1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const float outer = amax / (float)denominator;
  vu shift{}, upper{};
  for (int l = 0; l < VL; ++l) shift[l] = 4 * (l & 7), upper[l] = l < 8 ? 0 : ~0u;
  alignas(64) float values[VL];
  for (int64_t done = 0; done < blocks; done += VL) {
    const int64_t n = std::min<int64_t>(VL, blocks - done);
    store_as(values, e4m3_values(load_bytes(scales + done, n)));
    for (int64_t b = 0; b < n; ++b) {
      const uint8_t* from = codes + 8 * (done + b);
      T* to = out + 16 * (done + b);
      vu table[16 / VL];
      for (int part = 0; part < 16 / VL; ++part)
        table[part] = as_stored(T{}, (load_as<vf>(e2m1 + part * VL) * values[b]) * outer);
      uint32_t low, high;
      std::memcpy(&low, from, 4);
      std::memcpy(&high, from + 4, 4);
      if (VL == 16) {
        store_values(to, lookup(table, (upper != 0 ? splat(high) : splat(low)) >> shift));
      } else {
        store_values(to, lookup(table, splat(low) >> shift));
        store_values(to + 8, lookup(table, splat(high) >> shift));
      }
    }
  }
}

}  // namespace
