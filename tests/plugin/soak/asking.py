"""Requests of the soak put to an engine in this process, and what it answers."""

from dataclasses import dataclass, field

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind


@dataclass
class Answer:
    """What an engine answered to one request.

    Attributes:
        tokens: of each part of a session, or of each of several answers.
        gaps: how far each of these tokens was ahead of the next best one, in log-probability.
        prompt_logprobs: of vLLM, if they were asked for.
        parts: how many parts of a session have ended.
        ended: nothing more will come.
        error: it ended with one.
    """

    tokens: list[list[int]]
    gaps: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list | None = None
    parts: int = 0
    ended: bool = False
    error: bool = False


class Asking:
    """Puts requests to an engine.

    Args:
        llm: the engine.
        adapters: by name.
        gaps: also ask how far each token was ahead.

    Attributes:
        asked: by index, those put so far.
        prompts: by index, what each was asked after.
        answers: by index.
        names: by index, vLLM's id: of the first of several.
        sessions: by index, parts put so far of those to which more are to come.
    """

    def __init__(self, llm, adapters, gaps=False):
        self.engine, self._adapters, self._gaps = llm.llm_engine, adapters, gaps
        self.asked, self.prompts, self.answers, self.names = {}, {}, {}, {}
        self.sessions = {}

    def add(self, asked, known):
        """``known``: answers of the requests that follow-ups follow, by index."""
        index = asked.index
        self.asked[index] = asked
        count = max(asked.several, len(asked.parts))
        self.answers[index] = Answer([[] for _ in range(count)], [[] for _ in range(count)])
        self.prompts[index] = prompt_of(asked, known)
        if asked.kind == "session":
            self.sessions[index] = 0
            self.add_part(index)
            return
        sampling = self._sampling(asked, asked.new[0], dict(asked.settings))
        # vLLM refuses several greedy answers, which would be equal; here they have to be.
        sampling.n, sampling.skip_clone = asked.several, True
        self.names[index] = self.engine.add_request(
            str(index),
            {"prompt_token_ids": list(self.prompts[index])},
            sampling,
            lora_request=self._adapters[asked.adapter],
            priority=asked.priority,
        )

    def add_part(self, index):
        """The next part of a session, or its end, as ``AsyncLLM`` puts them."""
        asked, number = self.asked[index], self.sessions[index]
        ends = number == len(asked.parts)
        kind = RequestOutputKind.DELTA
        request = self.engine.input_processor.process_inputs(
            self.names.get(index, str(index)),
            {"prompt_token_ids": [0] if ends else list(asked.parts[number])},
            self._sampling(asked, 1 if ends else asked.new[number], {"output_kind": kind}),
            supported_tasks=self.engine.get_supported_tasks(),
            lora_request=self._adapters[asked.adapter],
            priority=asked.priority,
            resumable=not ends,
        )
        if number:
            request.external_req_id = str(index)
        else:
            self.engine.input_processor.assign_request_id(request)
            self.names[index] = request.request_id
        self.engine.output_processor.add_request(request, None, None, 0)
        # Both sides append the next parts to what they were given; here it would be one list.
        request.prompt_token_ids = list(request.prompt_token_ids)
        self.engine.engine_core.add_request(request)
        self.sessions[index] += 1
        if ends:
            del self.sessions[index]
            self._end_session(index)

    def abort(self, index):
        self.sessions.pop(index, None)
        self.answers[index].ended = True
        self.engine.abort_request([str(index)])

    def step(self):
        """Returns the indices of requests that have ended."""
        ended = []
        for output in self.engine.step():
            index = int(output.request_id)
            if self.asked[index].kind == "session":
                self._take_part(index, output.outputs[0])
            else:
                self._take(index, output)
            if self.answers[index].ended:
                ended.append(index)
        return ended

    def _sampling(self, asked, new, settings):
        if self._gaps:
            settings["logprobs"] = 2
        settings = {"output_kind": RequestOutputKind.FINAL_ONLY} | settings
        return SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **settings
        )

    def _take(self, index, output):
        answer = self.answers[index]
        answer.ended = True
        answer.error = any(one.finish_reason == "error" for one in output.outputs)
        answer.tokens = [list(one.token_ids) for one in output.outputs]
        answer.prompt_logprobs = output.prompt_logprobs
        if self._gaps:
            answer.gaps = [list(map(gap, one.logprobs)) for one in output.outputs]

    def _take_part(self, index, output):
        answer = self.answers[index]
        answer.tokens[answer.parts] += output.token_ids
        if self._gaps:
            answer.gaps[answer.parts] += map(gap, output.logprobs)
        answer.parts += output.finish_reason is not None
        answer.error = output.finish_reason == "error"
        self._end_session(index)

    def _end_session(self, index):
        answer = self.answers[index]
        whole = index not in self.sessions and answer.parts == len(self.asked[index].parts)
        answer.ended = whole or answer.error


def prompt_of(asked, known):
    """What it is asked after, its parts as one; a follow-up after what it follows."""
    own = sum(asked.parts, ())
    if asked.after is None:
        return own
    before = known[asked.after.index]
    return prompt_of(asked.after, known) + tuple(before.tokens[0]) + own


def gap(logprobs):
    """By how much the best of these is ahead."""
    best, second, *_ = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
    return best - second
