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

// One of the two scales tried. The error is added value by value in order; the two attempts go side by side, because each
// of their sums alone is a chain that leaves most of the processor idle.
template <bool LEVELS_SCALE> struct Attempt {
  E4M3 scale;
  vf inverse, level, half, error;

  inline void prepare(const Anchor& anchor, vf base) {
    scale = e4m3(least((vu)base, splat(bits_of(448.0f))));
    inverse = inverse_step(scale.value, anchor);
    level = (scale.value * anchor.amax) / anchor.denominator;
    const vf level15 = ((1.5f * scale.value) * anchor.amax) / anchor.denominator;
    half = (level15 - level) * 2.0f;  // exact: the two are within a factor of two
    error = vf{};
  }

  inline vf add(const Anchor& anchor, vf magnitude) {  // returns the sum that holds the code
    const E2M1 coded = e2m1(magnitude * inverse);
    const vf q = coded.sum - coded.magic;
    vf value;
    if (LEVELS_SCALE) {
      const vf power = (vf)((vu)q & EXPONENT);                     // q is it, or one and a half times it
      value = multiply_add(power, level, (q - power) * half);      // exact, fused or not
    } else {
      value = ((q * scale.value) * anchor.amax) / anchor.denominator;
    }
    error = error + (vf)((vu)(value - magnitude) & ABS);
    return coded.sum;
  }
};

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
    store_bytes(scales, scale, n);
    uint8_t whole[8 * VL];
    uint8_t* to = n == VL ? codes : whole;
    store_as(to, first);
    store_as(to + sizeof first, second);
    if (n < VL) std::memcpy(codes, whole, 8 * n);
  }
};

// VL blocks and what their scales decide: the better of two scales ...
template <bool LEVELS_SCALE> struct FourOverSix {
  Lanes lanes;
  Attempt<LEVELS_SCALE> to6, to4;

  inline void prepare(const Anchor& anchor, vf base, const uint8_t*, int64_t) {
    to6.prepare(anchor, base);
    to4.prepare(anchor, base * 1.5f);
  }

  inline vu finish(const Anchor& anchor, Packed& packed) {
    vf sums6[16], sums4[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const vf magnitude = (vf)(lanes.x[i] & ABS);
      sums6[i] = to6.add(anchor, magnitude);
      sums4[i] = to4.add(anchor, magnitude);
    }
    const vi four = to4.error < to6.error;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) packed.put(i, e2m1_code(four ? sums4[i] : sums6[i]), lanes.x[i]);
    return four ? to4.scale.byte : to6.scale.byte;
  }
};

// ... or a given one, which may be any byte: negative ones turn signs, NaN gives codes 0, as the reference's comparisons do.
struct GivenScales {
  Lanes lanes;
  vu scale;
  vf inverse;

  inline void prepare(const Anchor& anchor, vf, const uint8_t* given, int64_t n) {
    scale = load_bytes(given, n);
    inverse = inverse_step(e4m3_values(scale), anchor);
  }

  inline vu finish(const Anchor&, Packed& packed) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const vf y = (vf)lanes.x[i] * inverse;
      const vu a = (vu)y & ABS;
      packed.put(i, e2m1_code(e2m1((vf)(a > EXPONENT ? vu{} : a)).sum), (vu)y);
    }
    return scale;
  }
};

// `blocks` blocks of one expert from block `first` on; the outputs point at that block. Some vectors of blocks are prepared
// before they are finished: preparing is a long chain of divisions that only other blocks can hide.
template <class T, class Choice> __attribute__((noinline)) Counts quantize_nvfp4(
    const Weight& w, int64_t expert, int64_t first, int64_t blocks, const Anchor& anchor, const uint8_t* given,
    uint8_t* codes, uint8_t* scales) {
  constexpr int64_t VECTORS = 4;
  Choice choices[VECTORS];
  Blocks<T, 16> source(w, expert, first);
  vu saturated{}, orphaned{}, highest{};
  for (int64_t done = 0; done < blocks; done += VECTORS * VL) {
    const int64_t end = std::min(blocks, done + VECTORS * VL);
    for (int64_t at = done; at < end; at += VL) {
      const int64_t n = std::min<int64_t>(VL, end - at);
      Choice& choice = choices[(at - done) / VL];
      choice.lanes = load_lanes(source.next(n));
      vu tops[4]{};
      for (int i = 0; i < 16; ++i) tops[i & 3] = most(tops[i & 3], choice.lanes.x[i] & ABS);
      const vu top = most(most(tops[0], tops[1]), most(tops[2], tops[3]));
      const vf base = ((vf)top / 6.0f) * anchor.encode;
      choice.prepare(anchor, base, given ? given + at : nullptr, n);
      highest = most(highest, top);
      saturated -= (vu)(base > 448.0f);
      if (anchor.amax == 0) orphaned -= (vu)(top != 0);
    }
    for (int64_t at = done; at < end; at += VL) {
      Packed packed;
      const vu scale = choices[(at - done) / VL].finish(anchor, packed);
      packed.store(codes + 8 * at, scales + at, scale, std::min<int64_t>(VL, end - at));
    }
  }
  const bool damaged = any((vu)(highest >= EXPONENT));
  return {damaged ? non_finite<T, 16>(w, expert, first, blocks) : 0, count(saturated), count(orphaned)};
}

template <class T> Counts quantize_nvfp4(const Weight& w, int64_t expert, int64_t first, int64_t blocks, float amax,
                                         int64_t denominator, const uint8_t* given, uint8_t* codes, uint8_t* scales) {
  const Anchor anchor(amax, denominator);
  const auto quantize = given                  ? quantize_nvfp4<T, GivenScales>
                        : anchor.levels_scale ? quantize_nvfp4<T, FourOverSix<true>>
                                              : quantize_nvfp4<T, FourOverSix<false>>;
  return quantize(w, expert, first, blocks, anchor, given, codes, scales);
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
