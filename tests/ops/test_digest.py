"""Digests against plain loops."""

import math

import pytest
import torch

from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax, dequantize_keys4

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make_tiles(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (16, 128), (3, 5, 6), (2, 3, 7, 10), (0, 3, 16, 8)])
def test_minmax_is_elementwise_over_tokens(shape, dtype):
    tiles = make_tiles(shape, dtype)
    dim = shape[-1] // 2
    tiles[..., dim:] = math.nan  # values must not be looked at
    digest = build_minmax(tiles)
    assert digest.shape == (*shape[:-2], 2, dim)
    assert digest.dtype == dtype
    flat, out = tiles.reshape(-1, *shape[-2:]), digest.reshape(-1, 2, dim)
    for tile, got in zip(flat, out, strict=True):
        for channel in range(dim):
            column = [float(tile[token, channel]) for token in range(shape[-2])]
            assert float(got[0, channel]) == min(column)
            assert float(got[1, channel]) == max(column)


def test_minmax_of_a_strided_view():
    store = make_tiles((4, 3, 2, 16, 12))
    view = store[:, 1]
    assert not view.is_contiguous()
    assert torch.equal(build_minmax(view), build_minmax(view.clone()))


def test_minmax_shows_what_nobody_wrote():
    tiles = make_tiles((16, 8))
    tiles[3, 1] = math.nan
    assert build_minmax(tiles).isnan().tolist() == [[False, True, False, False]] * 2


@pytest.mark.parametrize("build", [build_minmax, build_keys4])
def test_odd_tiles_are_refused(build):
    with pytest.raises(ValueError, match=r"must be even; found shape \[16, 7\]"):
        build(torch.zeros(16, 7))


def test_keys4_refuses_an_odd_head_dim():
    with pytest.raises(ValueError, match=r"even head dim.*found 5"):
        build_keys4(torch.zeros(16, 10))


def half(value):
    return float(torch.tensor(value, dtype=torch.float32).half())


def f32(value):
    return float(torch.tensor(value, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4), (16, 32), (2, 3, 5, 12), (0, 3, 16, 8)])
def test_keys4_codes_scales_and_packing(shape, dtype):
    tiles = make_tiles(shape, dtype, seed=1) * 3
    tokens, dim = shape[-2], shape[-1] // 2
    tiles[..., dim:] = math.nan
    digest = build_keys4(tiles)
    assert digest.codes.shape == (*shape[:-1], dim // 2)
    assert digest.codes.dtype == torch.uint8
    assert digest.scale_zero.shape == (*shape[:-2], 2, dim)
    assert digest.scale_zero.dtype == torch.float16
    back = dequantize_keys4(digest)
    assert back.dtype == torch.float32
    flat = zip(
        tiles.reshape(-1, *shape[-2:]),
        digest.codes.reshape(-1, tokens, dim // 2),
        digest.scale_zero.reshape(-1, 2, dim),
        back.reshape(-1, tokens, dim),
        strict=True,
    )
    for tile, codes, scale_zero, keys in flat:
        for channel in range(dim):
            column = [f32(float(tile[token, channel])) for token in range(tokens)]
            zero = half(min(column))
            scale = half(f32(f32(max(column) - min(column)) / 15))
            assert float(scale_zero[0, channel]) == scale
            assert float(scale_zero[1, channel]) == zero
            for token, key in enumerate(column):
                byte = int(codes[token, channel % (dim // 2)])
                code = byte >> 4 if channel >= dim // 2 else byte & 15
                steps = f32(f32(f32(key - zero) / scale) + 0.5) if scale else 0
                assert code == min(max(math.floor(steps), 0), 15)
                assert float(keys[token, channel]) == f32(f32(code * scale) + zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 300.0, 6e4])
def test_keys4_error_is_half_a_step(size, dtype):
    generator = torch.Generator().manual_seed(2)
    tiles = ((torch.rand(50, 16, 32, generator=generator) * 2 - 1) * size).to(dtype)
    keys = tiles[..., :16].float()
    digest = build_keys4(tiles)
    scale, zero = digest.scale_zero.float().unsqueeze(-2).unbind(-3)
    rounding = zero.abs() * 2**-11 + 15 * scale * 2**-11 + 16 * 2**-25
    assert bool(((dequantize_keys4(digest) - keys).abs() <= scale / 2 + rounding).all())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.140625, 2.0**-14, -65280.0, 117.5])
def test_constant_channels_come_back_exactly(value):
    tiles = torch.full((2, 16, 8), value, dtype=torch.bfloat16)
    digest = build_keys4(tiles)
    assert bool((digest.codes == 0).all())
    assert torch.equal(dequantize_keys4(digest), torch.full((2, 16, 4), value))


def test_a_constant_that_float16_rounds_has_codes_of_zero():
    tiles = torch.tensor([0.1, -0.1, 0.3, -0.3]).repeat(16, 2)
    digest = build_keys4(tiles)
    assert bool((digest.codes == 0).all())
    assert torch.equal(dequantize_keys4(digest), tiles[:, :4].half().float())


def test_half_steps_round_up():
    column = torch.tensor([0.0, 0.5, 1.5, 2.5, 14.5, 15.0])
    digest = build_keys4(column[:, None].repeat(1, 4))
    assert (digest.codes & 15)[:, 0].tolist() == [0, 1, 2, 3, 15, 15]


def test_keys_outside_float16_stay_finite():
    tiles = torch.zeros(16, 16)
    tiles[:, 0] = 1e30
    tiles[::2, 1], tiles[1::2, 1] = -3e38, 3e38
    tiles[0, 2], tiles[1, 2] = math.inf, -math.inf
    tiles[0, 3] = 1e-40
    digest = build_keys4(tiles)
    assert bool(digest.scale_zero.isfinite().all())
    back = dequantize_keys4(digest)
    assert bool(back.isfinite().all())
    assert back[:, 0].tolist() == [65504.0] * 16
    # The step is 131008 / 15, itself rounded to float16 (relative 2**-11).
    assert back[0, 1] == -65504
    assert abs(float(back[1, 1]) - 65504) <= 131008 * 2**-11
    assert float(back[0, 3]) == 0


def test_nan_key_shows_in_its_channel_only():
    tiles = make_tiles((16, 8))
    tiles[5, 2] = math.nan
    digest = build_keys4(tiles)
    assert digest.scale_zero.isnan().tolist() == [[False, False, True, False]] * 2
    assert bool(
        ((digest.codes & 15)[:, 0] == (build_keys4(make_tiles((16, 8))).codes & 15)[:, 0]).all()
    )
    assert bool(((digest.codes >> 4)[:, 0] == 0).all())


def test_keys4_takes_three_sixteenths_of_a_bf16_tile():
    tiles = make_tiles((16, 256), torch.bfloat16)
    digest = build_keys4(tiles)
    used = sum(part.numel() * part.element_size() for part in Keys4(*digest))
    assert used * 16 == tiles.numel() * tiles.element_size() * 3
