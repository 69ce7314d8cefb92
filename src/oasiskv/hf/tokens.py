"""Text to token ids."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from oasiskv.errors import ModelError


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        ModelError: the folder has none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a tokenizer from {folder}: {error}") from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: of the model.
        text: the prompt.
        chat: wrap it in the model's chat template, as the user's turn.

    Raises:
        ModelError: the model has no chat template.
    """
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        raise ModelError("the model has no chat template: leave --chat out")
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
