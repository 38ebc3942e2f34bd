"""Runs a model over known tokens as it would be served, in chunks, and gives the logits of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, weight_origin
from quire.engine.build.load_weights import load_weights
from quire.engine.build.opening import Model
from quire.executor.base import F32, Executor, Limits, StepArrays, step_array_bytes
from quire.executor.kinds import executor_kind
from quire.program.memory import weight_bytes
from quire.program.ops.linear import Linear
from quire.records import dataclass
from quire.spec.draft import Features

WINDOW = 512  # tokens run as one sequence, at most the model's context
CHUNK = 32  # tokens per step; the logits of all of them are computed
CONTINUATION = 128  # the longest answer to one prompt, in tokens
OWN_TOKENS, OWN_ROUNDS = 512, 4  # prompts repeat until this many tokens of answers, or this many rounds
_F64 = npt.NDArray[np.float64]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens run as one sequence; predictions are compared from the first token after the `prompt`, except of those in
    the ranges [begin, end) of `others`: further prompts.
    """

    tokens: tuple[int, ...]
    prompt: int = 1
    others: tuple[tuple[int, int], ...] = ()

    @property
    def compared(self) -> npt.NDArray[np.bool_]:
        """Which tokens are predicted."""
        found = np.arange(len(self.tokens)) >= self.prompt
        for begin, end in self.others:
            found[begin:end] = False
        return found

    @property
    def predictions(self) -> int:
        return int(self.compared.sum())


def log_softmax(logits: F32) -> _F64:
    """Log probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    log_p: _F64 = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return log_p


class Scorer:
    """A model in one format that computes the logits of every token of a sequence.

    `beside` is a loaded scorer of the same model with the same weights, whose weights it uses; only the formats of the
    cache may differ. `layers`: it also leaves the residual stream after every layer.
    """

    def __init__(
        self,
        model: Model,
        asked: EngineConfig,
        longest: int,
        *,
        beside: Scorer | None = None,
        layers: bool = False,
    ) -> None:
        self._model, self.longest, self._beside = model, longest, beside
        asked = asked.replace(max_model_len=max(longest, 2), max_num_seqs=1)
        count = len(model.facts.spec.layers)
        features = Features(tuple(range(1, count + 1))) if layers else None
        facts = machine_facts(asked.execution.executor)
        self.config, self.program = choose(model, asked, facts, features=features)
        if beside is not None:
            if self.program.params != beside.program.params:
                raise ValueError("kv_cache_dtype: the weights would not be the same")
            self.program = replace(self.program, params=(), borrowed=self.program.params)
        self._kind = executor_kind(self.config)
        groups = len(self.program.cache_groups)
        size = self.config.asked.cache.block_size
        blocks = -(-longest // size)
        self.limits = Limits(CHUNK, 1, CHUNK, longest, blocks * groups, size)
        self._arrays = StepArrays(self.limits, groups)
        self.executor: Executor
        for group, table in enumerate(self._arrays.block_tables):
            table[0, :blocks] = np.arange(group * blocks, (group + 1) * blocks)

    @property
    def nbytes(self) -> int:
        """Bytes it will hold: the executor, its arrays, and the log probabilities of a chunk."""
        held = sum(self._kind.planned_bytes(self.program, self.limits).values())
        scores = 3 * CHUNK * self.program.vocab * 8
        return held + step_array_bytes(self.limits, len(self.program.cache_groups)) + scores

    @property
    def borrows(self) -> bool:
        """Whether it uses the weights of another."""
        return self._beside is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that it uses."""
        return weight_bytes(self.program if self._beside is None else self._beside.program)

    def load(self, progress: Progress | None) -> None:
        """Take the weights; once, before the first step."""
        beside = None if self._beside is None else self._beside.executor
        self.executor = self._kind.make(self.program, beside)
        if beside is None:
            load_weights(weight_origin(self._model), self.program, self.config, self.executor, progress)
        self.executor.bind(self.limits, self._arrays)

    def logits(self, tokens: Sequence[int], start: int) -> F32:
        """Logits [n, vocabulary] of tokens[start : start + CHUNK]; all tokens before must have been run."""
        n = self._fill(tokens, start)
        return self.executor.run(n, 1, n)["logits"]

    def residuals(self, tokens: Sequence[int], start: int) -> list[F32]:
        """As `logits`, the residual stream [n, dim] after each layer; for a scorer with `layers`."""
        found = self.executor.run(self._fill(tokens, start), 1, 0)
        return [rows for name, rows in found.items() if name.startswith("features")]

    def linear_inputs(self, tokens: Sequence[int], start: int) -> Iterator[tuple[str, F32]]:
        """As `logits`, the inputs [n, cols] of every linear of the body and the name of its weight, in order."""
        n, begin = self._fill(tokens, start), 0
        for at, op in enumerate(self.program.body):
            if isinstance(op, Linear):
                self.executor.run_range(n, 1, 0, begin, at)
                begin = at
                yield op.weight, self.executor.read(op.x, n)
        self.executor.run_range(n, 1, 0, begin, len(self.program.body))

    def _fill(self, tokens: Sequence[int], start: int) -> int:
        arrays, chunk = self._arrays, tokens[start : start + CHUNK]
        n = len(chunk)
        if start + n > self.longest:
            raise ValueError(f"tokens up to {start + n} of a passage, beyond the limit of {self.longest}")
        arrays.token_ids[:n], arrays.positions[:n] = chunk, range(start, start + n)
        arrays.slots[0], arrays.query_start[:2], arrays.logit_rows[:n] = 0, (0, n), range(n)
        return n

    def close(self) -> None:
        """Free everything."""
        self.executor.close()


def score(scorer: Scorer, passages: Sequence[Passage]) -> Iterator[F32]:
    """The logits of all predictions, chunk by chunk; each array is valid until the next."""
    for passage in passages:
        for start, wanted in _chunks(passage):
            logits = scorer.logits(passage.tokens, start)[: len(wanted)]
            if wanted.any():
                yield logits[wanted]


def targets(passages: Sequence[Passage]) -> Iterator[npt.NDArray[np.int64]]:
    """The tokens that `score` predicts, in chunks of the same sizes."""
    for passage in passages:
        tokens = np.array(passage.tokens, np.int64)
        for start, wanted in _chunks(passage):
            if wanted.any():
                yield tokens[start + 1 : start + 1 + CHUNK][wanted]


def _chunks(passage: Passage) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Where each chunk starts, and which of its tokens' predictions are compared; the last token has none."""
    compared = passage.compared
    for start in range(0, len(compared) - 1, CHUNK):
        yield start, compared[start + 1 : start + 1 + CHUNK]


def windows(tokens: Sequence[int], longest: int, stride: int | None = None) -> list[Passage]:
    """Windows of at most `longest` tokens, each `stride` (default: `longest`) after the one before.

    Every token but the first is predicted once, after at least `longest - stride` tokens of context where there are as
    many; with the default the first token of each window is not predicted.
    """
    if stride is None or stride >= longest:
        cuts = (tuple(tokens[at : at + longest]) for at in range(0, len(tokens), longest))
        return [Passage(window) for window in cuts if len(window) > 1]
    found, done = list[Passage](), 1
    for at in range(0, len(tokens), stride):
        end = min(at + longest, len(tokens))
        if end > done:
            found.append(Passage(tuple(tokens[at:end]), done - at))
            done = end
    return found


def own_answers(
    plain: Scorer,
    prompts: Sequence[Sequence[int]],
    seed: int | None,
    stops: set[int],
    most_tokens: int = OWN_TOKENS,
) -> list[Passage]:
    """A model's answers to prompts, each up to its end: drawn from its distributions, about `most_tokens` in all, one
    after the other in as few sequences as hold them; or without a `seed` its greedy answer to each prompt alone.
    """
    random = None if seed is None else np.random.default_rng(seed)
    found: list[_Talk] = []
    for prompt in list(prompts) * (1 if random is None else OWN_ROUNDS):
        if random is not None and sum(talk.answered for talk in found) >= most_tokens:
            break
        if not found or random is None or not found[-1].has_room(prompt):
            found.append(_Talk(plain))
        found[-1].answer(prompt[-(plain.longest // 2) :], random, stops)
    return [talk.passage() for talk in found]


class _Talk:
    """Prompts and a model's answers in one sequence: later answers have a long context."""

    def __init__(self, plain: Scorer) -> None:
        self._plain, self._tokens, self._start = plain, list[int](), 0
        self._prompts: list[tuple[int, int]] = []

    @property
    def answered(self) -> int:
        return len(self._tokens) - sum(end - begin for begin, end in self._prompts)

    def has_room(self, prompt: Sequence[int]) -> bool:
        """For a prompt and its longest answer."""
        return len(self._tokens) + len(prompt) + CONTINUATION <= self._plain.longest

    def answer(self, prompt: Sequence[int], random: np.random.Generator | None, stops: set[int]) -> None:
        """Append a prompt and the answer, of at least one token; greedy if `random` is None."""
        tokens, plain = self._tokens, self._plain
        self._prompts.append((len(tokens), len(tokens) + len(prompt)))
        tokens += prompt
        kept, most = len(tokens), min(len(tokens) + CONTINUATION, plain.longest)
        while len(tokens) < most and not (len(tokens) > kept and tokens[-1] in stops):
            rows = plain.logits(tokens, self._start)
            self._start += len(rows)
            if self._start == len(tokens):  # else: of the prompt
                tokens.append(_next(rows[-1:], random))

    def passage(self) -> Passage:
        (_, first), *others = self._prompts
        return Passage(tuple(self._tokens), first, tuple(others))


def _next(row: F32, random: np.random.Generator | None) -> int:
    """A token drawn from logits [1, vocabulary], or the likeliest."""
    if random is None:
        return int(row.argmax())
    shares = np.exp(log_softmax(row)[0]).cumsum()
    return min(int(np.searchsorted(shares, random.random() * shares[-1], "right")), len(shares) - 1)
