"""The wire: frames survive any cutting, messages come back as they were, and nothing else gets in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache_kinds import FullGroup, SlidingGroup, StateGroup
from quire.config.schema import EngineConfig
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import EngineStats, StepRecord
from quire.engine.host.messages import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    AddRequest,
    AskLog,
    AskRecords,
    AskView,
    ClearCache,
    Command,
    Fatal,
    Finish,
    FrameReader,
    Load,
    LoadProgress,
    Logprobs,
    LogRows,
    Note,
    Ping,
    Pong,
    ProtocolError,
    Ready,
    Records,
    Refused,
    Report,
    Stats,
    StepReport,
    Stop,
    Tell,
    Viewed,
    Vocabulary,
    command_decoder,
    frame,
    pack_handles,
    pack_ids,
    pack_logprobs,
    pack_score,
    report_decoder,
    unpack_handles,
    unpack_ids,
    unpack_logprobs,
)
from quire.engine.view import EngineView, ViewedBranch, ViewedSequence
from quire.logprobs import LogprobTable, TokenLogprob
from quire.parameters import TextTokens
from quire.text.token_bytes import TokenBytes
from quire.types import FinishReason, Grammar, Request, SamplingParams, SoftSpan, TokenIds
from quire.util.startup_spans import Span

PARAMS = SamplingParams(
    temperature=0.0, stop=["a", "é"], logit_bias={3: -1.5, 4: 2.0, "a": 1.0}, seed=2**64 - 1, allowed_token_ids=[1, 2],
    max_tokens=7, logprobs=3, n=4,
)  # fmt: skip
TEXTS = TextTokens(((1, 2), (3,)), (4,), ((5, 1.0),))
LOGPROBS = LogprobTable.of(
    [[TokenLogprob(5, -0.25, 1)], [TokenLogprob(2**31 - 1, -1e-30, 128), TokenLogprob(0, -9.5, 1)]]
)
COMMANDS: list[Command] = [
    Load("folder", EngineConfig(memory=2**33, dtype="bfloat16"), {"server": 5}),
    AddRequest(
        2**50,
        Request(
            request_id="näme",
            prompt_token_ids=TokenIds([0, 2**31 - 1]),
            params=PARAMS,
            arrival=1.25,
            priority=-3,
            namespace="salt",
            tenant="key",
            eos_token_ids=(7,),
            soft_tokens=(SoftSpan(0, 1, bytes(32)),),
            grammar=Grammar('start: "é"', bytes(32)),
            prediction=TokenIds([5, 6]),
            texts=TEXTS,
        ),
    ),
    Abort(1),
    Finish(2, 127),
    Vocabulary(TokenBytes(b"ab", b"\1\0\0\0\2\0\0\0")),
    Ping(3),
    AskRecords(4),
    ClearCache(),
    AskLog(),
    AskView(17),
    Tell(b"row"),
    Stop(),
]
GROUPS = FullGroup((0, 2)), SlidingGroup((1,), 8), StateGroup((3,), 640)
REPORTS: list[Report] = [
    LoadProgress(1, 2),
    Ready(SchedulerConfig(num_blocks=9, groups=GROUPS), 128, (1, 2), ("hm",),
          9, {"kv": 4}, ("line",), (("kv", 2**46, 8),), (Span("engine", "weights", 1.0, 2.5),)),
    Fatal("CheckpointError", "why"),
    StepReport(1, 2.0, 3.0, 4, 5, 6, 7, 8, pack_handles([9]), pack_handles([2**60]), pack_ids([1]), b"",
         pack_ids([0, 3, 1, 1]), (Note(0, 16, FinishReason.STOP, 2, pack_logprobs(LOGPROBS)),),
         pack_handles([9, 2**40, 16]), pack_score(3, LogprobTable.of([[TokenLogprob(5, -0.5, 2)]]))),
    Refused(1, "prompt", "no"),
    Pong(2),
    Stats(EngineStats(1, 2, 3, 4, 5, 16, step_phase_seconds={"forward": 0.5}, step_tokens=(1, 2), resident_bytes=14)),
    Records([StepRecord(1, 2.0, 3.0, 4.0, 5.0, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]),
    LogRows(b"log"),
    Viewed(
        EngineView(2, (0, -1, -2, 1), (ViewedSequence("é", 1, 2, 3, 4, 5, 6),), (ViewedBranch(-1, 16, 1),), b"log", 9)
    ),
]  # fmt: skip


@settings(max_examples=60)
@given(st.data())
def test_messages_survive_any_cutting(data: st.DataObject) -> None:
    for decode, messages in ((command_decoder().decode, COMMANDS), (report_decoder().decode, REPORTS)):
        whole = b"".join(bytes(frame(message)) for message in messages)
        cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=12).map(sorted))
        reader = FrameReader()
        got: list[Any] = []
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            got.extend([decode(body) for body in reader.feed(whole[start:end])])
        assert [type(message) for message in got] == [type(message) for message in messages]
        assert [frame(message) for message in got] == [frame(message) for message in messages]


def test_parameters_mean_the_same_on_the_other_side() -> None:
    (add,) = (command_decoder().decode(body) for body in FrameReader().feed(bytes(frame(COMMANDS[1]))))
    assert isinstance(add, AddRequest)
    params = add.request.params
    assert params.logit_bias == {3: -1.5, 4: 2.0, "a": 1.0}
    assert add.request.texts == TEXTS
    assert (params.seed, list(params.stop), params.n) == (2**64 - 1, ["a", "é"], 4)
    assert isinstance(add.request.prompt_token_ids, TokenIds)
    assert add.request.prompt_token_ids.tolist() == [0, 2**31 - 1]
    assert add.request.soft_tokens == (SoftSpan(0, 1, bytes(32)),)


def test_cache_groups_come_back_as_what_they_are() -> None:
    (ready,) = (report_decoder().decode(body) for body in FrameReader().feed(bytes(frame(REPORTS[1]))))
    assert isinstance(ready, Ready)
    assert ready.scheduler.groups == GROUPS
    strange = bytes(frame(REPORTS[1])).replace(b"\xa6window\x08", b"\xa6widow_\x08")
    with pytest.raises((ProtocolError, msgspec.ValidationError), match="no cache group"):
        [report_decoder().decode(body) for body in FrameReader().feed(strange)]


def test_packed_numbers_come_back() -> None:
    assert unpack_logprobs(pack_logprobs(LOGPROBS)) == LOGPROBS
    assert unpack_logprobs(pack_logprobs(None)) is None
    assert unpack_handles(pack_handles([0, 2**62])) == [0, 2**62]
    assert unpack_ids(pack_ids([])) == []


def test_bytes_that_are_not_a_message_are_refused() -> None:
    for decoder in (command_decoder(), report_decoder()):
        for body in (b"", b"\x90", b"\x91\x63", b"\x81\xa1a\x01", b"\xc1", b"\x80\x04\x95pickle"):
            with pytest.raises(msgspec.MsgspecError):
                decoder.decode(body)
    with pytest.raises(msgspec.MsgspecError):  # a report is no command
        command_decoder().decode(bytes(frame(REPORTS[3]))[HEADER_BYTES:])
    with pytest.raises(ProtocolError, match="over the limit"):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "little")))
    with pytest.raises(ProtocolError, match="differ in length"):
        unpack_logprobs(Logprobs(pack_ids([1]), b"", pack_ids([1]), pack_handles([1])))
    with pytest.raises(ProtocolError, match="incomplete numbers"):
        unpack_logprobs(Logprobs(pack_ids([1]), b"", pack_ids([1]), b"1"))
