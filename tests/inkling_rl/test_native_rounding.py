"""How compiled kernels round: the flags of `inkling_rl.native` promise one IEEE operation per operator.

The formats' C++ has no product that a compiler could fuse with a sum unseen; these probes have, so that the flags
themselves are tested and the next kernel may rely on them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from inkling_rl import native

PROBE = """
extern "C" {
void fused(const float* a, const float* b, const float* c, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = a[i] * b[i] + c[i];
}
void quotient(const float* a, const float* b, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = a[i] / b[i];
}
void total(const float* a, float* out, long n) {
  float sum = 0;
  for (long i = 0; i < n; ++i) sum += a[i];
  *out = sum;
}
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(PROBE)
    library = native.NativeLibrary(f"probe_{folder.name}", folder / "probe.cpp", "The probe", "The test is skipped")
    try:
        native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))
    path = library.build()
    loaded = ctypes.CDLL(str(path))
    Path(path).unlink()  # mapped; the cache is the user's
    return loaded


def call(function: ctypes._CFuncPtr, *arrays: np.ndarray) -> None:
    function(*(array.ctypes.data_as(ctypes.c_void_p) for array in arrays), ctypes.c_long(arrays[0].size))


def numbers(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(4096) * scale).astype(np.float32)


def test_products_are_rounded_before_they_are_added(probe: ctypes.CDLL) -> None:
    a, b, out = numbers(0), numbers(1), np.empty(4096, np.float32)
    c = -(a * b)  # what is left is 0 when the product was rounded, its rounding error when it was not
    call(probe.fused, a, b, c, out)
    assert not out.any()


def test_quotients_are_exact_and_subnormals_survive(probe: ctypes.CDLL) -> None:
    a, b, out = numbers(2), numbers(3), np.empty(4096, np.float32)
    call(probe.quotient, a, b, out)
    assert np.array_equal(out, a / b)
    tiny = numbers(4, 1e-39)
    call(probe.quotient, tiny, np.full_like(tiny, 2.0), out)
    assert np.array_equal(out, tiny / np.float32(2)) and np.count_nonzero(out) == 4096


def test_sums_keep_their_order(probe: ctypes.CDLL) -> None:
    a, out = numbers(5), np.empty(1, np.float32)
    call(probe.total, a, out)
    assert out[0] == np.cumsum(a, dtype=np.float32)[-1] != np.sum(a)
