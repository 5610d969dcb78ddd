// Router and experts, see `experts` in reference.py.
#pragma once
#include "linear.h"

namespace {

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
