// The PagedBatch of one KV-cache group: which row belongs to which request and position, and where a position lies.
#pragma once
#include "vectors.h"

namespace {

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

}  // namespace
