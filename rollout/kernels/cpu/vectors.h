// Vectors of VL floats: loading, rounding to bfloat16, folding, exp, sigmoid, tanh. Not fast mathematics: nothing is
// reordered, and the errors are those of the last bit or two.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__FMA__)
#include <immintrin.h>
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

struct bf16 { uint16_t bits; };


inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline vf load(const bf16* p) {
  vh h; std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
inline float load1(const float* p) { return *p; }
inline float load1(const bf16* p) { uint32_t u = (uint32_t)p->bits << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }

inline uint16_t round_bits(float x) {  // to nearest even; a NaN stays one
  uint32_t u; std::memcpy(&u, &x, 4);
  if (x != x) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { p->bits = round_bits(x); }
inline float rounded(float x, const float*) { return x; }
inline float rounded(float x, const bf16*) { bf16 b{round_bits(x)}; return load1(&b); }

// Vectors of 16, 8 and 4 floats and single floats: the columns left over by wide tiles run in narrower ones.
#define VECTOR(name, n)                                                        \
  typedef float name __attribute__((vector_size(4 * n)));                      \
  typedef uint32_t name##_u __attribute__((vector_size(4 * n)));               \
  typedef uint16_t name##_h __attribute__((vector_size(2 * n)));               \
  inline void read(name& v, const float* p) { std::memcpy(&v, p, sizeof v); }  \
  inline void read(name& v, const bf16* p) {                                   \
    name##_h h; std::memcpy(&h, p, sizeof h);                                  \
    v = (name)(__builtin_convertvector(h, name##_u) << 16);                    \
  }
VECTOR(f16, 16)
VECTOR(f8, 8)
VECTOR(f4, 4)
#undef VECTOR

// a * b + c with one rounding.
inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class V> inline V fma1(V a, V b, V c) {
  for (size_t i = 0; i < sizeof(V) / 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#if defined(__AVX512F__)
inline f16 fma1(f16 a, f16 b, f16 c) { return (f16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#endif
#if defined(__FMA__)
inline f8 fma1(f8 a, f8 b, f8 c) { return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline f4 fma1(f4 a, f4 b, f4 c) { return (f4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
#endif
inline void read(float& v, const float* p) { v = *p; }
inline void read(float& v, const bf16* p) { v = load1(p); }

struct Add { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Max { template <class T> T operator()(T a, T b) const { return a > b ? a : b; } };

// Folds a vector by halves, quarters, ...: the order that `fold_tile` has too.
template <class F = Add> inline float fold(vf v, F f = F()) {
  f8 h;
  if (VL == 16) { f8 halves[2]; std::memcpy(halves, &v, sizeof v); h = f(halves[0], halves[sizeof v / 64]); }
  else std::memcpy(&h, &v, sizeof h);
  f4 quarters[2]; std::memcpy(quarters, &h, sizeof h);
  const f4 q = f(quarters[0], quarters[1]);
  return f(f(q[0], q[2]), f(q[1], q[3]));
}

#if defined(__AVX512F__)
// VL vectors to the vector of their folds, by the same tree, all at once.
template <class F = Add> inline vf fold_tile(const vf* a, F f = F()) {
  const vi lo8 = {0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23}, hi8 = lo8 + 8;
  const vi lo4 = {0,1,2,3,8,9,10,11,16,17,18,19,24,25,26,27}, hi4 = lo4 + 4;
  const vi lo2 = {0,1,4,5,8,9,12,13,16,17,20,21,24,25,28,29}, hi2 = lo2 + 2;
  const vi lo1 = {0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30}, hi1 = lo1 + 1;
  vf b[8], c[4], d[2];
  auto join = [f](vf x, vf y, vi lo, vi hi) { return f(__builtin_shuffle(x, y, lo), __builtin_shuffle(x, y, hi)); };
  for (int i = 0; i < 8; ++i) b[i] = join(a[2*i], a[2*i+1], lo8, hi8);
  for (int i = 0; i < 4; ++i) c[i] = join(b[2*i], b[2*i+1], lo4, hi4);
  for (int i = 0; i < 2; ++i) d[i] = join(c[2*i], c[2*i+1], lo2, hi2);
  return join(d[0], d[1], lo1, hi1);
}
#else
template <class F = Add> inline vf fold_tile(const vf* a, F f = F()) {
  float s[VL];
  for (int i = 0; i < VL; ++i) s[i] = fold(a[i], f);
  return load(s);
}
#endif

inline vf exp_v(vf x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  x = x > splat(88.0f) ? splat(88.0f) : x;
  vf n = fma1(x, splat(1.44269504088896341f), splat(12582912.0f)) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
  vf r = fma1(n, splat(2.12194440e-4f), fma1(n, splat(-0.693359375f), x));
  vf p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma1(p, r, splat(c));
  p = fma1(p * r, r, r) + 1.0f;
  vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
  return p * (vf)scale;
}
inline vf sigmoid_v(vf x) { return 1.0f / (1.0f + exp_v(-x)); }
inline vf tanh_v(vf x) {
  vf z = x * x;
  vf near = splat(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    near = fma1(near, z, splat(c));
  near = fma1(near * z, x, x);
  vf far = 1.0f - 2.0f / (exp_v(x + x) + 1.0f);
  return z < splat(0.625f * 0.625f) ? near : far;
}
inline float sigmoid_1(float x) { return sigmoid_v(splat(x))[0]; }

template <class F> inline void map(float* out, const float* in, int64_t n, F f) {  // out[i] = f(in[i]), any n
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store(out + i, f(load(in + i)));
  if (i < n) {
    float rest[VL] = {};
    std::memcpy(rest, in + i, (n - i) * 4);
    store(rest, f(load(rest)));
    std::memcpy(out + i, rest, (n - i) * 4);
  }
}

inline float dot(const float* a, const float* b, int64_t n) {
  vf acc = {};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) acc = fma1(load(a + i), load(b + i), acc);
  float sum = fold(acc);
  for (; i < n; ++i) sum = fma1(a[i], b[i], sum);
  return sum;
}

}  // namespace
