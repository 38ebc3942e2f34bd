"""One LLM for several streams, calls and threads; what it says when it is used in a way that cannot work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire.types import ContextLengthError, QuireError, RequestError
from quire.util.turns import Turns

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
ONCE, AGO = "Once upon a time", "Long ago"


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return LLM(checkpoint("llama3.1"), progress=False, max_model_len=200)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, str]:
    return {prompt: _text(llm.generate(prompt, GREEDY)) for prompt in (ONCE, AGO)}


def _text(outputs: list[RequestOutput]) -> str:
    return outputs[0].outputs[0].text


def test_streams_in_turns_lose_nothing(llm: LLM, alone: dict[str, str]) -> None:
    texts = ["", ""]
    for pair in zip_longest(llm.stream(ONCE, GREEDY), llm.stream(AGO, GREEDY)):
        for i, delta in enumerate(pair):
            texts[i] += delta.text if delta else ""
    assert texts == [alone[ONCE], alone[AGO]]


def test_generate_while_a_stream_is_open(llm: LLM, alone: dict[str, str]) -> None:
    stream = llm.stream(ONCE, GREEDY)
    text = next(stream).text
    assert _text(llm.generate(AGO, GREEDY)) == alone[AGO]
    assert stream.output.finished  # it shared the steps, and its text waits
    assert text + "".join(delta.text for delta in stream) == alone[ONCE]
    assert list(stream) == []


def test_threads_share_the_engine(llm: LLM, alone: dict[str, str]) -> None:
    def work(i: int) -> bool:
        prompt = (ONCE, AGO)[i % 2]
        streamed = "".join(delta.text for delta in llm.stream(prompt, GREEDY))
        return streamed == _text(llm.generate(prompt, GREEDY)) == alone[prompt]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))
    assert max(record.rows for record in llm.step_records()) > 2  # they ran together
    assert llm.built.core.scheduler.blocks_used == 0


def test_a_stream_that_is_dropped_ends_its_request(llm: LLM) -> None:
    scheduler = llm.built.core.scheduler
    llm.stream(ONCE, LONG)  # never begun
    stream = llm.stream(ONCE, LONG)
    next(stream)
    assert scheduler.blocks_used > 0
    del stream
    assert scheduler.blocks_used == 0
    assert not llm.built.core.has_work()
    with llm.stream(ONCE, LONG) as stream:
        next(stream)
    assert scheduler.blocks_used == 0
    assert list(stream) == []


def test_an_interrupt_ends_the_call_and_nothing_else(
    llm: LLM, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, steps = llm.built.core.worker.forward, 0

    def interrupted(out: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(out)

    monkeypatch.setattr(llm.built.core.worker, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([ONCE] * 4, LONG)
    assert not llm.built.core.has_work()
    assert _text(llm.generate(ONCE, GREEDY)) == alone[ONCE]


def test_after_a_failed_step_every_caller_gets_the_reason(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint("llama3.1"), progress=False, max_model_len=200) as llm:
        stream = llm.stream(ONCE, GREEDY)
        next(stream)

        def fail(_: Any) -> Any:
            raise MemoryError("none left")

        monkeypatch.setattr(llm.built.core.worker, "forward", fail)
        with pytest.raises(MemoryError):
            llm.generate(AGO, GREEDY)
        for call in (lambda: next(stream), lambda: llm.generate(AGO, GREEDY)):
            with pytest.raises(
                QuireError, match=r"a step failed \(MemoryError: none left\); create a new LLM"
            ):
                call()


def test_closing_frees_the_memory_of_an_llm_that_is_kept(checkpoint: Folder) -> None:
    """The sampler of an engine keeps its executor, and with it the weights and the cache."""
    llm = LLM(checkpoint("llama3.1"), progress=False, max_model_len=200)
    llm.generate(ONCE, GREEDY)
    core = llm.built.executor.core  # type: ignore[attr-defined]
    llm.close()
    assert sys.getrefcount(core) == 2  # this name, and the argument


def test_after_close_it_says_so(checkpoint: Folder) -> None:
    llm = LLM(checkpoint("llama3.1"), progress=False, max_model_len=200)
    stream = llm.stream(ONCE, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate(ONCE),
        lambda: llm.stream(ONCE),
        lambda: llm.chat([{"role": "user", "content": "Hi"}]),
        lambda: next(stream),
    ):
        with pytest.raises(QuireError, match="this LLM is closed"):
            call()
    stream.close()


FORK = """
import os, sys
from quire import LLM
from quire.types import QuireError
llm = LLM(sys.argv[1], progress=False, max_model_len=200)
llm.generate([[5, 6, 7]], use_tqdm=False)
child = os.fork()
if child == 0:
    try:
        llm.generate([[5, 6, 7]])
    except QuireError as error:
        print(error, flush=True)
    llm.close()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_is_refused_and_ends(checkpoint: Folder) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(checkpoint("llama3.1"))],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    message, status = done.stdout.splitlines()
    assert "its threads do not exist in a forked child" in message
    assert status == "7"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda llm: llm.generate(5),
            "prompts: must be a string, a list of token ids or a list of those, not int",
        ),
        (
            lambda llm: llm.generate(None),
            "prompts: must be a string, a list of token ids or a list of those, not None",
        ),
        (lambda llm: llm.generate(b"x"), "prompts: must be .*, not bytes"),
        (
            lambda llm: llm.generate([5.5]),
            "prompts: item 0 must be a string or a list of token ids, not float",
        ),
        (lambda llm: llm.generate([[1, 2], 3]), "prompts: item 1 must be .*, not int"),
        (lambda llm: llm.generate([1, "x"]), "prompts: 'x' is not a token id"),
        (lambda llm: llm.stream(5), "prompt: must be"),
        (lambda llm: llm.stream(["a", "b"]), "prompt: a stream takes one prompt, not 2"),
        (lambda llm: llm.generate("x", 0.7), "params: must be SamplingParams or a list .*, not float"),
        (lambda llm: llm.generate("x", [GREEDY] * 2), "params: got 2 for 1 prompts"),
        (lambda llm: llm.generate("x", priority=[1]), "priority: .*scheduling_policy"),
        (lambda llm: llm.generate("x", cache_salt=3), "cache_salt: must be a string, not int"),
        (lambda llm: llm.chat("Hi"), "messages: must be a list of messages or of conversations, not str"),
        (lambda llm: llm.chat([5]), "messages: item 0 must be a message or a list of messages, not int"),
    ],
)
def test_wrong_types_are_named(llm: LLM, call: Callable[[LLM], object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        call(llm)


def test_unknown_options_are_named(checkpoint: Folder) -> None:
    with pytest.raises(ValueError, match="max_seqs is not an option; did you mean max_num_seqs"):
        LLM(checkpoint("llama3.1"), max_seqs=3)


def test_arrays_are_prompts(llm: LLM) -> None:
    expected = llm.generate([[5, 6], [7, 8]], GREEDY)
    found = llm.generate(np.array([[5, 6], [7, 8]]), GREEDY)
    assert [o.outputs for o in found] == [o.outputs for o in expected]
    assert llm.generate(np.array([5, 6]), GREEDY)[0].outputs == expected[0].outputs
    assert llm.generate([], GREEDY) == []


def test_representations_in_notebooks_are_short(llm: LLM) -> None:
    (out,) = llm.generate(
        [[5, 6, 7] * 30], SamplingParams(n=2, max_tokens=80, logprobs=3, ignore_eos=True, seed=1)
    )
    lines = repr(out).splitlines()
    assert lines[0].startswith("RequestOutput('request-")
    assert "90 prompt tokens" in lines[0]
    assert [("80 tokens, length" in line, len(line) < 500) for line in lines[1:3]] == [(True, True)] * 2
    assert repr(llm) == "LLM(LlamaForCausalLM: f32 weights, context of 200 tokens)"


def test_turns_go_round() -> None:
    turns, order, waiting = Turns(), [], threading.Semaphore(0)

    def work(i: int) -> None:
        waiting.release()
        with turns:
            order.append(i)

    turns.acquire()
    threads = []
    for i in range(4):
        thread = threading.Thread(target=work, args=(i,))
        thread.start()
        waiting.acquire()
        while len(turns._waiting) <= i:  # it has queued
            pass
        threads.append(thread)
    assert not turns.acquire(blocking=False)
    turns.release()
    turns.acquire()  # after all earlier callers
    assert order == [0, 1, 2, 3]
    turns.release()
    for thread in threads:
        thread.join()


def test_a_length_that_does_not_fit_is_refused_and_none_is_the_rest(llm: LLM) -> None:
    for prompt, params, field, numbers in (
        (
            [5] * 10,
            SamplingParams(max_tokens=99_999),
            "max_tokens",
            "10 prompt tokens and 99999 to generate are 100009",
        ),
        (
            [5] * 10,
            SamplingParams(max_tokens=191),
            "max_tokens",
            "201, over the model's context of 200 tokens",
        ),
        ([5] * 200, SamplingParams(max_tokens=1), "prompt_token_ids", "200 tokens leave no room"),
    ):
        with pytest.raises(ContextLengthError, match=numbers) as refused:
            llm.generate(prompt, params)
        assert refused.value.field == field
    for length in (190, None):
        (output,) = llm.generate([5] * 10, SamplingParams(max_tokens=length, ignore_eos=True))
        assert output.usage.completion_tokens == 190
