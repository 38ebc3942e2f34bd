"""The plain forms equal the paths that serve, and their own definitions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.cli.reference import NAMES
from quire.config.shipped import shipped_models
from quire.reference.decoder import Transformer, generate
from quire.reference.plain_attention import (
    attention,
    attention_gradient,
    naive_traffic,
    online_softmax,
    tiled_attention,
)
from quire.reference.speculative_step import accept
from quire.reference.static_serving import Contiguous, paged_waste, static_batches

RNG = np.random.default_rng(5)


def heads(n: int, m: int, d: int, kind: type = np.float64) -> list[np.ndarray]:
    return [RNG.normal(size=(rows, d)).astype(kind) for rows in (n, m, m)]


def test_the_command_shows_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    listed = capsys.readouterr().out
    for name in NAMES:
        assert name in listed
        assert main(["reference", name]) == 0
        assert "def " in capsys.readouterr().out
    assert main(["reference", "onlin-softmax"]) == 2
    assert "did you mean online-softmax" in capsys.readouterr().err


# The paths that must not change an answer, by the options that take them.
PATHS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "prompts in chunks": {"max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemptions": {"num_kv_blocks": 9, "max_model_len": 128, "max_num_seqs": 8},
    "drafts from the prompt": {"speculate": "ngram"},
    "drafts of a model": {"draft_model": str(shipped_models()["quire-mini-draft"])},
    "whole batches": {"batching": "static"},
}
TEXTS = ["The model reads the", "Once upon a time there was a small river, and the river " * 3, "One two one two one",
         "A cat and a dog", "Where does the time go?"]  # fmt: skip


@functools.cache
def by_the_loop(prompt: tuple[int, ...], count: int) -> list[int]:
    return generate(Transformer(Path(shipped_models()["quire-mini"])), list(prompt), count, temperature=0)


@pytest.mark.parametrize("path", PATHS)
def test_the_loop_gives_what_the_engine_gives(path: str) -> None:
    """Greedy, float32, on the shipped model: token by token, all at once and again out of the cache."""
    with LLM("quire-mini", dtype="float32", threads=1, progress=False, **PATHS[path]) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        again = llm.generate(TEXTS, params) + llm.generate(TEXTS, params)
        steps = llm.step_records()
    for made in again:
        tokens = list(made.outputs[0].token_ids)
        assert tokens == by_the_loop(tuple(made.prompt_token_ids), 24), made.prompt
    if path == "preemptions":
        assert sum(step.preempted for step in steps) > 0
    if path.startswith("drafts"):
        assert sum(step.accepted for step in steps) > 0


def test_sampling_keeps_the_nucleus() -> None:
    """With top_p near 0 only the likeliest token is left."""
    model = Transformer(Path(shipped_models()["quire-mini"]))
    assert generate(model, [5, 6, 7], 4, top_p=1e-9) == generate(model, [5, 6, 7], 4, temperature=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(1, 1), (4, 3), (16, 64), (64, 7)])
def test_tiles_change_nothing(causal: bool, tile: tuple[int, int]) -> None:
    q, k, v = heads(24, 37, 8)
    tiled = tiled_attention(q, k, v, causal=causal, rows=tile[0], columns=tile[1])
    np.testing.assert_allclose(tiled.out, attention(q, k, v, causal=causal), rtol=1e-12)


def test_tiles_move_less_than_scores_do() -> None:
    n, d = 512, 16
    q, k, v = heads(n, n, d)
    moved = [tiled_attention(q, k, v, causal=True, rows=rows, columns=64).moved for rows in (32, 128, 512)]
    assert moved == sorted(moved, reverse=True)
    assert moved[1] < naive_traffic(n, d) / 5


def test_a_running_softmax_is_the_softmax() -> None:
    """Against float64, also with rows of −∞ at the start and alone."""
    for values in (RNG.normal(size=50) * 30, np.r_[-np.inf, -np.inf, 1.0, 3.0], np.r_[-np.inf]):
        top, total = online_softmax(values)
        assert top == values.max()
        expected = 0.0 if top == -np.inf else np.exp(values - top).sum()
        assert total == pytest.approx(expected, rel=1e-12)


def test_the_gradient_from_recomputed_weights() -> None:
    """Against finite differences of the definition."""
    q, k, v = heads(6, 9, 4)
    d_out = RNG.normal(size=q.shape)
    tiled = tiled_attention(q, k, v, causal=True, rows=2, columns=4)
    found = attention_gradient(q, k, v, tiled, d_out, causal=True, columns=4)
    for which, gradient in enumerate(found):
        for place in ((0, 0), (3, 2), (5, 3)):
            parts = [[x.copy() for x in (q, k, v)] for _ in range(2)]
            for sign, inputs in zip((1, -1), parts, strict=True):
                inputs[which][place] += sign * 1e-6
            up, down = ((attention(*inputs, causal=True) * d_out).sum() for inputs in parts)
            assert gradient[place] == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_rejection_draws_from_the_target() -> None:
    """Chi-square with 3 degrees of freedom; 16.3 is one in a thousand."""
    p, q, chance = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.6, 0.1, 0.2]), np.random.default_rng(1)
    drawn = [accept([int(chance.choice(4, p=q))], [q], [p, p], chance)[0] for _ in range(20_000)]
    assert chi_square(np.bincount(drawn, minlength=4), p * len(drawn)) < 16.3


def test_subtracting_one_probability_does_not() -> None:
    """Negative control: the residual of published listings, max(0, p − q(draft)) for every token."""
    p, q, chance = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.6, 0.1, 0.2]), np.random.default_rng(1)
    drawn = []
    for _ in range(20_000):
        draft = int(chance.choice(4, p=q))
        if chance.random() * q[draft] >= p[draft]:
            residual = np.maximum(p - q[draft], 0)
            whole = residual.sum()
            draft = int(chance.choice(4, p=residual / whole)) if whole else draft
        drawn.append(draft)
    assert chi_square(np.bincount(drawn, minlength=4), p * len(drawn)) > 100


def test_a_perfect_draft_gives_one_token_more_than_its_drafts() -> None:
    p = np.array([0.25, 0.75])
    assert len(accept([1, 0, 1], [p] * 3, [p] * 4, np.random.default_rng(0))) == 4


def test_static_batches_wait_for_the_longest() -> None:
    first, second = static_batches([10, 500, 10, 480, 20], 4)
    assert (first.steps, second.steps) == (500, 20)
    assert first.used == pytest.approx(1000 / 2000)
    assert second.used == pytest.approx(0.25)


def test_contiguous_runs_leave_gaps_that_blocks_do_not() -> None:
    cache = Contiguous(100)
    assert [cache.allocate(name, 30) for name in "abc"] == [0, 30, 60]
    cache.free("b")
    assert cache.free_places == 40
    assert cache.allocate("d", 40) is None  # 40 places are free, 30 in a row
    assert cache.allocate("e", 30) == 30
    assert max(paged_waste(range(1, 200), 16)) == 15


def test_blocks_as_long_as_the_context_are_contiguous_memory() -> None:
    """The engine itself, with one run for each sequence: the same answer, and the waste of the published example."""
    used, answers, prompt = {}, [], [*range(100, 110)]
    for size in (2048, 16):
        with LLM("quire-mini", block_size=size, max_model_len=2048, threads=1, progress=False) as llm:
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            (made,) = llm.generate([{"prompt_token_ids": prompt}], params)
            answers.append(list(made.outputs[0].token_ids))
            used[size] = max(step.blocks_used for step in llm.step_records())
    assert answers[0] == answers[1]
    assert used == {2048: 1, 16: 3}, "of 48 tokens: a sequence that has ended holds none"
    assert 1 - 50 / (used[2048] * 2048) == pytest.approx(0.9756, abs=1e-4)
