"""The same prompts in vLLM and in the reference engine: tokens and wanted blocks, step by step."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from vllm import SamplingParams

import oasiskv.vllm
from oasiskv.config import OasisConfig
from oasiskv.core.pipeline import LayerPlan
from oasiskv.data import data_path
from oasiskv.drafts.base import NoDrafts
from oasiskv.hf import Engine, load_model
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.models import resolve_model
from oasiskv.stores.host import HostStore
from oasiskv.vllm.batch_layers import BatchLayers
from oasiskv.vllm.runtime import current_runtime
from plugin.engines import engine

SMALL = {
    "budget_tokens": 64,
    "hot_tokens": 96,
    "sink_tokens": 16,
    "window_tokens": 32,
    "host_gib": 0.05,
}
"""Settings under which a few hundred tokens are far more than the hot set holds."""
NOVEL = {
    "budget_tokens": 256,
    "hot_tokens": 384,
    "sink_tokens": 16,
    "window_tokens": 64,
    "host_gib": 0.5,
    "lookahead": "held_back",
}
"""The same for two thousand tokens."""


class Step(NamedTuple):
    """What one step did to a request.

    Attributes:
        drafts: fed.
        accepted: tokens gained.
        wanted: blocks that the next step wants, ``[layers, heads, K]``; None while dense.
        hot: the resident map once the swaps are made, and when each block was last wanted,
            ``[2, layers, heads, S]``; None while dense, and where requests are tiered one by one.
        scores: the reference engine's, as wanted blocks were chosen by them, ``[layers, heads,
            blocks]``, -1 for blocks that are no candidates; None while dense, and of the plugin.
    """

    drafts: list[int]
    accepted: list[int]
    wanted: torch.Tensor | None
    hot: torch.Tensor | None = None
    scores: torch.Tensor | None = None


@dataclass
class Run:
    """What an engine did with the prompts.

    Attributes:
        tokens: of each request.
        steps: of each request, by its number; empty for an engine without the plugin.
        logprobs: of each token of each request: log-probabilities by token id, the best ones from
            vLLM, of the whole vocabulary, as a tensor, from the reference engine; None if not kept.
        followed: what made the reference engine follow the plugin; None where it did not.
    """

    tokens: list[list[int]] = field(default_factory=list)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    logprobs: list[list] | None = None
    followed: "Follow | None" = None


class Agreement:
    """How many blocks of ours are among theirs.

    Args:
        tie: share of a score within which two blocks count as tied.

    Attributes:
        compared: blocks of ours.
        same: those of them that are among theirs.
        tied: those of them, the same ones included, whose score by the reference is at most ``tie``
            below that of the last one that it wants.
    """

    def __init__(self, tie=0.0):
        self._tie = tie
        self.compared = self.same = self.tied = 0

    def add(self, ours, theirs, scores=None):
        """Take in ``[..., n]`` blocks, -1 for none, and the reference's scores of all blocks."""
        ours = ours.long()
        there = ours >= 0
        both = (ours[..., None] == theirs[..., None, :]).any(-1) & there
        self.compared += int(there.sum())
        self.same += int(both.sum())
        if scores is not None:
            last = scores.gather(-1, theirs.clamp(min=0)).masked_fill(theirs < 0, torch.inf)
            least = (1 - self._tie) * last.amin(-1, keepdim=True)
            self.tied += int(
                (both | ((scores.gather(-1, ours.clamp(min=0)) >= least) & there)).sum()
            )

    @property
    def share(self):
        return self.same / self.compared

    @property
    def tied_share(self):
        return self.tied / self.compared


def novel_prompts():
    """The built-in model and four passages of 2,000 and more tokens of a novel."""
    folder = resolve_model("smollm2-135m")
    text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
    ids = encode(load_tokenizer(folder), text, chat=False)
    return folder, [ids[3000 * i : 3000 * i + 2000 + 7 * i] for i in range(4)]


def assert_truth(folder, prompts, new, settings, **engine_args):
    """The plugin chooses what the reference engine chooses, which is fed vLLM's drafts.

    Returns:
        ``(tokens, wanted blocks compared, drafts accepted)``.
    """
    ours = in_vllm(folder, prompts, new, settings, **engine_args)
    theirs = in_reference(load_model(folder), prompts, ours, OasisConfig(**settings), forced=False)
    assert ours.tokens == theirs.tokens
    agreement = compare_wanted(ours, theirs)
    # The two forwards round differently, so that blocks of nearly equal score may change places.
    assert agreement.share > 0.999
    return ours.tokens, agreement.compared, accepted_drafts(ours)


def compare_wanted(ours, theirs, tie=0.0):
    """Wanted blocks of all steps of all requests, after the same tokens.

    But for the last step of each, which may have been fed more drafts than tokens are left: then
    vLLM throws away what is too much, and the reference engine does not feed it.
    """
    agreement = Agreement(tie)
    for number, steps in theirs.steps.items():
        for mine, reference in zip(ours.steps[number][:-1], steps[:-1], strict=True):
            assert mine.accepted == reference.accepted
            assert (mine.wanted is None) == (reference.wanted is None)
            if mine.wanted is not None:
                agreement.add(mine.wanted, reference.wanted, reference.scores)
    return agreement


def accepted_drafts(run):
    """Of all requests."""
    return sum(len(step.accepted) - 1 for steps in run.steps.values() for step in steps)


def divergence(ours, theirs):
    """KL divergence of vLLM's next-token distributions from the reference engine's, in nats.

    vLLM's give the best tokens only: what is left counts as one token, which makes it a lower
    bound.

    Returns:
        Of each token of all requests, float64 ``[tokens]``.
    """
    found = []
    for best, rows in zip(ours.logprobs, theirs.logprobs, strict=True):
        for mine, row in zip(best, rows, strict=True):
            ids = torch.tensor(list(mine))
            p = torch.tensor([entry.logprob for entry in mine.values()], dtype=torch.float64)
            p, q = with_rest(p), with_rest(row[ids].double())
            found.append((p.exp() * (p - q)).sum())
    return torch.stack(found)


def with_rest(logprobs):
    """One more: the log-probability of all other tokens, at least that of one in a billion."""
    rest = (1 - logprobs.exp().sum()).clamp(min=1e-9).log()
    return torch.cat([logprobs, rest[None]])


def keep_scores(reference):
    """The list to which the reference engine adds the scores that a selection is made by."""
    kept = []
    if reference.tiering is None:
        return kept
    selector, config = reference.tiering.selector, reference.config
    plan = selector.plan

    def plan_and_keep(scores, residents, step):
        held = residents.blocks[..., : residents.filled] - config.sink_blocks
        adjusted = scores.scatter(-1, held, config.hysteresis * scores.gather(-1, held))
        kept.append(pad(adjusted, (config.sink_blocks, 0), value=-1).cpu())
        return plan(scores, residents, step)

    selector.plan = plan_and_keep
    return kept


class Replay:
    """Proposes the drafts that vLLM proposed after the same tokens."""

    def __init__(self, drafts):
        self._drafts = drafts

    def propose(self, request_id, tokens, max_drafts):
        return self._drafts[request_id].get(len(tokens), [])[:max_drafts]

    def finish(self, request_id):
        pass


def hot_set(layers, name):
    """``Step.hot`` of a request of the plugin."""
    request = layers.requests[name]
    if not isinstance(layers, BatchLayers) or not request.sparse:
        return None
    state, row = layers.tiering.state, request.row
    return torch.stack([state.resident[:, row], state.last_wanted[:, row]]).long().cpu()


class Follow:
    """A ``before_step`` hook of the reference engine: gives each request the plugin's hot set.

    Which blocks are resident depends on all earlier steps, and so does, through hysteresis and what
    attention sees, what is wanted next: two engines that round differently drift apart at the
    first near-tie. Followed, each step is compared on its own.

    Args:
        ours: the plugin's run.
        done: the reference engine's, steps of which are added as they are done.

    Attributes:
        agreement: of the hot sets that both made of the same earlier one.
    """

    def __init__(self, ours, done):
        self._ours, self._done = ours.steps, done.steps
        self.agreement = Agreement()

    def __call__(self, engine):
        for request in engine.running:
            residents, name = request.residents, request.request_id
            if residents is None:
                continue
            hot = self._ours[name][len(self._done[name]) - 1].hot.to(residents.blocks.device)
            self.agreement.add(hot[0], residents.blocks)
            for layer, (blocks, last_wanted) in enumerate(zip(*hot, strict=True)):
                differs = blocks != residents.blocks[layer]
                slots = torch.arange(blocks.shape[-1], device=blocks.device)
                victims = torch.where(differs, slots, -1)
                plan = LayerPlan(torch.where(differs, blocks, -1), victims, last_wanted)
                pipeline = request.pipeline
                pipeline.consume(layer, engine.step_number)
                # No step of the engine is negative: no ticket of its own comes twice.
                pipeline.predicted(layer, -engine.step_number)
                pipeline.planned(layer, plan)
                if plan.num_tiles:
                    engine.tiering.transfer(request, pipeline, layer, plan)
                else:
                    pipeline.settle(layer)
                    residents.last_wanted[layer] = last_wanted


def in_vllm(folder, prompts, new, settings, logprobs=None, **engine_args):
    """Greedy decoding in vLLM.

    Args:
        folder: the model.
        prompts: token ids of each.
        new: tokens to decode.
        settings: of the plugin; None: stock vLLM.
        logprobs: best log-probabilities to keep of each token; None: none.
        engine_args: of vLLM, over the defaults.
    """
    plugin = {} if settings is None else oasiskv.vllm.engine_args(**settings)
    run = Run()

    def observe(record):
        # vLLM's ids are the prompt's number and a suffix.
        number = record.request_id.split("-")[0]
        hot = hot_set(current_runtime().target, record.request_id)
        step = Step(record.drafts, record.accepted, record.wanted, hot)
        run.steps.setdefault(number, []).append(step)

    sampling = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    with engine(folder, **(plugin | engine_args)) as llm:
        if settings is not None:
            current_runtime().observer = observe
        outputs = [output.outputs[0] for output in llm.generate(inputs, sampling, use_tqdm=False)]
    run.tokens = [list(output.token_ids) for output in outputs]
    if logprobs is not None:
        run.logprobs = [list(output.logprobs) for output in outputs]
    return run


def in_reference(loaded, prompts, ours, config, forced=True, follow=False, logprobs=False):
    """The same in the reference engine, which is fed vLLM's drafts.

    Args:
        loaded: the model.
        prompts: token ids of each.
        ours: vLLM's run.
        config: settings.
        forced: decode vLLM's tokens, whatever the model would choose.
        follow: begin each step with the plugin's hot sets.
        logprobs: keep log-probabilities.
    """
    drafts = {}
    for number, steps in ours.steps.items():
        known, at = {}, len(prompts[int(number)])
        for step in steps:
            known[at] = step.drafts
            at += len(step.accepted)
        drafts[number] = known
    loaded = replace(loaded, eos_tokens=frozenset())
    store = None
    if config.mode != "dense":
        pairs = zip(prompts, ours.tokens, strict=True)
        blocks = sum(1 + (len(prompt) + len(tokens)) // 16 for prompt, tokens in pairs)
        store = HostStore(loaded.geometry, blocks)
    reference = Engine(loaded, config, store, Replay(drafts) if drafts else NoDrafts())
    run = Run(logprobs=[[] for _ in prompts] if logprobs else None)

    def observe(record):
        number = record.request.request_id
        wanted = scores = None
        if record.selection is not None:
            wanted, scores = record.selection.wanted.cpu(), kept.pop()
        step = Step([], record.accepted, wanted, scores=scores)
        run.steps.setdefault(number, []).append(step)
        if run.logprobs is not None:
            rows = record.logits[: len(record.accepted)].log_softmax(-1)
            run.logprobs[int(number)].extend(rows)

    kept = keep_scores(reference)
    reference.observer = observe
    if follow:
        run.followed = Follow(ours, run)
        reference.before_step = run.followed
    requests = [
        reference.submit(str(i), prompt, len(tokens), forced=tokens if forced else ())
        for i, (prompt, tokens) in enumerate(zip(prompts, ours.tokens, strict=True))
    ]
    for output in reference.stream():
        assert output.error is None
    run.tokens = [request.output for request in requests]
    return run
