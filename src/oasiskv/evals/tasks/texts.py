"""The bundled texts as token ids, and passages of them."""

import lzma
import random
from collections.abc import Sequence
from functools import cache, lru_cache

from transformers import PreTrainedTokenizerBase

from oasiskv.data import data_path
from oasiskv.errors import PromptError

_FILES = {
    "prose": ("persuasion.txt", "persuasion_5_24.txt.xz"),
    "code": ("python_code.txt.xz",),
    "manual": ("python_manual.txt.xz",),
}
TEXTS = tuple(_FILES)


@cache
def read_text(name: str) -> str:
    """One of ``TEXTS``, whole."""
    return "\n".join(_read(f"texts/{file}") for file in _FILES[name])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that may be longer than the model's context; no special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@lru_cache(maxsize=len(_FILES))
def encode_bundled(tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[int, ...]:
    """Token ids of one of ``TEXTS``, which take a second: the latest few are kept."""
    return tuple(encode_text(tokenizer, read_text(name)))


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the model wants before any text: the begin-of-text token if its tokenizer adds one."""
    added = list(tokenizer("")["input_ids"])
    return [token for token in added if token == tokenizer.bos_token_id]


def passages(
    ids: Sequence[int], length: int, count: int, rng: random.Random, what: str
) -> list[list[int]]:
    """Passages of a text, spread over it evenly, each moved at random.

    Args:
        ids: the text.
        length: tokens of each passage.
        count: how many; they overlap if the text is shorter than all of them.
        rng: moves them.
        what: the text's name, for the error.

    Raises:
        PromptError: the text has too few tokens for passages that differ.
    """
    if len(ids) < length + count:
        raise PromptError(
            f"the text {what!r} has {len(ids)} tokens: {count} passages of {length} tokens need "
            f"{length + count} at least; ask for fewer tokens"
        )
    stride = (len(ids) - length) / count
    starts = [int((index + rng.random()) * stride) for index in range(count)]
    return [list(ids[start : start + length]) for start in starts]


def dialogues(
    tokenizer: PreTrainedTokenizerBase, name: str, length: int, count: int
) -> list[list[int]]:
    """The passages with the most quotation marks, which do not overlap, in order.

    Args:
        tokenizer: of the model.
        name: one of ``TEXTS``; prose has dialogue.
        length: tokens of each passage.
        count: how many.

    Raises:
        PromptError: the text has too few tokens.
    """
    ids = encode_bundled(tokenizer, name)
    whole = len(ids) // length
    if whole < count:
        raise PromptError(
            f"the text {name!r} has {len(ids)} tokens: {count} passages of {length} tokens need "
            f"{count * length}; ask for fewer tokens or passages"
        )
    cut = [ids[index * length : (index + 1) * length] for index in range(whole)]
    quotes = [tokenizer.decode(passage).count('"') for passage in cut]
    best = sorted(range(whole), key=lambda index: -quotes[index])[:count]
    return [list(cut[index]) for index in sorted(best)]


def _read(file: str) -> str:
    path = data_path(file)
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes()).decode("utf-8")
    return path.read_text(encoding="utf-8")
