// CPU kernels of the rollout engine. Plain C interface, no torch headers: the build takes seconds and does not depend on
// torch's version. The meaning of every function is that of its namesake in reference.py; T, H, N, K, D, E, I, C as there.
//
// Rule of this file: the result of a row depends on that row, its position and its cache only, bit by bit, never on how
// many other rows a step has or how a prompt was cut. So every sum runs in an order fixed by the row alone: a linear layer
// adds its inputs one by one, attention runs over absolute positions, experts add in ascending order. Tiles change which
// rows are computed together, not how. The compiler may not contract (-ffp-contract=off): it would in one tile and not in
// another, so multiply-adds are written as such. Weights lie in memory with the input dimension outermost ([C, O], "k-major").
//
// C interface: sizes are int64, `half` says that weights or caches are bfloat16.
#include "attention.h"
#include "draft.h"
#include "experts.h"
#include "short_conv.h"

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

void ink_norm_rotate(float* x, const float* weight, const float* cos, const float* sin, int64_t T, int64_t N, int64_t D,
                     float eps) {
  norm_rotate(x, weight, cos, sin, T, N, D, eps);
}

void ink_draft_attention(const DraftAttention* a, const void* cache, int64_t half) {
  if (half) draft_attention(*a, (const bf16*)cache);
  else draft_attention(*a, (const float*)cache);
}

void ink_draft_block(const DraftBlock* b, const void* w1, const void* joint, const void* w2, int64_t half) {
  if (half) draft_block(*b, (const bf16*)w1, (const bf16*)joint, (const bf16*)w2);
  else draft_block(*b, (const float*)w1, (const float*)joint, (const float*)w2);
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
