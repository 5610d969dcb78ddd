// Linear layers: rows of x times a k-major weight, in tiles whose shape does not change an output.
#pragma once
#include "vectors.h"

namespace {

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

}  // namespace
