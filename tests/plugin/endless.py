"""An engine with the plugin, its core in a process of its own, that generates until it is killed.

``python endless.py <model folder> [ranks]``; writes a line once requests run.
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

import oasiskv.vllm
from plugin.engines import DEFAULTS
from plugin.probe import EXACT
from tiny import prompt_of


def main(folder, ranks=1):
    args = DEFAULTS | {"max_model_len": 448, "tensor_parallel_size": ranks}
    args |= oasiskv.vllm.engine_args(**EXACT)
    engine = LLM(model=str(folder), **args).llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    started = steps = 0
    while True:
        while engine.get_num_unfinished_requests() < 4:
            prompt = prompt_of(200, seed=started)
            engine.add_request(str(started), {"prompt_token_ids": prompt}, sampling)
            started += 1
        engine.step()
        steps += 1
        if steps == 30:
            sys.stdout.write("generating\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
