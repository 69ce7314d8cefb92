"""Does sparse decoding find a planted fact that dense attention finds?"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from oasiskv.config import OasisConfig
from oasiskv.drafts.base import DraftSource, NoDrafts
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.errors import PromptError
from oasiskv.evals.tasks.texts import encode_text
from oasiskv.evals.tasks.words import WORDS
from oasiskv.hf.engine import Engine
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import Prefilled, prefill
from oasiskv.stores.host import HostStore

# The table in docs/accuracy.md is of texts with these, in the words that the 32K model knows.
_WORDS = WORDS[:27]
_FACT = "\nThe special number of {key} is {value}.\n"
_QUESTION = "\nQuestion: What is the special number of {key}?\nAnswer: "
FACTS = 4
DIGITS = 6

Method = Literal["last_query", "held_back_ngram", "oracle"]
METHODS: tuple[Method, ...] = ("last_query", "held_back_ngram", "oracle")


@dataclass(frozen=True)
class Case:
    """A text with facts, and a question after one of them.

    Args:
        text: token ids of the text.
        question: token ids of the question, up to the answer.
        answer: token ids of the answer.
        depth: where the fact stands, 0 to 1.
    """

    text: list[int]
    question: list[int]
    answer: list[int]
    depth: float


@dataclass(frozen=True)
class Outcome:
    """Answers of one method at one size of the hot set.

    Args:
        method: the method.
        hot_tokens: S.
        right: which cases it answered right.
    """

    method: Method
    hot_tokens: int
    right: list[bool]


def make_cases(
    tokenizer: PreTrainedTokenizerBase, filler: str, positions: int, tokens: int, seed: int
) -> list[Case]:
    """Texts of ``tokens`` tokens; the fact asked for stands at evenly spread depths.

    Args:
        tokenizer: of the model.
        filler: real text, longer than ``tokens`` tokens.
        positions: how many cases.
        tokens: length of text and question together.
        seed: drives everything random.

    Raises:
        PromptError: the filler is too short.
    """
    rng = random.Random(seed)
    filler_ids = encode_text(tokenizer, filler)
    if len(filler_ids) < 2 * tokens:
        raise PromptError(
            f"the filler has {len(filler_ids)} tokens: {2 * tokens} are needed to vary texts of "
            f"{tokens} tokens"
        )
    cases = []
    for index in range(positions):
        keys = [" ".join(pair) for pair in _pairs(rng)]
        values = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in keys]
        facts = [
            encode_text(tokenizer, _FACT.format(key=key, value=value))
            for key, value in zip(keys, values, strict=True)
        ]
        question = encode_text(tokenizer, _QUESTION.format(key=keys[0]))
        room = tokens - len(question) - sum(map(len, facts))
        start = rng.randrange(len(filler_ids) - room)
        body = filler_ids[start : start + room]
        depth = (index + 0.5) / positions
        places = sorted(
            [(int(depth * room), 0), *((rng.randrange(room), i) for i in range(1, FACTS))],
            reverse=True,
        )
        for place, fact in places:
            body[place:place] = facts[fact]
        cases.append(Case(body, question, encode_text(tokenizer, values[0]), depth))
    return cases


def run(
    loaded: LoadedModel,
    cases: Sequence[Case],
    config: OasisConfig,
    hot_tokens: Sequence[int],
    question: Literal["prompt", "decoded"],
    on_case: Callable[[int], None],
) -> tuple[list[bool], list[Outcome]]:
    """Ask every case densely, and with every method and hot set.

    Args:
        loaded: the model.
        cases: what to ask.
        config: everything but the hot set and the lookahead mode.
        hot_tokens: sizes S of the hot set.
        question: ``prompt``: the question is prefilled with the text; ``decoded``: it is decoded
            sparsely, so that its blocks must be found on demand.
        on_case: called with the number of cases done.

    Returns:
        Which cases dense attention gets right, and the outcomes.
    """
    dense: list[bool] = []
    outcomes = [Outcome(method, hot, []) for hot in hot_tokens for method in METHODS]
    for done, case in enumerate(cases, start=1):
        shared = prefill(loaded, case.text)
        answer = _answer(loaded, case, OasisConfig(mode="dense"), NoDrafts(), shared, question)
        dense.append(answer == case.answer)
        for outcome in outcomes:
            sparse = config.model_copy(
                update={"hot_tokens": outcome.hot_tokens, "lookahead": _lookahead(outcome.method)}
            )
            drafts = _drafts(outcome.method, case, case.question + answer)
            found = _answer(loaded, case, sparse, drafts, shared, question)
            outcome.right.append(found == case.answer)
        on_case(done)
    return dense, outcomes


def _answer(
    loaded: LoadedModel,
    case: Case,
    config: OasisConfig,
    drafts: DraftSource,
    shared: Prefilled,
    question: Literal["prompt", "decoded"],
) -> list[int]:
    """The tokens that stand where the answer should."""
    prompt, forced = case.text + case.question, list[int]()
    if question == "decoded":
        prompt, forced = case.text, case.question
    new = len(forced) + len(case.answer)
    store = None
    if config.mode != "dense":
        store = HostStore(loaded.geometry, loaded.geometry.blocks_for(len(prompt) + new))
    engine = Engine(loaded, config, store=store, drafts=drafts)
    request = engine.submit("case", prompt, new, forced=forced, prefilled=shared)
    engine.run()
    return request.output[len(forced) :]


def _lookahead(method: Method) -> LookaheadMode:
    return LookaheadMode.LAST_ACCEPTED if method == "last_query" else LookaheadMode.HELD_BACK


def _drafts(method: Method, case: Case, continuation: list[int]) -> DraftSource:
    if method == "last_query":
        return NoDrafts()
    if method == "held_back_ngram":
        return NgramDrafts()
    return OracleDrafts({"case": continuation}, {"case": len(case.text)})


def _pairs(rng: random.Random) -> list[tuple[str, str]]:
    words = rng.sample(_WORDS, 2 * FACTS)
    return list(zip(words[::2], words[1::2], strict=True))
