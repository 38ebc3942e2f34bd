"""A slow start and a halting stream have different causes: which one to look at."""


def investigate(ttft_p95_ms: float, itl_p95_ms: float) -> str:
    if itl_p95_ms > 120:
        return "inspect decode scheduling and memory pressure"
    if ttft_p95_ms > 900 and itl_p95_ms <= 80:
        return "inspect queueing and prefill"
    return "within example thresholds"


def main() -> None:
    print("long initial pause:", investigate(1100, 60))
    print("choppy stream:", investigate(350, 160))
