"""The Triton path against the plain one, kernel by kernel and as a whole.

With a GPU the kernels are compiled and run in half precision. Without one Triton's interpreter runs the same code on
the CPU in float32, which proves the arithmetic but not the compiled code; that takes Triton 3.6 and, as it turns
one-element arrays into loop bounds, NumPy before 2.4. Where there is neither the tests are skipped.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

triton = pytest.importorskip("triton", reason="this environment has no Triton")
NEWEST = {"triton": (3, 6), "numpy": (2, 4)}
FOUND = {name: tuple(map(int, metadata.version(name).split(".")[:2])) for name in NEWEST}
if not GPU and (FOUND["triton"] < NEWEST["triton"] or FOUND["numpy"] >= NEWEST["numpy"]):
    pytest.skip(
        f"no GPU of compute capability 8.0, and the interpreter of Triton {FOUND['triton']} with NumPy {FOUND['numpy']} "
        "cannot run these kernels (it takes Triton 3.6 and NumPy before 2.4)",
        allow_module_level=True,
    )

import triton.language as tl  # noqa: E402
from test_packed import gradients, pack, small  # noqa: E402

from app.errors import Fault  # noqa: E402
from app.train import kernels_attention, kernels_eight, kernels_entropy, kernels_rows, packed, packed_fused  # noqa: E402
from app.train.kernels_dropout import dropped, factor_of, keeps, number_of  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
#: a whole model takes a minute in the interpreter
long_without_gpu = pytest.mark.skipif(False, reason="") if GPU else pytest.mark.long
DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float32]
LENGTHS = [1, 5, 64, 65, 70, 9]
TOKENS = 230
EIGHT_BITS = not GPU or torch.cuda.get_device_capability() >= (8, 9)  #: whether kernels can make 8-bit numbers here
#: Relative error by norm of rounding to 8 bits, on a GPU: half a step of 1/8 or 1/4, evenly spread, and some for what is
#: tiny. The interpreter of Triton 3.6 makes 4 of 7.9, because it drops what is carried into the exponent.
EIGHT = {torch.float8_e4m3fn: 0.032 if GPU else 0.1, torch.float8_e5m2: 0.064 if GPU else 0.2}
SCALE = 4096.0  #: of the loss, as float16 training has it, or small gradients vanish


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error by norm; not a number never passes."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def close(dtype: torch.dtype) -> float:
    return {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]


@triton.jit(do_not_specialize=["seed"])
def _write_keeps(out, seed, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROPPED: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    kept = keeps(factor_of(seed, row), number_of(column), DROPPED)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], kept.to(tl.int32))


def kept(rows: int, columns: int, seed: int, dropout: float) -> torch.Tensor:
    out = torch.empty(triton.next_power_of_2(rows), triton.next_power_of_2(columns), dtype=torch.int32, device=DEVICE)
    _write_keeps[(1,)](out, seed, ROWS=out.shape[0], COLUMNS=out.shape[1], DROPPED=dropped(dropout))
    return out[:rows, :columns].bool()


def seeded(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int32, device=DEVICE)


def starts(lengths: list[int]) -> torch.Tensor:
    edges = torch.tensor([0, *lengths, TOKENS - sum(lengths)]).cumsum(0)
    return torch.cat((edges, edges.new_full((3,), TOKENS))).int().to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention(dtype: torch.dtype, dropout: float) -> None:
    torch.manual_seed(0)
    heads, width, number = 2, 16, 77
    seed = seeded(number)
    qkv = torch.randn(TOKENS, 3, heads, width, device=DEVICE, dtype=dtype)
    grad = torch.randn(TOKENS, heads * width, device=DEVICE, dtype=dtype)
    cu_seqlens = starts(LENGTHS)
    plan = kernels_attention.plan(cu_seqlens, TOKENS)
    assert len(plan.numbers) == 256  # TOKENS up to the end of the last tile, which is read to its end
    out, _, lse = kernels_attention.attend(qkv, plan, dropout, seed, True)
    dqkv, sums = kernels_attention.attend_backward(grad, qkv, out, lse, plan, dropout, seed)
    exact = qkv.double().requires_grad_()
    parts = []
    mask = kept(TOKENS * heads, 256, number, dropout).view(TOKENS, heads, 256) if dropout else None
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        query, key, value = exact[begin:end].permute(1, 2, 0, 3)
        weights = (query @ key.transpose(1, 2) * width**-0.5).softmax(-1)
        if mask is not None:
            weights = weights * mask[begin:end, :, : end - begin].transpose(0, 1) / (1 - dropout)
        parts.append((weights @ value).transpose(0, 1).flatten(1))
    want = torch.cat(parts)
    want.backward(grad.double())
    assert off(out, want) < close(dtype)
    assert off(dqkv, exact.grad) < close(dtype)
    assert off(sums[2 * heads * width :], exact.grad[:, 2].flatten(1).sum(0)) < close(dtype)
    assert off(sums[: heads * width], exact.grad[:, 0].flatten(1).sum(0)) < close(dtype)
    if not EIGHT_BITS:
        return
    again, out8, _ = kernels_attention.attend(qkv, plan, dropout, seed, True, True)
    assert torch.equal(again, out)
    assert off(out8.float() / kernels_attention.CONTEXT_SCALE.value, want) < EIGHT[out8.dtype]
    dqkv8, sums8 = kernels_attention.attend_backward(grad, qkv, out, lse, plan, dropout, seed, True)
    assert torch.equal(sums8, sums)
    assert off(dqkv8.float(), exact.grad) < EIGHT[dqkv8.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_norm(dtype: torch.dtype, dropout: float) -> None:
    torch.manual_seed(0)
    rows, size, number = 37, 48, 5
    seed = seeded(number)
    x, residual, dy = torch.randn(3, rows, size, device=DEVICE, dtype=dtype).unbind(0)
    weight, bias = torch.randn(2, size, device=DEVICE).unbind(0)
    y, _, z, mean, rstd = kernels_rows.norm(x, residual, weight, bias, 1e-12, dropout, seed, True)
    dz, dx, _, sums = kernels_rows.norm_backward(dy, z, mean, rstd, weight, dropout, 0.0, seed)
    exact = [t.double().requires_grad_() for t in (x, residual, weight, bias, torch.zeros(size, device=DEVICE))]
    branch = exact[0] + exact[4]
    if dropout:
        branch = branch * kept(rows, size, number, dropout) / (1 - dropout)
    want = torch.nn.functional.layer_norm(branch + exact[1], (size,), exact[2], exact[3], 1e-12)
    want.backward(dy.double())
    for got, expected in zip((y, dx, dz, *sums), (want, *(t.grad for t in exact)), strict=True):
        assert off(got, expected) < close(dtype)
    if not EIGHT_BITS:
        return
    again, y8, *_ = kernels_rows.norm(x, residual, weight, bias, 1e-12, dropout, seed, True, True)
    assert torch.equal(again, y)
    assert off(y8.float(), want) < EIGHT[y8.dtype]
    _, _, dx8, sums8 = kernels_rows.norm_backward(
        dy / 2, z, mean, rstd, weight, dropout, 0.0, seed, more=dy / 2, half=False, eight=True
    )
    assert off(dx8.float(), exact[0].grad) < EIGHT[dx8.dtype]
    assert off(sums8, sums) < close(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    u, da = torch.randn(2, 530, 272, device=DEVICE, dtype=dtype).unbind(0)
    exact = u.double().requires_grad_()
    want = torch.nn.functional.gelu(exact)
    want.backward(da.double())
    assert off(kernels_rows.gelu(u), want) < close(dtype)
    got, sums = kernels_rows.gelu_backward(da.clone(), u)
    assert off(got, exact.grad) < close(dtype)
    assert off(sums, exact.grad.sum(0)) < close(dtype)
    if not EIGHT_BITS:
        return
    assert off(kernels_rows.gelu(u, torch.float8_e4m3fn).float(), want) < EIGHT[torch.float8_e4m3fn]
    du8, sums8 = kernels_rows.gelu_backward(da, u, torch.float8_e5m2)
    assert off(du8.float(), exact.grad) < EIGHT[du8.dtype]
    assert off(sums8, sums) < 1e-5


@pytest.mark.skipif(not EIGHT_BITS, reason="needs a GPU of compute capability 8.9: 8-bit numbers")
def test_copies_in_eight_bits() -> None:
    """Weights are held at the largest value, gradients that do not fit are not numbers; a turned matrix is filled up with zeros."""
    x = torch.tensor([[1.0, -0.3, 0.0], [7.0, float("nan"), 6.9]], device=DEVICE)
    made = kernels_eight.eight_bits(x, 64.0)
    assert made[0].tolist() == [64.0, -20.0, 0.0]
    assert made[1, ::2].tolist() == [448.0, 448.0]
    if GPU:  # the interpreter knows neither the largest value nor what is not a number
        assert made[1, 1].isnan()
        assert kernels_eight.eight_bits(x * 9, 64.0)[1, ::2].tolist() == [448.0, 448.0]
    da = torch.tensor([[60000.0, 57344.0, -1e5, 2.0]], device=DEVICE)
    du8, sums = kernels_rows.gelu_backward(da, torch.full_like(da, 20.0), torch.float8_e5m2)
    assert du8[0].isnan().tolist() == [True, False, True, False]
    assert du8[0, 1::2].tolist() == [57344.0, 2.0]
    assert sums.tolist() == [60000.0, 57344.0, -1e5, 2.0]
    matrix = torch.randn(197, 144, device=DEVICE).to(torch.float8_e5m2)
    turned = kernels_eight.turned(matrix)
    assert turned.shape == (144, 208)
    assert torch.equal(turned[:, :197].float(), matrix.float().t())
    assert (turned[:, 197:].float() == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vocabulary, padded = 2500, 2560
    logits = torch.randn(9, padded, device=DEVICE, dtype=dtype) * 5
    targets = torch.tensor([0, 2499, 7, -100, 2048, 2047, -100, 1, 5], device=DEVICE)
    losses, lse = kernels_entropy.entropy(logits, targets, vocabulary)
    exact = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact[:, :vocabulary], targets, reduction="none")
    (want.sum() * 3).backward()
    dlogits = kernels_entropy.entropy_backward(logits, targets, lse, torch.tensor(3.0, device=DEVICE), vocabulary)
    assert off(losses, want) < 1e-5
    assert off(dlogits, exact.grad) < close(dtype)
    assert (dlogits[:, vocabulary:] == 0).all()


def test_dropout_masks_are_even_and_independent() -> None:
    """Share kept, and products of neighbouring rows, columns and seeds, lie within 5 deviations of independence."""
    masks = [kept(256, 256, seed, 0.1).double() for seed in (1, 2, 3)]
    deviation = (0.1 * 0.9 / 256**2) ** 0.5
    for mask in masks:
        assert abs(mask.mean() - 0.9) < 5 * deviation
        assert abs((mask[1:] * mask[:-1]).mean() - 0.81) < 5 * (0.81 * 0.19 / 256**2) ** 0.5
        assert abs((mask[:, 1:] * mask[:, :-1]).mean() - 0.81) < 5 * (0.81 * 0.19 / 256**2) ** 0.5
        assert mask.mean(0).std() < 2 * (0.09 / 256) ** 0.5
        assert mask.mean(1).std() < 2 * (0.09 / 256) ** 0.5
    assert abs((masks[0] * masks[1]).mean() - 0.81) < 5 * (0.81 * 0.19 / 256**2) ** 0.5


@long_without_gpu
@pytest.mark.parametrize("task", ["mlm", "classify"])
@pytest.mark.parametrize("types", [True, False])
def test_whole_model(task: str, types: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every parameter's gradient against the plain path in float64."""
    lengths = [1, 20, 24, 9, 24, 3]
    batch = pack(task, lengths, 100, types=types).to(DEVICE)
    model = small(task).to(DEVICE)
    want_loss = packed.loss(model, batch)
    want = gradients(model, want_loss)
    model.float()
    for dtype in DTYPES:
        found = []
        for fused in (False, True):
            monkeypatch.setattr(packed_fused, "usable", lambda _, fused=fused: fused)
            monkeypatch.setattr(packed_fused, "half_type", lambda _, dtype=dtype: dtype)
            with torch.autocast(DEVICE, dtype, enabled=GPU):
                loss = packed.loss(model, batch)
            assert loss.dtype == torch.float32
            assert off(loss, want_loss) < close(dtype)
            found.append({name: grad / SCALE for name, grad in gradients(model, loss * SCALE).items()})
            monkeypatch.undo()
        plain, got = found
        assert got.keys() == want.keys()
        for name, value in want.items():
            if "key.bias" in name:  # its true gradient is 0
                assert got[name].norm() < close(dtype) * want[name.replace("key", "query")].norm() * 10
            else:  # the gradients of queries are small differences: as wrong as torch's own in this precision is right
                assert off(got[name], value) < 2 * off(plain[name], value) + close(dtype), name
        with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=GPU):
            monkeypatch.setattr(packed_fused, "half_type", lambda _, dtype=dtype: dtype)
            hidden = packed_fused.encode(model.bert, batch)
            monkeypatch.undo()
        assert off(hidden, packed.encode(model.bert.double(), batch)) < close(dtype)
        model.float()


@long_without_gpu
def test_dropout_repeats_with_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass drops what the forward pass dropped: the loss falls as the gradient says, mask and all."""
    dtype = DTYPES[0]
    model = small("mlm", torch.float32, dropout=0.2).to(DEVICE)
    batch = pack("mlm", [20, 24, 9], 60).to(DEVICE)
    monkeypatch.setattr(packed_fused, "usable", lambda _: True)
    monkeypatch.setattr(packed_fused, "half_type", lambda _: dtype)

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.autocast(DEVICE, dtype, enabled=GPU):
            return packed.loss(model, batch)

    assert loss(1).item() == loss(1).item() != loss(2).item()
    got = {name: grad / SCALE for name, grad in gradients(model, loss(1) * SCALE).items()}
    again = gradients(model, loss(1) * SCALE)
    assert all(torch.equal(value / SCALE, got[name]) for name, value in again.items())
    slope = sum(float(g.double().square().sum()) for g in got.values())
    step = (0.02 if GPU else 1e-3) / slope
    moved = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(got[name], alpha=sign * step)
            moved.append(loss(1).item())
            for name, parameter in model.named_parameters():
                parameter.sub_(got[name], alpha=sign * step)
    assert (moved[0] - moved[1]) / (2 * step * slope) == pytest.approx(1, abs=0.2 if GPU else 0.05)


@pytest.mark.skipif(not GPU, reason="needs a GPU of compute capability 8.0: this is what chooses the kernels there")
def test_chosen_on_a_gpu() -> None:
    model = small("mlm", torch.float32).to(DEVICE)
    assert packed_fused.why_not(torch.device("cuda", torch.cuda.current_device())) is None
    assert not packed_fused.usable(model.bert)
    with torch.autocast("cuda", torch.float16):
        assert packed_fused.usable(model.bert)
        model.config.hidden_act = "relu"
        assert not packed_fused.usable(model.bert)


@pytest.mark.skipif(
    GPU and packed_fused.why_not_fp8(torch.device("cuda", 0)) is not None,
    reason="needs a GPU of compute capability 8.9 and torch 2.8: 8-bit products",
)
@long_without_gpu
def test_fp8_gradients_point_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of fp16; and where the backward pass is cut before each layer, as for several GPUs, as where it is not.

    A cut adds up what is handed on as two summands elsewhere: a lost summand is an error of 5 %, rounding one of 0.1 %.
    """
    model = small("mlm", torch.float32, sizes=(128, 256)).to(DEVICE)
    batch = pack("mlm", [20, 24, 9, 24, 24, 11], 120).to(DEVICE)  # not a multiple of 16
    monkeypatch.setattr(packed_fused, "half_type", lambda _: torch.float16)
    monkeypatch.setattr(packed_fused, "usable", lambda _: True)

    def run(fp8: bool, cuts: dict[int, Any]) -> tuple[float, dict[str, torch.Tensor]]:
        model.bert._packed_fp8 = fp8
        model.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = packed.loss(model, replace(batch, cuts=cuts))
        (loss * SCALE).backward()
        for place in sorted(cuts, reverse=True):
            below, above = cuts[place]
            below.backward(above.grad)
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

    (loss, want), (loss8, got), (_, parts) = run(False, {}), run(True, {}), run(True, {0: None, 1: None})
    assert loss8 != loss
    assert loss8 == pytest.approx(loss, rel=0.02)
    for name, value in want.items():
        if "key.bias" not in name:  # its true gradient is 0
            cosine = (value * got[name]).sum() / (value.norm() * got[name].norm())
            assert cosine > (0.9 if "query" in name or "key" in name else 0.97), (name, float(cosine))
    for name in ("bert.embeddings.LayerNorm.bias", "bert.encoder.layer.0.output.LayerNorm.bias"):
        assert off(got[name], parts[name]) < 0.01, name


@pytest.mark.skipif(GPU, reason="needs a machine without a GPU: this is the refusal there")
def test_fp8_is_refused_without_a_gpu() -> None:
    with pytest.raises(Fault, match="they need a GPU, this is cpu"):
        packed.use_fp8(small("mlm"))
