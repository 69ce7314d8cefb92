"""OasisKV's reference engine as a model of lm_eval."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from oasiskv import __version__
from oasiskv.drafts.verify import Sampling
from oasiskv.errors import ConfigError, ModelError
from oasiskv.evals.harness.arguments import batch_of, one_of, sampling_of, settings_of
from oasiskv.evals.harness.runner import Job, Runner
from oasiskv.evals.harness.scores import Pair, Score, Scorer
from oasiskv.hf.choices import DraftKind, Dtype, draft_source
from oasiskv.hf.loading import load_model, pick_device
from oasiskv.hf.request import Request
from oasiskv.hf.tokens import load_tokenizer
from oasiskv.models.resolve import resolve_model

_LOGGER = logging.getLogger(__name__)


class OasisLM(HFLM):
    """A model of transformers, decoded by OasisKV.

    Texts, chat templates, stop strings and truncation are lm_eval's own: those of its model ``hf``.

    Args:
        pretrained: built-in name, folder or hub id.
        tokenizer: folder or hub id of another tokenizer.
        dtype: float32, bfloat16 or float16.
        device: cpu or cuda; by default what is there.
        batch_size: requests computed together.
        max_length: most tokens of prompt and output; by default, and at most, the model's positions
            less one, since the engine gives the last token one too.
        add_bos_token: as of lm_eval's ``hf``; so are the next four.
        prefix_token_id: stands for an empty context.
        enable_thinking: of the chat template.
        think_end_token: what comes before it is not part of an answer.
        chat_template_args: further ones.
        draft: none, ngram or assistant.
        assistant: built-in name, folder or hub id of the smaller model for ``draft=assistant``.
        seed: of the first request that is sampled; the n-th after it has ``seed + n``.
        settings: of ``OasisConfig``, by name.

    Raises:
        ConfigError: an argument is unknown or not legal.
        ModelError: the model cannot be loaded or served, or its tokenizer has no token that ends a
            text.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        draft: str = "ngram",
        assistant: str | None = None,
        seed: int = 0,
        **settings: Any,  # noqa: ANN401 - a setting has the type that its field has
    ) -> None:
        own = [name for name in inspect.signature(OasisLM).parameters if name != "settings"]
        self.settings = settings_of(settings, own)
        size = batch_of(batch_size)
        chosen = one_of(Dtype, "dtype", dtype)
        kind = one_of(DraftKind, "draft", draft)
        folder = resolve_model(pretrained)
        self.loaded = load_model(folder, chosen.torch_dtype, pick_device(device))
        longest = self.loaded.max_tokens - 1
        length = longest if max_length is None else max_length
        if not (isinstance(length, int) and 2 <= length <= longest):
            raise ConfigError(
                f"max_length={max_length!r} is not legal: it must be from 2 to {longest}, the "
                "model's positions less one"
            )
        text = load_tokenizer(folder if tokenizer is None else tokenizer)
        if text.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {tokenizer or pretrained} has no end-of-sequence token, which "
                "lm_eval stops at: set eos_token in its tokenizer_config.json"
            )
        drafts = draft_source(kind, assistant, self.loaded)
        super().__init__(
            pretrained=self.loaded.model,
            tokenizer=text,
            batch_size=size,
            max_length=length,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            enable_thinking=enable_thinking,
            think_end_token=think_end_token,
            chat_template_args=chat_template_args,
        )
        self._drafting = {"draft": kind.value, "assistant": assistant}
        self._next_seed = Sampling(seed=seed).seed
        # False while all that was asked came from lm_eval's cache.
        self._computed = False
        self._runner = Runner(self.loaded, self.settings, drafts)
        self._scorer = Scorer(self.loaded, self.settings, self._runner, size)

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes beside its results: the model, every setting, what was sparse."""
        settings = self.settings.model_dump(mode="json")
        settings["threshold_tokens"] = self.settings.resolved_threshold_tokens
        settings["sparse_requests"] = self._runner.sparse_requests
        computed = self._computed and self.settings.mode != "dense"
        if computed and not settings["sparse_requests"]:
            _LOGGER.warning(
                "no request had a sparse step, so the results are those of dense decoding: none "
                "decoded a second token past threshold_tokens=%d; smaller budget_tokens and "
                "hot_tokens lower it",
                settings["threshold_tokens"],
            )
        return {
            "model_num_parameters": self.loaded.model.num_parameters(),
            "model_dtype": str(self.loaded.geometry.dtype),
            "oasiskv": {"version": __version__, **self._drafting, **settings},
        }

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Score]:
        """Score requests; those of a rolling likelihood, which have no text, as texts."""
        self._computed = True
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        if all(text is None for text, _, _ in requests):
            return self._scorer.texts(pairs)
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="loglikelihood") as bar:
            scores = self._scorer.continuations(pairs, bar.update)
        for (text, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, score)
        return scores

    def _fitting(self, context: list[int], continuation: list[int]) -> Pair:
        """Leave out the first tokens of a context that is too long, as ``hf`` does."""
        surplus = len(context) + len(continuation) - (self.max_length + 1)
        if surplus <= 0:
            return context, continuation
        if surplus >= len(context):
            raise ConfigError(
                f"a continuation of {len(continuation)} tokens does not fit max_length="
                f"{self.max_length}: raise it, up to {self.loaded.max_tokens - 1}"
            )
        _LOGGER.warning(
            "context of %d tokens: the first %d are left out for max_length=%d",
            *(len(context), surplus, self.max_length),
        )
        return context[surplus:], continuation

    def _model_generate(
        self,
        context: torch.Tensor,
        max_length: int,
        stop: list[str],
        **generation_kwargs: Any,  # noqa: ANN401 - whatever the task says
    ) -> torch.Tensor:
        """Decode a batch.

        Args:
            context: int64 ``[requests, longest prompt]``, padded on the left.
            max_length: tokens of the longest prompt with its output.
            stop: strings that end an output.
            generation_kwargs: ``attention_mask``, 0 at padding; the task's.

        Returns:
            ``context`` with the outputs behind it, padded on the right.
        """
        self._computed = True
        mask = generation_kwargs.pop("attention_mask").bool()
        new_tokens = max_length - context.shape[1]
        jobs = []
        for row, kept in zip(context, mask, strict=True):
            sampling = sampling_of(generation_kwargs, self._next_seed)
            self._next_seed += 1
            jobs.append(Job(row[kept].tolist(), new_tokens, sampling=sampling))

        def stopped(request: Request) -> bool:
            text = self.tokenizer.decode(request.output)
            return any(string in text for string in stop)

        outputs = self._runner.run(jobs, stop=stopped)
        width = context.shape[1] + max(map(len, outputs))
        rows = context.new_full((len(jobs), width), self.tokenizer.pad_token_id)
        rows[:, : context.shape[1]] = context
        for row, output in zip(rows, outputs, strict=True):
            row[context.shape[1] :][: len(output)] = row.new_tensor(output)
        return rows
