"""What stock vLLM answers to the requests of the soak."""

from collections import defaultdict

import torch

from plugin.engines import engine
from plugin.soak.asked import LONGEST
from plugin.soak.asking import Asking

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
ARGS = {
    **LORA,
    "max_model_len": LONGEST,
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
}


def stock_answers(folder, adapters, chapters):
    """Answers to all requests of ``chapters`` by index, with how far each token was ahead."""
    known = {}
    with engine(folder, **ARGS) as llm:
        weights = Weights(llm)
        for number in sorted({chapter.weights for chapter in chapters}):
            weights.set(number)
            assert llm.reset_prefix_cache()
            requests = [
                asked
                for chapter in chapters
                if chapter.weights == number
                for asked in chapter.asked
            ]
            known |= _answers(Asking(llm, adapters, gaps=True), requests)
    return known


def _answers(asking, requests):
    waiting, follow_ups = [], defaultdict(list)
    for asked in requests:
        (follow_ups[asked.after.index] if asked.after else waiting).append(asked)
    while True:
        for asked in waiting:
            asking.add(asked, asking.answers)
            for _ in asked.parts if asked.kind == "session" else ():
                # All parts and the end at once.
                asking.add_part(asked.index)
        if not asking.engine.has_unfinished_requests():
            return asking.answers
        waiting = [one for index in asking.step() for one in follow_ups.pop(index, [])]


class Weights:
    """An engine's weights, and others that are not far from them: number 0 and 1."""

    def __init__(self, llm):
        self._llm = llm
        llm.collective_rpc(self._keep)

    def set(self, number):
        self._number = number
        self._llm.collective_rpc(self._put)

    def _keep(self, worker):
        generator = torch.Generator().manual_seed(1)
        self._kept = []
        for weight in worker.model_runner.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            self._kept.append((weight.data.clone(), weight.data + 0.05 * noise))

    @torch.inference_mode()
    def _put(self, worker):
        for weight, kept in zip(worker.model_runner.model.parameters(), self._kept, strict=True):
            weight.data.copy_(kept[self._number])
