"""The kernels of a GPU as one table, each tried once at the start: `load`.

A Triton kernel is compiled on the machine it runs on, by whatever Triton, driver and ptxas are there. So before the
first request each one runs on a small input with the model's sizes and is compared with its torch fallback on the host.
One that does not compile or launch, or that computes something else, is replaced by that fallback after one warning, or
stops the start (`strict`). What a kernel must get right is the business of tests/gpu, not of this check.

A draft's kernels are tried where a model has a draft.

Some kernels take the place of a vendor's where they are faster: `SKINNY_ROWS`, `VECTOR_ROWS` and `MIN_PAIRS` say where.
Those are tried in the same way and are as strict, but where one does not run the vendor's does, and where none is used
none is tried.

Not the dispatch by device (`rollout.kernels.ops` does that for the CPU), nor what runs on another GPU than it was
written for (`rollout.plugin.device`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from inkling_rl.native import KERNELS_ENV
from rollout.kernels import draft_fallback, expert_trials, fallback
from rollout.kernels.draft_trials import DRAFT_TRIALS
from rollout.kernels.expert_trials import EXPERT_TRIALS
from rollout.kernels.served import SERVED
from rollout.kernels.trials import TRIALS, Sizes, Trial, moved, worst_error

__all__ = ["FALLBACKS", "KernelError", "Kernels", "Sizes", "load"]

logger = logging.getLogger(__name__)


class KernelError(RuntimeError):
    """A kernel that does not run, where that is not to be passed over. The message is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What an engine on a GPU calls. Signatures are those of the Triton functions, fallback or not."""

    tap_sources: Callable[..., torch.Tensor]
    prepare: Callable[..., None]
    conv_mix: Callable[..., None]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    activation: Callable[..., torch.Tensor]
    align: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    weighted_sum: Callable[..., torch.Tensor]
    project: Callable[..., torch.Tensor]
    softcap_logits: Callable[..., torch.Tensor]
    decode: Callable[..., torch.Tensor]
    prefill: Callable[..., torch.Tensor]
    skinny_inputs: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    skinny_linear: Callable[..., torch.Tensor]
    skinny_logits: Callable[..., torch.Tensor]
    vector_experts: Callable[..., torch.Tensor]
    grouped_product: Callable[..., torch.Tensor]
    draft_norm_rotate: Callable[..., torch.Tensor]
    draft_store: Callable[..., None]
    draft_attention: Callable[..., torch.Tensor]
    draft_rnn: Callable[..., None]
    draft_logits: Callable[..., torch.Tensor]
    fell_back: tuple[str, ...] = ()
    """Names of the fields above that were tried and are fallbacks, or not called."""

    few_rows: int = 0
    """Up to so many rows a step's products are the three `skinny` kernels', beyond torch's and `project`'s."""

    vector_rows: int = 0
    """Up to so many rows experts in Marlin's layout are `vector_experts`'."""

    min_pairs: int | None = None
    """From so many pairs of token and expert per expert on, their products are `grouped_product`'s; None: never."""

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured in a CUDA graph: the fallbacks of attention read lengths on the host."""
        return not _WAITING & set(self.fell_back)


_FALLBACKS: dict[str, Any] = {
    "tap_sources": fallback.tap_sources,
    "prepare": fallback.prepare,
    "conv_mix": fallback.conv_mix,
    "route": fallback.route,
    "activation": fallback.expert_activation,
    "align": fallback.align,
    "weighted_sum": fallback.weighted_sum,
    "project": fallback.project,
    "softcap_logits": fallback.softcap_logits,
    "decode": fallback.decode_attention,
    "prefill": fallback.prefill_attention,
    "skinny_inputs": fallback.attention_inputs,
    "skinny_linear": fallback.linear,
    "skinny_logits": fallback.few_logits,
    "vector_experts": expert_trials.vector_experts,
    "grouped_product": expert_trials.grouped_product,
    "draft_norm_rotate": draft_fallback.norm_rotate,
    "draft_store": draft_fallback.store_context,
    "draft_attention": draft_fallback.attention,
    "draft_rnn": draft_fallback.rnn_step,
    "draft_logits": draft_fallback.token_logits,
}
_TRITON = {
    "tap_sources": ("triton_taps", "tap_sources"),
    "prepare": ("triton_preparation", "prepare"),
    "conv_mix": ("triton_conv_mix", "conv_mix"),
    "route": ("triton_router", "route"),
    "activation": ("triton_activation", "expert_activation"),
    "align": ("triton_moe_align", "align"),
    "weighted_sum": ("triton_moe_sum", "weighted_sum"),
    "project": ("triton_linear", "project"),
    "softcap_logits": ("triton_softcap", "softcap_logits"),
    "decode": ("triton_decode", "attention"),
    "prefill": ("triton_prefill", "attention"),
    "skinny_inputs": ("triton_skinny", "attention_inputs"),
    "skinny_linear": ("triton_skinny", "linear"),
    "skinny_logits": ("triton_skinny", "softcap_logits"),
    "vector_experts": ("triton_moe_vector", "experts"),
    "grouped_product": ("grouped_product", "grouped_product"),
    "draft_norm_rotate": ("triton_draft", "norm_rotate"),
    "draft_store": ("triton_draft", "store_context"),
    "draft_attention": ("triton_draft", "attention"),
    "draft_rnn": ("triton_draft_head", "rnn_step"),
    "draft_logits": ("triton_draft_head", "token_logits"),
}
_TRIALS = TRIALS | EXPERT_TRIALS | DRAFT_TRIALS
# Fallbacks that read something on the host.
_WAITING = frozenset(("decode", "prefill", "draft_attention"))

SKINNY_ROWS = 16
"""Up to 32 (`triton_skinny.MOST_ROWS`); 0 leaves those kernels alone, and they are not tried either."""

VECTOR_ROWS = 8
"""`Kernels.vector_rows` of a GPU from Hopper on, up to 16; 0: never. They read an expert anew for every token of it."""

MIN_PAIRS: int | None = 48
"""`Kernels.min_pairs` of a Hopper GPU; None: never. With fewer than 48, the smallest block is mostly padding."""

HALF_MAX = 65504

FALLBACKS = Kernels(**_FALLBACKS, fell_back=tuple(_FALLBACKS))
"""No Triton at all: any device, for tests and for `INKLING_RL_KERNELS=torch`."""

# Measured on an H200 by tests.benchmarks.fallback_gpu with launches: attention at a context of 8,192, the others on
# steps of 9 to 1,030 rows. Where a step computes more, the ratio is larger.
SLOWDOWNS: dict[str, float] = {
    "tap_sources": 13, "prepare": 30, "conv_mix": 15, "route": 3, "activation": 3, "align": 7, "weighted_sum": 8,
    "project": 1.5, "softcap_logits": 1.1, "decode": 70, "prefill": 80,
}  # fmt: skip
# In the place of one of these, all are left alone, and a vendor's products run.
_SKINNY = frozenset(("skinny_inputs", "skinny_linear", "skinny_logits"))
# In the place of one of these Marlin runs, whose times these are against: docs/benchmarks.md.
_EXPERTS = frozenset(EXPERT_TRIALS)
SLOWDOWNS |= dict.fromkeys(_SKINNY, 2) | {"vector_experts": 1.3, "grouped_product": 2.3}
# A draft's are estimates, from launches and bytes; not measured.
SLOWDOWNS |= {
    "draft_norm_rotate": 10, "draft_store": 10, "draft_attention": 100, "draft_rnn": 10, "draft_logits": 5,
}  # fmt: skip


def load(device: torch.device, sizes: Sizes, *, strict: bool) -> Kernels:
    """The kernels for a model, tried on `device`; the answer is kept for the process.

    Args:
        device: where the engine runs.
        sizes: of the model, as `rollout.plugin.device.kernel_sizes` reads them.
        strict: whether a kernel that does not run is an error.

    Raises:
        KernelError: a kernel does not run and `strict`, or it left the device unusable.
    """
    return _load(device, sizes, strict)


@cache
def _load(device: torch.device, sizes: Sizes, strict: bool) -> Kernels:
    if os.environ.get(KERNELS_ENV) == "torch":
        logger.warning("%s=torch: all kernels run on torch, about 100 times slower", KERNELS_ENV)
        return FALLBACKS
    sizes = replace(sizes, few_rows=SKINNY_ROWS if sizes.dtype is torch.bfloat16 else 0, least_pairs=MIN_PAIRS or 0)
    chosen: dict[str, Any] = {}
    used = [name for name in SLOWDOWNS if _is_used(name, device, sizes)]
    if device.type == "cuda":
        _compile(used, device, sizes)
    for name in used:
        kernel, reason = _try(name, device, sizes)
        if kernel is not None and reason is None:
            chosen[name] = kernel
        else:
            _pass_over(name, device, reason, strict)
    return replace(
        FALLBACKS,
        **chosen,
        fell_back=tuple(name for name in used if name not in chosen),
        few_rows=sizes.few_rows if chosen.keys() >= _SKINNY else 0,
        vector_rows=VECTOR_ROWS if "vector_experts" in chosen else 0,
        min_pairs=MIN_PAIRS if "grouped_product" in chosen else None,
    )


def _is_used(name: str, device: torch.device, sizes: Sizes) -> bool:
    """Whether the engine would call it on this device; a vendor's kernel is there for what it would not."""
    if name in _SKINNY:
        return sizes.few_rows > 0
    if name in DRAFT_TRIALS:
        return sizes.draft is not None
    if name not in _EXPERTS:
        return True
    if name == "vector_experts":
        # It holds activations as halves.
        wanted = VECTOR_ROWS > 0 and _capability(device) >= (9, 0) and sizes.gate_cap * sizes.up_cap <= HALF_MAX
    else:
        reached = sizes.least_pairs * sizes.experts <= sizes.max_tokens * sizes.top_k
        wanted = MIN_PAIRS is not None and _capability(device) == (9, 0) and reached
    return wanted and bool(sizes.expert_formats)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _pass_over(name: str, device: torch.device, reason: str | None, strict: bool) -> None:
    """Stop, or say what runs instead of a kernel that does not."""
    slowdown, other = f"about {SLOWDOWNS[name]:g} times slower", "vLLM's Marlin" if name in _EXPERTS else "torch"
    if strict:
        raise KernelError(
            f"the kernel {name} must run on {_name_of(device)} while rollout.strict_kernels is true; {reason}. "
            f"Set rollout.strict_kernels: false to run it on {other}, {slowdown}"
        )
    without = ", and without CUDA graphs" if name in _WAITING else ""
    logger.warning(
        "the kernel %s does not run on %s (%s): it runs on %s, %s%s. rollout.strict_kernels: true makes this an error",
        name, _name_of(device), reason, other, slowdown, without,
    )  # fmt: skip


def _compile(used: list[str], device: torch.device, sizes: Sizes) -> None:
    """Compile what the trials will launch, all at once: one after the other that is most of a start."""
    names = used[::-1]
    names.sort(key=lambda name: name != "conv_mix")  # what takes longest first; experts and attention are next
    try:
        from rollout.kernels.compile_ahead import compile_ahead

        compile_ahead(partial(_call_all, name, device, sizes) for name in names)
    # It leans on what Triton does not promise, and nothing but time depends on it.
    except Exception as error:
        logger.warning("kernels are compiled one after the other, about a minute: %s: %s", type(error).__name__, error)


def _call_all(name: str, device: torch.device, sizes: Sizes) -> None:
    """All calls of a kernel's trials, one trial's arguments at a time, and those that differ for the compiler alone.

    What is wrong with them the trial itself finds.
    """
    with suppress(Exception), _plain_defaults():
        kernel = _triton(name)
        for trial in _TRIALS[name](sizes):
            trial.call(kernel, trial.to(device))
        for call in SERVED.get(name, lambda *_: ())(kernel, sizes, device):
            call()


def _try(name: str, device: torch.device, sizes: Sizes) -> tuple[Callable[..., Any] | None, str | None]:
    """The kernel, and what is wrong with it."""
    try:
        kernel = _triton(name)
        with _plain_defaults():
            for trial in _TRIALS[name](sizes):
                error = _error(kernel, _FALLBACKS[name], trial, device)
                if not error <= trial.limit:
                    return kernel, f"{trial.what}: it computes something else, relative error {error:.1e}"
    # A compiler, a driver, an assembler and a cache on disk can fail in ways that nobody lists. All of them are
    # answered in the same way, and none is passed over without a word.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        _check_device(name, device, reason)
        return None, reason
    return kernel, None


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """New tensors on the host and in float32: a model is built with the device and its dtype as defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _error(kernel: Callable[..., Any], slow: Callable[..., Any], trial: Trial, device: torch.device) -> float:
    """The largest error of what the kernel returns and of what it writes, against the fallback's."""
    host = device if trial.on_device else torch.device("cpu")
    given, expected = trial.to(device), trial.to(host)
    pairs = [(moved(trial.call(kernel, given), host), trial.call(slow, expected))]
    pairs = [(trial.kept(got), trial.kept(wanted)) for got, wanted in pairs]
    pairs += [(moved(given[place], host), expected[place]) for place in trial.written]
    return max(worst_error(got, wanted) for got, wanted in pairs)


def _check_device(name: str, device: torch.device, reason: str) -> None:
    """After an illegal access nothing runs in this process any more, fallback or not."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        raise KernelError(
            f"the kernel {name} must leave {_name_of(device)} usable; {reason}. Set {KERNELS_ENV}=torch to run "
            "without Triton kernels, about 100 times slower"
        ) from error


def _triton(name: str) -> Callable[..., Any]:
    """A kernel, imported here: without Triton that fails, which is a reason like any other."""
    module, function = _TRITON[name]
    kernel: Callable[..., Any] = getattr(import_module(f"rollout.kernels.{module}"), function)
    return kernel


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
