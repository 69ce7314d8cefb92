"""Questions about facts that are planted into a long text."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from oasiskv.errors import PromptError
from oasiskv.evals.tasks.base import Part, Question
from oasiskv.evals.tasks.texts import TEXTS, encode_bundled, encode_text, opening, passages

NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)


@dataclass(frozen=True)
class Sketch:
    """A question in words.

    Args:
        facts: planted into the text; the first at even depths over the questions, the others
            anywhere.
        ask: what comes between text and question, prefilled: instructions, an example.
        question: decoded up to the answer.
        answer: the right one.
        parts: what counts in the answer, as pairs of the row's name (or nothing) and the part, both
            as they stand in the answer; none: all of it.
    """

    facts: list[str]
    ask: str
    question: str
    answer: str
    parts: list[tuple[str, str]]


@dataclass(frozen=True)
class Planted:
    """A task whose facts stand in real text, or in sentences without news.

    Args:
        name: as users select it.
        doc: what it asks, in one line.
        sketch: makes a question in words.
        real: plant into the bundled texts by turns; or into one paragraph, over and over.
        spare: tokens to decode beyond the right answer's, as a share of them.
    """

    name: str
    doc: str
    sketch: Callable[[random.Random], Sketch]
    real: bool = True
    spare: float = 0.0

    def make(
        self, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
    ) -> list[Question]:
        """See ``Task.make``."""
        rng = random.Random(f"{self.name} {seed}")
        sketches = [self.sketch(rng) for _ in range(count)]
        kinds = TEXTS if self.real else ("noise",)
        texts = {kind: _text(tokenizer, kind, tokens) for kind in kinds[:count]}
        questions = []
        for index, sketch in enumerate(sketches):
            question, answer, parts = word_ids(tokenizer, sketch)
            facts = [encode_text(tokenizer, fact) for fact in sketch.facts]
            begin, ask = opening(tokenizer), encode_text(tokenizer, sketch.ask)
            new = len(answer) + int(self.spare * len(answer))
            fixed = len(begin) + sum(map(len, facts)) + len(ask) + len(question) + new
            if fixed >= tokens:
                raise PromptError(
                    f"the task {self.name!r} has {fixed} tokens of facts, question and answer: "
                    f"ask for more than {tokens} tokens"
                )
            kind = kinds[index % len(kinds)]
            (body,) = passages(texts[kind], tokens - fixed, 1, rng, kind)
            body = plant(body, facts, (index + 0.5) / count, rng)
            name = f"{self.name}-{seed}-{index}"
            prompt = [*begin, *body, *ask]
            questions.append(
                Question(
                    self.name, name, name, prompt, question, answer, "answer", new, tuple(parts)
                )
            )
        return questions


def plant(body: list[int], facts: list[list[int]], depth: float, rng: random.Random) -> list[int]:
    """Put facts into a text: the first at ``depth`` of it (0 to 1), the others anywhere."""
    places = [int(depth * len(body)), *(rng.randrange(len(body) + 1) for _ in facts[1:])]
    planted = list(body)
    for place, fact in sorted(zip(places, facts, strict=True), reverse=True):
        planted[place:place] = fact
    return planted


def word_ids(
    tokenizer: PreTrainedTokenizerBase, sketch: Sketch
) -> tuple[list[int], list[int], list[Part]]:
    """Token ids of question, answer and parts, as they are when the answer follows the question.

    A token that spans both belongs to the answer.
    """
    text = sketch.question + sketch.answer
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
    cut = sum(end <= len(sketch.question) for _, end in spans)

    def ids_of(words: str, start: int) -> tuple[list[int], int]:
        begin = text.index(words, start)
        end = begin + len(words)
        return [i for i, (a, b) in zip(ids, spans, strict=True) if a < end and b > begin], begin

    parts = []
    for row, words in sketch.parts:
        row_ids, begin = ids_of(row, len(sketch.question)) if row else ([], len(sketch.question))
        parts.append(Part(ids_of(words, begin)[0], row_ids))
    return ids[:cut], ids[cut:], parts


def _text(tokenizer: PreTrainedTokenizerBase, kind: str, tokens: int) -> Sequence[int]:
    if kind != "noise":
        return encode_bundled(tokenizer, kind)
    once = encode_text(tokenizer, NOISE)
    return once * (tokens // len(once) + 2)
