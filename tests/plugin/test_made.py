"""Engines are refused where they are configured, before anything starts. No engine starts here."""

import pytest
from vllm.engine.arg_utils import EngineArgs

import oasiskv.vllm
from oasiskv.errors import ConfigError
from oasiskv.vllm import made
from oasiskv.vllm.checks import check_backends
from oasiskv.vllm.connector import OasisConnector
from plugin.engines import DEFAULTS

STOCK = {name: value for name, value in DEFAULTS.items() if name != "disable_log_stats"}


def configured(folder, **more):
    """As ``LLM(...)`` configures an engine."""
    args = STOCK | oasiskv.vllm.engine_args(host_gib=1) | more
    return EngineArgs(model=str(folder), **args).create_engine_config()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"block_size": 32}, "block_size=32 is not supported by OasisKV: set it to 16"),
        ({"worker_cls": "auto"}, "CPUWorker does not go with OasisConnector"),
        ({"kv_transfer_config": None}, "kv_connector=None does not go with OasisKV"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 is not supported by OasisKV"),
        ({"kv_offloading_size": 0.1}, "kv_connector=OffloadingConnector does not go"),
        (
            {"kv_offloading_size": 0.1, "disable_hybrid_kv_cache_manager": True},
            "kv_connector=OffloadingConnector does not go with OasisKV",
        ),
    ],
)
def test_what_does_not_go_with_oasiskv(tiny_folder, more, message):
    with pytest.raises(ConfigError) as caught:
        configured(tiny_folder, **more)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engines_without_oasiskv_are_none_of_ours(tiny_folder, monkeypatch):
    oasiskv.vllm.engine_args(host_gib=1)
    stock = EngineArgs(model=str(tiny_folder), **STOCK, kv_offloading_size=0.1)
    found = stock.create_engine_config().kv_transfer_config
    assert found.kv_connector == "OffloadingConnector"
    args = STOCK | oasiskv.vllm.engine_args(host_gib=1) | {"block_size": 32}
    monkeypatch.setenv("OASISKV_DISABLE", "1")
    config = EngineArgs(model=str(tiny_folder), **args).create_engine_config()
    assert config.cache_config.block_size == 32


def test_the_check_is_there_once():
    makers = []
    for _ in range(2):
        oasiskv.vllm.engine_args(host_gib=1)
        makers.append(EngineArgs.create_engine_config.__wrapped__)
    assert makers[0] is makers[1]
    assert not hasattr(makers[0], "__wrapped__")


@pytest.mark.parametrize(
    ("part", "elsewhere"),
    [
        ({"distributed_executor_backend": "ray"}, True),
        ({"distributed_executor_backend": "mp"}, False),
        ({"distributed_executor_backend": "mp", "nnodes": 2}, True),
        ({"data_parallel_size_local": 0}, True),
    ],
)
def test_a_store_beyond_the_machine(tiny_folder, monkeypatch, part, elsewhere):
    config = configured(tiny_folder)
    for name, value in part.items():
        assert hasattr(config.parallel_config, name)
        setattr(config.parallel_config, name, value)
    monkeypatch.setattr(made, "total_bytes", lambda: 2**30)
    made.check_machine(config)
    monkeypatch.setattr(made, "total_bytes", lambda: 2**30 - 1)
    if elsewhere:
        made.check_machine(config)
    else:
        with pytest.raises(ConfigError, match=r"host_gib=1\.0 is too large: this machine"):
            made.check_machine(config)


@pytest.mark.smoke
def test_a_store_larger_than_any_machine_is_refused_where_it_is_configured(tiny_folder):
    args = STOCK | oasiskv.vllm.engine_args(host_gib=2**17)
    with pytest.raises(ConfigError, match=r"host_gib=131072\.0 is too large: this machine"):
        EngineArgs(model=str(tiny_folder), **args).create_engine_config()


class StockLayer:
    """An attention layer as vLLM has it, with a backend of vLLM's."""

    def get_attn_backend(self):
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        return FlashAttentionBackend


def test_a_layer_with_another_attention_backend(tiny_folder):
    config = configured(tiny_folder)
    config.compilation_config.static_forward_context["a"] = StockLayer()
    check_backends(config, [])
    with pytest.raises(ConfigError, match="attention_backend=FLASH_ATTN for layer a is not"):
        check_backends(config, ["a"])


def test_the_connectors_module_has_no_other_connector():
    from oasiskv.vllm import connector

    assert connector.OasisConnector is OasisConnector
    assert not hasattr(connector, "other")
    with pytest.raises(ConfigError, match="kv_connector=OtherConnector does not go with OasisKV"):
        connector.OtherConnector  # noqa: B018
