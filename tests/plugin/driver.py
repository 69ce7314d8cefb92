"""Requests added, stepped, preempted and aborted one by one."""

from vllm import SamplingParams

from plugin.engines import greedy
from plugin.probe import is_greedy


class Driver:
    """Adds, steps, preempts and aborts.

    Attributes:
        done: request id -> its tokens.
        failed: ids of requests that ended with an error.
        requests: request id -> vLLM's request.
        found: request id -> prompt tokens found in a cache.
    """

    def __init__(self, probe):
        self.probe = probe
        self.engine = probe.llm.llm_engine
        self.prompts, self.done, self.requests, self.found = {}, {}, {}, {}
        self.failed = set()

    def add(self, name, prompt, new, **settings):
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.prompts[name] = prompt
        known = set(self.probe.scheduler.requests)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling, **settings)
        [internal] = set(self.probe.scheduler.requests) - known
        self.requests[name] = self.probe.scheduler.requests[internal]

    def step(self, count=1):
        for _ in range(count):
            for output in self.engine.step():
                self.found[output.request_id] = output.num_cached_tokens
                if output.finished and output.outputs[0].finish_reason == "error":
                    self.failed.add(output.request_id)
                elif output.finished:
                    self.done[output.request_id] = list(output.outputs[0].token_ids)

    def until(self, done, most=500):
        """Step until ``done()``."""
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError(f"not within {most} steps")

    def abort(self, name):
        self.engine.abort_request([name])

    def preempt(self, name):
        """Preempt a running request as vLLM does, between two steps: it may come back at once."""
        request, scheduler = self.requests[name], self.probe.scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def finish(self, most=5000):
        for _ in range(most):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"requests left after {most} steps: {self.probe.scheduler.requests}")

    def drain(self, most=100):
        """Step until nothing is held for late completions; a request keeps vLLM going."""
        for _ in range(most):
            if not self.probe.state.held:
                return
            greedy(self.probe.llm, [[1]], 1)
        raise AssertionError(f"held after {most} requests: {self.probe.state.held}")

    def preemptions(self):
        return [request.num_preemptions for request in self.requests.values()]

    def assert_right_and_all_back(self, model, tie=1e-4):
        for name, tokens in self.done.items():
            assert len(tokens) == self.requests[name].max_tokens
            assert is_greedy(model, self.prompts[name], tokens, tie), name
        # Workers hear of the last ends with the next step; one token closes no block.
        greedy(self.probe.llm, [[1]], 1)
        self.probe.assert_all_back()
        self.probe.assert_nothing_known()
