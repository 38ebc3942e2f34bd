"""Estimate the tokens a second of a model on a device: every step reads all weights once."""

from quire.planner.time_sums import throughput


def estimate(params_b: float, bits: float, bandwidth_gb_s: float, batch: int = 1) -> None:
    print(f"{params_b:g}B, {bits:g} bits a weight, {bandwidth_gb_s:,g} GB/s, batch {batch}")
    for figure in throughput(params_b=params_b, bits=bits, bandwidth_gb_s=bandwidth_gb_s, batch=batch):
        print(f"  {figure.label}: {figure.value:,.1f} {figure.unit}")


def main() -> None:
    estimate(70, 16, 2000)  # an A100
    estimate(70, 4, 3350)  # an H100, weights in INT4
    estimate(70, 4, 3350, batch=32)
