// The draft's attention over pages and its RNN head with the drawing of tokens. Meaning: rollout/kernels/draft.py.
#pragma once
#include "linear.h"

namespace {

// Vectors of D, N per row: RMS norm, then rotation of channel i of the first half with channel i of the second.
void norm_rotate(float* x, const float* weight, const float* cos, const float* sin, int64_t T, int64_t N, int64_t D,
                 float eps) {
  const int64_t half = D / 2;
  for (int64_t t = 0; t < T; ++t) {
    const float *c = cos + t * half, *s = sin + t * half;
    for (int64_t n = 0; n < N; ++n, x += D) {
      const float f = 1.0f / std::sqrt(dot(x, x, D) / D + eps);
      for (int64_t i = 0; i < half; ++i) {
        const float a = x[i] * f * weight[i], b = x[half + i] * f * weight[half + i];
        x[i] = a * c[i] - b * s[i];
        x[half + i] = b * c[i] + a * s[i];
      }
    }
  }
}

struct DraftAttention {
  const float *q, *k, *v; float* out;
  const int32_t* block_table; const int64_t* lengths;
  int64_t requests, rows, N, K, D, table_stride, page, block_stride, head_stride, token_stride;
};

// softmax of n numbers in place, scaled before; what lies 87 below the largest counts as nothing.
inline void softmax(float* x, int64_t n, float scale) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) top = std::max(top, x[i]);
  map(x, x, n, [=](vf v) { v = (v - top) * scale; return v < splat(-87.0f) ? splat(0.0f) : exp_v(v); });
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  const float f = 1.0f / sum;
  for (int64_t i = 0; i < n; ++i) x[i] *= f;
}

template <class C> void draft_attention(const DraftAttention& a, const C* cache) {
  const int64_t group = a.N / a.K, width = a.N * a.D;
#pragma omp parallel for schedule(static) if (a.requests > 8)
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t length = a.lengths[r], S = length + a.rows;
    std::vector<float> keys(a.D * S), values(S * a.D), scores(a.rows * S);
    for (int64_t h = 0; h < a.K; ++h) {
      for (int64_t s = 0; s < length; ++s) {  // only what a query may see is read
        const C* at = cache + a.block_table[r * a.table_stride + s / a.page] * a.block_stride + h * a.head_stride +
                      s % a.page * a.token_stride;
        for (int64_t d = 0; d < a.D; ++d) { keys[d * S + s] = load1(at + d); values[s * a.D + d] = load1(at + a.D + d); }
      }
      for (int64_t i = 0; i < a.rows; ++i) {
        const int64_t own = ((r * a.rows + i) * a.K + h) * a.D;
        for (int64_t d = 0; d < a.D; ++d) keys[d * S + length + i] = a.k[own + d];
        std::memcpy(&values[(length + i) * a.D], a.v + own, a.D * 4);
      }
      for (int64_t g = 0; g < group; ++g) {
        const int64_t first = r * a.rows * width + (h * group + g) * a.D;
        matmul(a.q + first, width, keys.data(), S, scores.data(), S, a.rows, S, a.D);
        for (int64_t i = 0; i < a.rows; ++i) softmax(&scores[i * S], S, 1.0f / std::sqrt((float)a.D));
        matmul(scores.data(), S, values.data(), a.D, a.out + first, width, a.rows, a.D, S);
      }
    }
  }
}

struct DraftBlock {
  const float *logits, *prepared, *temperature; const double* uniform; const uint8_t* forbidden; const int64_t* anchors;
  int64_t* tokens; float* probs;
  int64_t requests, rows, vocabulary, rank;
};

// The first token whose running sum exceeds its share of the whole, in float64; never one of probability 0.
inline int64_t drawn(const float* probs, int64_t n, double uniform) {
  double total = 0.0, sum = 0.0;
  for (int64_t i = 0; i < n; ++i) total += probs[i];
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (probs[i] == 0.0f) continue;
    last = i;
    if ((sum += probs[i]) > uniform * total) break;
  }
  return last;
}

// w1 and w2 are [rank, vocabulary] in memory, joint [2 rank, 3 rank].
template <class W> void draft_block(const DraftBlock& b, const W* w1, const W* joint, const W* w2) {
  const int64_t R = b.requests, S = b.rank, V = b.vocabulary;
  std::vector<float> state(R * S), input(R * 2 * S), mixed(R * 3 * S), output(R * S), logits(R * V);
  std::vector<int64_t> previous(b.anchors, b.anchors + R);
  for (int64_t step = 0; step < b.rows; ++step) {
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < S; ++i) {
        input[r * 2 * S + i] = state[r * S + i];
        input[r * 2 * S + S + i] = load1(w1 + i * V + previous[r]);
      }
    matmul(input.data(), 2 * S, joint, 3 * S, mixed.data(), 3 * S, R, 3 * S, 2 * S);
    for (int64_t r = 0; r < R; ++r) {
      float* m = &mixed[r * 3 * S];
      const float* p = b.prepared + (r * b.rows + step) * 3 * S;
      for (int64_t i = 0; i < 3 * S; ++i) m[i] += p[i];
      map(m, m, S, [](vf v) { return sigmoid_v(v); });
      map(m + S, m + S, 2 * S, [](vf v) { return tanh_v(v); });
      for (int64_t i = 0; i < S; ++i) {
        state[r * S + i] = m[i] * state[r * S + i] + (1.0f - m[i]) * m[S + i];
        output[r * S + i] = m[2 * S + i];
      }
    }
    matmul(output.data(), S, w2, V, logits.data(), V, R, V, S);
    for (int64_t r = 0; r < R; ++r) {
      float* l = &logits[r * V];
      const float* base = b.logits + (r * b.rows + step) * V;
      for (int64_t i = 0; i < V; ++i) l[i] += base[i];
      if (b.forbidden)
        for (int64_t i = 0; i < V; ++i) if (b.forbidden[r * V + i]) l[i] = -std::numeric_limits<float>::infinity();
      const bool greedy = b.temperature[r] == 0.0f;
      if (greedy) previous[r] = std::max_element(l, l + V) - l;
      if (b.probs) {
        float* p = b.probs + (r * b.rows + step) * V;
        std::memcpy(p, l, V * 4);
        softmax(p, V, greedy ? 1.0f : 1.0f / b.temperature[r]);
        if (!greedy) previous[r] = drawn(p, V, b.uniform[r * b.rows + step]);
      }
      b.tokens[r * b.rows + step] = previous[r];
    }
  }
}

}  // namespace
