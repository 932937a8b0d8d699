"""When a text ends: the call's stopping criteria, the common ones of them without a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class Ending:
    """The stopping criteria of one call.

    Attributes:
        hard: whether there is an end token; without one, dense decoding goes on with a row until
            all have ended.
        others: criteria that have to see a row's text for every token of it.
    """

    def __init__(self, criteria: Any) -> None:
        """criteria: transformers' list."""
        self.hard = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.others = StoppingCriteriaList(
            one for one in criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        known = [one for one in criteria if one not in self.others]
        self._longest = min(
            (int(one.max_length) for one in known if type(one) is MaxLengthCriteria), default=None
        )
        ends = [one.eos_token_id for one in known if type(one) is EosTokenCriteria]
        self._tokens = {int(token) for ids in ends for token in ids.flatten().tolist()}

    def by_token(self, token: int, count: int) -> bool:
        """Whether a text of so many tokens ends with this one by its length or an end token."""
        return token in self._tokens or (self._longest is not None and count >= self._longest)

    def by_text(self, text: Tensor) -> bool:
        """Whether another criterion ends the text, int64 [1, tokens]."""
        return bool(len(self.others)) and bool(self.others(text, None)[0])
