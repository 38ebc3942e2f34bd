"""LLM under vLLM's names: options, arguments and prompts, and a notebook's loop and bars."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tokenizers import Folder
from quire import LLM, SamplingParams, StructuredOutput
from quire.llm.asked import engine_options
from quire.types import RequestError
from quire.util import progress

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> Iterator[LLM]:
    """Made as a script for vLLM makes it."""
    with LLM(
        model=checkpoint("llama3.1"), tokenizer=None, tensor_parallel_size=1, trust_remote_code=False, dtype="float",
        quantization=None, seed=0, max_model_len=200, enforce_eager=False, swap_space=0, cpu_offload_gb=0,
        hf_overrides=None, disable_custom_all_reduce=False, num_gpu_blocks_override=64, progress=False,
    ) as made:  # fmt: skip
        yield made


def test_options_of_vllm_mean_what_they_mean_on_the_command_line(llm: LLM) -> None:
    asked = llm.built.config.asked
    assert asked.cache.num_kv_blocks == 64
    assert asked.formats.dtype == "float32"
    half = engine_options({"gpu_memory_utilization": 0.5}).limits.memory
    assert isinstance(half, int)
    assert half > 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel_size": 2}, "expert_parallel_size: 2 takes only 1 here"),
        ({"tokenizer": "other"}, "tokenizer: 'other' is not supported: it is part of the checkpoint"),
        (
            {"trust_remote_code": True},
            "trust_remote_code: True is not supported: code in checkpoints is never run",
        ),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization: 1.5 is not in \(0, 1\]"),
        ({"num_gpu_blocks_override": "x"}, "num_gpu_blocks_override: 'x' is not a value of num_kv_blocks"),
        ({"num_kv_blocks": 5, "num_gpu_blocks_override": 6}, "num_gpu_blocks_override: contradicts"),
        ({"max_model_lem": 5}, "max_model_lem is not an option; did you mean max_model_len"),
    ],
)
def test_options_that_cannot_be_had_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_options(options)


def test_arguments_of_calls(llm: LLM) -> None:
    texts = [out.outputs[0].text for out in llm.generate(["Hi", [5, 6]], GREEDY)]
    prompts = [{"prompt": "Hi"}, {"prompt_token_ids": [5, 6], "prompt": None}]
    named = llm.generate(prompts, sampling_params=GREEDY, use_tqdm=False, lora_request=None)
    assert [out.outputs[0].text for out in named] == texts
    assert llm.generate({"prompt": "Hi"}, GREEDY)[0].outputs[0].text == texts[0]
    chat = [{"role": "user", "content": "Hi"}]
    (plain,), (said,) = (
        llm.chat(chat, GREEDY),
        llm.chat(chat, sampling_params=GREEDY, use_tqdm=False, lora_request=None, chat_template=None,
                 chat_template_content_format="auto", add_generation_prompt=True, continue_final_message=False,
                 tools=None, chat_template_kwargs={}, mm_processor_kwargs=None),
    )  # fmt: skip
    assert said.outputs[0].text == plain.outputs[0].text


def test_arguments_that_cannot_be_had_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lora_request: is not supported: an adapter"):
        llm.generate("Hi", GREEDY, lora_request=object())
    with pytest.raises(RequestError, match="chat_template: is not supported"):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, chat_template="{{ messages }}")
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'sampling'"):
        llm.generate("Hi", sampling=GREEDY)
    with pytest.raises(RequestError, match="prompts: 'multi_modal_data' is not supported"):
        llm.generate({"prompt": "Hi", "multi_modal_data": {"image": 1}}, GREEDY)
    with pytest.raises(RequestError, match=r"prompts\[0\]: has no prompt"):
        llm.generate([{}], GREEDY)  # type: ignore[list-item]


def test_a_running_loop_is_no_hindrance(llm: LLM, checkpoint: Folder) -> None:
    """As in a cell of a notebook, whose loop runs while the cell does."""
    asked = SamplingParams(temperature=0, max_tokens=30, structured=StructuredOutput(regex="[ab]{4}"))
    chat = [{"role": "user", "content": "Hi"}]
    wanted = llm.generate("Hi", asked)[0].outputs[0].text, llm.chat(chat, GREEDY)[0].outputs[0].text

    async def cell() -> None:
        with LLM(checkpoint("llama3.1"), dtype="float32", max_model_len=200, progress=False) as own:
            assert own.generate("Hi", asked)[0].outputs[0].text == wanted[0]
            assert "".join(delta.text for delta in own.stream_chat(chat, GREEDY)) == wanted[1]

    asyncio.run(cell())


class Bar:
    """What tqdm would be asked for."""

    made: list[dict[str, Any]]

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.made[-1]["steps"] = 0

    def set_postfix_str(self, text: str, refresh: bool) -> None: ...

    def update(self, count: int) -> None:
        self.made[-1]["steps"] += count

    def close(self) -> None: ...


def test_bars_are_shown_in_a_notebook(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Bar.made = []
    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert Bar.made == [{"total": 2, "desc": "requests", "unit": "req", "steps": 2}]
    assert not progress.shows_progress()  # no terminal here
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress.shows_progress()
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    llm.generate(["a", "b", "c"], GREEDY)
    assert Bar.made[-1]["steps"] == 3
