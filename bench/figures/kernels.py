"""Kernels of a profiled step: which stage each belongs to, and what bounds it."""

from dataclasses import dataclass

from rows import Row

HBM = 4.24e12  # bytes/s of a device-to-device copy on this card, read and written
L2 = 10e12  # bytes/s from L2 to the SMs, measured with the up kernel's loads alone

# Tiles by whose operands' loads the traffic from L2 is reckoned.
TILES = {
    "up": (128, 256),
    "down": (128, 192),
    "down_backward": (128, 256),
    "up_backward": (128, 192),
    "down_weight_backward": (256, 192),
    "up_weight_backward": (256, 192),
}
PRODUCTS = tuple(TILES)


def stage_of(name: str, seen: dict[str, int]) -> str:
    """`seen` counts what came before in the step; it decides between the two uses of a kernel."""

    def use(kind: str, *stages: str) -> str:
        seen[kind] = seen.get(kind, 0) + 1
        return stages[min(seen[kind], len(stages)) - 1]

    if any(kernel in name for kernel in ("FinishActivationBackward", "DownBackwardKernel", "GemmDGated")):
        return "down_backward"
    if any(kernel in name for kernel in ("UpKernel", "CooperativeKernel", "FinisherKernel", "GemmGated")):
        return use("up", "up", "up_again")
    if "RowsKernel" in name:
        return "down" if "LoadWeightAlongK" in name else "up_backward"
    if "WeightKernel" in name or "weight_gemm" in name:
        return use("weight", "down_weight_backward", "up_weight_backward")
    if "GemmDefault" in name:  # SonicMoE's, in the order of its step
        return use("default", "down", "down_weight_backward", "up_backward", "up_weight_backward")
    if "combine" in name or "token_gather_sum" in name:
        return use("combine", "combine", "combine_backward")
    if "dispatch" in name or "row_weights" in name or "bitmatrix" in name or "col_partial_sum" in name:
        return "dispatch"
    return "other"


def stage_us(row: Row) -> dict[str, float]:
    """Microseconds of each stage in a step; several kernels of one stage are summed."""
    seen: dict[str, int] = {}
    result: dict[str, float] = {}
    for name, us in row.get("kernels_us", []):
        stage = stage_of(name, seen)
        result[stage] = result.get(stage, 0.0) + us
    return result


@dataclass
class Roof:
    """Of one stage at one shape: its work, and the time that each limit alone would take."""

    flop: float
    hbm_bytes: float
    l2_bytes: float
    product_s: float  # the same product by cuBLAS, in the same run: what the matrix units give at this power

    @property
    def limits_s(self) -> dict[str, float]:
        return {"memory": self.hbm_bytes / HBM, "L2": self.l2_bytes / L2, "tensor": self.product_s}

    @property
    def bound_by(self) -> str:
        return max(self.limits_s, key=lambda limit: self.limits_s[limit])


def roof(stage: str, row: Row, product_s: float) -> Roof:
    """Bytes are the least that must pass to and from memory in bf16: every tensor once."""
    T, d, n, E, K = (row[key] for key in "TdnEK")
    R = T * K
    tokens, rows_d, h, a = 2 * T * d, 2 * R * d, 4 * R * n, 2 * R * n
    w_up, w_down = 4 * E * n * d, 2 * E * n * d
    wide = stage in ("up", "up_backward", "up_weight_backward")
    flop = (4 if wide else 2) * R * d * n
    hbm = {
        "up": tokens + w_up + h + a,
        "down": a + w_down + rows_d,
        "down_backward": tokens + w_down + h + h + a,
        "up_backward": h + w_up + rows_d,
        "down_weight_backward": tokens + a + w_down,
        "up_weight_backward": tokens + h + w_up,
    }[stage]
    tile_m, tile_n = TILES[stage]
    return Roof(flop, hbm, flop * (1 / tile_m + 1 / tile_n), product_s)
