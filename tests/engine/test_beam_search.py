"""Beam search: the sequences and scores of transformers, the same bits in any company, and no block left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from helpers.tokenizers import Folder
from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.beams import Beams
from quire.core.beam_search import BeamSearch
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import Ask
from quire.engine.beam_sequences import BeamSequences
from quire.llm.beam_outputs import BeamSearchOutput
from quire.logprobs import LogprobTable
from quire.types import FinishReason, Request, RequestError, StepOutput, TokenIds

WINDOWS = "qwen2-mixed-windows"
PARAMS = BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> Iterator[LLM]:
    with LLM(checkpoint("llama3.1"), progress=False, max_model_len=200) as made:
        yield made


def asked(seed: int) -> tuple[list[int], BeamSearchParams]:
    """A random prompt and search."""
    rng = random.Random(seed)
    tokens = rng.choice([1, 2, 5, 20])
    return [rng.randrange(3, 128) for _ in range(rng.randrange(1, 60))], BeamSearchParams(
        beam_width=rng.choice([2, 3, 4, 8]),
        max_tokens=tokens,
        length_penalty=rng.choice([0.0, 0.5, 1.0, 2.0, -1.0]),
        early_stopping=rng.choice([True, False, "never"]),  # type: ignore[arg-type]
        ignore_eos=True,
        include_stop_str_in_output=True,
        stop_token_ids=tuple(rng.sample(range(128), rng.choice([1, 2, 20]))),
        min_tokens=min(tokens, rng.choice([0, 0, 1, 3])),
    )


def reference(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """The sequences of transformers, without padding, and their scores."""
    stops = list(params.stop_token_ids)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens, min_new_tokens=params.min_tokens or None,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping, eos_token_id=stops,
            pad_token_id=0, do_sample=False, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        output = row[len(prompt) :]
        end = next((i for i, token in enumerate(output) if i >= params.min_tokens and token in stops), None)
        found.append((row if end is None else row[: len(prompt) + end + 1], score))
    return found


def numbers(found: BeamSearchOutput) -> list[tuple[list[int], float, list[float]]]:
    return [
        (beam.tokens, beam.score, [entry[0].logprob for entry in beam.logprobs]) for beam in found.sequences
    ]


@pytest.mark.parametrize("name", ["llama3.1", WINDOWS])
def test_sequences_and_scores_equal_transformers(checkpoint: Folder, name: str) -> None:
    folder = checkpoint(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with LLM(folder, progress=False, max_model_len=200) as llm:
        for seed in range(16):
            prompt, params = asked(seed)
            (found,) = llm.beam_search([prompt], params)
            expected = reference(model, prompt, params)
            assert [beam.tokens for beam in found.sequences] == [tokens for tokens, _ in expected], seed
            scores = [beam.score for beam in found.sequences]
            assert scores == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2, "max_num_batched_tokens": 7, "max_num_seqs": 3},  # chunks; beams wait for one another
        {"num_kv_blocks": 28, "max_num_seqs": 16},  # preempted
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_same_bits_in_any_company(checkpoint: Folder, options: dict[str, Any]) -> None:
    folder, common = checkpoint(WINDOWS), {"max_model_len": 96, "progress": False}
    searches = [asked(seed) for seed in range(5)]
    with LLM(folder, threads=1, **common) as llm:
        alone = [numbers(llm.beam_search([prompt], params)[0]) for prompt, params in searches]
    with LLM(folder, **common, **options) as llm:
        engine, scheduler = llm._engine, llm.built.core.scheduler
        asks = [
            Ask(prompt=[5, 6, seed + 7] * 9, params=SamplingParams(max_tokens=50, seed=seed))
            for seed in range(6)
        ]
        others = engine.add(asks)
        for (prompt, params), expected in zip(searches, alone, strict=True):
            assert numbers(llm.beam_search([prompt], params)[0]) == expected
            scheduler.audit()
        together = llm.beam_search([searches[0][0], searches[1][0]], searches[0][1])
        assert numbers(together[0]) == alone[0]
        if "num_kv_blocks" in options:
            assert scheduler.num_preemptions > 0
        engine.abort(others)
        assert scheduler.blocks_used == 0
        assert not llm.built.core.has_work()


def test_beams_share_full_blocks(llm: LLM) -> None:
    """A beam that forks finds the full blocks of its parent, and computes at most one block again."""
    prompt, width = [7, 9, 11] * 30, 8
    core, before = llm.built.core, len(llm.step_records())
    llm.beam_search([prompt], BeamSearchParams(width, 40, ignore_eos=True))
    records = llm.step_records()[before:]
    assert len(records) == 40
    assert records[0].prefill_tokens == len(prompt)
    block = core.scheduler.config.block_size
    for record in records[1:]:
        assert record.prefill_tokens + record.decode_tokens <= width * block
    # all blocks of the prompt are held once, and each beam holds few of its own
    assert max(record.blocks_used for record in records) < len(prompt) // block + 4 * width
    assert core.scheduler.blocks_used == 0


def test_beam_search_finds_the_prompt_in_the_cache(llm: LLM) -> None:
    prompt = list(range(3, 83))
    first = llm.beam_search([prompt], PARAMS)
    before = len(llm.step_records())
    assert llm.beam_search([prompt], PARAMS) == first
    assert llm.step_records()[before].prefill_tokens <= llm.built.core.scheduler.config.block_size


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_an_abort_frees_all_blocks(llm: LLM, steps: int) -> None:
    ask = Ask(
        prompt=[9, 8, 7] * 12,
        params=SamplingParams(n=3, max_tokens=60, ignore_eos=True),
        beams=Beams(width=5),
    )
    (output,) = llm._engine.add([ask])
    for _ in range(steps):
        llm._engine.advance([output])
    assert not output.finished
    llm._engine.abort([output])
    assert output.finished
    assert {sample.finish_reason for sample in output.outputs} == {FinishReason.ABORT}
    scheduler = llm.built.core.scheduler
    assert scheduler.blocks_used == scheduler.num_running == scheduler.num_waiting == 0
    scheduler.audit()


def test_a_row_that_fails_ends_the_search_and_frees_all_blocks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, sample = llm.built.core, llm.built.core.worker.sample

    def failing(masks: Any = None) -> StepOutput:
        result = sample(masks)
        if len(result.token_ids) == 3:
            result.failed[1], result.token_ids[1] = FinishReason.ERROR, []
        return result

    monkeypatch.setattr(core.worker, "sample", failing)
    params = SamplingParams(n=2, max_tokens=60, ignore_eos=True)
    (output,) = llm._engine.add([Ask(prompt=[9, 8, 7] * 12, params=params, beams=Beams(width=3))])
    while not output.finished:
        llm._engine.advance([output])
    assert [sample.finish_reason for sample in output.outputs] == [FinishReason.ERROR] * 2
    assert not core.has_work()
    assert core.scheduler.blocks_used == 0
    core.scheduler.audit()


def test_a_stop_token_is_left_out_unless_asked_for(llm: LLM) -> None:
    (found,) = llm.beam_search(["Once upon"], PARAMS)
    first = found.sequences[0]
    stop = first.tokens[len("Once upon") + 3]
    (kept,) = llm.beam_search(
        ["Once upon"],
        BeamSearchParams(4, 24, ignore_eos=True, stop_token_ids=[stop], include_stop_str_in_output=True),
    )
    (cut,) = llm.beam_search(["Once upon"], BeamSearchParams(4, 24, ignore_eos=True, stop_token_ids=[stop]))
    stopped = 0
    for whole, short in zip(kept.sequences, cut.sequences, strict=True):
        assert (whole.finish_reason, whole.score) == (short.finish_reason, short.score)
        ends = whole.finish_reason is FinishReason.STOP
        assert short.tokens == (whole.tokens[:-1] if ends else whole.tokens)
        assert short.stop_reason == (stop if ends else None)
        stopped += ends
    assert stopped
    assert first.text is not None
    assert first.text.startswith("Once upon")


def test_one_beam_is_greedy(llm: LLM) -> None:
    (greedy,) = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    (found,) = llm.beam_search(["Hello"], BeamSearchParams(1, 24, ignore_eos=True))
    assert found.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_speculation_leaves_beams_alone(checkpoint: Folder, llm: LLM) -> None:
    prompt = [7, 9, 11] * 10
    expected = llm.beam_search([prompt], PARAMS)
    with LLM(checkpoint("llama3.1"), progress=False, max_model_len=200, speculate="ngram") as drafting:
        assert drafting.beam_search([prompt], PARAMS) == expected
        assert not any(record.drafted for record in drafting.step_records())


def test_without_chunks_a_beam_that_starts_again_must_fit_in_a_step() -> None:
    config = SchedulerConfig(num_blocks=64, max_num_batched_tokens=40, enable_chunked_prefill=False)
    beams = BeamSequences(Scheduler(config))
    for tokens, fits in ((21, True), (22, False)):
        request = Request(
            request_id=str(tokens),
            prompt_token_ids=TokenIds([5] * 20),
            params=SamplingParams(max_tokens=tokens),
            beams=Beams(width=2),
        )
        with nullcontext() if fits else pytest.raises(RequestError, match="exceed max_num_batched_tokens 40"):
            beams.add(request)


def test_async_llm_finds_the_same(checkpoint: Folder, llm: LLM) -> None:
    expected = llm.beam_search(["Once upon", [5, 6, 7]], PARAMS)

    async def run() -> list[BeamSearchOutput]:
        async with AsyncLLM(checkpoint("llama3.1"), max_model_len=200) as other:
            return await other.beam_search(["Once upon", [5, 6, 7]], PARAMS)

    assert asyncio.run(run()) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (BeamSearchParams(0, 5), r"beam_width: 0 is not an integer in \[1, 32\]"),
        (BeamSearchParams(33, 5), r"beam_width: 33 is not an integer in \[1, 32\]"),
        (BeamSearchParams(2, 5, length_penalty=11.0), r"length_penalty: 11.0 is not a number in \[-10, 10\]"),
        (BeamSearchParams(2, 5, length_penalty=float("nan")), "length_penalty: nan is not a number"),
        (BeamSearchParams(2, 5, early_stopping="yes"), "early_stopping: 'yes' is not true, false or 'never'"),  # type: ignore[arg-type]
        (BeamSearchParams(2, 5, temperature=0.7), "temperature: 0.7 is not 0"),
        (BeamSearchParams(32, 5, stop_token_ids=range(3, 40)), "stop_token_ids: 38 stop tokens and 32 beams"),
        (SamplingParams(), "params: must be a BeamSearchParams"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_by_name(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.beam_search(["Hello"], params)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"stop": ["a"]}, "stop"), ({"repetition_penalty": 1.2}, "repetition_penalty"), ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"), ({"banned_token_ids": [5]}, "banned_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"), ({"n": 3}, "n"),
    ],
)  # fmt: skip
def test_parameters_that_would_change_nothing_are_refused(llm: LLM, more: dict[str, Any], field: str) -> None:
    ask = Ask(prompt=[5], params=SamplingParams(max_tokens=4, **more), beams=Beams(width=2))
    with pytest.raises(RequestError, match=f"^{field}: "):
        llm._engine.add([ask])


def test_of_equal_sums_the_first_beam_and_the_likelier_token_come_first() -> None:
    search = BeamSearch(Beams(width=2), SamplingParams(), (), 2)
    assert search.advance([LogprobTable.of([])] and [_table({4: -1.0, 3: -1.0, 5: -2.0})]) == [0, 0]
    assert [beam.tokens for beam in search.running] == [(4,), (3,)]
    assert search.advance([_table({1: -1.0}), _table({1: -1.0})]) == []
    assert [beam.tokens for beam in search.finished] == [(4, 1), (3, 1)]
    assert [beam.score for beam in search.finished] == [-1.0, -1.0]


def _table(likely: dict[int, float]) -> LogprobTable:
    """The likeliest tokens at one position."""
    ids, values = list(likely), list(likely.values())
    table = LogprobTable()
    table.add([ids[0], *ids], [values[0], *values], 1)
    return table
