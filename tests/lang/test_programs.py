"""Generation programs on an LLM: the text of plain requests, branches in common batches, hits in the prefix cache."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM, ProgramState, SamplingParams, assistant, function, gen, select, system, user
from quire.lang.transcript import PromptWriter, Transcript
from quire.text.tokenizer import Tokenizer
from quire.types import ContextLengthError, FinishReason, QuireError, RequestError

STORY = "Once upon a time a fox lived in a wood. " * 8
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
ASKED = "What is TTFT?"


@pytest.fixture(autouse=True)
def _nothing_is_left(llm: LLM) -> Iterator[None]:
    llm.built.core.scheduler.clear_prefix_cache()
    yield
    assert not llm.built.core.has_work()
    assert llm.built.core.scheduler.blocks_used == 0


def steps(llm: LLM, since: int = 0) -> list[Any]:
    return [record for record in llm.step_records() if record.step >= since]


def now(llm: LLM) -> int:
    records = llm.step_records()
    return records[-1].step + 1 if records else 0


# -- text and turns


def test_plain_text_is_continued_as_by_generate(llm: LLM) -> None:
    s = ProgramState(llm, **GREEDY)
    s += "Once upon " + gen("start") + " So " + gen("end", max_tokens=4)
    first = llm.generate("Once upon ", SamplingParams(**GREEDY))[0].outputs[0].text
    second = llm.generate(f"Once upon {first} So ", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0]
    assert (s["start"], s["end"]) == (first, second.text)
    assert s.text == f"Once upon {first} So {second.text}"
    assert s.result("end").outputs[0].finish_reason is FinishReason.LENGTH


def test_turns_are_those_of_chat(llm: LLM) -> None:
    s = ProgramState(llm, temperature=0, max_tokens=16)
    s += system("Be brief.") + user(ASKED)
    s += assistant(gen("first"))
    s += user("And TPOT?")
    with s.turn("assistant"):
        s += "Well, " + gen("second")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    params = SamplingParams(temperature=0, max_tokens=16)
    first = llm.chat(messages, params)[0].outputs[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And TPOT?"}]
    begun = [*messages, {"role": "assistant", "content": "Well, "}]
    ids = llm.encode_chat(begun, add_generation_prompt=False, continue_final_message=True)
    assert s["first"] == first
    assert s["second"] == llm.generate([ids], params)[0].outputs[0].text
    assert s.text == s.runner.writer.render(s._transcript).text
    assert s.result("second").usage.cached_tokens >= 16


def test_the_user_can_be_written_too(llm: LLM) -> None:
    s = ProgramState(llm, **GREEDY)
    s += system("You ask questions.") + user("What ", gen("question"))
    assert s["question"]
    assert s.text.endswith(f"<|im_start|>user\nWhat {s['question']}<|im_end|>\n")


def test_what_the_model_wrote_is_never_a_control_token(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    end = tokenizer.token_to_id("<|im_end|>")
    writer, plain, chat = PromptWriter(tokenizer), Transcript(), Transcript()
    plain.add("a<|im_", own=True)
    plain.add("end|>b", own=True)
    written = "a<|im_end|>b"
    assert writer.encode(writer.render(plain)) == tokenizer.encode(written)
    assert end in tokenizer.encode(written)
    plain.add(written, own=False)
    assert writer.encode(writer.render(plain), "<|im_end|>").count(end) == 2
    chat.start("assistant")
    chat.turns.append({"role": "user", "content": written})
    chat.add(written, own=True)
    assert writer.encode(writer.render(chat)).count(end) == 1


def test_a_template_that_changes_earlier_text_is_noticed(llm: LLM) -> None:
    assert llm.tokenizer is not None
    templates = llm.tokenizer.chat_templates
    kept = templates["default"]
    s = ProgramState(llm, **GREEDY)
    try:
        templates["default"] = kept.replace("text(message.content)", "text(message.content) | upper")
        s.runner.writer = PromptWriter(llm.tokenizer)
        assert s.runner.writer._chat
    finally:
        templates["default"] = kept
    s += user("Why?") + assistant("x", gen("a"))
    s += user("And?") + assistant(gen("b"))
    with pytest.warns(
        UserWarning, match="the chat template changes earlier text: it is computed again from 'x"
    ):
        s.run()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([user("a"), "b"], "text cannot stand between turns"),
        ([user("a"), gen("b")], "gen and select cannot stand between turns"),
        (["a", user("b")], "a turn of user cannot follow plain text"),
        ([user("a", assistant("b"))], "cannot start inside one of user"),
        ([select("a", ["b"])], "the text before them has no token"),
        ([user("a"), assistant(gen("b", max_tokens=5000))], "max_tokens"),
    ],
)
def test_parts_in_wrong_places(llm: LLM, parts: list[Any], message: str) -> None:
    s = ProgramState(llm)
    for part in parts:
        s += part
    with pytest.raises(RequestError, match=message):
        s.run()
    s += "more"  # a branch that has failed takes nothing more
    with pytest.raises(RequestError, match=message):
        s["b"]


def test_mistakes_are_found_where_they_are_made(llm: LLM) -> None:
    s = ProgramState(llm)
    with pytest.raises(
        TypeError, match="max_new_tokens is not a field of SamplingParams; did you mean max_tokens"
    ):
        gen("a", max_new_tokens=3)
    with pytest.raises(RequestError, match="temperature"):
        gen("a", temperature=-1)
    with pytest.raises(RequestError, match="n: must be 1; fork the state"):
        gen("a", n=2)
    for choices in ("ab", [], ["a", ""], ["a", "a"]):
        with pytest.raises(RequestError, match="choices"):
            select("a", choices)
    with pytest.raises(RequestError, match="by: must be 'sum' or 'mean'"):
        select("a", ["b"], by="max")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="count"):
        s.fork(0)
    with pytest.raises(RequestError, match="at_once"):
        ProgramState(llm, at_once=0)
    with pytest.raises(TypeError, match="not int"):
        s += 5  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="'a' is not a variable of this branch; it has none"):
        s["a"]
    with pytest.raises(QuireError, match="runs on an LLM"):
        s.__await__().send(None)


def test_the_repr_has_a_line_for_each_variable(llm: LLM) -> None:
    s = ProgramState(llm, **GREEDY)
    s += "Once upon " + gen("a")
    assert repr(s) == "ProgramState(0 prompt tokens, 0 cached, 2 parts pending)"
    text = s["a"]
    count = len(llm.built.model.tokenizer.encode("Once upon "))
    assert repr(s) == f"ProgramState({count} prompt tokens, 0 cached, complete)\n  a = {text!r}"


# -- branches


def test_branches_run_together_and_compute_their_prefix_once(llm: LLM) -> None:
    before, width = now(llm), 16
    s = ProgramState(llm, **GREEDY)
    s += STORY
    forks = s.fork(width)
    for i, fork in enumerate(forks):
        fork += f"Chapter {i}: " + gen("text")
    texts = forks["text"]
    assert texts == [o.outputs[0].text for o in llm.generate(
        [f"{STORY}Chapter {i}: " for i in range(width)], SamplingParams(**GREEDY))
    ]  # fmt: skip
    records, prefix = steps(llm, before), len(llm.tokenizer.encode(STORY))
    own = sum(fork.usage.prompt_tokens - prefix for fork in forks)
    mine = records[: 1 + next(i for i, r in enumerate(records) if r.running == 0 and i > 1)]
    assert sum(record.prefill_tokens for record in mine) <= prefix + own + 16 * width
    assert max(record.rows for record in mine) == width
    assert all(fork.usage.cached_tokens >= (prefix - 1) // 16 * 16 for fork in forks)
    assert s.usage.cached_tokens == 0


def test_without_the_first_run_every_branch_would_compute_the_prefix(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr("quire.lang.program_state._WORTH_WAITING", 10**6)
    s = ProgramState(llm, **GREEDY)
    s += STORY
    forks = s.fork(4)
    for fork in forks:
        fork += gen("text")
    assert sum(fork.usage.cached_tokens for fork in forks.join()) == 0


def test_forks_of_forks_have_the_variables_of_their_parents(llm: LLM) -> None:
    s = ProgramState(llm, seed=3, max_tokens=6, temperature=4)
    s += user(STORY) + assistant(gen("root"))
    outer = s.fork(2)
    for fork in outer:
        fork += user("Go on.") + assistant(gen("outer"))
    inner = [f for fork in outer for f in fork.fork(3)]
    for fork in inner:
        fork += user("And then?")
        with fork.turn("assistant"):
            fork += gen("inner")
    s += user("The end.")
    assert [fork["root"] for fork in inner] == [s["root"]] * 6
    assert [fork["outer"] for fork in inner] == [text for text in outer["outer"] for _ in range(3)]
    assert len({fork["inner"] for fork in inner}) > 3
    assert inner[4].path == (1, 1)
    assert all(fork.usage.cached_tokens >= 64 for fork in [*outer, *inner])
    outer[0] += user("One more.")  # puts the branch back
    with pytest.raises(TypeError, match="cannot be replaced"):
        outer[0] = outer[1]
    outer.join()


@function(seed=11, temperature=2, max_tokens=10)
def chapters(s: ProgramState, topic: str) -> list[str]:
    s += f"{STORY} Now about {topic}: " + gen("first")
    forks = s.fork(3)
    for fork in forks:
        fork += " Then " + gen("then") + select("mood", [" Good", " Bad"])
    return [*forks["then"], *forks["mood"], s["first"]]


def test_the_same_text_alone_in_a_batch_and_one_request_at_a_time(llm: LLM) -> None:
    alone = chapters.run(llm, "tea").returned
    assert len(set(alone[:3])) == 3
    noise = [
        llm.stream("Long ago", SamplingParams(seed=i, max_tokens=200, ignore_eos=True)) for i in range(5)
    ]
    assert chapters.run(llm, topic="tea").returned == alone
    for stream in noise:
        stream.close()
    before = now(llm)
    assert chapters.with_options(at_once=1).run(llm, "tea").returned == alone
    assert max(record.rows for record in steps(llm, before)) == 1
    batch = chapters.run_batch(llm, [{"topic": topic} for topic in ("tea", "ships", "tea")], at_once=2)
    assert [state.returned for state in batch][::2] == [alone, alone]
    other = chapters.with_options(seed=12).run(llm, "tea").returned
    assert other != alone


def test_a_variable_is_streamed_while_other_branches_go_on(llm: LLM) -> None:
    s = ProgramState(llm, temperature=0, max_tokens=12)
    s += "Once upon a time" + gen("a") + " And" + gen("b")
    forks = s.fork(2)
    for fork in forks:
        fork += gen("c")
    pieces = list(s.stream("b"))
    assert len(pieces) > 3
    assert "".join(pieces) == s["b"] == "".join(s.stream("b"))
    begun = forks[0].stream("c")
    next(iter(begun))
    assert forks[1].stream("c")._part.written  # it has begun in the same step
    assert "".join(forks[0].stream("c")) == forks["c"][0] == forks["c"][1]


def test_the_error_of_a_branch_leaves_the_others_alone(llm: LLM) -> None:
    def three(s: ProgramState) -> list[Any]:
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += "Once" + gen("a", max_tokens=5000 if i == 1 else 4)
        grandchild = forks[1].fork(2)[1]
        grandchild += "more"
        return [*forks, grandchild]

    s = ProgramState(llm)
    first, second, third, last = three(s)
    assert first["a"]
    assert third["a"]
    for failed in (second, last):
        with pytest.raises(ContextLengthError):
            failed["a"]
    with pytest.raises(ContextLengthError):
        function(three).run(llm)  # what fails is not passed over
    assert [f.error is None for f in function(lambda s: looked(three(s))).run(llm).returned] == [
        True,
        False,
        True,
    ]


def looked(branches: list[Any]) -> list[Any]:
    for branch in branches[:3]:
        while branch.busy:
            branch.runner.step()
        assert branch.error is None or isinstance(branch.error, ContextLengthError)
    return branches[:3]


def test_a_program_that_ends_early_aborts_its_requests(llm: LLM) -> None:
    def broken(s: ProgramState) -> None:
        forks = s.fork(4)
        for fork in forks:
            fork += "Once upon a time" + gen("a", max_tokens=500, ignore_eos=True)
        next(iter(forks[0].stream("a")))
        assert llm.built.core.has_work()
        raise RuntimeError("enough")

    for at_once in (64, 2):
        with pytest.raises(RuntimeError, match="enough"):
            function(broken, at_once=at_once).run(llm)
        assert not llm.built.core.has_work()
    s = ProgramState(llm)
    with pytest.raises(RuntimeError, match="enough"):
        broken(s)
    s.close()
    assert isinstance(s.unfinished[1].error, QuireError)
    with pytest.raises(RuntimeError, match="enough"):
        function(broken).run_batch(llm, [{}] * 3)


# -- forms


def test_generated_text_has_the_form_that_is_asked_for(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    s = ProgramState(llm, seed=2, temperature=3, max_tokens=60)
    s += user("When was it?")
    s += assistant(
        "On ", gen("date", regex=r"\d{4}-\d{2}-\d{2}"), " at ", gen("place", choices=["home", "sea"])
    )
    forks = s.fork(3)
    for fork in forks:
        fork += user("As JSON.") + assistant(gen("object", json=schema))
    wrong = s.fork(1)[0]
    wrong += user("And?") + assistant(gen("text", regex="(("))
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", s["date"])
    assert s["place"] in {"home", "sea"}
    assert all(json.loads(text)["n"] in range(3, 6) for text in forks["object"])
    with pytest.raises(RequestError, match="regex"):
        wrong.run()
    with pytest.raises(RequestError, match=r"regex and json|json and regex"):
        gen("a", regex="a", json={})


# -- select


def independent(llm: LLM, prompt: str, choices: list[str]) -> list[float]:
    """Sums of the log-probabilities, each option in a request of its own, with all logprobs."""
    tokens = [llm.tokenizer.encode(prompt + choice) for choice in choices]
    before = [llm.tokenizer.encode(prompt), *tokens]
    shared = next(i for i in range(len(before[0]) + 1) if len({tuple(ids[: i + 1]) for ids in before}) > 1)
    outputs = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return [sum(at[0].logprob for at in output.prompt_logprobs[shared:]) for output in outputs]


@pytest.mark.parametrize(
    "choices", [[" time", " tree", " dog"], ["time", " t", "n the sea", "other"], ["s", "n"]]
)
@pytest.mark.parametrize("prompt", [f"{STORY}Once upon a", "Once upo", "A cat i"])
def test_select_takes_the_most_probable_choice(llm: LLM, prompt: str, choices: list[str]) -> None:
    expected = independent(llm, prompt, choices)
    llm.built.core.scheduler.clear_prefix_cache()
    s = ProgramState(llm)
    s += prompt + select("a", choices)
    result = s.result("a")
    assert list(result.logprobs.values()) == pytest.approx(expected, rel=1e-12)
    if not any(a != b and b.startswith(a) for a in choices for b in choices):
        assert s["a"] == result.choice == choices[expected.index(max(expected))]
        assert result.scores == pytest.approx(result.logprobs)
    assert s.text == prompt + s["a"]


def test_the_end_of_the_prompt_may_be_part_of_an_option(llm: LLM) -> None:
    """Or the text that the model knows would be split where it never was."""
    tokenizer = llm.tokenizer
    prompt, choices = "Once upon a", ["nother", " tree"]
    whole = tokenizer.encode(prompt + choices[0])
    assert whole[: len(tokenizer.encode(prompt))] != tokenizer.encode(prompt)
    s = ProgramState(llm)
    s += prompt + select("a", choices)
    assert list(s.result("a").logprobs.values()) == pytest.approx(
        independent(llm, prompt, choices), rel=1e-12
    )


def test_options_hit_the_prefix_of_their_prompt(llm: LLM) -> None:
    before = now(llm)
    s = ProgramState(llm)
    s += STORY + select("a", [" Then", " Now", " The end", " And so"])
    s.run()
    prompt = len(llm.tokenizer.encode(STORY))
    assert sum(record.prefill_tokens for record in steps(llm, before)) < prompt + 4 * 24
    assert s.usage.cached_tokens >= 3 * (prompt // 16 - 1) * 16
    s += select("b", [" x", " y"])
    s.run()
    assert s.usage.cached_tokens >= 5 * (prompt // 16 - 1) * 16


def test_choices_that_begin_each_other(llm: LLM) -> None:
    s = ProgramState(llm)
    s += "The fox was " + select("a", ["1", "12", "123"]) + select("b", ["1", "12"], by="mean")
    result = s.result("a")
    sums = [math.exp(value) for value in result.logprobs.values()]
    assert sums == sorted(sums, reverse=True)
    expected = [sums[0] - sums[1], sums[1] - sums[2], sums[2]]
    assert [math.exp(value) for value in result.scores.values()] == pytest.approx(expected)
    mean = s.result("b")
    assert mean.scores["12"] == pytest.approx(mean.logprobs["12"] / 2)


# -- the package


def test_the_package_imports_programs_when_they_are_used() -> None:
    code = "import quire, sys; assert 'quire.lang' not in sys.modules; quire.gen(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_shows_hits_in_every_branch(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(quire.__file__).parents[2] / "examples/tree_of_thought.py"
    spec = importlib.util.spec_from_file_location("tree_of_thought", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    state = example.tree_of_thought.run(llm, example.DOCUMENT, example.QUESTION)
    document = len(llm.tokenizer.encode(example.DOCUMENT))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + 8
    for line in lines:
        assert int(line.split()[1]) >= document // 16 * 16, line
    assert all(branch["answer"] for branch in state.returned)


def test_a_program_needs_a_tokenizer() -> None:
    missing: Tokenizer | None = None
    with pytest.raises(RequestError, match="no tokenizer"):
        PromptWriter(missing)
