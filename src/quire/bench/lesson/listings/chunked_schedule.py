"""The scheduler splits a long prompt over steps, each of which also decodes for the stream that runs."""

from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.types import Request, SamplingParams, StepOutput, TokenIds


def request(name: str, tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=TokenIds(range(tokens)), params=params, arrival=0.0)


def step(scheduler: Scheduler) -> list[int]:
    """Run a step; the tokens of each of its rows."""
    out = scheduler.schedule()
    tokens = [[1] if row.sample else [] for row in out.scheduled]
    nothing = [None] * len(tokens)
    scheduler.update(out, StepOutput(tokens, nothing, list(nothing)))
    return [len(row.token_ids) for row in out.scheduled]


def main() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=1024, max_num_batched_tokens=2049, max_model_len=8192))
    scheduler.add(request("stream", 1))
    step(scheduler)  # the stream has begun
    scheduler.add(request("long prompt", 6144))
    for _ in range(3):
        decoded, prefilled = step(scheduler)
        print(f"prefill {prefilled}")
        print("decode active streams" if decoded == 1 else "stalled")
