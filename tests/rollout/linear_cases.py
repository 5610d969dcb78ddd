"""Checks of the small projections and of the softcapped logits, for any device."""

from __future__ import annotations

import torch

from rollout.kernels import triton_linear, triton_softcap


def check_project(device: str, dtype: torch.dtype, jobs: int, rows: int, outputs: int, hidden: int) -> None:
    """Against float64, on planes and rows that lie apart."""
    generator = torch.Generator(device).manual_seed(rows)
    wide = torch.randn(jobs, rows + 1, hidden + 8, generator=generator, device=device).to(dtype)
    x_JTH = wide[:, 1:, :hidden]
    weight_JNH = torch.randn(jobs, outputs, hidden, generator=generator, device=device)
    exact = torch.einsum("jth,jnh->jtn", x_JTH.double(), weight_JNH.double())
    error = (triton_linear.project(x_JTH, weight_JNH) - exact).norm() / exact.norm()
    assert error < 3e-6, error


def check_softcap(device: str, dtype: torch.dtype, rows: int, vocabulary: int, padded: int, hidden: int) -> None:
    """Against float64: values about 0, where a careless tanh cancels, and beyond the cap.

    A product is as exact as float32 sums are, which is in proportion to its rows' norms, not to its value.
    """
    generator = torch.Generator(device).manual_seed(rows)
    x_TH = torch.randn(rows, hidden, generator=generator, device=device).to(dtype)
    weight_VH = torch.randn(vocabulary, hidden, generator=generator, device=device).to(dtype)
    weight_VH[::3] *= 1e-4
    weight_VH[1::3] *= 30
    logits_TP = triton_softcap.softcap_logits(x_TH, weight_VH, 20.0, padded)
    exact = 20 * torch.tanh(x_TH.double() @ weight_VH.double().t() / 20)
    assert logits_TP.dtype == torch.float32 and logits_TP.shape == (rows, padded)
    assert bool((logits_TP[:, vocabulary:] == float("-inf")).all())
    norms_TV = x_TH.double().norm(dim=1)[:, None] * weight_VH.double().norm(dim=1)
    error_TV = (logits_TP[:, :vocabulary].double() - exact).abs()
    assert bool((error_TV <= 2e-6 + 2e-5 * exact.abs() + 2e-7 * norms_TV).all())
