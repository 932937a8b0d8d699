"""From a document of an lm-eval task to token ids."""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from .base import Case, Query
from .lm_common import encode, split, wrapped

NEW_TOKENS = 256  # of a generated answer where the task says nothing, as lm-eval
# LongBench asks these without a chat template: examples or code lead into the answer
PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
TAIL = 200  # characters
LONGEST_EXPECTED = 200  # characters of an expected answer that a sample keeps


class Prompts:
    """Cases of one task.

    Args:
        task: lm-eval's.
        shots: examples before the question.
        tokens: of prompt and answer, at most.
        cut: take the middle out of longer prompts; False: skip them.
        new_tokens: of a generated answer; None: as the task says.

    Attributes:
        skipped, truncated: documents so far.
        metric: the task's first.
    """

    def __init__(
        self, tokenizer: Any, task: Any, shots: int, tokens: int, cut: bool, new_tokens: int | None
    ) -> None:
        self.tokenizer = tokenizer
        self.task = task
        self.shots = shots
        self.tokens = tokens
        self.cut = cut
        self.skipped = 0
        self.truncated = 0
        self.metric: str = task.config.metric_list[0]["metric"]
        self.chooses = task.OUTPUT_TYPE == "multiple_choice"
        options = dict(task.config.generation_kwargs or {})
        most = new_tokens or int(options.get("max_gen_toks", NEW_TOKENS))
        self.new_tokens = 0 if self.chooses else most
        until = options.get("until") or []
        self.until = tuple([until] if isinstance(until, str) else until)
        subset = str(task.config.dataset_name).removesuffix("_e")
        self.plain = self.chooses or subset in PLAIN

    def case(self, name: str, number: int) -> Case | None:
        """Document `number` as a case with one question; None where it is too long."""
        doc = self.task.task_docs[number]
        text = self.task.fewshot_context(doc, self.shots)
        continuations = self._continuations(doc, text)
        room = self.tokens - (max(map(len, continuations)) if self.chooses else self.new_tokens)
        after = self._after_context(doc, text)
        prompt, special, ids = self._encode(text)
        if len(ids) > room:
            shorter = self._shortened(text, room) if self.cut else None
            if shorter is None:
                self.skipped += 1
                return None
            self.truncated += 1
            text = shorter
            prompt, special, ids = self._encode(text)
        at = prompt.rfind(text[-after:]) if after else -1
        context, asked = split(self.tokenizer, prompt, ids, at if at >= 0 else len(prompt), special)
        query = Query(
            asked, self.new_tokens, name, self._expected(doc), until=self.until,
            choices=tuple(map(tuple, continuations)), data=number,
        )  # fmt: skip
        return Case(context, (query,))

    def _encode(self, text: str) -> tuple[str, bool, list[int]]:
        """The whole prompt, whether special tokens are added, and its ids."""
        prompt, special = (text, True) if self.plain else wrapped(self.tokenizer, text, "", "")
        return prompt, special, encode(self.tokenizer, prompt, special)

    def _continuations(self, doc: Any, text: str) -> list[list[int]]:
        """Token ids of each choice: what the prompt with it has more than without."""
        if not self.chooses:
            return []
        end = text[-TAIL:]  # what stands before it does not change the tokens of a choice
        before = len(encode(self.tokenizer, end, False))
        found = [
            encode(self.tokenizer, end + request.args[1], False)[before:]
            for request in self.task.construct_requests(doc, text)
        ]
        if not all(found):
            raise InputError("a choice has no token of its own: the tokenizer merges it away")
        return found

    def _after_context(self, doc: Any, text: str) -> int:
        """Characters of the prompt behind the document's long text; 0 where it has none."""
        context = doc.get("context")
        at = text.rfind(context) if isinstance(context, str) and context else -1
        return 0 if at < 0 else len(text) - at - len(context)

    def _shortened(self, text: str, room: int) -> str | None:
        """The text without its middle, so that the prompt has at most `room` tokens."""
        ids = encode(self.tokenizer, text, False)
        keep = room - (len(self._encode(text)[2]) - len(ids))
        while keep > 1:
            half = keep // 2
            parts = (
                self.tokenizer.decode(part, skip_special_tokens=True)
                for part in (ids[:half], ids[-half:])
            )
            shorter = "".join(parts)
            over = len(self._encode(shorter)[2]) - room
            if over <= 0:
                return shorter
            keep -= over  # the halves, joined, may have other tokens than before
        return None

    def _expected(self, doc: Any) -> tuple[str, ...]:
        """Right answers as a person would write them."""
        target = self.task.doc_to_target(doc)
        if self.chooses and isinstance(target, int):
            target = self.task.doc_to_choice(doc)[target]
        answers = target if isinstance(target, list) else [target]
        return tuple(str(answer)[:LONGEST_EXPECTED] for answer in answers)
