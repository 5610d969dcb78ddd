"""vLLM's counters of drafts, read from its text format, and what a step makes of them."""

from __future__ import annotations

import pytest

from trainer.acceptance import DraftCounts

LABELS = 'engine="0",model_name="policy"'
TEXT = f"""# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{{LABELS}}} 100.0
vllm:spec_decode_num_drafts_created{{{LABELS}}} 1.78e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="0"}} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="1"}} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{{{LABELS},position="1"}} 1.78e+09
vllm:generation_tokens_total{{{LABELS}}} 230.0
vllm:request_success_total{{{LABELS},finished_reason="stop"}} 15.0
vllm:request_success_total{{{LABELS},finished_reason="length"}} 5.0
vllm:kv_cache_usage_perc{{{LABELS}}} NaN
"""


def test_counters_become_tokens_per_step_and_fractions() -> None:
    counts = DraftCounts.parse(TEXT)
    assert counts == DraftCounts(drafts=100, tokens=230, requests=20, accepted=(80, 40))
    assert counts.metrics() == pytest.approx(
        {
            "rollout/acceptance_length": 2.1,
            "rollout/acceptance_at_1": 0.8,
            "rollout/acceptance_at_2": 0.4,
        }
    )


def test_a_step_is_a_difference_and_engines_add_up() -> None:
    both = DraftCounts.parse(TEXT).plus(DraftCounts.parse(TEXT))
    assert both == DraftCounts(drafts=200, tokens=460, requests=40, accepted=(160, 80))
    assert both.plus(DraftCounts.parse(TEXT), -1) == DraftCounts.parse(TEXT)
    assert DraftCounts.parse(TEXT).plus(DraftCounts(), -1) == DraftCounts.parse(TEXT)


def test_an_engine_without_a_draft_reports_nothing() -> None:
    assert DraftCounts.parse("vllm:generation_tokens_total{} 5.0\n").metrics() == {}
