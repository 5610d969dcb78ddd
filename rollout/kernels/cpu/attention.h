// Keys and values into their pages, and relative attention over them, see `store_kv` and `attention` in reference.py.
#pragma once
#include "pages.h"

namespace {

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

}  // namespace
