"""Every kernel becomes machine code for the GPUs that it is meant for, with the Triton that is here: no GPU is needed for that.

In a process of its own, because ``test_packed_kernels`` has the kernels interpreted where there is no GPU.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="this environment has no Triton")
EIGHT_BITS = tuple(map(int, metadata.version("triton").split(".")[:2])) >= (3, 4)  # that of torch 2.8, which fp8 needs
SHARED = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
}  # bytes a block may have, CUDA C guide, table 21


@pytest.mark.parametrize(("capability", "half"), [(80, "fp16"), (86, "bf16"), (90, "fp16")])
def test_half_precision(capability: int, half: str) -> None:
    check(capability, half, "no")


@pytest.mark.skipif(not EIGHT_BITS, reason="the Triton here is older than the one that fp8 needs")
@pytest.mark.parametrize("capability", [89, 90])
def test_eight_bits(capability: int) -> None:
    check(capability, "fp16", "yes")


def check(capability: int, half: str, eight: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, str(capability), half, eight],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert len(made) == 11
    for name, (code, shared) in made.items():
        assert code > 1000, name
        assert shared <= SHARED[capability], name


def compile_all(capability: int, half: str, eight: bool) -> dict[str, tuple[int, int]]:
    """Bytes of machine code and of shared memory of each kernel, by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from app.train import kernels_attention, kernels_dropout, kernels_eight, kernels_entropy, kernels_rows

    activation, gradient = ("fp8e4nv", "fp8e5") if eight else (half, half)
    size = {"SIZE": 768, "WIDE": 1024, "ROWS": 1}
    heads = {
        "HEADS": 6,
        "WIDTH": 128,
        "TILE": kernels_attention.TILE,
        "DROPPED": 429496730,
    }  # the widest, which take most
    first, then = kernels_attention.FORWARD_STEP, kernels_attention.BACKWARD_STEP
    jobs = [
        (kernels_dropout._numbers, {"BLOCK": 1024}, {}),
        (kernels_rows._norm_forward, {**size, "DROPPED": 429496730, "SAVE": True, "EIGHT": eight}, {}),
        (kernels_rows._embed_forward, {**size, "DROPPED": 429496730, "SAVE": True, "TYPED": True, "EIGHT": eight}, {}),
        (
            kernels_rows._norm_backward,
            {**size, "BEFORE": 429496730, "AFTER": 0, "MORE": eight, "HALF": True, "EIGHT": eight},
            {},
        ),
        (kernels_rows._gelu_forward, {"BLOCK": kernels_rows.BLOCK}, {}),
        (kernels_rows._gelu_backward, {"SIZE": 3072, "GROUP": 256, "ROWS": 16, "COLUMNS": 128}, {}),
        (kernels_attention._forward, {**heads, "STEP": first, "SAVE": True, "EIGHT": eight}, {"num_stages": 2}),
        (kernels_attention._backward_queries, {**heads, "STEP": then}, {"num_stages": 3}),
        (kernels_attention._backward_keys, {**heads, "STEP": then}, {"num_stages": 2}),
    ]
    if not eight:  # the head stays in half precision
        entropy = {"VOCABULARY": 30522, "BLOCK": 2048}
        jobs += [
            (kernels_entropy._entropy_forward, entropy, {"num_warps": 8}),
            (kernels_entropy._entropy_backward, {**entropy, "PADDED": 30528}, {"num_warps": 8}),
        ]
    if eight:
        jobs += [
            (kernels_eight._eight_bits, {"BLOCK": 1024}, {}),
            (kernels_eight._turn, {"SIZE": 768, "TURNED": kernels_eight.TURNED}, {"num_warps": 8}),
        ]
    types_of = {
        "*i64": "ids positions types targets",
        "*i32": "tiles number seed factors",
        "*fp32": "lse delta sums mean rstd weight bias words places kinds losses",
        "*" + activation: "y8 out8 a",
        "*" + gradient: "dx8 dqkv du",
        "i32": "rows tokens count across stride",
        "fp32": "eps scale slope zero",
    }
    known = {name: kind for kind, names in types_of.items() for name in names.split()}
    own = {
        "_numbers": {"out": "*i32"}, "_eight_bits": {"y": "*fp8e4nv", "scale": "fp32"}, "_turn": {"x": "*u8", "y": "*u8"},
        "_entropy_backward": {"grad": "*fp32"},
    }  # fmt: skip
    made = {}
    for kernel, constants, options in jobs:
        name = kernel.fn.__name__
        types = {
            argument: own.get(name, {}).get(argument) or known.get(argument, "*" + half)
            for argument in kernel.arg_names
            if argument not in constants
        }
        places = {argument: place for place, argument in enumerate(kernel.arg_names)}
        # as at a launch: tensors begin at multiples of 16 bytes and hold multiples of 16 tokens, a seed is one of many numbers
        aligned = [
            places[k]
            for k, kind in types.items()
            if k != "seed" and (kind[0] == "*" or k in ("rows", "tokens", "across"))
        ]
        if "constants" in inspect.signature(ASTSource).parameters:  # Triton 3.0 and 3.1 go by place
            from triton.compiler import AttrsDescriptor

            source = ASTSource(
                kernel,
                {places[k]: v for k, v in types.items()},
                constants={places[k]: v for k, v in constants.items()},
                attrs=AttrsDescriptor(tuple(aligned), ()),
            )
        else:
            source = ASTSource(
                kernel,
                types | dict.fromkeys(constants, "constexpr"),
                constants,
                {(place,): [["tt.divisibility", 16]] for place in aligned},
            )
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, **options})
        made[name] = (len(found.asm["cubin"]), found.metadata.shared)
    return made


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    print(json.dumps(compile_all(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "yes")))
