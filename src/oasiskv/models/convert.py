"""Turning a GGUF file into a Hugging Face folder that loads in a second."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from oasiskv.models.progress import Report
from oasiskv.models.quiet import quiet_transformers

# GGUF stores it as a float32 that reads 9.99999975e-06.
RMS_NORM_EPS = 1e-5
# Facts of the file that was read and of where it lay, not of the model.
DROPPED_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert_gguf(gguf: Path, folder: Path, report: Report) -> None:
    """Write the Llama model in ``gguf`` to ``folder``: weights in bf16, config, tokenizer.

    Args:
        gguf: a GGUF file of the Llama architecture.
        folder: an empty folder.
        report: told what is going on.
    """
    with quiet_transformers():
        report("reading the GGUF", 0.1)
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        report("reading the tokenizer", 0.75)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        report("writing", 0.9)
        settings = {k: v for k, v in read.config.to_dict().items() if k not in DROPPED_KEYS}
        settings |= {"rms_norm_eps": RMS_NORM_EPS, "dtype": "bfloat16"}
        # A model read from GGUF counts as quantized and cannot be saved: hence a fresh one.
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict(), strict=True)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
