"""The bandwidth bound of a model that is spread over several devices, all of which read their part at once."""

from quire.planner.devices import device
from quire.planner.formulas import stream_bound


def main() -> None:
    weights_gb, card = 140.0, device("h100")
    print("fits on one H100-80GB:", weights_gb <= card.memory_gb)
    print(f"four-GPU ideal shard-read bound: {stream_bound(weights_gb, card.bandwidth_gb_s, 4):.1f} tokens/s")
