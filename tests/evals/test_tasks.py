"""Questions are made by seed, as long as asked for, and can be answered from their prompts."""

import json
import random
import re

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from oasiskv.errors import PromptError
from oasiskv.evals.tasks import TASKS, Part, Question
from oasiskv.evals.tasks.base import find
from oasiskv.evals.tasks.planted import NOISE, Sketch, plant, word_ids
from oasiskv.evals.tasks.real_text import FREE_TOKENS
from oasiskv.evals.tasks.tables import MONTHS
from oasiskv.evals.tasks.texts import TEXTS, dialogues, encode_text, passages, read_text
from oasiskv.evals.tasks.words import WORDS

PIECES = r"\d|[A-Za-z]+|\s|[^\sA-Za-z\d]"
PLANTED = [
    *("passkey", "needle_keys", "needle_values", "needle_queries", "needle_turns", "variables"),
    *("table_middle", "table_spread"),
]
FORCED = ["forced_prose", "forced_code", "forced_manual", "forced_dialogue"]
BOS = 0
NUMBER = re.compile(r"The special number of (\w+ \w+) is (\d{6})\.")


def words_tokenizer(bos):
    """One token per word, digit, mark and white space."""
    known = {piece for text in TEXTS for piece in re.findall(PIECES, read_text(text))}
    known |= {
        *WORDS,
        *re.findall(PIECES, NOISE),
        *"0123456789#",
        "JSON",
        "Question",
        "Answer",
        "price",
        *MONTHS,
    }
    vocabulary = {piece: i for i, piece in enumerate(["<s>", "<?>", *sorted(known)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<?>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="module")
def tokenizer():
    return words_tokenizer(bos=False)


def length(question):
    return len(question.prompt) + len(question.question) + question.new_tokens


def test_every_task_is_tested():
    assert list(TASKS) == [*PLANTED[:5], "json_pairs", *PLANTED[5:], *FORCED, "free"]
    assert all(TASKS[name].name == name and TASKS[name].doc for name in TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_questions_and_another_seed_others(tokenizer, name):
    first, again, other = (TASKS[name].make(tokenizer, 4, 2000, seed) for seed in (1, 1, 2))
    assert first == again
    if name != "forced_dialogue":
        assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
    assert len({tuple(question.prompt) for question in first}) == 4
    names = [question.name for question in [*first, *other]]
    assert len(set(names)) == 8


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("tokens", [1500, 4096, 32768])
def test_questions_are_as_long_as_asked_for(tokenizer, name, tokens):
    for question in TASKS[name].make(tokenizer, 2, tokens, 0):
        short = 40 if name == "json_pairs" else 0
        assert tokens - short <= length(question) <= tokens
        assert question.task == name


@pytest.mark.parametrize("name", TASKS)
def test_a_begin_of_text_token_comes_first_and_only_there(name):
    for question in TASKS[name].make(words_tokenizer(bos=True), 1, 2000, 0):
        ids = [*question.prompt, *question.question, *question.answer]
        assert ids[0] == BOS
        assert BOS not in ids[1:]
        short = 40 if name == "json_pairs" else 0
        assert 2000 - short <= length(question) <= 2000


@pytest.mark.parametrize("name", [*PLANTED, "json_pairs"])
def test_the_right_answer_scores_one_and_none_scores_nothing(tokenizer, name):
    for question in TASKS[name].make(tokenizer, 3, 2000, 0):
        assert question.kind == "answer"
        assert question.score(question.answer) == 1
        assert question.score([*question.answer, 5, 6]) == 1
        assert question.score([]) == 0
        assert question.score(question.prompt[100 : 100 + question.new_tokens]) < 1
        assert "<?>" not in tokenizer.decode([*question.question, *question.answer])


def facts_of(tokenizer, name, seed):
    question = TASKS[name].make(tokenizer, 1, 2000, seed)[0]
    return tuple(
        tokenizer.decode(ids) for ids in (question.prompt, question.question, question.answer)
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_passkey_is_in_the_text_twice(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "passkey", seed)
    assert prompt.count(f"{answer.strip()}") == 2
    assert question.endswith("The pass key is")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["needle_keys", "needle_turns"])
def test_needles_answer_with_the_number_of_the_name_asked_last(tokenizer, name, seed):
    prompt, question, answer = facts_of(tokenizer, name, seed)
    facts = NUMBER.findall(prompt)
    assert len(facts) == len(set(facts)) == len({value for _, value in facts}) == 8
    asked = re.findall(r"special number of (\w+ \w+)\?", question)
    assert len(asked) == len(set(asked)) == (1 if name == "needle_keys" else 3)
    assert dict(facts)[asked[-1]] == answer
    for key, value in zip(asked[:-1], re.findall(r"Answer: (\d+)", question), strict=True):
        assert dict(facts)[key] == value


@pytest.mark.parametrize("seed", range(3))
def test_needle_values_wants_every_number_of_one_name(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "needle_values", seed)
    (asked,) = re.findall(r"numbers of (\w+ \w+)\?", question)
    wanted = [value for key, value in NUMBER.findall(prompt) if key == asked]
    assert sorted(answer.split(", ")) == sorted(wanted)
    assert len(wanted) == 3


@pytest.mark.parametrize("seed", range(3))
def test_needle_queries_wants_a_number_for_every_name(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "needle_queries", seed)
    asked = re.search(r"numbers of (\w+ \w+), (\w+ \w+) and (\w+ \w+)\?", question).groups()
    _, given = question.split("Answer:\n")
    facts = dict(NUMBER.findall(prompt))
    assert NUMBER.findall(given + answer) == [(key, facts[key]) for key in asked]


@pytest.mark.parametrize("seed", range(3))
def test_json_pairs_is_json_with_the_answer(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "json_pairs", seed)
    pairs = json.loads(prompt.strip().removesuffix(",\n}") + "}")
    (asked,) = re.findall(r'value of "(\w+ \w+)"', question)
    assert pairs[asked] == answer
    assert list(pairs.values()).count(answer) == 1
    assert len(pairs) == prompt.count(":") > 50


@pytest.mark.parametrize("seed", range(3))
def test_variables_lead_to_the_number(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "variables", seed)
    meanings = dict(re.findall(r"\n# (\w+) = (\w+)\n", prompt))
    assert len(meanings) == 9
    links = re.findall(r"print\((\w+)\) # (\w+)", question + answer)
    assert len(links) == 3
    assert all(meanings[name] == meaning for name, meaning in links)
    assert [name for name, _ in links[1:]] == [meaning for _, meaning in links[:-1]]
    assert links[-1][1].isdigit()
    assert all(name not in prompt.split("print(", 1)[1] for name, _ in links)


@pytest.mark.parametrize("seed", range(3))
def test_a_table_in_the_middle_has_the_rows_of_the_answer(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "table_middle", seed)
    table = json.loads(question.split("JSON:\n")[1] + answer)
    lines = re.findall(r'^"item": .*$', prompt, re.MULTILINE)
    assert table == [json.loads(f"{{{line}}}") for line in lines]
    assert len(table) == 5
    assert "\n".join(lines) in prompt


@pytest.mark.parametrize("seed", range(3))
def test_the_rows_of_a_spread_table_stand_in_the_text(tokenizer, seed):
    prompt, question, answer = facts_of(tokenizer, "table_spread", seed)
    table = json.loads(question.split("JSON:\n")[1] + answer)
    rows = re.findall(r"^(\w+): price (\d{3}), stock (\d{3})$", prompt, re.MULTILINE)
    assert len(rows) == len(table) == 5
    assert table == {m: {"price": int(price), "stock": int(stock)} for m, price, stock in rows}


def test_a_table_is_scored_by_its_cells(tokenizer):
    question = TASKS["table_middle"].make(tokenizer, 1, 2000, 0)[0]
    answer = tokenizer.decode(question.answer)

    def score(text):
        return question.score(encode_text(tokenizer, text))

    rows = answer.split("{")
    assert len(rows) == 4
    assert score(answer) == 1
    assert score("{".join(rows[:1])) == pytest.approx(2 / 8)
    assert score("{".join([*rows[:1], *reversed(rows[1:])])) == 1, "the order does not count"
    prices = re.findall(r'"price": \d+', answer)
    swapped = answer.replace(prices[0], "@").replace(prices[1], prices[0])
    assert score(swapped.replace("@", prices[1])) == pytest.approx(6 / 8)
    assert score(re.sub(r'"item": "', "", answer)) == 1, "a lost label shifts no cell"
    assert score(re.sub(r"\d", "0", answer)) == 0


def question_of(answer, *parts):
    return Question("t", "t-0", "t-0", [1], [2], answer, "answer", len(answer), parts)


def test_an_answer_without_parts_is_right_or_wrong():
    question = question_of([7, 8, 9])
    assert [question.score(t) for t in ([7, 8, 9], [7, 8, 9, 1], [7, 8], [1, 7, 8, 9])] == [
        1,
        1,
        0,
        0,
    ]


def test_an_answer_of_parts_is_scored_by_their_share():
    question = question_of([7, 8, 5, 9, 9], Part([7, 8], []), Part([9, 9], []))
    assert question.score([9, 9, 1, 7, 8]) == 1
    assert question.score([9, 1, 9, 7, 8]) == 0.5
    assert question.score([7, 9, 8]) == 0


@pytest.mark.parametrize("name", FORCED)
def test_forced_text_goes_on_as_the_text_does(tokenizer, name):
    text = read_text("prose" if name == "forced_dialogue" else name.removeprefix("forced_"))
    for question in TASKS[name].make(tokenizer, 3, 1500, 0):
        assert (question.kind, question.question, len(question.answer)) == ("forced", [], 256)
        piece = tokenizer.decode([*question.prompt[-100:], *question.answer])
        assert "<?>" not in piece
        assert piece in text


def test_free_text_begins_with_each_of_the_texts(tokenizer):
    questions = TASKS["free"].make(tokenizer, 3, 2000, 0)
    for question, text in zip(questions, TEXTS, strict=True):
        assert (question.kind, question.answer, question.new_tokens) == ("free", [], FREE_TOKENS)
        assert tokenizer.decode(question.prompt) in read_text(text)


def test_dialogues_have_the_most_quotation_marks(tokenizer):
    text = read_text("prose")
    best = [tokenizer.decode(ids).count('"') for ids in dialogues(tokenizer, "prose", 1000, 3)]
    ids = encode_text(tokenizer, text)
    all_of_them = [
        tokenizer.decode(ids[start : start + 1000]).count('"')
        for start in range(0, len(ids) - 999, 1000)
    ]
    assert sorted(best) == sorted(all_of_them)[-3:]
    assert min(best) > 2 * sum(all_of_them) / len(all_of_them)


def test_facts_stand_in_order_of_depth():
    body, rng = list(range(100)), random.Random(0)
    assert plant(body, [[-1, -2]], 0.25, rng) == [*range(25), -1, -2, *range(25, 100)]
    planted = plant(body, [[-1, -1], [-2, -2], [-3]], 0.5, rng)
    assert [token for token in planted if token >= 0] == body
    assert planted.count(-1) == planted.count(-2) == 2
    assert planted[planted.index(-1) + 1] == -1
    assert planted[planted.index(-2) + 1] == -2


def test_passages_are_spread_over_the_text():
    cut = passages(range(1000), 100, 3, random.Random(0), "numbers")
    assert [part == list(range(part[0], part[0] + 100)) for part in cut] == [True] * 3
    assert [part[0] // 300 for part in cut] == [0, 1, 2]


def test_a_token_across_question_and_answer_belongs_to_the_answer():
    tokenizer = Tokenizer(models.WordLevel({"is": 0, " 12": 1, "<?>": 2}, unk_token="<?>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s?\w+"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert word_ids(fast, Sketch([], "", "is ", "12", [("", "12")])) == ([0], [1], [Part([1], [])])


def test_too_short_a_text_is_refused():
    with pytest.raises(PromptError, match=r"'noise' has 50 tokens: 3 passages of 48 .* fewer"):
        passages(range(50), 48, 3, random.Random(0), "noise")


@pytest.mark.parametrize("name", [*PLANTED[1:5], *PLANTED[5:], *FORCED, "free"])
def test_more_tokens_than_the_texts_have_are_refused(tokenizer, name):
    with pytest.raises(PromptError, match="fewer tokens"):
        TASKS[name].make(tokenizer, 3, 1_000_000, 0)


def test_more_tokens_than_there_are_pairs_are_refused(tokenizer):
    with pytest.raises(PromptError, match="3080 pairs"):
        TASKS["json_pairs"].make(tokenizer, 1, 200_000, 0)


@pytest.mark.parametrize("name", TASKS)
def test_too_few_tokens_are_refused(tokenizer, name):
    with pytest.raises(PromptError, match=rf"'{name}' .*more than 30 tokens"):
        TASKS[name].make(tokenizer, 1, 30, 0)


@pytest.mark.parametrize("name", ["needle_keys", "json_pairs"])
def test_the_answers_stand_at_even_depths(tokenizer, name):
    for index, question in enumerate(TASKS[name].make(tokenizer, 5, 4000, 0)):
        depth = find(question.prompt, question.answer) / len(question.prompt)
        assert depth == pytest.approx((index + 0.5) / 5, abs=0.05)


def test_needle_queries_count_every_number_after_its_name(tokenizer):
    question = TASKS["needle_queries"].make(tokenizer, 1, 2000, 0)[0]
    lines = tokenizer.decode(question.answer).split("\n")
    wrong = [lines[0], re.sub(r"\d", "0", lines[1]), lines[2]]
    assert question.score(encode_text(tokenizer, "\n".join(wrong))) == pytest.approx(2 / 3)
    assert question.score(encode_text(tokenizer, lines[0])) == pytest.approx(1 / 3)
