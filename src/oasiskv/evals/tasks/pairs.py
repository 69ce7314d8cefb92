"""Looking up one of very many keys in a JSON object."""

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from oasiskv.errors import PromptError
from oasiskv.evals.tasks.base import Question
from oasiskv.evals.tasks.planted import Sketch, word_ids
from oasiskv.evals.tasks.texts import encode_text, opening
from oasiskv.evals.tasks.words import WORDS, names, numbers

DIGITS = 6
MOST_PAIRS = len(WORDS) * (len(WORDS) - 1)


@dataclass(frozen=True)
class JsonPairs:
    """A task without filler: the whole text is the object.

    Args:
        name: as users select it.
        doc: what it asks, in one line.
    """

    name: str
    doc: str

    def make(
        self, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
    ) -> list[Question]:
        """See ``Task.make``; a question is shorter than ``tokens`` by less than a pair."""
        rng = random.Random(f"{self.name} {seed}")
        begin = [*opening(tokenizer), *encode_text(tokenizer, "{\n")]
        end = encode_text(tokenizer, "}\n")
        questions = []
        for index in range(count):
            keys, values = names(rng, MOST_PAIRS), numbers(rng, MOST_PAIRS, DIGITS)
            sketch = Sketch([], "", f'\nThe value of "{keys[0]}" is "', values[0], [])
            question, answer, _ = word_ids(tokenizer, sketch)
            room = tokens - len(begin) - len(end) - len(question) - len(answer)
            lines = self._lines(tokenizer, keys, values, room, tokens)
            # The pair asked for was the first to find room.
            asked = lines.pop(0)
            lines.insert(int((index + 0.5) / count * (len(lines) + 1)), asked)
            prompt = [*begin, *(token for line in lines for token in line), *end]
            name = f"{self.name}-{seed}-{index}"
            questions.append(
                Question(self.name, name, name, prompt, question, answer, "answer", len(answer))
            )
        return questions

    def _lines(
        self,
        tokenizer: PreTrainedTokenizerBase,
        keys: list[str],
        values: list[str],
        room: int,
        tokens: int,
    ) -> list[list[int]]:
        """As many pairs as there is room for."""
        lines: list[list[int]] = []
        for key, value in zip(keys, values, strict=True):
            line = encode_text(tokenizer, f'"{key}": "{value}",\n')
            if len(line) > room:
                if len(lines) < 2:
                    raise PromptError(
                        f"the task {self.name!r} has room for {len(lines)} pairs and needs 2: ask "
                        f"for more than {tokens} tokens"
                    )
                return lines
            room -= len(line)
            lines.append(line)
        raise PromptError(
            f"the task {self.name!r} has {MOST_PAIRS} pairs, which {tokens} tokens are more than: "
            "ask for fewer tokens"
        )


TASKS = (JsonPairs("json_pairs", "one of the keys of a JSON object that fills the text"),)
