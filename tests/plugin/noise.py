"""The plugin against the reference engine where both round to 16 bits: no more than noise apart.

In 16 bits two right engines want different blocks wherever scores are nearly equal, and another
block in the hot set changes what is wanted from then on. So the reference engine is fed the tokens,
drafts and hot sets of the plugin, which leaves each step to be compared on its own, and noise is
measured: what the reference engine differs from itself by, in float32 and in 16 bits, and what
stock vLLM differs from the dense reference engine by.
"""

import logging
import math
from dataclasses import dataclass

import torch

from oasiskv.config import OasisConfig
from oasiskv.hf import load_model
from plugin.truth import accepted_drafts, compare_wanted, divergence, in_reference, in_vllm

log = logging.getLogger(__name__)
TIE = 3.0
"""Scores that differ by less than this many times their noise are tied."""
SLACK = 1.5
"""Two means over some two hundred tokens, or some hundred thousand blocks of the same few texts, of
which the one may come out this much above the other."""


@dataclass
class Noise:
    """What was measured. Shares are of wanted blocks, KL divergences in nats, means over tokens.

    Attributes:
        compared: wanted blocks.
        accepted: drafts.
        own: share in which the reference engine agrees with itself, 16 bits with float32.
        plugin: share in which the plugin agrees with the reference engine in float32.
        tied: the same, ties counted as agreement.
        hot: share of the hot sets, made of the same earlier ones.
        score: root mean square of the relative noise of scores.
        dense_kl: of stock vLLM from the dense reference engine in float32.
        sparse_kl: of the plugin from the sparse one.
        dense_twice_kl: of stock vLLM from the dense reference engine in 16 bits as well; not
            asserted: the engines may share kernels, and then some of the noise is the same in both.
        sparse_twice_kl: of the plugin from the sparse one in 16 bits.
        alone: share in which the plugin agrees with a reference engine that is fed the tokens and
            drafts but keeps hot sets of its own; tells how far they drift, and is not asserted.
    """

    compared: int
    accepted: int
    own: float
    plugin: float
    tied: float
    hot: float
    score: float
    dense_kl: float
    sparse_kl: float
    dense_twice_kl: float
    sparse_twice_kl: float
    alone: float

    def check(self):
        """Everything that can be asked in 16 bits."""
        assert self.tied > 0.995
        assert self.hot > 0.98
        assert 1 - self.plugin < SLACK * (1 - self.own)
        assert self.sparse_kl < SLACK * self.dense_kl


def measure_noise(folder, prompts, new, settings, dtype, device, best, **engine_args):
    """Run the plugin, stock vLLM, and the reference engine five times.

    Args:
        folder: the model.
        prompts: token ids of each.
        new: tokens to decode.
        settings: of the plugin.
        dtype: name of a 16-bit dtype.
        device: of the reference engine.
        best: log-probabilities of each token to take from vLLM.
        engine_args: of vLLM, over the defaults.
    """
    args = engine_args | {"dtype": dtype, "max_logprobs": best, "logprobs": best}
    config = OasisConfig(**settings)
    plugin = in_vllm(folder, prompts, new, settings, **args)
    stock = in_vllm(folder, prompts, new, None, **(args | {"speculative_config": None}))

    half = load_model(folder, getattr(torch, dtype), device)
    rounded = in_reference(half, prompts, plugin, config, follow=True, logprobs=True)
    twice = in_reference(half, prompts, stock, OasisConfig(mode="dense"), logprobs=True)
    full = load_model(folder, torch.float32, device)
    exact = in_reference(full, prompts, plugin, config, follow=True, logprobs=True)
    alone = in_reference(full, prompts, plugin, config)
    dense = in_reference(full, prompts, stock, OasisConfig(mode="dense"), logprobs=True)

    score = score_noise(rounded, exact)
    agreement = compare_wanted(plugin, exact, tie=1 - math.exp(-TIE * score))
    found = Noise(
        compared=agreement.compared,
        accepted=accepted_drafts(plugin),
        own=compare_wanted(rounded, exact).share,
        plugin=agreement.share,
        tied=agreement.tied_share,
        hot=exact.followed.agreement.share,
        score=score,
        dense_kl=float(divergence(stock, dense).mean()),
        sparse_kl=float(divergence(plugin, exact).mean()),
        dense_twice_kl=float(divergence(stock, twice).mean()),
        sparse_twice_kl=float(divergence(plugin, rounded).mean()),
        alone=compare_wanted(plugin, alone).share,
    )
    log.info("%s: %s", dtype, found)
    return found


def score_noise(rounded, exact):
    """Root mean square of the difference of the logarithms of two runs' scores.

    Of those that matter: within a factor of two of the last that is wanted.
    """
    found = []
    for number, steps in exact.steps.items():
        for mine, other in zip(steps[:-1], rounded.steps[number][:-1], strict=True):
            if mine.scores is not None:
                last = mine.scores.gather(-1, mine.wanted.clamp(min=0))
                last = last.masked_fill(mine.wanted < 0, torch.inf).amin(-1, keepdim=True)
                near = (mine.scores > last / 2) & (mine.scores < 2 * last)
                found.append((other.scores[near] / mine.scores[near]).log())
    return float(torch.cat(found).square().mean().sqrt())
