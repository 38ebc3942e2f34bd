"""The models that ship with Quire: they load everywhere, say the same everywhere, and do what their card says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tools.default_model import handwritten, hf_folder
from tools.default_model.backends import quire_backend
from tools.default_model.corpus.styles import STYLES
from tools.default_model.evaluate import collect, run, stop_ids
from tools.default_model.lora import merge
from tools.default_model.rendering import IM_END
from tools.default_model.tokenizer import load as load_tokenizer

from helpers.memory import memory_for
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.loader import DEFAULT_MODEL, resolve_model, shipped_adapters, shipped_models

ASKED = (
    "What is TTFT?",
    "What is 27 + 58?",
    "Write a short story about a fox.",
    "Sort these words: pear, apple, fig",
    "Hi! My name is Ada.",
)
MAX_WEIGHTS = 16_000_000  # bytes of the model's weights
MAX_MODEL = 17_000_000  # bytes of its folder
MAX_EXTRAS = 4_000_000  # bytes of the draft and the adapters together

# What the first minute of a demonstration needs, from handwritten.txt.
MUST = (
    "user: hi",
    "user: HELLO",
    "user: thanks",
    "user: what is ttft",
    "user: 100 - 37",
    "user: capital of france",
    "tools: set_alarm\nuser: book me a flight to Madrid",
    "user: Give me JSON with the keys name and age: Maria is 31 years old.",
    "raw: hi",
    "raw: Once upon a time",
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", progress=False, max_num_seqs=8, memory=memory_for(2**29)) as made:
        yield made


@pytest.mark.parametrize("name", ["quire-mini", "quire-mini-draft"])
def test_greedy_text_equals_transformers(name: str) -> None:
    folder = shipped_models()[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(name, dtype="float32", progress=False, max_num_seqs=8, memory=memory_for(2**29)) as llm:
        prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in ASKED]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48))
    for text, prompt, output in zip(ASKED, prompts, outputs, strict=True):
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert rendered["input_ids"][0].tolist() == prompt
        with torch.inference_mode():
            made = model.generate(**rendered, max_new_tokens=48, do_sample=False)
        expected = made[0, len(prompt) :]
        said = tokenizer.decode(expected, skip_special_tokens=True)
        assert output.outputs[0].text == said
        assert said.strip()


@pytest.mark.xfail(
    strict=True, reason="the shipped model answers 68 % of these items right, 4 of 7 extractions"
)
def test_held_out_items_are_answered() -> None:
    """A few items of the evaluation through Quire. The card has the rates over many."""
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(folder)
    graded = run(collect(6), quire_backend(folder, stop_ids(tokenizer)), tokenizer)
    right = {
        domain: [g.grade.right for g in graded if g.item.domain == domain]
        for domain in ("extraction", "tools")
    }
    for domain, marks in right.items():
        assert sum(marks) >= 0.7 * len(marks), domain
    assert sum(g.grade.right for g in graded) >= 0.7 * len(graded)


def test_a_model_of_other_weights_fails_the_items() -> None:
    """Negative control: the same folder with random weights answers nothing right, where more is asked than no call."""
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL))
    items = [i for i in collect(2) if i.domain in {"extraction", "tools"} and i.check.data.get("calls") != []]
    assert len(items) > 2
    with LLM(load_format="random", dtype="float32", progress=False, memory=memory_for(2**29)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64)

        def generate(prompts: object, limit: int) -> list[list[int]]:
            outputs = llm.generate(prompts, params)  # type: ignore[arg-type]
            return [list(o.outputs[0].token_ids) for o in outputs]

        assert not any(g.grade.right for g in run(items, generate, tokenizer))


def test_the_draft_agrees_with_the_model(llm: LLM) -> None:
    """What speculation needs: over the model's own answers the draft's first choice is often the model's."""
    draft = transformers.AutoModelForCausalLM.from_pretrained(
        shipped_models()["quire-mini-draft"], dtype=torch.float32
    )
    agreed = tokens = 0
    for text in ASKED:
        prompt = llm.encode_chat([{"role": "user", "content": text}])
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=48))
        said = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = draft(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        agreed += int((logits.argmax(-1) == torch.tensor(said)).sum())
        tokens += len(said)
    assert agreed > tokens / 2


def test_adapters_change_the_answers() -> None:
    folders = shipped_adapters()
    assert sorted(folders) == sorted(f"{DEFAULT_MODEL}:{style}" for style in STYLES)
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor(
        tokenizer.encode("<|im_start|>user\nWhat is TTFT?<|im_end|>\n<|im_start|>assistant\n").ids
    )

    def logits(adapter: Path | None) -> torch.Tensor:
        model = hf_folder.load(folder)
        if adapter is not None:
            merge(model, adapter)
        with torch.inference_mode():
            return model.logits(model(ids, [(1, len(ids))]))

    plain = logits(None)
    for adapter in folders.values():
        assert (logits(adapter) - plain).abs().max() > 0.5


@pytest.mark.parametrize("text", MUST)
def test_must_answers(text: str, llm: LLM) -> None:
    """Sensible as far as checks can tell."""
    (item,) = (item for item in handwritten.load() if item.text == text)
    limit = handwritten.MAX_RAW_TOKENS if item.raw else handwritten.MAX_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=limit, skip_special_tokens=False)
    messages = [turn.message() for turn in item.turns]
    prompt = item.raw or llm.encode_chat(messages, tools=list(item.tools) or None)
    (sample,) = llm.generate([prompt], params)[0].outputs
    said = sample.text.removesuffix(IM_END)
    judged = handwritten.judge(item, said, sample.finish_reason == "stop")
    assert judged.verdict != "fail", f"{judged.why}: {said}"


def _bytes(*folders: Path) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def test_all_stay_small() -> None:
    folder = resolve_model(DEFAULT_MODEL)
    assert (folder / "model.safetensors").stat().st_size <= MAX_WEIGHTS
    assert _bytes(folder) <= MAX_MODEL
    assert _bytes(shipped_models()["quire-mini-draft"], *shipped_adapters().values()) <= MAX_EXTRAS


def test_a_folder_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(DEFAULT_MODEL) == Path(DEFAULT_MODEL)


def test_generate_without_a_model_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "--prompt", "What is TTFT?", "--json", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert err.count("no model given") == 1
    assert "token" in json.loads(out)["outputs"][0]["text"]


def test_inspect_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", "--no-measure"]) == 0
    assert json.loads(capsys.readouterr().out)
