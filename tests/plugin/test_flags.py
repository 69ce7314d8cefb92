"""The command line of ``oasiskv serve``: what is read, however it is written. No engine starts."""

import json
import sys

import pytest
import yaml
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from oasiskv import cli
from oasiskv.config import OasisConfig
from oasiskv.errors import ConfigError
from oasiskv.setting_types import choices_of, is_switch, may_be_none
from oasiskv.vllm.flags import FLAGS, help_text, take_settings
from oasiskv.vllm.serve import make_command, parse

ROOM = {"hot_tokens": 2**30}
"""What the largest budget needs."""


@pytest.fixture(scope="module")
def command():
    return make_command()


def legal_values(name):
    """All choices of a setting, or the ends of its range; and its default."""
    field = OasisConfig.model_fields[name]
    values = {field.default, *choices_of(field)}
    values |= {True, False} if is_switch(field) else set()
    values |= {None} if may_be_none(field) else set()
    for rule in field.metadata:
        values |= {getattr(rule, bound) for bound in ("ge", "le") if hasattr(rule, bound)}
        values |= {rule.gt + 2**-20} if hasattr(rule, "gt") else set()
    # In the same order in each process: workers share these tests out.
    return sorted((str(v) if isinstance(v, str) else v for v in values), key=repr)


def cases():
    return [(name, value) for name in FLAGS.values() for value in legal_values(name)]


def flags_of(name, value):
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", "none" if value is None else str(value)]


def read(command, *words):
    return OasisConfig(**(ROOM | take_settings(command.parse(["m", *words]))))


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "value"), cases())
def test_every_legal_value_of_every_setting_can_be_given(command, tmp_path, name, value):
    wanted = OasisConfig(**(ROOM | {name: value}))
    assert read(command, *flags_of(name, value)) == wanted
    file = tmp_path / "flags.yaml"
    for written in (name, name.replace("_", "-")):
        file.write_text(yaml.safe_dump({written: value}))
        assert read(command, "--config", str(file)) == wanted
    transfer = {"kv_connector": "A", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    dotted = f"--kv-transfer-config.kv_connector_extra_config.{name}"
    whole = transfer | {"kv_connector_extra_config": {name: value}}
    for words in (
        ["--kv-transfer-config", json.dumps(whole)],
        [dotted, json.dumps(value), *dots(transfer)],
    ):
        read_by_vllm = command.parse(["m", *words]).kv_transfer_config
        assert OasisConfig(**(ROOM | read_by_vllm.kv_connector_extra_config)) == wanted


def dots(transfer):
    return [
        word
        for key in ("kv_connector", "kv_role")
        for word in (f"--kv-transfer-config.{key}", transfer[key])
    ]


def test_the_values_tried_are_all_there_are():
    assert {None, 2**30} <= set(legal_values("threshold_tokens"))
    assert {True, False} == set(legal_values("checksums"))
    assert set(legal_values("digest")) == {"minmax", "keys4"}
    assert len(cases()) > 2 * len(FLAGS)


@pytest.mark.parametrize("word", ["None", "NULL", "none"])
def test_none_in_any_case_where_it_is_legal(command, word):
    assert read(command, "--threshold-tokens", word).threshold_tokens is None
    with pytest.raises(ConfigError, match=f"digest='{word}' is not legal"):
        read(command, "--digest", word)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checksums", "true"], "unrecognized arguments: true"),
        (["--hot-tokens"], "argument --hot-tokens: expected one argument"),
        (["--hot-tokens", "many"], "hot_tokens='many' is not legal"),
        (["--host-gib", "-0.5"], "host_gib='-0.5' is not legal"),
        (["--host-gib", "1e300"], "host_gib='1e300' is not legal"),
        (["--transfer-timeout-s", "inf"], "transfer_timeout_s='inf' is not legal"),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(command, words, message):
    with pytest.raises(ConfigError) as caught:
        read(command, *words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.smoke
def test_what_vllm_is_given(command, tiny_folder):
    words = ["--host-gib", "2", "--port", "80", "--cap-fraction=none", "--block-size", "16"]
    parsed = parse(command, str(tiny_folder), words)
    assert parsed.model_tag == str(tiny_folder)
    assert parsed.served_model_name is None
    assert (parsed.port, parsed.block_size, parsed.async_scheduling) == (80, 16, False)
    assert parsed.worker_cls == "oasiskv.vllm.cpu_worker.OasisCPUWorker"
    assert isinstance(parsed.kv_transfer_config, KVTransferConfig)
    extra = parsed.kv_transfer_config.kv_connector_extra_config
    assert extra == {"host_gib": 2.0, "cap_fraction": None}
    assert not any(attribute in FLAGS for attribute in vars(parsed))
    with pytest.raises(ConfigError, match="host_gib is not set"):
        parse(command, str(tiny_folder), [])


@pytest.mark.parametrize(
    ("words", "name"), [([], "built-in"), (["--served-model", "mine"], "mine")]
)
def test_a_built_in_model_is_served_under_its_name(command, monkeypatch, tmp_path, words, name):
    monkeypatch.setattr("oasiskv.vllm.serve.resolve_model", lambda model: tmp_path)
    parsed = parse(command, "built-in", ["--host-gib", "2", *words])
    assert parsed.model_tag == str(tmp_path)
    assert parsed.served_model_name == [name]


CONFLICTS = [
    (["--block-size", "32"], "--block-size", "32"),
    (["--block-siz", "32"], "--block-size", "32"),
    (["--block_size=32"], "--block-size", "32"),
    (["--async-sched"], "--async-scheduling", "True"),
    (["--worker-cls", "a.b"], "--worker-cls", "a.b"),
    (["--kv-transfer-config.kv_port=5"], "--kv-transfer-config", "None"),
    (["--kv-transfer-config", '{"kv_port": 5}'], "--kv-transfer-config", "None"),
    (
        ["--kv-transfer-config.kv_connector", "B", "--kv-transfer-config.kv_role=kv_both"],
        "--kv-transfer-config",
        "B",
    ),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("words", "flag", "found"), CONFLICTS)
def test_a_filled_in_flag_is_refused_however_it_is_written(command, words, flag, found):
    with pytest.raises(ConfigError) as caught:
        parse(command, "m", ["--host-gib", "2", *words])
    assert f"{flag} is filled in by oasiskv serve" in str(caught.value)
    assert f"and {found} is given" in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"block-size": 32},
        {"async_scheduling": True},
        {"kv-transfer-config": {"kv_connector": "B", "kv_role": "kv_both"}},
    ],
)
def test_a_filled_in_flag_is_refused_in_a_file(command, tmp_path, flags):
    file = tmp_path / "flags.yaml"
    file.write_text(yaml.safe_dump({"host-gib": 2} | flags))
    with pytest.raises(ConfigError, match="is filled in by oasiskv serve"):
        parse(command, "m", ["--config", str(file)])


@pytest.mark.smoke
@pytest.mark.parametrize("words", [[], ["--kv-offloading-backend", "lmcache"]])
@pytest.mark.parametrize("more", [[], ["--disable-hybrid-kv-cache-manager"]])
def test_a_flag_that_rewrites_what_was_filled_in(command, tiny_folder, words, more):
    words = ["--host-gib", "2", "--kv-offloading-siz", "0.1", *words, *more]
    parsed = parse(command, str(tiny_folder), words)
    parsed.model = parsed.model_tag
    with pytest.raises(ConfigError) as caught:
        AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    assert "does not go with OasisKV: set kv_connector to OasisConnector" in str(caught.value)
    assert "leave out what makes vLLM take another (kv_offloading_size)" in str(caught.value)


def test_the_kill_switch_leaves_vllm_as_it_is(command, tiny_folder, monkeypatch):
    monkeypatch.setenv("OASISKV_DISABLE", "1")
    words = ["--port", "80", "--block-size", "32"]
    parsed = parse(command, str(tiny_folder), ["--host-gib", "x", "--checksums", *words])
    stock = command.parse([str(tiny_folder), *words])
    assert vars(parsed) == vars(stock)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["oasiskv", "serve", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["m", "-h"], ["m", "--port", "1", "--help"]])
def test_help_names_every_setting_and_where_vllms_flags_are(monkeypatch, capsys, words):
    assert run(monkeypatch, *words) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (help_text(), "")
    for name in FLAGS.values():
        assert f"--{name.replace('_', '-')}" in out
    assert "--help=all" in out


def test_vllms_own_help_has_the_settings_among_its_groups(monkeypatch, capsys):
    assert run(monkeypatch, "m", "--help=OasisKV") == 0
    assert "--threshold-tokens" in capsys.readouterr().out


def test_flags_before_the_model(monkeypatch, capsys):
    assert run(monkeypatch, "--host-gib", "1", "m") == 2
    assert "--host-gib stands where MODEL is needed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--host-gib", "1", "--hot-tokens", "7"], ["--host-gib"]])
def test_what_is_wrong_is_one_line_of_the_command(monkeypatch, capsys, words):
    assert run(monkeypatch, "m", *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("oasiskv: error: ")
