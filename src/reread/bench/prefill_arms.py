"""Dense causal attention of a whole prompt in one layer, by whoever is installed, checked before it
is timed."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..errors import NumericalError
from .checks import named
from .timing import Record, milliseconds

Run = Callable[[], Tensor]
# q [H, L, D], k and v [Hkv, L, D], scale -> a call that gives [H, L, D]
Make = Callable[[Tensor, Tensor, Tensor, float], Run]
TOLERANCE = 1e-2  # of bfloat16 outputs against fp32, relative in the 2-norm
CAUSAL_TOKENS = 4096  # of the row that causality is checked on
SECONDS, REPEATS = 1.5, 15  # an arm's calls take at most so long, or are so many
TOGETHER, SHORT_MS = 10, 5.0  # at most so many short calls between two events
MATMUL = 8192


@dataclass(frozen=True, slots=True)
class PrefillArm:
    """One implementation of dense causal attention.

    Attributes:
        name: as printed. make: None where it cannot run.
        missing: why it cannot; "" if it can.
    """

    name: str
    make: Make | None
    missing: str = ""


def sdpa(backend: SDPBackend) -> Make:
    """PyTorch's attention with one backend, causal by its flag: no mask is made."""

    def make(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Run:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q[None], k[None], v[None],
                    is_causal=True, scale=scale, enable_gqa=q.shape[0] != k.shape[0],
                )[0]  # fmt: skip

        return run

    return make


def _absent(name: str, module: str) -> PrefillArm | None:
    missing = importlib.util.find_spec(module) is None
    return PrefillArm(name, None, f"{module} is not installed") if missing else None


def flash_attention_3() -> PrefillArm:
    """FlashAttention-3, where it is installed."""
    if absent := _absent("flash_attn_3", "flash_attn_interface"):
        return absent

    def make(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Run:
        attend = import_module("flash_attn_interface").flash_attn_func
        laid = [x.transpose(0, 1).contiguous()[None] for x in (q, k, v)]

        def run() -> Tensor:
            out = attend(*laid, softmax_scale=scale, causal=True)
            out = out[0] if isinstance(out, tuple) else out
            return torch.as_tensor(out)[0].transpose(0, 1)

        return run

    return PrefillArm("flash_attn_3", make)


def flashinfer() -> PrefillArm:
    """FlashInfer's attention of one prompt, where it is installed."""
    if absent := _absent("flashinfer", "flashinfer"):
        return absent

    def make(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Run:
        attend = import_module("flashinfer").single_prefill_with_kv_cache
        laid = [x.transpose(0, 1).contiguous() for x in (q, k, v)]

        def run() -> Tensor:
            out = attend(*laid, causal=True, kv_layout="NHD", sm_scale=scale)
            return torch.as_tensor(out).transpose(0, 1)

        return run

    return PrefillArm("flashinfer", make)


def dense_arms() -> list[PrefillArm]:
    """All of them; those that are not installed say so."""
    return [
        PrefillArm("cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)),
        PrefillArm("flash", sdpa(SDPBackend.FLASH_ATTENTION)),
        flash_attention_3(),
        flashinfer(),
    ]


def pick(names: str) -> list[PrefillArm]:
    """The arms that `names` names, see `checks.named`."""
    return named(names, dense_arms())


def causal_pairs(length: int) -> int:
    """Pairs of a query and a key that it may see."""
    return length * (length + 1) // 2


def dense_flops(heads: int, dim: int, length: int) -> int:
    """Floating-point operations of one layer's causal attention: two products of D for each pair
    and head, a multiplication and an addition each."""
    return 4 * heads * dim * causal_pairs(length)


def measure_dense(
    arm: PrefillArm, q: Tensor, k: Tensor, v: Tensor, scale: float, ceiling: float
) -> Record:
    """Milliseconds of one arm, checked before; or why it did not run.

    Args:
        q: [H, L, D]; k, v: [Hkv, L, D]. ceiling: FLOP/s of a large matmul.
    """
    if arm.make is None:
        return {"arm": arm.name, "not_run": arm.missing}
    try:
        error = check(arm, q, k, v, scale)
        found = timed(arm.make(q, k, v, scale))
    except Exception as failed:  # whatever a rival raises is its result, and the others go on
        return {"arm": arm.name, "not_run": f"failed: {reason(failed)}"}
    flops = dense_flops(q.shape[0], q.shape[2], q.shape[1])
    rate = flops / (found["ms"] * 1e-3)
    return {
        "arm": arm.name, **found, "flops": flops, "tflops": rate / 1e12,
        "share_of_matmul": rate / ceiling, "error": error,
    }  # fmt: skip


def check(arm: PrefillArm, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """Relative error at sampled queries against fp32, after a check that it is causal.

    Raises:
        NumericalError: it reads later keys, or its output is wrong.
    """
    assert arm.make is not None
    n = min(q.shape[1], CAUSAL_TOKENS)
    cut = n // 2
    first = [x[:, :n].contiguous() for x in (q, k, v)]
    changed = [first[0], *(x.clone() for x in first[1:])]
    for x in changed[1:]:
        x[:, cut:] = -2 * x[:, cut:].flip(1)
    before = arm.make(first[0], first[1], first[2], scale)()[:, :cut]
    after = arm.make(changed[0], changed[1], changed[2], scale)()[:, :cut]
    if not relative(after, before) < TOLERANCE:
        raise NumericalError(f"{arm.name} is not causal: later keys change an early output")
    out = arm.make(q, k, v, scale)()
    positions = sampled(q.shape[1])
    return close(out[:, positions], exact(q, k, v, positions, scale), arm.name)


def sampled(length: int) -> list[int]:
    """A few query positions over the whole row, the last among them."""
    return sorted({length // 64, length // 3, length // 2 + 1, length - 1} - {length})


def exact(q: Tensor, k: Tensor, v: Tensor, positions: Sequence[int], scale: float) -> Tensor:
    """fp32 causal attention of some queries: [H, P, D]."""
    group = q.shape[0] // k.shape[0]
    out = []
    for at in positions:
        rows = q[:, at].float().view(k.shape[0], group, -1)
        logits = torch.matmul(rows, k[:, : at + 1].float().transpose(1, 2)) * scale
        found = torch.matmul(torch.softmax(logits, dim=-1), v[:, : at + 1].float())
        out.append(found.flatten(0, 1))
    return torch.stack(out, dim=1)


def relative(got: Tensor, want: Tensor) -> float:
    """Relative difference in the 2-norm."""
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm())


def close(got: Tensor, want: Tensor, what: str) -> float:
    """`relative`.

    Raises:
        NumericalError: it is not below `TOLERANCE`.
    """
    error = relative(got, want)
    if not error < TOLERANCE:
        raise NumericalError(f"{what}: relative error {error:.3g}, should be below {TOLERANCE}")
    return error


def timed(run: Callable[[], object]) -> Record:
    """Milliseconds of a call by events: median, p20 and p80 of as many as `SECONDS` allow; short
    calls are timed back to back, so that the host runs ahead."""
    run()
    first = max(milliseconds(run), 1e-3)
    together = max(1, min(TOGETHER, int(SHORT_MS / first)))
    repeats = min(REPEATS, int(SECONDS * 1e3 / (first * together)))

    def group() -> None:
        for _ in range(together):
            run()

    # a call that takes seconds is its own warm-up
    times = sorted(milliseconds(group) / together for _ in range(repeats)) or [first]
    return {
        "ms": statistics.median(times), "p20": times[len(times) // 5],
        "p80": times[-1 - len(times) // 5], "runs": len(times), "together": together,
    }  # fmt: skip


def matmul_ceiling(device: torch.device) -> float:
    """FLOP/s of a large bfloat16 matmul, the best of many."""
    a, b = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    best = min(milliseconds(lambda: torch.matmul(a, b, out=out)) for _ in range(30))
    return 2 * MATMUL**3 / (best * 1e-3)


def reason(error: BaseException) -> str:
    """One line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:240]
