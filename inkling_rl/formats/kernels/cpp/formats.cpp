// CPU kernels of the number formats. Plain C interface, no torch headers: the build takes seconds and does not depend on
// torch's version. The meaning of every function is that of its namesake in reference/nvfp4.py and reference/mxfp8.py, and
// the bytes are equal. Contraction is off (-ffp-contract=off): every rounding decides bytes.
//
// Sizes are int64, `half` says that values are bfloat16. Work is cut into chunks of blocks that belong to one expert; how
// they are spread over threads changes nothing.
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <vector>

#include "mxfp8.h"
#include "nvfp4.h"

namespace {

// Asks for large pages under a result that nobody has touched yet: faulting in small ones costs more than the conversion.
inline void large_pages(void* p, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t first = ((uintptr_t)p + PAGE - 1) & ~(PAGE - 1), last = ((uintptr_t)p + bytes) & ~(PAGE - 1);
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#endif
}

// Calls work(chunk) for 0 <= chunk < chunks on `threads` threads, each in the default rounding. Guided: long runs of chunks
// first, because threads that take turns would fault in the same large page of the result; short ones last, to end together.
template <class F> void for_chunks(int64_t chunks, int64_t values, int64_t threads, F work) {
#pragma omp parallel num_threads((int)threads) if (values > ONE_THREAD && threads > 1)
  {
    const DefaultRounding rounding;
#pragma omp for schedule(guided)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) work(chunk);
  }
}

// Calls work(expert, first block, number of blocks).
template <class F> void for_blocks(int64_t experts, int64_t blocks, int64_t size, int64_t threads, F work) {
  const int64_t per_expert = chunks_of(blocks);
  for_chunks(experts * per_expert, experts * blocks * size, threads, [&](int64_t chunk) {
    const int64_t expert = chunk / per_expert, first = chunk % per_expert * CHUNK;
    work(expert, first, std::min(CHUNK, blocks - first));
  });
}

inline void add(int64_t* counter, int64_t value) {
  if (!value) return;
#pragma omp atomic
  *counter += value;
}

template <class T> void largest(const Weight& w, float* out, int64_t threads) {
  const int64_t blocks = w.rows * (w.columns / 16), per_expert = chunks_of(blocks);
  std::vector<uint32_t> found(w.experts * per_expert);
  for_blocks(w.experts, blocks, 16, threads, [&](int64_t expert, int64_t first, int64_t n) {
    Blocks<T, 16> source(w, expert, first);
    uint32_t top = 0;
    while (n) {
      int64_t run = n;
      const T* p = source.run(run);
      top = std::max(top, largest_bits(p, run * 16));
      n -= run;
    }
    found[expert * per_expert + first / CHUNK] = top;
  });
  for (int64_t e = 0; e < w.experts; ++e)
    out[e] = float_of(*std::max_element(found.begin() + e * per_expert, found.begin() + (e + 1) * per_expert));
}

template <class T> void dequantize(const uint8_t* codes, const uint8_t* scales, const float* amax, int64_t denominator,
                                   int64_t experts, int64_t blocks, T* out, int64_t threads) {
  for_blocks(experts, blocks, 16, threads, [&](int64_t expert, int64_t first, int64_t n) {
    const int64_t at = expert * blocks + first;
    dequantize_nvfp4(codes + 8 * at, scales + at, amax[expert], denominator, n, out + 16 * at);
  });
}

template <class T> void dequantize(const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out, int64_t threads) {
  for_blocks(1, blocks, 32, threads, [&](int64_t, int64_t first, int64_t n) {
    dequantize_mxfp8(codes + 32 * first, scales + first, n, out + 32 * first);
  });
}

}  // namespace

extern "C" {

void fmt_largest(const Weight* w, float* out, int64_t threads) {
  if (w->half) largest<bf16>(*w, out, threads);
  else largest<float>(*w, out, threads);
}

// counts int64 [E, 3], zero on entry; given is null or the scales to keep.
void fmt_quantize_nvfp4(const Weight* w, const float* anchor, int64_t denominator, const uint8_t* given, uint8_t* codes,
                        uint8_t* scales, int64_t* counts, int64_t threads) {
  const int64_t blocks = w->rows * (w->columns / 16);
  large_pages(codes, 8 * w->experts * blocks);
  const auto quantize = w->half ? quantize_nvfp4<bf16> : quantize_nvfp4<float>;
  for_blocks(w->experts, blocks, 16, threads, [&](int64_t expert, int64_t first, int64_t n) {
    const int64_t at = expert * blocks + first;
    const Counts found = quantize(*w, expert, first, n, anchor[expert], denominator, given ? given + at : nullptr,
                                  codes + 8 * at, scales + at);
    add(counts + 3 * expert, found.non_finite);
    add(counts + 3 * expert + 1, found.saturated);
    add(counts + 3 * expert + 2, found.orphaned);
  });
}

void fmt_dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales, const float* amax, int64_t denominator,
                          int64_t experts, int64_t blocks, void* out, int64_t half, int64_t threads) {
  large_pages(out, experts * blocks * 16 * (half ? 2 : 4));
  if (half) dequantize(codes, scales, amax, denominator, experts, blocks, (bf16*)out, threads);
  else dequantize(codes, scales, amax, denominator, experts, blocks, (float*)out, threads);
}

// counts int64 [E], zero on entry; given is null or the scales to keep.
void fmt_quantize_mxfp8(const Weight* w, const uint8_t* given, uint8_t* codes, uint8_t* scales, int64_t* counts,
                        int64_t threads) {
  const int64_t blocks = w->rows * (w->columns / 32);
  large_pages(codes, 32 * w->experts * blocks);
  const auto quantize = w->half ? quantize_mxfp8<bf16> : quantize_mxfp8<float>;
  for_blocks(w->experts, blocks, 32, threads, [&](int64_t expert, int64_t first, int64_t n) {
    const int64_t at = expert * blocks + first;
    add(counts + expert,
        quantize(*w, expert, first, n, given ? given + at : nullptr, codes + 32 * at, scales + at));
  });
}

void fmt_dequantize_mxfp8(const uint8_t* codes, const uint8_t* scales, int64_t blocks, void* out, int64_t half,
                          int64_t threads) {
  large_pages(out, blocks * 32 * (half ? 2 : 4));
  if (half) dequantize(codes, scales, blocks, (bf16*)out, threads);
  else dequantize(codes, scales, blocks, (float*)out, threads);
}

}  // extern "C"
