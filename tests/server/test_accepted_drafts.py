"""Tokens of an answer that were accepted drafts, named for those who ask. How many are run depends on the load."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from helpers.server import LiveServer, Reply
from quire.answers import RowDrafts
from quire.engine.api import GenerateAsk
from quire.engine.front.output import OutputBuilder
from quire.server.draft_marks import DraftMarks, places_for
from quire.types import Request, SamplingParams, TokenIds

ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
MARKED = ASKED | {"return_accepted_drafts": True, "return_token_ids": True}


def predicted(server: LiveServer) -> dict[str, Any]:
    """The text that the model will say, with a part in the middle that it won't."""
    said = server.chat(**ASKED).json["choices"][0]["message"]["content"]
    half = len(said) // 2
    return {"type": "content", "content": said[:half] + "something else" + said[half:]}


def rising(positions: list[int], tokens: int) -> bool:
    return all(a < b for a, b in pairwise(positions)) and all(0 < at < tokens for at in positions)


def marks(reply: Reply) -> dict[int, list[int]]:
    """Those of a stream, by choice; each chunk names some of its own tokens."""
    found: dict[int, list[int]] = defaultdict(list)
    sent: dict[int, int] = defaultdict(int)
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            first = sent[choice["index"]]
            sent[choice["index"]] += len(choice.get("token_ids", ()))
            own = choice.get("accepted_drafts", [])
            assert all(first <= at < sent[choice["index"]] for at in own)
            found[choice["index"]] += own
    return dict(found)


def test_a_whole_answer_names_its_accepted_drafts(server: LiveServer) -> None:
    prediction = predicted(server)
    plain = server.chat(prediction=prediction, **ASKED).json["choices"]
    body = server.chat(prediction=prediction, **MARKED).json
    (choice,) = body["choices"]
    positions = choice.pop("accepted_drafts")
    assert rising(positions, len(choice.pop("token_ids")))
    counts = body["usage"]["completion_tokens_details"]
    assert len(positions) == counts["accepted_prediction_tokens"]
    assert [choice] == plain
    (choice,) = server.chat(**MARKED).json["choices"]
    assert choice["accepted_drafts"] == []


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_chunks_name_their_own(server: LiveServer, more: dict[str, Any]) -> None:
    prediction = predicted(server)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    reply = server.chat(prediction=prediction, **MARKED, **usage, **more)
    (positions,) = marks(reply).values()
    counts = reply.events[-2]["usage"]["completion_tokens_details"]
    assert rising(positions, 60)
    assert len(positions) == counts["accepted_prediction_tokens"]


def test_each_choice_of_completions_has_its_own(server: LiveServer) -> None:
    asked: dict[str, Any] = {"temperature": 0.5, "seed": 3, "max_tokens": 40, "n": 2}
    plain = server.complete(["Hello", "Good"], **asked).json["choices"]
    prediction = {"type": "content", "content": plain[0]["text"]}
    asked |= {"prediction": prediction, "return_accepted_drafts": True, "return_token_ids": True}
    body = server.complete(["Hello", "Good"], **asked).json
    named = {choice["index"]: choice["accepted_drafts"] for choice in body["choices"]}
    counts = body["usage"]["completion_tokens_details"]
    assert sum(map(len, named.values())) == counts["accepted_prediction_tokens"]
    for choice in body["choices"]:
        assert rising(named[choice["index"]], len(choice["token_ids"]))
    streamed = marks(server.complete(["Hello", "Good"], stream=True, **asked))
    assert streamed.keys() <= named.keys()


def test_nobody_else_is_told(server: LiveServer) -> None:
    """Without the field an answer is byte for byte what it was, drafts or not."""
    prediction = predicted(server)
    for path in ("/v1/chat/completions", "/v1/completions"):
        asked = (
            {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hello"}
        )
        for stream in (False, True):
            body = asked | ASKED | {"stream": stream, "prediction": prediction}
            assert "accepted_drafts" not in server.post(path, body).text
            off = server.post(path, body | {"return_accepted_drafts": False}).text
            assert "accepted_drafts" not in off
    server.chat(return_accepted_drafts=3).error(400, param="return_accepted_drafts")


def test_positions_are_those_of_the_rows_that_were_drafted() -> None:
    """A row's accepted drafts come first among its tokens; a stream has each in the chunk of its token."""
    request = Request(request_id="r", prompt_token_ids=TokenIds([1]), params=SamplingParams(n=2))
    ask = GenerateAsk(request=request, accepted=places_for(2))
    builder = OutputBuilder(request, None, None, lambda _: None, keep=False, accepted=ask.accepted)
    stream, whole = DraftMarks([ask]), DraftMarks([ask])
    rows = [
        (0, [7], None),
        (1, [7], None),
        (0, [8, 9, 10], 2),
        (1, [8], 0),
        (0, [11], None),
        (0, [12, 13], 1),
    ]
    named = []
    for index, tokens, accepted in rows:
        if accepted is not None:
            builder.drafted(index, RowDrafts(3, accepted, predicted=True))
        delta = builder.grow(index, tokens, 0.0)
        assert delta is not None
        named.append(stream.of_next(index, len(delta.token_ids)))
    assert named == [[], [], [1, 2], [], [], [5]]
    assert [whole.of_all(index, count) for index, count in ((0, 7), (1, 2))] == [[1, 2, 5], []]
    assert whole.of_all(0, 5) == [1, 2]  # an answer that ended before
    assert builder.output.usage.accepted_draft_tokens == 3
