"""Keys and values are kept for KV heads, not for query heads: the factor between both."""

from quire.planner.formulas import kv_cache_bytes


def main() -> None:
    grouped, one_each = (kv_cache_bytes(80, heads, 128, 4096) for heads in (8, 64))
    print(f"GQA cache: {grouped / 1e9:.2f} GB")
    print(f"MHA cache: {one_each / 1e9:.2f} GB")
    print("MHA / GQA:", one_each // grouped)
