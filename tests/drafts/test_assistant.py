import random
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from oasiskv.drafts.assistant import AssistantDrafts
from oasiskv.errors import ModelError

VOCAB = 64
POSITIONS = 2048


def tiny(kind="llama"):
    """A random model whose greedy text is not one repeated token."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    if kind == "sliding":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)).double().eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()


@torch.no_grad()
def plain_greedy(model, tokens, count):
    """Greedy tokens without any cache."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(tokens) :]


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_equals_plain_greedy_after_any_mix_of_accepted_and_rejected(kind):
    model, chance = tiny(kind), random.Random(1)
    source = AssistantDrafts(model, VOCAB)
    texts = {
        name: [chance.randrange(VOCAB) for _ in range(size)]
        for name, size in (("a", 1), ("b", 17), ("c", 40))
    }
    seen = set()
    for _ in range(36):
        name, count = chance.choice("abc"), chance.choice([1, 2, 5])
        drafts = source.propose(name, texts[name], count)
        assert drafts == plain_greedy(model, texts[name], count)
        kept = chance.randint(0, count)
        seen.add(kept == count)
        texts[name] += [*drafts[:kept], chance.randrange(VOCAB)]
    assert seen == {True, False}
    assert len({token for text in texts.values() for token in text}) > VOCAB // 2


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_equals_transformers_generate(count):
    model, prompt = tiny(), [5, 9, 2]
    expected = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    assert AssistantDrafts(model, VOCAB).propose("r", prompt, count) == expected[0, 3:].tolist()


def test_the_same_call_again_and_a_shorter_text():
    model = tiny()
    source, text = AssistantDrafts(model, VOCAB), list(range(20))
    assert source.propose("r", text, 4) == source.propose("r", text, 4)
    assert source.propose("r", text[:9], 4) == plain_greedy(model, text[:9], 4)


def test_finish_forgets_and_the_id_comes_again():
    model = tiny()
    source = AssistantDrafts(model, VOCAB)
    source.propose("r", list(range(20)), 4)
    source.finish("r")
    assert not source._states
    other = [3, 1, 4, 1, 5]
    assert source.propose("r", other, 4) == plain_greedy(model, other, 4)
    source.finish("unknown")


def test_computes_each_token_once_in_pieces():
    model, lengths = tiny(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    source, text = AssistantDrafts(model, VOCAB), [i % VOCAB for i in range(1100)]
    drafts = source.propose("r", text, 3)
    assert lengths == [512, 512, 76, 1, 1]
    lengths.clear()
    # Two drafts accepted, one new token; the last draft was never in the cache.
    source.propose("r", [*text, *drafts[:2], (drafts[2] + 1) % VOCAB], 2)
    assert lengths == [1, 1]


def test_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AssistantDrafts(tiny(), VOCAB).propose("r", [1, 2, 3], 3)


def test_short_input_and_the_end_of_the_positions():
    source = AssistantDrafts(tiny(), VOCAB)
    assert source.propose("r", [], 4) == []
    assert source.propose("r", [1], 0) == []
    assert len(source.propose("r", [1] * (POSITIONS - 1), 4)) == 2
    assert source.propose("r", [1] * (POSITIONS + 1), 4) == []


def test_refuses_another_vocabulary_and_recurrent_state():
    with pytest.raises(ModelError, match=r"64 tokens, the target's 65"):
        AssistantDrafts(tiny(), 65)
    model = tiny()
    model._is_stateful = True
    with pytest.raises(ModelError, match="LlamaForCausalLM keeps recurrent state"):
        AssistantDrafts(model, VOCAB)
