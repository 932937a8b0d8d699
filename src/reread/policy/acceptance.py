"""Which drafted tokens stand: the rules that leave dense decoding's text, or its distribution, as
it is. No model, no loop."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(scores: Tensor, drafted: int | None) -> tuple[bool, int]:
    """One position of greedy decoding.

    Args:
        scores: [V] dense scores, logits processors applied.
        drafted: the token that was drafted there; None behind the last one.

    Returns:
        whether the drafted token stands, and the token that dense decoding chooses.
    """
    token = int(scores.argmax())
    return token == drafted, token


def speculative(scores: Tensor, drafted: int | None, draft: Tensor | None) -> tuple[bool, int]:
    """One position of sampling: a drafted token x stands with probability min(1, p(x) / q(x));
    otherwise the token comes from max(0, p - q), normalised. The result is distributed as p
    (Leviathan et al., 2023, appendix A.1; Chen et al., 2023, theorem 1).

    Args:
        scores: [V] dense scores, logits processors applied: p = softmax.
        drafted: the token drawn from q; None behind the last one.
        draft: q, fp32 [V].

    Returns:
        whether the drafted token stands, and the token.
    """
    p = torch.softmax(scores.float(), dim=-1)
    if drafted is None or draft is None:
        return False, _draw(p)
    # u < p / q without dividing; a token that q cannot draw does not come here
    if float(torch.rand((), device=p.device)) * float(draft[drafted]) < float(p[drafted]):
        return True, drafted
    rest = (p - draft).clamp(min=0.0)
    # p and q that differ by rounding alone leave nothing to draw from
    return False, _draw(rest if float(rest.sum()) > 0 else p)


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """What greedy decoding chooses of scores [..., V], and how probable it is: int64 and fp32
    [...]; the latter NaN where a score is. Nothing is read from the device."""
    scores = scores.float()
    largest, token = scores.max(dim=-1)
    return token, (largest - torch.logsumexp(scores, dim=-1)).exp()


def _draw(weights: Tensor) -> int:
    return int(torch.multinomial(weights, 1))
