// Short convolutions over a paged window, see `short_conv` in reference.py.
#pragma once
#include "pages.h"

namespace {

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

}  // namespace
