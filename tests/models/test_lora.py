"""Merging adds b @ a, and an adapter that does not fit is refused before anything is written."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from oasiskv.data import data_path
from oasiskv.errors import ModelError
from oasiskv.models.lora import add_lora

RANK = 3


def layers():
    generator = torch.Generator().manual_seed(0)
    made = {"layers.0.q_proj": nn.Linear(8, 8, bias=False), "layers.0.k_proj": nn.Linear(8, 4)}
    for layer in made.values():
        layer.weight.data = torch.randn(layer.weight.shape, generator=generator)
    return made


def tensors(targets):
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for name, layer in targets.items():
        out_dim, in_dim = layer.weight.shape
        pairs[f"{name}.a"] = torch.randn(RANK, in_dim, generator=generator).bfloat16()
        pairs[f"{name}.b"] = torch.randn(out_dim, RANK, generator=generator).bfloat16()
    return pairs


def saved(tmp_path, pairs, metadata=None):
    path = tmp_path / "lora.safetensors"
    save_file(pairs, path, metadata={"rope_theta": "1000000.0"} if metadata is None else metadata)
    return path


def test_weights_gain_b_times_a_in_float32(tmp_path):
    targets = layers()
    pairs = tensors(targets)
    expected = {
        name: layer.weight.double() + pairs[f"{name}.b"].double() @ pairs[f"{name}.a"].double()
        for name, layer in targets.items()
    }
    assert add_lora(targets, saved(tmp_path, pairs)) == 1e6
    for name, layer in targets.items():
        torch.testing.assert_close(layer.weight.double(), expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("layers.0.k_proj.a"), r"1 tensors .*'layers\.0\.k_proj\.a'"),
        (lambda p: p.update({"layers.9.q_proj.a": torch.zeros(1)}), r"'layers\.9\.q_proj\.a'"),
        (lambda p: p.update({"layers.0.q_proj.a": torch.zeros(RANK, 7)}), r"\(3, 7\)"),
        (lambda p: p.update({"layers.0.q_proj.a": torch.zeros(2, 8)}), r"b \(8, 3\)"),
        (lambda p: p.update({"layers.0.k_proj.b": torch.zeros(8, RANK)}), r"\[4, R\]"),
        (lambda p: p.update({"layers.0.q_proj.a": torch.zeros(8)}), r"\(8,\)"),
    ],
)
def test_names_and_shapes_must_fit(tmp_path, change, message):
    targets = layers()
    pairs = tensors(targets)
    change(pairs)
    with pytest.raises(ModelError, match=message):
        add_lora(targets, saved(tmp_path, pairs))


def test_the_rope_base_must_be_there(tmp_path):
    targets = layers()
    with pytest.raises(ModelError, match="rope_theta"):
        add_lora(targets, saved(tmp_path, tensors(targets), metadata={}))


def test_a_cut_off_file_is_refused(tmp_path):
    targets = layers()
    path = saved(tmp_path, tensors(targets))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="cannot be read"):
        add_lora(targets, path)


def test_the_shipped_adapter_fits_the_model_it_was_trained_on():
    widths = {"q_proj": 576, "k_proj": 192, "v_proj": 192, "o_proj": 576}
    targets = {
        f"layers.{index}.{name}": nn.Linear(576, out_dim, bias=False)
        for index in range(30)
        for name, out_dim in widths.items()
    }
    assert add_lora(targets, data_path("smollm2_32k/lora.safetensors")) == 1e6
