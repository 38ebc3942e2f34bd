"""What a model needs in all, and how many of each device hold it: one unit throughout, rounded up once."""

from quire.planner.memory_sums import memory

CARDS = ("rtx4090", "rtx5090", "a100", "h100", "h200", "b200")


def show(title: str, **sizes: float) -> None:
    figures = {figure.label: figure for figure in memory(**sizes)}  # type: ignore[arg-type]
    print(
        title,
        "|",
        ", ".join(f"{name} {figures[name].value:.2f}" for name in ("weights", "KV cache", "all")),
        "GB",
    )
    print("  ", ", ".join(f"{figures[card].value} {card}" for card in CARDS))


def main() -> None:
    show("8B, FP16", params_b=8, layers=32, kv_heads=8, head_dim=128, hidden=4096)
    show("70B, INT4", params_b=70, bits=4, layers=80, kv_heads=8, head_dim=128, hidden=8192)
    show(
        "70B, FP16, 131,072 tokens",
        params_b=70,
        layers=80,
        kv_heads=8,
        head_dim=128,
        hidden=8192,
        tokens=131072,
    )
