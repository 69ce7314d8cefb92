"""What the soak asks: chapters of requests of all kinds, each chapter the same at every call."""

import random
from dataclasses import dataclass

from vllm.sampling_params import StructuredOutputsParams

from tiny import prompt_of

LONGEST = 480
"""Tokens of the longest request, its answer included."""
CHAPTER = 100
"""Requests of a chapter."""
RECENT = 12
"""Requests back that others ask again, or follow."""
KINDS = {
    "plain": 4,
    "again": 2,
    "follow-up": 2,
    "prompt_logprobs": 1,
    "skip reading": 1,
    "several": 1,
    "session": 1,
    "structured": 1,
}
"""How often each kind comes, beside one another."""
FEATURES = frozenset({"adapters", "new weights", "resets", "preemptions", "aborts", "long parts"})
"""What else can be left out. With new weights every other chapter has other ones; without long
parts only the last one of a session has more than one token decoded."""
ALL = FEATURES | KINDS.keys()
ADAPTERS = (None, "one", "two")
STRUCTURES = [
    {"regex": "(yes|no way){40}"},
    {"regex": "([0-9]{3}-[a-c]{4}){40}"},
    {"json": {"type": "array", "items": {"enum": [7]}, "minItems": 40}},
    {"grammar": 'root ::= ("ab" | "c") root'},
]
"""None that is complete before the answer ends: then no token is allowed, and stock fails, too."""


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        index: of all that are asked.
        kind: of ``KINDS``.
        parts: its prompt, or those of a session's parts.
        new: tokens to decode after each part.
        after: the request whose prompt and answer come before the prompt of a follow-up.
        several: answers.
        settings: more of vLLM's sampling parameters.
        adapter: of ``ADAPTERS``.
        priority: as vLLM's.
    """

    index: int
    kind: str
    parts: tuple[tuple[int, ...], ...]
    new: tuple[int, ...]
    after: "Asked | None" = None
    several: int = 1
    settings: tuple[tuple[str, object], ...] = ()
    adapter: str | None = None
    priority: int = 0

    @property
    def most_tokens(self):
        own = sum(map(len, self.parts)) + sum(self.new)
        return own + (self.after.most_tokens if self.after else 0)


class Chapter:
    """Requests that share prefixes.

    Two chapters in turn have the same ones, so that a reset between them has something to forget.

    Args:
        number: seed of everything.
        kinds: and features, of ``ALL``.
    """

    def __init__(self, number, kinds=ALL):
        self.number, self.kinds = number, kinds
        self.weights = number % 2 if "new weights" in kinds else 0
        self._texts = [prompt_of(LONGEST, seed=10 * (number // 2) + index) for index in range(4)]
        self._draw = random.Random(number)
        self.asked = []
        for index in range(CHAPTER):
            self.asked.append(self._request(CHAPTER * number + index))

    def _request(self, index):
        draw = self._draw
        names = [kind for kind in KINDS if kind in self.kinds]
        [kind] = draw.choices(names, [KINDS[name] for name in names])
        common = {"priority": draw.randint(0, 2)}
        if "adapters" in self.kinds and draw.random() < 0.2:
            common["adapter"] = draw.choice(ADAPTERS)
        new = draw.choice([1, 2, draw.randint(3, 8), draw.randint(3, 8), draw.randint(9, 24)])
        if kind == "session":
            return self._session(index, common)
        if kind in ("again", "follow-up"):
            found = self._after(index, kind, new, common)
            if found is not None:
                return found
            kind = "plain"
        prompt = self._prompt(1 + int((LONGEST - 30) * draw.random() ** 2))
        prompt = prompt[: LONGEST - new]
        if kind == "prompt_logprobs":
            common["settings"] = (("prompt_logprobs", draw.randint(1, 2)),)
        elif kind == "skip reading":
            common["settings"] = (("skip_reading_prefix_cache", True),)
        elif kind == "several":
            common["several"] = draw.randint(2, 3)
        elif kind == "structured":
            structure = StructuredOutputsParams(**draw.choice(STRUCTURES))
            common["settings"] = (("structured_outputs", structure),)
        return Asked(index, kind, (prompt,), (new,), **common)

    def _prompt(self, length):
        """One that others may have, or begin with, or a new one."""
        draw = self._draw
        shared = draw.choice([0, length, draw.randint(0, length)])
        text = draw.choice(self._texts)[:shared]
        return tuple(text + prompt_of(length, seed=draw.randrange(2**20))[shared:])

    def _session(self, index, common):
        draw, parts, new = self._draw, [], []
        left = LONGEST
        for _ in range(draw.randint(2, 4)):
            decoded = draw.randint(1, 8)
            length = min(1 + int(250 * draw.random() ** 2), left - decoded - 1)
            if length < 1:
                break
            if "long parts" not in self.kinds:
                new = [1] * len(new)
            parts.append(
                self._prompt(length) if not parts else tuple(prompt_of(length, seed=index))
            )
            new.append(decoded)
            left -= length + decoded
        return Asked(index, "session", tuple(parts), tuple(new), **common)

    def _after(self, index, kind, new, common):
        """One that asks the same as a recent one, or goes on where that ended."""
        adapter = common.get("adapter")
        tail = tuple(prompt_of(self._draw.randint(1, 20), seed=index))
        recent = [one for one in self.asked[-RECENT:] if one.kind != "session"]
        self._draw.shuffle(recent)
        for before in recent:
            fits = before.most_tokens + len(tail) + new <= LONGEST
            if before.adapter == adapter and fits:
                if kind == "again":
                    return Asked(index, kind, before.parts, (new,), before.after, **common)
                return Asked(index, kind, (tail,), (new,), before, **common)
        return None
