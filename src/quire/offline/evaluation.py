"""What `quire eval` measures besides the gate: perplexity by a strided window, and greedy answers."""

from __future__ import annotations

import math
import statistics

from quire.config.schema import EngineConfig
from quire.engine.build.opening import Model
from quire.offline.divergence import perplexity, side_by_side
from quire.offline.eval_text import check_same_tokens, prompts_of, tokenizer_of
from quire.offline.scorer import WINDOW, Progress, Scorer, own_answers, score, windows
from quire.records import dataclass

WINDOW_LIMIT = 4096  # the default window is the model's context, up to this


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a text: windows of `window` tokens, each `stride` after the one before, in which only the
    tokens that no window before had are predicted. `bits_per_byte` compares models with different tokenizers.
    """

    model: str
    tokens: int
    window: int
    stride: int
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a candidate's greedy answers are those of the original.

    same_tokens: the share of the original's tokens that the candidate finds likeliest too, after the same tokens.
    same_answers: answers that are equal to the end. common_tokens: the median of the tokens before the first
    difference.
    """

    answers: int
    tokens: int
    same_tokens: float
    same_answers: int
    common_tokens: float


def text_perplexity(
    model: Model, asked: EngineConfig, text: str, window: int | None = None, stride: int | None = None, *,
    loading: Progress | None = None, scoring: Progress | None = None,
) -> Perplexity:  # fmt: skip
    """Raises ValueError for a window beyond the context, a stride beyond the window, and a text shorter than a window
    that was asked for; MemoryBudgetError.
    """
    context = model.facts.spec.max_positions
    tokens = tokenizer_of(model).encode(text)
    if window is not None and not 2 <= window <= context:
        raise ValueError(f"window: {window} is not between 2 and the model's context of {context} tokens")
    if window is not None and len(tokens) < window:
        raise ValueError(f"window: the text has {len(tokens)} tokens, fewer than a window of {window}")
    if len(tokens) < 2:
        raise ValueError(f"eval: the text has {len(tokens)} tokens; at least 2 are needed")
    wide = window or min(context, WINDOW_LIMIT, len(tokens))
    step = stride or max(wide // 2, 1)
    if not 1 <= step <= wide:
        raise ValueError(f"stride: {step} is not between 1 and the window of {wide} tokens")
    scorer = Scorer(model, asked, wide)
    side_by_side(scorer, [])
    scorer.load(loading)
    passages = windows(tokens, wide, step)
    found = perplexity(scorer, passages, scoring)
    scorer.close()
    scored = sum(passage.predictions for passage in passages)
    size = len(text.encode()) * scored / len(tokens)
    return Perplexity(model.folder.name, scored, wide, step, found, math.log2(found) * scored / max(size, 1))


def greedy_agreement(
    original: Model, candidate: Model, asked: EngineConfig, changed: EngineConfig, file: str | None, *,
    loading: Progress | None = None, comparing: Progress | None = None,
) -> Agreement:  # fmt: skip
    """Compare answers to the lines of a file or to built-in prompts. Raises ValueError, MemoryBudgetError."""
    check_same_tokens(original, candidate)
    prompts = prompts_of(original, file)
    longest = min(WINDOW, original.facts.spec.max_positions, candidate.facts.spec.max_positions)
    one = Scorer(original, asked, longest)
    two = Scorer(candidate, changed, longest, beside=one if candidate is original else None)
    side_by_side(one, [two])
    one.load(loading)
    passages = own_answers(one, prompts, None, set(original.facts.generation.eos_token_ids))
    if not two.borrows:
        one.close()
    two.load(loading)
    common, same, done, total = list[int](), 0, 0, sum(passage.predictions for passage in passages)
    for passage in passages:
        chosen = [int(token) for rows in score(two, [passage]) for token in rows.argmax(-1)]
        equal = [a == b for a, b in zip(chosen, passage.tokens[passage.prompt :], strict=True)]
        common.append(equal.index(False) if False in equal else len(equal))
        same += sum(equal)
        done += len(equal)
        if comparing is not None:
            comparing(done, total)
    whole = sum(length == passage.predictions for length, passage in zip(common, passages, strict=True))
    two.close()
    if two.borrows:
        one.close()
    return Agreement(len(passages), total, same / total, whole, statistics.median(common))
