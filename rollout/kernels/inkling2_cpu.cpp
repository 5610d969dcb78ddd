// CPU kernels of the rollout engine. Plain C interface, no torch headers: the build takes seconds and does not depend on
// torch's version. The meaning of every function is that of its namesake in reference.py; T, H, N, K, D, E, I, C as there.
//
// Rule of this file: the result of a row depends on that row, its position and its cache only, bit by bit, never on how
// many other rows a step has or how a prompt was cut. So every sum runs in an order fixed by the row alone: a linear layer
// adds its inputs one by one, attention runs over absolute positions, experts add in ascending order. Tiles change which
// rows are computed together, not how. The compiler may not contract (-ffp-contract=off): it would in one tile and not in
// another, so multiply-adds are written as such. Weights lie in memory with the input dimension outermost ([C, O], "k-major").
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__FMA__)
#include <immintrin.h>
#endif

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

namespace {

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

// ---- linear ------------------------------------------------------------------------------------------------------

// R rows by V x COLS columns. Each output adds k = 0, 1, 2, ... in one accumulator, whatever the tile.
template <class V, int R, int COLS, class W>
inline void tile(const float* x, int64_t ldx, const W* w, int64_t ldw, float* y, int64_t ldy, int64_t K) {
  constexpr int lanes = sizeof(V) / 4;
  V acc[R][COLS] = {};
  for (int64_t k = 0; k < K; ++k) {
    V wk[COLS];
    for (int c = 0; c < COLS; ++c) read(wk[c], w + k * ldw + c * lanes);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < COLS; ++c) acc[r][c] = fma1(x[r * ldx + k] - V{}, wk[c], acc[r][c]);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLS; ++c) std::memcpy(y + r * ldy + c * lanes, &acc[r][c], sizeof(V));
}

constexpr int TILE_ROWS = VL == 16 ? 6 : 4, TILE_COLS = VL == 16 ? 4 : 2;

template <class V, int COLS, class W>
inline void strip(const float* x, int64_t ldx, const W* w, int64_t ldw, float* y, int64_t ldy, int64_t M, int64_t K) {
  int64_t m = 0;
  for (; m + TILE_ROWS <= M; m += TILE_ROWS) tile<V, TILE_ROWS, COLS>(x + m * ldx, ldx, w, ldw, y + m * ldy, ldy, K);
  for (; m + 2 <= M; m += 2) tile<V, 2, COLS>(x + m * ldx, ldx, w, ldw, y + m * ldy, ldy, K);
  if (m < M) tile<V, 1, COLS>(x + m * ldx, ldx, w, ldw, y + m * ldy, ldy, K);
}

template <class W>
void matmul(const float* x, int64_t ldx, const W* w, int64_t ldw, float* y, int64_t ldy, int64_t M, int64_t N, int64_t K) {
  int64_t n = 0;
  for (; n + VL * TILE_COLS <= N; n += VL * TILE_COLS) strip<vf, TILE_COLS>(x, ldx, w + n, ldw, y + n, ldy, M, K);
  for (; n + VL <= N; n += VL) strip<vf, 1>(x, ldx, w + n, ldw, y + n, ldy, M, K);
  for (; n + 8 <= N; n += 8) strip<f8, 1>(x, ldx, w + n, ldw, y + n, ldy, M, K);
  for (; n + 4 <= N; n += 4) strip<f4, 1>(x, ldx, w + n, ldw, y + n, ldy, M, K);
  for (; n < N; ++n) strip<float, 1>(x, ldx, w + n, ldw, y + n, ldy, M, K);
}

// Rows are spread over threads in whole tiles; with one thread this is `matmul`.
template <class W>
void matmul_mt(const float* x, const W* w, float* y, int64_t ldy, int64_t M, int64_t N, int64_t K) {
  const int64_t chunk = 8 * TILE_ROWS;
#pragma omp parallel for schedule(static) if (M > chunk)
  for (int64_t m = 0; m < M; m += chunk) matmul(x + m * K, K, w, N, y + m * ldy, ldy, std::min(chunk, M - m), N, K);
}

// ---- paged caches ------------------------------------------------------------------------------------------------

struct Batch {  // the PagedBatch of one group
  const int32_t* query_start; const int32_t* seq_lens; const int32_t* block_table; const int64_t* slots;
  int64_t requests, table_stride, tokens_per_block;
};

struct Row { int32_t request, first, position; };  // of one row of the step: request, its first row, absolute position

std::vector<Row> rows_of(const Batch& b, int64_t T) {
  std::vector<Row> rows(T, Row{-1, 0, 0});
  for (int64_t r = 0; r < b.requests; ++r) {
    int32_t first = b.query_start[r], last = b.query_start[r + 1], start = b.seq_lens[r] - (last - first);
    for (int32_t t = first; t < last && t < T; ++t) rows[t] = Row{(int32_t)r, first, start + t - first};
  }
  return rows;
}

inline int64_t block_of(const Batch& b, int32_t request, int64_t position) {
  return b.block_table[request * b.table_stride + position / b.tokens_per_block];
}

constexpr int TAPS = 4;

// One row: y = residual + (sum over taps of (w + d) * source + own) * scale, all channels in one pass.
inline void conv_row(float* y, const float* const* source, const float* const* taps, const float* dynamic,
                     const float* residual, int64_t C, int64_t per_head, float scale) {
  for (int64_t h = 0; h * per_head < C; ++h) {
    float d[TAPS] = {};
    if (dynamic) for (int j = 0; j < TAPS; ++j) d[j] = dynamic[h * TAPS + j];
    const int64_t c0 = h * per_head, c1 = c0 + per_head;
    const float *s0 = source[0], *s1 = source[1], *s2 = source[2], *s3 = source[3];
    const float *w0 = taps[0], *w1 = taps[1], *w2 = taps[2], *w3 = taps[3];
    for (int64_t c = c0; c < c1; ++c) {
      float sum = (w0[c] + d[0]) * s0[c];
      sum += (w1[c] + d[1]) * s1[c];
      sum += (w2[c] + d[2]) * s2[c];
      sum += (w3[c] + d[3]) * s3[c];
      y[c] = (sum + s0[c]) * scale;
    }
    if (residual) for (int64_t c = c0; c < c1; ++c) y[c] = residual[c] + y[c];
  }
}

// `now` are the inputs as the state will hold them; with a float32 state they are `x` itself.
template <class S>
void short_conv(const float* x, S* state, const Batch& b, const float* weight, const float* dynamic, const float* residual,
                float* out, int64_t T, int64_t C, int64_t heads, int64_t block_stride, int64_t token_stride) {
  constexpr bool exact = sizeof(S) == 4;
  std::vector<float> copy(exact ? 0 : T * C), zeros(C, 0.0f);
  if (!exact) for (int64_t i = 0; i < T * C; ++i) copy[i] = rounded(x[i], state);
  const float* now = exact ? x : copy.data();
  // Before any read: a request may have been given pages of a common prefix that another one fills in this very step.
  for (int64_t t = 0; t < T; ++t) {
    if (b.slots[t] < 0) continue;
    S* slot = state + b.slots[t] / b.tokens_per_block * block_stride + b.slots[t] % b.tokens_per_block * token_stride;
    for (int64_t c = 0; c < C; ++c) put(slot + c, now[t * C + c]);
  }
  const float* taps[TAPS];  // by distance; static weights have the current token last
  for (int j = 0; j < TAPS; ++j) taps[j] = weight + (dynamic ? j : TAPS - 1 - j) * C;
  const float scale = 1.0f / std::sqrt((float)((dynamic ? 2 : 1) * TAPS + 1));
  const std::vector<Row> rows = rows_of(b, T);
#pragma omp parallel if (T > 64)
  {
    std::vector<float> past(TAPS * C);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) {
      const Row row = rows[t];
      const float* source[TAPS];
      for (int j = 0; j < TAPS; ++j) {
        const int64_t position = row.position - j;
        if (position < 0) source[j] = zeros.data();
        else if (t - j >= row.first) source[j] = now + (t - j) * C;
        else {
          const S* slot = state + block_of(b, row.request, position) * block_stride + position % b.tokens_per_block * token_stride;
          for (int64_t c = 0; c < C; ++c) past[j * C + c] = load1(slot + c);
          source[j] = past.data() + j * C;
        }
      }
      conv_row(out + t * C, source, taps, dynamic ? dynamic + t * heads * TAPS : nullptr,
               residual ? residual + t * C : nullptr, C, heads ? C / heads : C, scale);
    }
  }
}

template <class S>
void store_kv(const float* k, const float* v, S* cache, const Batch& b, int64_t T, int64_t K, int64_t D,
              int64_t block_stride, int64_t head_stride, int64_t token_stride, float clip, float eps) {
  for (int64_t t = 0; t < T; ++t) {
    if (b.slots[t] < 0) continue;
    S* slot = cache + b.slots[t] / b.tokens_per_block * block_stride + b.slots[t] % b.tokens_per_block * token_stride;
    for (int64_t h = 0; h < K; ++h) {
      const float *kh = k + (t * K + h) * D, *vh = v + (t * K + h) * D;
      const float ks = std::min(1.0f, clip / (std::sqrt(dot(kh, kh, D)) + 1e-6f));
      const float vs = 1.0f / std::sqrt(dot(vh, vh, D) / D + eps);
      S* dst = slot + h * head_stride;
      for (int64_t d = 0; d < D; ++d) put(dst + d, kh[d] * ks);
      for (int64_t d = 0; d < D; ++d) put(dst + D + d, vh[d] * vs);
    }
  }
}

// ---- attention ---------------------------------------------------------------------------------------------------

struct Attention {
  const float *q, *r, *sink, *gate, *q_scale, *r_scale, *proj;
  float *out;
  int64_t T, N, K, D, M, extent, window, block_stride, head_stride, token_stride;
  float q_clip, r_clip, alpha, floor;
};

constexpr int HEADS = VL / 2;  // heads of one key/value head that run together: their q and r norms fold in one tile

struct Scratch { std::vector<float> floats; std::vector<const void*> keys; };

// Scaled, clipped, position-scaled q [n, D] and r [n, M] of `n` heads from `head` on.
inline void prepare(const Attention& a, float* q, float* r, int64_t t, int64_t head, int64_t n, float tau) {
  vf squares[VL] = {};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t h = head + i;
    for (int64_t d = 0; d < a.D; d += VL) {
      const vf v = load(a.q + (t * a.N + h) * a.D + d) * load(a.q_scale + h * a.D + d);
      store(q + i * a.D + d, v);
      squares[i] = fma1(v, v, squares[i]);
    }
    for (int64_t m = 0; m < a.M; m += VL) {
      const vf v = load(a.r + (t * a.N + h) * a.M + m) * load(a.r_scale + h * a.M + m);
      store(r + i * a.M + m, v);
      squares[HEADS + i] = fma1(v, v, squares[HEADS + i]);
    }
  }
  float factor[VL];
  store(factor, fold_tile(squares));
  for (int i = 0; i < VL; ++i)
    factor[i] = std::min(1.0f, (i < HEADS ? a.q_clip : a.r_clip) / (std::sqrt(factor[i]) + 1e-6f)) * tau;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < a.D; d += VL) store(q + i * a.D + d, load(q + i * a.D + d) * factor[i]);
    for (int64_t m = 0; m < a.M; m += VL) store(r + i * a.M + m, load(r + i * a.M + m) * factor[HEADS + i]);
  }
}

// Addresses of the keys from position `first` on, in order. What fills up the last vector repeats the last key.
template <class S>
inline void find_keys(const S** key, const S* cache, const Attention& a, const Batch& b, int32_t request, int64_t kh,
                      int64_t first, int64_t keys, int64_t padded) {
  for (int64_t j = 0; j < keys;) {
    const int64_t offset = (first + j) % b.tokens_per_block, run = std::min(b.tokens_per_block - offset, keys - j);
    const S* k = cache + block_of(b, request, first + j) * a.block_stride + kh * a.head_stride + offset * a.token_stride;
    for (int64_t i = 0; i < run; ++i) key[j + i] = k + i * a.token_stride;
    j += run;
  }
  for (int64_t j = keys; j < padded; ++j) key[j] = key[keys - 1];
}

// Softmax with a sink over rows of `s`; entries beyond `keys` become zero.
inline void softmax(float* s, int64_t n, int64_t keys, int64_t padded, const float* sink) {
  vf highest[VL], total[VL] = {};
  for (int i = 0; i < VL; ++i) highest[i] = splat(i < n ? sink[i] : 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = keys; j < padded; ++j) s[i * padded + j] = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < padded; j += VL) highest[i] = Max()(load(s + i * padded + j), highest[i]);
  }
  const vf top = fold_tile(highest, Max());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < padded; j += VL) {
      const vf x = load(s + i * padded + j), e = x < splat(-1e30f) ? vf{} : exp_v(x - top[i]);
      store(s + i * padded + j, e);
      total[i] += e;
    }
  float sinks[VL] = {};
  for (int64_t i = 0; i < n; ++i) sinks[i] = sink[i];
  const vf norm = 1.0f / (fold_tile(total) + exp_v(load(sinks) - top));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < padded; j += VL) store(s + i * padded + j, load(s + i * padded + j) * norm[i]);
}

// `reversed` is `proj` with distances descending and VL zeros behind each row: [M, extent + VL].
template <class S>
void attend(const Attention& a, const S* cache, const Batch& b, const float* reversed, const Row& row, int64_t t,
            int64_t head, int64_t n, Scratch& scratch) {
  const int64_t D = a.D, p = row.position, kh = head / (a.N / a.K);
  const int64_t first = a.window ? std::max<int64_t>(0, p - a.window + 1) : 0, keys = p - first + 1;
  const int64_t padded = (keys + VL - 1) / VL * VL, reach = std::min(a.extent, keys), width = a.extent + VL;
  scratch.floats.resize(n * (D + a.M + padded) + VL);
  scratch.keys.resize(padded);
  float *q = scratch.floats.data(), *r = q + n * D, *s = r + n * a.M;
  const S** key = (const S**)scratch.keys.data();
  prepare(a, q, r, t, head, n, a.floor > 0 ? 1.0f + a.alpha * std::log(std::max((float)(p + 1) / a.floor, 1.0f)) : 1.0f);
  find_keys(key, cache, a, b, row.request, kh, first, keys, padded);
  const float scaling = 1.0f / std::sqrt((float)D);
  for (int64_t j = 0; j < padded; j += VL)
    for (int64_t i = 0; i < n; ++i) {
      vf acc[VL] = {};
      for (int64_t d = 0; d < D; d += VL) {
        const vf qd = load(q + i * D + d);
        for (int l = 0; l < VL; ++l) acc[l] = fma1(qd, load(key[j + l] + d), acc[l]);
      }
      store(s + i * padded + j, fold_tile(acc) * scaling);
    }
  for (int64_t c = 0; c < reach; c += VL) {  // the last `reach` keys are within the extent
    vf bias[HEADS] = {};
    for (int64_t m = 0; m < a.M; ++m) {
      const vf profile = load(reversed + m * width + a.extent - reach + c);
      for (int64_t i = 0; i < n; ++i) bias[i] = fma1(profile, splat(r[i * a.M + m]), bias[i]);
    }
    // May run over the end of a row into the next one's first scores, adding zeros; the last row has room behind it.
    for (int64_t i = 0; i < n; ++i) {
      float* target = s + i * padded + keys - reach + c;
      store(target, load(target) + bias[i]);
    }
  }
  softmax(s, n, keys, padded, a.sink + t * a.N + head);
  const int64_t base = (t * a.N + head) * D;
  for (int64_t d = 0; d < D; d += VL) {
    vf acc[HEADS] = {};
    for (int64_t j = 0; j < keys; ++j) {
      const vf v = load(key[j] + D + d);
      for (int64_t i = 0; i < n; ++i) acc[i] = fma1(v, splat(s[i * padded + j]), acc[i]);
    }
    for (int64_t i = 0; i < n; ++i)
      store(a.out + base + i * D + d, acc[i] * sigmoid_v(load(a.gate + base + i * D + d)));
  }
}

template <class S>
void attention(const Attention& a, const S* cache, const Batch& b) {
  const std::vector<Row> rows = rows_of(b, a.T);
  const int64_t width = a.extent + VL, per_kv = a.N / a.K, groups = (per_kv + HEADS - 1) / HEADS;
  std::vector<float> reversed(a.M * width, 0.0f);
  for (int64_t m = 0; m < a.M; ++m)
    for (int64_t d = 0; d < a.extent; ++d) reversed[m * width + a.extent - 1 - d] = a.proj[m * a.extent + d];
#pragma omp parallel if (a.T * a.K > 16)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 8)
    for (int64_t i = 0; i < a.T * a.K * groups; ++i) {
      const int64_t t = i / (a.K * groups), kh = i / groups % a.K, g = i % groups * HEADS;
      const int64_t head = kh * per_kv + g, n = std::min<int64_t>(HEADS, per_kv - g);
      if (rows[t].request < 0) std::fill_n(a.out + (t * a.N + head) * a.D, n * a.D, 0.0f);
      else attend(a, cache, b, reversed.data(), rows[t], t, head, n, scratch);
    }
  }
}

// ---- experts -----------------------------------------------------------------------------------------------------

struct Experts {
  const float *x, *router, *bias;
  float *out;
  int64_t T, H, E, I, top_k;
  float route_scale, gate_cap, up_cap;
};

// Chosen experts of a token in ascending order and their weights; ties go to the lower number.
void route(const Experts& e, const float* logits, int32_t* chosen, float* weights) {
  std::vector<float> scores(e.E), ranked(e.E);
  map(scores.data(), logits, e.E, sigmoid_v);
  for (int64_t i = 0; i < e.E; ++i) ranked[i] = scores[i] + e.bias[i];
  for (int64_t k = 0; k < e.top_k; ++k) {
    int64_t best = std::max_element(ranked.begin(), ranked.end()) - ranked.begin();
    chosen[k] = (int32_t)best;
    ranked[best] = -std::numeric_limits<float>::infinity();
  }
  std::sort(chosen, chosen + e.top_k);
  float sum = 0.0f;
  for (int64_t k = 0; k < e.top_k; ++k) sum += scores[chosen[k]];
  for (int64_t k = 0; k < e.top_k; ++k) weights[k] = scores[chosen[k]] / (sum + 1e-20f) * e.route_scale;
}

template <class W>
void experts(const Experts& e, const W* gate_up, const W* down) {
  std::vector<float> logits(e.T * e.E), weights(e.T * e.top_k), partial(e.T * e.top_k * e.H);
  std::vector<int32_t> chosen(e.T * e.top_k);
  matmul_mt(e.x, e.router, logits.data(), e.E, e.T, e.E, e.H);
  std::vector<std::vector<int32_t>> members(e.E);
  for (int64_t t = 0; t < e.T; ++t) {
    route(e, logits.data() + t * e.E, chosen.data() + t * e.top_k, weights.data() + t * e.top_k);
    for (int64_t k = 0; k < e.top_k; ++k) members[chosen[t * e.top_k + k]].push_back((int32_t)(t * e.top_k + k));
  }
#pragma omp parallel if (e.T > 4)
  {
    const int64_t most = 8 * TILE_ROWS;  // rows at once, so that they stay in the first-level cache
    std::vector<float> rows(most * e.H), hidden(most * 2 * e.I), act(most * e.I), result(most * e.H);
#pragma omp for schedule(dynamic)
    for (int64_t expert = 0; expert < e.E; ++expert)
      for (int64_t first = 0; first < (int64_t)members[expert].size(); first += most) {
        const int32_t* slots = members[expert].data() + first;
        const int64_t n = std::min(most, (int64_t)members[expert].size() - first);
        for (int64_t i = 0; i < n; ++i) std::memcpy(&rows[i * e.H], e.x + slots[i] / e.top_k * e.H, e.H * 4);
        matmul(rows.data(), e.H, gate_up + expert * 2 * e.I * e.H, 2 * e.I, hidden.data(), 2 * e.I, n, 2 * e.I, e.H);
        for (int64_t i = 0; i < n; ++i)
          for (int64_t j = 0; j < e.I; j += VL) {
            const vf g = load(&hidden[i * 2 * e.I + j]), u = load(&hidden[i * 2 * e.I + e.I + j]);
            const vf gated = tanh_v(g / e.gate_cap) * e.gate_cap * sigmoid_v(g);
            store(&act[i * e.I + j], gated * (tanh_v(u / e.up_cap) * e.up_cap));
          }
        matmul(act.data(), e.I, down + expert * e.H * e.I, e.H, result.data(), e.H, n, e.H, e.I);
        for (int64_t i = 0; i < n; ++i)
          for (int64_t h = 0; h < e.H; ++h) partial[slots[i] * e.H + h] = result[i * e.H + h] * weights[slots[i]];
      }
  }
  for (int64_t t = 0; t < e.T; ++t) {
    float* y = e.out + t * e.H;
    std::memcpy(y, &partial[t * e.top_k * e.H], e.H * 4);
    for (int64_t k = 1; k < e.top_k; ++k)
      for (int64_t h = 0; h < e.H; ++h) y[h] += partial[(t * e.top_k + k) * e.H + h];
  }
}

}  // namespace

// ---- C interface: sizes are int64, `half` says that weights or caches are bfloat16 ---------------------------------

extern "C" {

void ink_linear(const float* x, const void* w, float* y, int64_t M, int64_t N, int64_t K, int64_t half) {
  if (half) matmul_mt(x, (const bf16*)w, y, N, M, N, K);
  else matmul_mt(x, (const float*)w, y, N, M, N, K);
}

void ink_softcap_logits(const float* x, const void* w, float* y, int64_t M, int64_t N, int64_t K, int64_t padded,
                        float cap, int64_t half) {
  if (half) matmul_mt(x, (const bf16*)w, y, padded, M, N, K);
  else matmul_mt(x, (const float*)w, y, padded, M, N, K);
  for (int64_t m = 0; m < M; ++m) {
    map(y + m * padded, y + m * padded, N, [cap](vf v) { return tanh_v(v / cap) * cap; });
    std::fill(y + m * padded + N, y + (m + 1) * padded, -std::numeric_limits<float>::infinity());
  }
}

void ink_mix_norm(const float* blocks, const float* partial, const float* queries, const float* weights, float* out,
                  int64_t S, int64_t T, int64_t H, int64_t Q, float mix_eps, float norm_eps) {
#pragma omp parallel for schedule(static) if (T > 64)
  for (int64_t t = 0; t < T; ++t) {
    const float* source[64];
    float inverse[64], share[64];
    for (int64_t i = 0; i <= S; ++i) {
      source[i] = i < S ? blocks + (i * T + t) * H : partial + t * H;
      inverse[i] = 1.0f / std::sqrt(dot(source[i], source[i], H) / H + mix_eps);
    }
    for (int64_t qi = 0; qi < Q; ++qi) {
      float* y = out + (qi * T + t) * H;
      if (queries) {
        float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
        for (int64_t i = 0; i <= S; ++i) {
          share[i] = dot(queries + qi * H, source[i], H) * inverse[i] / std::sqrt((float)H);
          top = std::max(top, share[i]);
        }
        for (int64_t i = 0; i <= S; ++i) total += share[i] = std::exp(share[i] - top);
        std::fill(y, y + H, 0.0f);
        for (int64_t i = 0; i <= S; ++i) {
          const float f = share[i] / total * inverse[i];
          for (int64_t h = 0; h < H; ++h) y[h] += f * source[i][h];
        }
      } else std::memcpy(y, source[S], H * 4);
      const float f = 1.0f / std::sqrt(dot(y, y, H) / H + norm_eps);
      for (int64_t h = 0; h < H; ++h) y[h] = weights[qi * H + h] * (y[h] * f);
    }
  }
}

void ink_short_conv(const float* x, void* state, const Batch* b, const float* weight, const float* dynamic,
                    const float* residual, float* out, int64_t T, int64_t C, int64_t heads, int64_t block_stride,
                    int64_t token_stride, int64_t half) {
  if (half) short_conv(x, (bf16*)state, *b, weight, dynamic, residual, out, T, C, heads, block_stride, token_stride);
  else short_conv(x, (float*)state, *b, weight, dynamic, residual, out, T, C, heads, block_stride, token_stride);
}

void ink_store_kv(const float* k, const float* v, void* cache, const Batch* b, int64_t T, int64_t K, int64_t D,
                  int64_t block_stride, int64_t head_stride, int64_t token_stride, float clip, float eps, int64_t half) {
  if (half) store_kv(k, v, (bf16*)cache, *b, T, K, D, block_stride, head_stride, token_stride, clip, eps);
  else store_kv(k, v, (float*)cache, *b, T, K, D, block_stride, head_stride, token_stride, clip, eps);
}

void ink_attention(const Attention* a, const void* cache, const Batch* b, int64_t half) {
  if (half) attention(*a, (const bf16*)cache, *b);
  else attention(*a, (const float*)cache, *b);
}

void ink_experts(const Experts* e, const void* gate_up, const void* down, int64_t half) {
  if (half) experts(*e, (const bf16*)gate_up, (const bf16*)down);
  else experts(*e, (const float*)gate_up, (const float*)down);
}

// Adapters come as vLLM stacks them, A [slots, R, C] and B [slots, O, R]; each is turned once per run of rows that use it.
void ink_lora(float* y, int64_t ldy, const float* x, const float* a, const float* b, const int64_t* slots, int64_t T,
              int64_t C, int64_t R, int64_t O, float scale) {
  std::vector<float> low, delta, turned_a(R * C), turned_b(O * R);
  int64_t turned = -1;
  for (int64_t t = 0; t < T;) {
    int64_t last = t + 1;
    while (last < T && slots[last] == slots[t]) ++last;
    if (const int64_t slot = slots[t]; slot >= 0) {
      if (slot != turned) {
        for (int64_t r = 0; r < R; ++r) for (int64_t c = 0; c < C; ++c) turned_a[c * R + r] = a[(slot * R + r) * C + c];
        for (int64_t o = 0; o < O; ++o) for (int64_t r = 0; r < R; ++r) turned_b[r * O + o] = b[(slot * O + o) * R + r];
        turned = slot;
      }
      low.resize((last - t) * R); delta.resize((last - t) * O);
      matmul_mt(x + t * C, turned_a.data(), low.data(), R, last - t, R, C);
      matmul_mt(low.data(), turned_b.data(), delta.data(), O, last - t, O, R);
      for (int64_t m = t; m < last; ++m)
        for (int64_t o = 0; o < O; ++o) y[m * ldy + o] += delta[(m - t) * O + o] * scale;
    }
    t = last;
  }
}

}  // extern "C"
