// Vectors of VL lanes through the compiler's vector types, a portable subset that becomes AVX-512, AVX2, SSE or NEON.
// Nothing is reordered, contracted or approximated: every operation on floats is one IEEE operation rounded to nearest.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16;
#else
constexpr int VL = 8;
#endif
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint16_t vhh __attribute__((vector_size(4 * VL)));
typedef uint8_t vb __attribute__((vector_size(VL)));

struct bf16 { uint16_t bits; };

constexpr uint32_t SIGN = 0x80000000u, ABS = 0x7FFFFFFFu, EXPONENT = 0x7F800000u;
constexpr float FLOAT_MAX = 3.40282346638528859812e38f;

// The caller's thread may flush denormals (torch.set_flush_denormal) or round otherwise; bytes must not depend on it.
class DefaultRounding {
#if defined(__SSE2__)
  unsigned saved = _mm_getcsr();
 public:
  DefaultRounding() { _mm_setcsr(0x1F80); }
  ~DefaultRounding() { _mm_setcsr(saved); }
#else
  std::fenv_t saved;
 public:
  DefaultRounding() { std::fegetenv(&saved); std::fesetenv(FE_DFL_ENV); }
  ~DefaultRounding() { std::fesetenv(&saved); }
#endif
};

template <class V> inline V load_as(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store_as(void* p, V v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }
inline vu splat(uint32_t x) { return x - vu{}; }
inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

// Order of non-negative floats is the order of their bits, NaN above all: integer minima and maxima serve for both.
inline vu least(vu a, vu b) { return a < b ? a : b; }
inline vu most(vu a, vu b) { return a > b ? a : b; }
inline vhh most(vhh a, vhh b) { return a > b ? a : b; }

// For operands whose product and sum are exact: then fusing changes nothing but the time.
inline vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline uint32_t any(vu mask) {
  uint32_t found = 0;
  for (int i = 0; i < VL; ++i) found |= mask[i];
  return found;
}
inline int64_t count(vu mask) {  // lanes are counters or masks of 1
  int64_t sum = 0;
  for (int i = 0; i < VL; ++i) sum += mask[i];
  return sum;
}

#if defined(__AVX512F__)
inline vu evens(vu a, vu b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline vu odds(vu a, vu b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline vu zip_low(vu a, vu b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline vu zip_high(vu a, vu b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#else
inline vu evens(vu a, vu b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
inline vu odds(vu a, vu b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
inline vu zip_low(vu a, vu b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline vu zip_high(vu a, vu b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#endif

// R vectors hold consecutive words; a step on registers at distance d moves the lowest bit of the lane into bit d of the
// register. After log2(R) steps register r holds the words r, r + R, r + 2R, ...: word r of every block of R words.
template <int D = 1, int R> inline void transpose(vu (&z)[R]) {
  if constexpr (D < R) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      if (!(r & D)) {
        const vu a = z[r], b = z[r + D];
        z[r] = evens(a, b);
        z[r + D] = odds(a, b);
      }
    transpose<2 * D>(z);
  }
}

// table[idx & 15] per lane.
inline vu lookup(const vu (&table)[16 / VL], vu idx) {
#if defined(__AVX512F__)
  return (vu)_mm512_permutexvar_epi32((__m512i)idx, (__m512i)table[0]);
#elif defined(__AVX2__)
  const vu low = (vu)_mm256_permutevar8x32_epi32((__m256i)table[0], (__m256i)idx);
  const vu high = (vu)_mm256_permutevar8x32_epi32((__m256i)table[1], (__m256i)idx);
  return (idx & 8) != 0 ? high : low;
#else
  vu v{};
  for (int i = 0; i < VL; ++i) v[i] = table[(idx[i] >> 3) & 1][idx[i] & 7];
  return v;
#endif
}

// bfloat16 bits in the low halves of the lanes, to nearest even; a NaN stays one.
inline vu round_bf16(vf x) {
  const vu u = (vu)x;
  return (u & ABS) > EXPONENT ? splat(0x7FC0u) : (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
}

inline void store_values(float* p, vu bits) { store_as(p, bits); }
inline void store_values(bf16* p, vu halves) { store_as(p, __builtin_convertvector(halves, vh)); }
inline vu as_stored(float, vf x) { return (vu)x; }
inline vu as_stored(bf16, vf x) { return round_bf16(x); }
inline vu as_truncated(float, vf x) { return (vu)x; }
inline vu as_truncated(bf16, vf x) { return (vu)x >> 16; }

// Bytes to lanes; compilers take generic conversions of bytes apart.
inline vu widen(vb bytes) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, vu);
#endif
}

// The next `n` <= VL bytes in the lanes, zeros behind them.
inline vu load_bytes(const uint8_t* p, int64_t n) {
  if (n == VL) return widen(load_as<vb>(p));
  uint8_t padded[VL] = {};
  std::memcpy(padded, p, n);
  return widen(load_as<vb>(padded));
}

// The bytes of the first `n` <= VL lanes.
inline void store_bytes(uint8_t* p, vu lanes, int64_t n) {
  const vb bytes = __builtin_convertvector(lanes, vb);
  if (n == VL) store_as(p, bytes);
  else std::memcpy(p, &bytes, n);
}

// E4M3, non-negative and not above 448: the value snapped to its grid, and its byte.
// Adding 2^23 grid steps rounds to nearest even; 152 more of them make bits + (bits >> 20) end in the byte.
struct E4M3 { vf value; vu byte; };
inline E4M3 e4m3(vu x) {
  const vu magic = (most(x, splat(bits_of(0x1p-6f))) & EXPONENT) + ((20u << 23) + 152);
  const vf sum = (vf)x + (vf)magic;
  return {sum - (vf)magic, ((vu)sum + ((vu)sum >> 20)) & 0xFF};
}

// Values of E4M3 bytes in the lanes, any byte.
inline vf e4m3_values(vu byte) {
  const vu magnitude = byte & 0x7F;
  const vu normal = (magnitude << 20) + (120u << 23);
  const vu subnormal = (vu)(__builtin_convertvector((vi)magnitude, vf) * 0x1p-9f);
  vu v = magnitude < 8 ? subnormal : normal;
  v = magnitude == 0x7F ? splat(0x7FC00000u) : v;
  return (vf)(v | (byte & 0x80) << 24);
}

}  // namespace
