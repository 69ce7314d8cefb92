"""Real text: forced to go on as it does, or free to go on for long."""

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from oasiskv.errors import PromptError
from oasiskv.evals.tasks.base import Question, Task
from oasiskv.evals.tasks.texts import TEXTS, dialogues, encode_bundled, opening, passages

FORCED_TOKENS = 256
FREE_TOKENS = 1024
LEAST_PROMPT = 256


@dataclass(frozen=True)
class Forced:
    """Passages of one text; their last tokens are decoded by teacher forcing.

    Args:
        name: as users select it.
        doc: what it asks, in one line.
        text: one of ``TEXTS``, or ``dialogue``: where the novel has the most quotation marks.
        new_tokens: tokens decoded.
    """

    name: str
    doc: str
    text: str
    new_tokens: int = FORCED_TOKENS

    def make(
        self, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
    ) -> list[Question]:
        """See ``Task.make``; passages of dialogue are the same for every seed."""
        begin = opening(tokenizer)
        _check(self.name, tokens, len(begin) + self.new_tokens)
        length = tokens - len(begin)
        if self.text == "dialogue":
            cut = dialogues(tokenizer, "prose", length, count)
        else:
            ids = encode_bundled(tokenizer, self.text)
            rng = random.Random(f"{self.name} {seed}")
            cut = passages(ids, length, count, rng, self.text)
        questions = []
        for index, passage in enumerate(cut):
            prompt, forced = passage[: -self.new_tokens], passage[-self.new_tokens :]
            name = f"{self.name}-{seed}-{index}"
            questions.append(
                Question(
                    self.name, name, name, [*begin, *prompt], [], forced, "forced", self.new_tokens
                )
            )
        return questions


@dataclass(frozen=True)
class Free:
    """Passages of all texts by turns, after which the model writes on.

    Args:
        name: as users select it.
        doc: what it asks, in one line.
        new_tokens: tokens to write.
    """

    name: str
    doc: str
    new_tokens: int = FREE_TOKENS

    def make(
        self, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
    ) -> list[Question]:
        """See ``Task.make``."""
        begin = opening(tokenizer)
        _check(self.name, tokens, len(begin) + self.new_tokens)
        rng = random.Random(f"{self.name} {seed}")
        length = tokens - len(begin) - self.new_tokens
        kinds = TEXTS[:count]
        cut = {
            kind: passages(
                encode_bundled(tokenizer, kind), length, -(-count // len(kinds)), rng, kind
            )
            for kind in kinds
        }
        questions = []
        for index in range(count):
            passage = cut[kinds[index % len(kinds)]][index // len(kinds)]
            name = f"{self.name}-{seed}-{index}"
            questions.append(
                Question(self.name, name, name, [*begin, *passage], [], [], "free", self.new_tokens)
            )
        return questions


def _check(name: str, tokens: int, fixed: int) -> None:
    if tokens < fixed + LEAST_PROMPT:
        raise PromptError(
            f"the task {name!r} needs {fixed + LEAST_PROMPT} tokens: {LEAST_PROMPT} of prompt and "
            f"{fixed} beside it; ask for more than {tokens} tokens"
        )


TASKS: tuple[Task, ...] = (
    *(
        Forced(f"forced_{text}", f"{text} that goes on as it does", text)
        for text in (*TEXTS, "dialogue")
    ),
    Free("free", f"{FREE_TOKENS} tokens written after real text"),
)
