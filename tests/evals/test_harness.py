"""OasisKV in lm_eval: dense it gives what lm_eval's own model gives, sparse what it decodes."""

import json
import string
import sys
from functools import partial
from pathlib import Path

import datasets
import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from oasiskv import __version__, cli
from oasiskv.config import OasisConfig
from oasiskv.core.tiering import Tiering
from oasiskv.errors import ConfigError, ModelError, PromptError
from oasiskv.evals import harness_command
from oasiskv.evals.harness import OasisLM, scores
from oasiskv.hf.engine import Engine
from oasiskv.hf.loading import load_model
from oasiskv.hf.tokens import load_tokenizer
from tiny import prompt_of
from tiny_folder import save_tiny

TASKS = Path(__file__).parent / "harness_tasks"
ANSWER, CHOICE = "oasis_facts_answer", "oasis_facts_choice"
POSITIONS = 400
END = "\x0b"
SMALL = {"budget_tokens": 32, "hot_tokens": 32, "sink_tokens": 16, "window_tokens": 16}
WHOLE = {**SMALL, "hot_tokens": 416, "threshold_tokens": 0}
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def save(folder, family="llama", **settings):
    end = string.printable.index(END)
    settings = {"max_position_embeddings": POSITIONS, "eos_token_id": end, **settings}
    save_tiny(folder, family, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.chat_template = END, CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def stock(folder):
    return stock_of(folder)


def stock_of(folder, **given):
    given = {"max_length": POSITIONS - 1, "batch_size": 3, **given}
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", **given)


def ours(folder, **given):
    return OasisLM(pretrained=str(folder), device="cpu", **given)


@pytest.fixture
def transitions(monkeypatch):
    """Names of requests that went sparse."""
    seen = []
    go_sparse = Tiering.go_sparse

    def counted(self, request, queries, step):
        seen.append(request.request_id)
        go_sparse(self, request, queries, step)

    monkeypatch.setattr(Tiering, "go_sparse", counted)
    return seen


def text(length, seed=0):
    return "".join(string.ascii_letters[token % 52] for token in prompt_of(length, seed))


PAIRS = [
    *((text(n), text(m, 1)) for n, m in ((1, 3), (5, 4), (15, 2), (16, 2), (17, 5), (40, 1))),
    *((text(n), text(m, 1)) for n, m in ((200, 70), (370, 20), (500, 10))),
    *((text(200), text(m, 2)) for m in (1, 5, 9)),
    ("", text(12)),
    ("", END + text(7)),
    (text(30) + "  ", text(4)),
]
TEXTS = [(text(n),) for n in (1, 3, 100, 390, 900)]
QUESTIONS = [
    *((text(n), {"until": ["a", "QQ"], "max_gen_toks": 40}) for n in (5, 100, 300, 390)),
    *((text(n), {"until": [], "max_gen_toks": 30, "do_sample": False}) for n in (1, 200, 370)),
]


def ask(model, kind, arguments):
    requests = [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]
    return getattr(model, kind)(requests, disable_tqdm=True)


def with_greedy_ones(stock):
    """The pairs, and some whose continuation is what the model would say."""
    said = [(question, {"until": [], "max_gen_toks": 6}) for question, _ in QUESTIONS[:3]]
    answers = ask(stock, "generate_until", said)
    assert all(map(len, answers))
    return [*PAIRS, *((asked, answer) for (asked, _), answer in zip(said, answers, strict=True))]


def assert_equal(model, stock):
    pairs = with_greedy_ones(stock)
    found = ask(model, "loglikelihood", pairs)
    expected = ask(stock, "loglikelihood", pairs)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [total for total, _ in found] == pytest.approx([e for e, _ in expected], abs=1e-3)
    rolling = ask(stock, "loglikelihood_rolling", TEXTS)
    assert ask(model, "loglikelihood_rolling", TEXTS) == pytest.approx(rolling, abs=1e-3)
    answers = ask(stock, "generate_until", QUESTIONS)
    assert len(set(map(len, answers))) > 2
    assert ask(model, "generate_until", QUESTIONS) == answers


@pytest.mark.parametrize(
    "given", [{}, {"batch_size": 4, "draft": "none"}, {"prefill_tokens": 32}], ids=str
)
def test_dense_equals_stock(folder, stock, given):
    model = ours(folder, mode="dense", **given)
    assert_equal(model, stock)
    assert any(greedy for _, greedy in ask(model, "loglikelihood", with_greedy_ones(stock)))


def test_dense_equals_stock_with_sliding_windows(tmp_path):
    """No prefill is shared there."""
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    # Its tokenizer adds a token for padding.
    folder = save(tmp_path / "model", "qwen2", vocab_size=128, **windows)
    assert None in load_model(folder).sliding_windows
    assert 32 in load_model(folder).sliding_windows
    assert_equal(ours(folder, mode="dense", batch_size=2), stock_of(folder))


@pytest.mark.parametrize(
    "given", [{"draft": "none"}, {"draft": "ngram", "host_gib": 0.01}], ids=str
)
def test_slots_for_the_whole_context_equal_stock(folder, stock, transitions, given):
    model = ours(folder, batch_size=3, **given, **WHOLE)
    assert_equal(model, stock)
    assert len(transitions) > len(PAIRS) + len(QUESTIONS)


def test_a_small_hot_set_scores_what_it_decodes(folder, stock, transitions):
    model = ours(folder, draft="none", **SMALL)
    asked = text(300)
    (answer,) = ask(model, "generate_until", [(asked, {"until": [], "max_gen_toks": 40})])
    other = answer[:20] + ("a" if answer[20] != "a" else "b") + answer[21:]
    pairs = [(asked, answer), (asked, other), (asked, answer[:5])]
    transitions.clear()
    found = ask(model, "loglikelihood", pairs)
    assert len(transitions) == 3
    assert [greedy for _, greedy in found] == [True, False, True]
    for (total, _), (dense, _) in zip(found, ask(stock, "loglikelihood", pairs), strict=True):
        assert abs(total - dense) > 0.01


def test_a_text_is_scored_as_if_all_of_it_was_decoded(folder, transitions):
    model = ours(folder, draft="none", **SMALL)
    for size in (70, 80, 81, 82, 390):
        ((decoded, _),) = ask(model, "loglikelihood", [("", text(size))])
        decoded_sparsely = len(transitions)
        (rolled,) = ask(model, "loglikelihood_rolling", [(text(size),)])
        assert rolled == pytest.approx(decoded, abs=1e-3)
        assert len(transitions) == 2 * decoded_sparsely
        transitions.clear()


def test_choices_of_a_question_share_its_prefill(folder, monkeypatch):
    prefilled = []
    prefill = scores.prefill

    def counted(loaded, prompt, prefill_tokens):
        prefilled.append(len(prompt))
        return prefill(loaded, prompt, prefill_tokens)

    monkeypatch.setattr(scores, "prefill", counted)
    pairs = [(text(n, s), text(3, c)) for c in range(4) for n, s in ((100, 0), (100, 5), (16, 0))]
    model = ours(folder, batch_size=3, draft="none", **SMALL)
    together = ask(model, "loglikelihood", [*pairs, (text(50), "a")])
    assert prefilled == [100, 100]
    apart = [ask(model, "loglikelihood", [pair])[0] for pair in pairs]
    assert prefilled == [100, 100]
    assert [total for total, _ in together[:-1]] == pytest.approx([t for t, _ in apart], abs=1e-3)


def test_a_stop_string_ends_the_decoding(folder, monkeypatch):
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))
    model = ours(folder, draft="none", **SMALL)
    (answer,) = ask(model, "generate_until", [(text(100), {"until": [], "max_gen_toks": 40})])
    assert len(steps) == 40
    steps.clear()
    until = answer[9:11]
    assert until not in answer[:10]
    stopped = ask(model, "generate_until", [(text(100), {"until": until, "max_gen_toks": 40})])
    assert stopped == [answer[:9]]
    assert len(steps) == 11


def test_it_says_when_nothing_was_sparse(folder, caplog):
    model = ours(folder, **SMALL)
    caplog.clear()
    model.get_model_info()
    assert not caplog.text
    ask(model, "loglikelihood", [(text(200), "a"), (text(40), text(20))])
    ask(model, "generate_until", [(text(40), {"until": [], "max_gen_toks": 20})])
    assert model.get_model_info()["oasiskv"]["sparse_requests"] == 0
    assert "no request had a sparse step" in caplog.text
    caplog.clear()
    ask(model, "loglikelihood", [(text(200), text(3))])
    ask(model, "generate_until", [(text(200), {"until": [], "max_gen_toks": 3})])
    assert model.get_model_info()["oasiskv"]["sparse_requests"] == 2
    assert not caplog.text


def test_sampling(folder):
    sampled = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 0.9}
    asked = [(text(100), sampled | {"top_p": 0.95, "num_beams": 1})] * 3
    first = ask(ours(folder, seed=5, batch_size=2), "generate_until", asked)
    assert len(set(first)) == 3
    assert ask(ours(folder, seed=5), "generate_until", asked) == first
    assert ask(ours(folder, seed=6), "generate_until", asked)[0] == first[1]
    drafted = ours(folder, seed=5, draft="assistant", assistant=str(folder))
    assert len(ask(drafted, "generate_until", asked)) == 3
    greedy = {"until": [], "max_gen_toks": 20}
    asked = [(text(100), greedy), (text(100), greedy | {"top_k": 3, "top_p": 0.5})]
    assert len(set(ask(ours(folder), "generate_until", asked))) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"do_sample": True, "temperature": 0.7, "top_k": 50}, "top_k=50"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"do_sample": True, "temperature": 0.7, "top_p": 2.0}, "top_p = 2.0"),
    ],
)
def test_gen_kwargs_that_are_refused(folder, given, said):
    with pytest.raises(ConfigError, match=said):
        ask(ours(folder), "generate_until", [(text(9), {"max_gen_toks": 2, **given})])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 64}, "unknown model argument budget=64; known in model_args: pretrained, .*"),
        ({"budget_tokens": 17}, "budget_tokens=17"),
        ({"mode": "under_pressure"}, "mode=under_pressure"),
        ({"batch_size": "auto"}, "batch_size='auto'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"dtype": "int8"}, "dtype='int8' .* float32, bfloat16, float16"),
        ({"draft": "eagle"}, "draft='eagle' .* none, ngram, assistant"),
        ({"draft": "assistant"}, "draft=assistant,assistant=MODEL"),
        ({"seed": "one"}, "seed = 'one'"),
        ({"max_length": "all"}, "max_length='all'"),
        ({"max_length": POSITIONS}, f"from 2 to {POSITIONS - 1}"),
    ],
)
def test_arguments_that_are_refused(folder, given, said):
    with pytest.raises(ConfigError, match=said):
        ours(folder, **given)


def test_what_cannot_be_scored(folder, tmp_path):
    model = ours(folder, max_length=20, **SMALL)
    with pytest.raises(ConfigError, match="30 tokens does not fit max_length=20"):
        ask(model, "loglikelihood", [(text(5), text(30))])
    with pytest.raises(PromptError, match="no tokens"):
        ask(model, "loglikelihood", [(text(5), "")])
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        ours(save_tiny(tmp_path / "endless"))


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    """Where the tasks' data are, with a cache of its own, without lm_eval's thousands of tasks."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    only_ours = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_ours)
    return only_ours(include_path=str(TASKS))


def evaluate(tasks, model, given, **more):
    return lm_eval.simple_evaluate(
        model=model,
        model_args=given,
        tasks=[ANSWER, CHOICE],
        task_manager=tasks,
        bootstrap_iters=0,
        **more,
    )


def samples(results):
    return {
        (name, sample["doc_id"]): sample["filtered_resps"]
        for name, found in results["samples"].items()
        for sample in found
    }


def test_tasks_and_chat_templates_as_with_stock(tmp_path, tasks):
    folder = save(tmp_path / "model", max_position_embeddings=4000)
    more = {"apply_chat_template": True, "system_instruction": "Be brief.", "limit": 2}
    given = f"pretrained={folder},max_length=3999"
    stock = evaluate(tasks, "hf", f"{given},dtype=float32", device="cpu", **more)
    dense = evaluate(tasks, "oasiskv", f"{given},mode=dense", device="cpu", batch_size=2, **more)
    expected, found = samples(stock), samples(dense)
    assert len(found) == 4
    assert found.keys() == expected.keys()
    for key, responses in found.items():
        if key[0] == ANSWER:
            assert responses == expected[key]
        else:
            totals = [total for total, _ in expected[key]]
            assert [total for total, _ in responses] == pytest.approx(totals, abs=1e-3)
    asked = dense["samples"][ANSWER][0]["arguments"][0][0]
    assert asked.startswith("system: Be brief.\nuser: ")
    assert asked == stock["samples"][ANSWER][0]["arguments"][0][0]
    settings = OasisConfig(mode="dense")
    assert dense["config"]["oasiskv"] == {
        **settings.model_dump(mode="json"),
        "threshold_tokens": settings.resolved_threshold_tokens,
        "version": __version__,
        "draft": "ngram",
        "assistant": None,
        "sparse_requests": 0,
    }


@pytest.mark.model
def test_a_real_model_answers_sparsely(tasks):
    given = {"pretrained": "smollm2-135m-32k", "budget_tokens": 128, "hot_tokens": 256}
    results = evaluate(tasks, "oasiskv", given, device="cpu", batch_size=4, limit=2)
    # Two answers, and two questions of four choices.
    assert results["config"]["oasiskv"]["sparse_requests"] == 10
    assert results["results"][ANSWER]["exact_match,none"] == 1
    assert results["results"][CHOICE]["acc,none"] == 1


def run(monkeypatch, *arguments):
    """``oasiskv eval harness`` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["oasiskv", "eval", "harness", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_command(monkeypatch, capsys, folder, tasks, tmp_path):
    arguments = [
        *("--model_args", f"pretrained={folder},budget_tokens=32,hot_tokens=48,draft=none"),
        *("--tasks", ANSWER, "--include_path", ".", "--limit", 1, "-b", 2, "--device", "cpu"),
    ]
    assert run(monkeypatch, *arguments, "--output_path", tmp_path / "out") == 0
    assert sys.argv[:3] == ["oasiskv", "eval", "harness"]
    assert "exact_match" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    settings = json.loads(written.read_text())["config"]["oasiskv"]
    assert (settings["hot_tokens"], settings["draft"]) == (48, "none")


def test_command_refuses_in_one_line(monkeypatch, capsys, folder, tasks):
    given = ["--model_args", f"pretrained={folder},hot=48", "--tasks", ANSWER, "--include_path"]
    assert run(monkeypatch, *given, ".") == 2
    assert "oasiskv: error: unknown model argument hot=48" in capsys.readouterr().err


def test_command_gives_help_of_lm_eval(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    assert "--num_fewshot" in capsys.readouterr().out


def test_command_without_lm_eval(monkeypatch, capsys):
    monkeypatch.setattr(harness_command, "find_spec", lambda name: None)
    assert run(monkeypatch, "--tasks", "gsm8k") == 2
    assert r"pip install 'oasiskv[harness]'" in capsys.readouterr().err


def test_lm_eval_keeps_its_own_models(folder):
    assert lm_eval.api.registry.get_model("hf") is HFLM
    assert lm_eval.api.registry.get_model("oasiskv") is OasisLM
    assert load_tokenizer(folder).eos_token == END
