"""Dense matrix rates of GPUs whose datasheet was checked. A name that is not here is unknown, never a relative's."""

from __future__ import annotations

#: TFLOP/s with float32 accumulation, by the exact name that the driver reports: (fp16, bf16); 0 where it has none.
#: From NVIDIA's datasheets and architecture whitepapers (GA102, Ada), sparse figures halved.
DENSE_TFLOPS: dict[str, tuple[float, float]] = {
    "Tesla V100-SXM2-16GB": (125.0, 0.0),
    "Tesla V100-SXM2-32GB": (125.0, 0.0),
    "Tesla V100-PCIE-16GB": (112.0, 0.0),
    "Tesla V100-PCIE-32GB": (112.0, 0.0),
    "NVIDIA A100-SXM4-40GB": (312.0, 312.0),
    "NVIDIA A100-SXM4-80GB": (312.0, 312.0),
    "NVIDIA A100-PCIE-40GB": (312.0, 312.0),
    "NVIDIA A100 80GB PCIe": (312.0, 312.0),
    "NVIDIA GeForce RTX 3090": (71.0, 71.0),
    "NVIDIA GeForce RTX 4090": (165.2, 165.2),
    "NVIDIA L40S": (362.0, 362.0),
    "NVIDIA H100 80GB HBM3": (989.4, 989.4),
    "NVIDIA H100 PCIe": (756.0, 756.0),
    "NVIDIA H100 NVL": (835.0, 835.0),
    "NVIDIA H200": (989.0, 989.0),
    "NVIDIA B200": (2250.0, 2250.0),
}


def dense_tflops(name: str, dtype: str) -> float | None:
    """Datasheet TFLOP/s of GPU ``name`` for "fp16" or "bf16", or None when unknown or not supported."""
    row = DENSE_TFLOPS.get(name)
    if row is None or dtype not in ("fp16", "bf16"):
        return None
    return (row[0] if dtype == "fp16" else row[1]) or None
