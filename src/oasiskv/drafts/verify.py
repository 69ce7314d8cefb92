"""Speculative verification: accept drafts so that the output stays the target model's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.errors import ConfigError, ModelError, StateError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Args:
        temperature: divides the logits, from 0 on; 0 takes the token with the largest logit.
        top_p: probability mass of the nucleus, above 0 up to 1; 1 keeps every token.
        seed: seed of the generator, 0 to 2^63 - 1.

    Raises:
        ConfigError: a value is outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_finite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature = {self.temperature!r}: needed is a finite number from 0 on, "
                "0 for greedy"
            )
        if not (_is_finite(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"top_p = {self.top_p!r}: needed is a number above 0, up to 1")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise ConfigError(f"seed = {self.seed!r}: needed is an integer from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the token with the largest logit is taken and no generator is needed."""
        return self.temperature == 0

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """Return a generator with this seed on ``device``, None when greedy."""
        return None if self.greedy else torch.Generator(device).manual_seed(self.seed)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that `sampling` draws from.

    Args:
        logits: ``[V]``, any float dtype; -inf forbids a token.
        sampling: temperature, then nucleus: the smallest set of the most probable tokens whose
            mass reaches ``top_p``. Of equally probable tokens the lower id comes first.

    Returns:
        ``[V]`` float64 that sums to 1; one-hot when greedy.

    Raises:
        ModelError: a logit is NaN or +inf, or no token is allowed.
    """
    _check_finite(logits)
    exact = logits.double()
    if sampling.greedy:
        return torch.zeros_like(exact).index_fill_(0, exact.argmax(), 1.0)
    # The largest logit goes to 0 before the division, so that a tiny temperature cannot overflow.
    mass = torch.softmax((exact - exact.max()) / sampling.temperature, dim=-1)
    if sampling.top_p == 1:
        return mass
    ordered, order = mass.sort(descending=True, stable=True)
    before = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]])
    outside = order[before >= sampling.top_p]
    kept = mass.index_fill(0, outside, 0.0)
    return kept / kept.sum()


def accept_known(drafts: Sequence[int], known: Sequence[int]) -> list[int]:
    """Accept a prefix of the drafts where what follows is known, and one token after it.

    Args:
        drafts: token ids; a held-back draft is left out by the caller.
        known: token ids that follow, at least one.

    Returns:
        The drafts that agree, then the known token after them, if there is one.
    """
    agreed = 0
    while agreed < min(len(drafts), len(known)) and drafts[agreed] == known[agreed]:
        agreed += 1
    return list(known[: agreed + 1])


def verify(
    logits: Tensor,
    drafts: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[int]:
    """Accept a prefix of the drafts and sample one token after it.

    Draft d at a row with distribution p is accepted with probability p(d); at the first rejection
    the token comes from p without d, renormalised; if all are accepted, from the last row. The
    tokens are then distributed as if drawn from the target model one by one. A draft with
    p(d) = 1 is never rejected. Greedy is the same rule with a one-hot p.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    https://arxiv.org/abs/2211.17192, with drafts that are certain (q one-hot).

    Args:
        logits: ``[n + 1, V]`` of the target model, any float dtype; row i follows the i-th of
            ``[last accepted token, *drafts]``.
        drafts: n token ids below V. A held-back draft and its row are left out by the caller.
        sampling: how tokens are chosen.
        generator: source of randomness on the device of ``logits``; None when greedy.

    Returns:
        Accepted drafts, then the sampled token: 1 to n + 1 ids.

    Raises:
        ModelError: a logit is NaN or +inf, or a row allows no token.
        StateError: rows and drafts do not match, a draft is no token id, or a generator is missing.
    """
    if logits.dim() != 2 or logits.shape[0] != len(drafts) + 1:
        raise StateError(
            f"logits {list(logits.shape)} for {len(drafts)} drafts: needed is one row more "
            f"than drafts, [{len(drafts) + 1}, V]"
        )
    vocab_size = logits.shape[1]
    if not all(0 <= draft < vocab_size for draft in drafts):
        raise StateError(f"drafts {list(drafts)}: needed are token ids from 0 to {vocab_size - 1}")
    _check_finite(logits)
    if sampling.greedy:
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        agreed = next((i for i, d in enumerate(drafts) if d != chosen[i]), len(drafts))
        return chosen[: agreed + 1]
    if generator is None:
        raise StateError(
            f"temperature = {sampling.temperature} without a generator: pass "
            "sampling.generator(device), or set temperature to 0"
        )
    return _verify_sampled(logits, drafts, sampling, generator)


def _verify_sampled(
    logits: Tensor, drafts: Sequence[int], sampling: Sampling, generator: torch.Generator
) -> list[int]:
    accepted: list[int] = []
    for row, draft in zip(logits, drafts, strict=False):
        target = probabilities(row, sampling)
        uniform = torch.rand((), dtype=target.dtype, device=target.device, generator=generator)
        # uniform is below 1, so that a draft that is certain always passes.
        if uniform >= target[draft]:
            return [*accepted, _draw(_without(target, draft), generator)]
        accepted.append(draft)
    return [*accepted, _draw(probabilities(logits[-1], sampling), generator)]


def _without(target: Tensor, draft: int) -> Tensor:
    """Return ``target`` ``[V]`` with the rejected draft removed, not renormalised."""
    rest = target.clone()
    rest[draft] = 0.0
    return rest


def _draw(weights: Tensor, generator: torch.Generator) -> int:
    """Draw one id in proportion to ``weights`` ``[V]``, which need not sum to 1."""
    return int(torch.multinomial(weights, 1, generator=generator))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_finite(logits: Tensor) -> None:
    # The maximum of a row is NaN, +inf or -inf exactly when nothing can be drawn from the row.
    broken = ~torch.isfinite(logits.amax(dim=-1))
    if bool(broken.any()):
        rows = torch.nonzero(broken.reshape(-1)).flatten().tolist()
        raise ModelError(
            f"logits of row(s) {rows} are NaN, +inf, or -inf for every token: needed are finite "
            "logits. Look at the weights and at the dtype of the model (float16 may overflow)"
        )
