"""What a Predictor makes of a batch of rows; it needs no Ray for that."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.memory import memory_for
from quire import LLM, SamplingParams, openai_app
from quire.ray import Predictor
from quire.types import QuireError, RequestError

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def options() -> dict[str, Any]:
    return {"memory": memory_for(2**28), "max_model_len": 200, "threads": 1}


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor(folder, sampling_params=GREEDY, errors="column", **options())


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, progress=False, **options()) as made:
        yield made


def rows(*values: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(values), np.object_)
    for i, value in enumerate(values):
        made[i] = value
    return made


def test_rows_have_the_texts_that_they_have_alone(predictor: Predictor, llm: LLM) -> None:
    ids = llm.tokenizer.encode("ab") if llm.tokenizer else []
    prompts = ["Hello", "Once upon a time", np.array(ids), "x"]
    batch = predictor({"prompt": rows(*prompts), "id": np.arange(4)})
    params = SamplingParams(**GREEDY)
    alone = [llm.generate([one], params)[0] for one in ("Hello", "Once upon a time", ids, "x")]
    assert list(batch["generated_text"]) == [out.outputs[0].text for out in alone]
    assert list(batch["num_input_tokens"]) == [out.usage.prompt_tokens for out in alone]
    assert list(batch["num_generated_tokens"]) == [6] * 4
    assert batch["num_input_tokens"].dtype == np.int64
    assert list(batch["finish_reason"]) == ["length"] * 4
    assert list(batch["error"]) == [""] * 4
    assert list(batch["id"]) == [0, 1, 2, 3]


def test_all_rows_of_a_batch_are_in_the_engine_at_once(predictor: Predictor) -> None:
    predictor({"prompt": rows(*(f"row {i}" for i in range(8)))})
    assert max(step.rows for step in predictor._llm.step_records()) == 8


def test_a_refused_row_has_its_reason_and_the_others_their_texts(predictor: Predictor) -> None:
    batch = predictor({"prompt": rows("Hello", "long " * 400, None, float("nan"), "Hello")})
    first, *refused, last = batch["generated_text"]
    assert first == last != ""
    assert refused == [""] * 3
    assert "200" in batch["error"][1]
    assert list(batch["error"][2:4]) == ["prompt: there is none"] * 2
    assert list(batch["num_generated_tokens"]) == [6, 0, 0, 0, 6]


def test_a_refused_row_ends_the_batch_unless_errors_are_a_column(folder: Path) -> None:
    predictor = Predictor(folder, sampling_params=GREEDY, **options())
    with pytest.raises(RequestError, match="200"):
        predictor({"prompt": rows("Hello", "long " * 400)})
    assert "error" not in predictor({"prompt": rows("Hello")}), "it goes on after a refusal"
    mine = predictor({"prompt": rows("Hello"), "error": rows("the dataset's own")})
    assert list(mine["error"]) == ["the dataset's own"]


def test_conversations() -> None:
    """As Ray gives them: structs have the fields of all rows, None where a message has none."""
    predictor = Predictor(
        "quire-mini",
        memory=memory_for(2**28),
        threads=1,
        sampling_params=SamplingParams(temperature=0, max_tokens=4),
    )
    asked = [{"role": "system", "content": "Be brief.", "name": None}, {"role": "user", "content": "Hi"}]
    batch = predictor({"messages": rows(np.array(asked, np.object_), [asked[1]])})
    with LLM("quire-mini", progress=False, memory=memory_for(2**28), threads=1) as llm:
        plain = [[{"role": "system", "content": "Be brief."}, asked[1]], [asked[1]]]
        alone = llm.chat(plain, SamplingParams(temperature=0, max_tokens=4))
    assert list(batch["generated_text"]) == [out.outputs[0].text for out in alone]


def test_what_is_wrong_is_named(predictor: Predictor, folder: Path) -> None:
    with pytest.raises(ValueError, match="column: the batch has no 'prompt', only 'question'"):
        predictor({"question": rows("Hello")})
    with pytest.raises(ValueError, match="has a column 'generated_text', which is added"):
        predictor({"prompt": rows("a"), "generated_text": rows("b")})
    with pytest.raises(ValueError, match="n must be 1"):
        Predictor(folder, sampling_params={"n": 2}, **options())
    with pytest.raises(ValueError, match="errors: 'skip' is not raise or column"):
        Predictor(folder, errors="skip", **options())
    with pytest.raises(TypeError, match="memory"):
        Predictor(folder)  # type: ignore[call-arg]


def test_an_application_that_did_not_start_is_not_well(folder: Path) -> None:
    """Ray pickles it on its way to a replica."""
    application = pickle.loads(pickle.dumps(openai_app(folder, **options())))
    with pytest.raises(QuireError, match="not started"):
        application.check()
