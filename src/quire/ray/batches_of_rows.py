"""Rows of a Ray dataset through a model: one engine in each actor, all rows of a batch in it at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.llm import LLM, TextStream
from quire.loader import DEFAULT_MODEL
from quire.types import RequestError, SamplingParams
from quire.util.sizes import parse_size

# Columns that are added. Names are those of Ray's own processors where these have the thing.
_TEXT, _REASONING, _FINISH, _ERROR = "generated_text", "reasoning", "finish_reason", "error"
_COUNTS = {
    "num_input_tokens": "prompt_tokens",
    "num_cached_tokens": "cached_tokens",
    "num_generated_tokens": "completion_tokens",
}
_COLUMNS = (_TEXT, _REASONING, *_COUNTS, _FINISH, _ERROR)


class Predictor:
    """What `Dataset.map_batches` calls in its actors: prompts or conversations in, texts and counts of tokens out.

        dataset.map_batches(Predictor, fn_constructor_kwargs={"model": "quire-mini", "memory": "1GiB"},
                            concurrency=4, num_cpus=2, memory=2**30, batch_size=64)

    `predict` makes this call. `memory` is what the actor's process may hold, with what Ray has loaded into it before,
    but without the batches, which are Ray's; it has no default, since several actors share a machine. `threads` is by
    default the number of CPUs that Ray has given the actor. `column` holds prompts (texts or token ids) or
    conversations (lists of messages); by default it is `messages`, or `prompt`. `chat` are options of LLM.chat.
    `sampling_params` is one for all rows, also as a dictionary; None uses the checkpoint's. A row that is refused, such
    as one that is too long, ends the job, or with errors="column" has its reason in the column `error`.
    Further options are those of LLM. Raises what LLM raises, and ValueError.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        memory: str | int,
        threads: int | None = None,
        column: str | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        chat: Mapping[str, Any] | None = None,
        errors: str = "raise",
        **options: Any,
    ) -> None:
        if errors not in {"raise", "column"}:
            raise ValueError(f"errors: {errors!r} is not raise or column")
        if isinstance(sampling_params, Mapping):
            sampling_params = SamplingParams(**sampling_params)
        if sampling_params is not None and sampling_params.n != 1:
            raise ValueError("sampling_params: n must be 1: a row has one text")
        self._column, self._params, self._errors = column, sampling_params, errors
        self._chat = dict(chat or {})
        threads = threads or _assigned_cpus()
        if threads is not None:
            options["threads"] = threads
        self._llm = LLM(model, progress=False, memory=memory, **options)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a batch with those of the answers, one row for each. Raises ValueError, and RequestError for
        a row that is refused unless errors are a column.
        """
        column = self._column or ("messages" if "messages" in batch else "prompt")
        if column not in batch:
            raise ValueError(f"column: the batch has no {column!r}, only {', '.join(map(repr, batch))}")
        names = [name for name in _COLUMNS if name != _ERROR or self._errors == "column"]
        if taken := [name for name in names if name in batch]:
            raise ValueError(f"the batch has a column {taken[0]!r}, which is added: rename it")
        added: dict[str, list[Any]] = {name: [] for name in names}
        streams = [self._begin(row) for row in batch[column]]
        try:
            self._run([stream for stream in streams if isinstance(stream, TextStream)])
            for stream in streams:
                found = _answer_columns(stream)
                for name in names:
                    added[name].append(found[name])
        finally:
            for stream in streams:
                if isinstance(stream, TextStream):
                    stream.close()
        return {**batch, **{name: np.asarray(values, _kind(name)) for name, values in added.items()}}

    def _begin(self, row: Any) -> TextStream | str:
        """Queue a row; its reason if it is refused and errors are a column."""
        try:
            if not hasattr(row, "__len__"):  # None, or the NaN of a table
                raise RequestError("prompt", "there is none")
            if (messages := _conversation(row)) is not None:
                return self._llm.stream_chat(messages, self._params, **self._chat)
            return self._llm.stream(row, self._params)
        except RequestError as error:
            if self._errors == "raise":
                raise
            return str(error)

    @staticmethod
    def _run(streams: Sequence[TextStream]) -> None:
        """Run all to their end. Each is read in its turn, so that no more than a step's text is kept unread."""
        while streams:
            streams = [stream for stream in streams if next(stream, None) is not None]


def _conversation(row: Any) -> list[dict[str, Any]] | None:
    """The messages of a row; None for a prompt. Ray gives messages the fields of all, None where one has none."""
    if isinstance(row, str) or not len(row) or not isinstance(row[0], Mapping):
        return None
    return [{name: value for name, value in message.items() if value is not None} for message in row]


def _answer_columns(stream: TextStream | str) -> dict[str, Any]:
    """What a row gets by column; empty values for one that was refused with a reason."""
    if isinstance(stream, str):
        return {_TEXT: "", _REASONING: "", **dict.fromkeys(_COUNTS, 0), _FINISH: "", _ERROR: stream}
    output = stream.output
    (sample,) = output.outputs
    counts = {name: getattr(output.usage, field) for name, field in _COUNTS.items()}
    finish = str(sample.finish_reason)
    return {_TEXT: sample.text, _REASONING: sample.reasoning, **counts, _FINISH: finish, _ERROR: ""}


def _kind(name: str) -> Any:
    return np.int64 if name in _COUNTS else np.object_


def _assigned_cpus() -> int | None:
    """The CPUs that Ray has given this actor; None outside of Ray, which an actor has imported already."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


def predict(
    dataset: Any,
    model: str | Path = DEFAULT_MODEL,
    *,
    memory: str | int,
    threads: int = 1,
    actors: int | tuple[int, int] = 1,
    batch_size: int = 64,
    **options: Any,
) -> Any:
    """A Ray dataset with a model's answer to each row, computed by so many actors (or from so many to so many).

    `memory` and `threads` of an actor are also what Ray counts for it, so that a node gets no more actors than it has
    room for. `options` are those of Predictor. The result is lazy, as all of Ray Data.
    """
    return dataset.map_batches(
        Predictor,
        fn_constructor_kwargs={"model": model, "memory": memory, "threads": threads, **options},
        concurrency=actors,
        num_cpus=threads,
        memory=parse_size(memory) if isinstance(memory, str) else memory,
        batch_size=batch_size,
        batch_format="numpy",
    )
