"""Training text is what the chat template renders, for transformers and for Quire."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from tools.default_model import tokenizer as tokenizers
from tools.default_model.batching import IGNORE, encode
from tools.default_model.corpus.conversation import Conversation
from tools.default_model.corpus.draw import Split
from tools.default_model.corpus.mixture import of_domain, stream
from tools.default_model.rendering import IM_END, prompt, segments
from transformers import AutoTokenizer

from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.tokenizer import Tokenizer


def _chats() -> list[Conversation]:
    made = list(islice(stream(11, Split.TRAIN), 150)) + of_domain("tools", 11, Split.TRAIN, 60)
    return [c for c in made if c.turns]


def test_transformers_renders_the_training_text(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for made in _chats():
        text = tokenizer.apply_chat_template(made.messages(), tools=made.tools or None, tokenize=False)
        assert text == "".join(s.text for s in segments(made))
        last = len(made.turns) - 1
        asked = tokenizer.apply_chat_template(
            made.messages()[:last], tools=made.tools or None, tokenize=False, add_generation_prompt=True
        )
        assert asked == prompt(made, last)


def test_quire_renders_the_training_text(tokenizer_folder: Path) -> None:
    renderer = ChatRenderer(Tokenizer.from_dir(tokenizer_folder))
    plain = tokenizers.load(tokenizer_folder)
    for made in _chats()[-60:]:
        last = len(made.turns) - 1
        ask = ChatAsk(messages=made.messages()[:last], tools=made.tools or None, add_generation_prompt=True)
        assert renderer.render(ask).text == prompt(made, last)
        assert renderer.encode(ask) == plain.encode(prompt(made, last)).ids


def test_arguments_may_come_as_a_json_string(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    made = next(c for c in _chats() if any(t.calls for t in c.turns))
    messages = made.messages()
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(messages, tools=made.tools, tokenize=False)
    assert text == "".join(s.text for s in segments(made))


def test_encoding_by_segment_equals_encoding_whole(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    for made in _chats():
        whole = tokenizer.encode("".join(s.text for s in segments(made))).ids
        assert encode(made, tokenizer).ids == whole[:-1]


def test_targets_are_the_answers(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    made = of_domain("rewriting", 1, Split.TRAIN, 1)[0]
    example = encode(made, tokenizer)
    learned = [t for t in example.targets if t != IGNORE]
    said = "".join(turn.content + IM_END for turn in made.turns if turn.role == "assistant")
    assert tokenizer.decode(learned, skip_special_tokens=False) == said
    assert len(example.ids) == len(example.targets)


@pytest.mark.parametrize("text", ["Héllo wörld 你好", "x = 42\n\n\tif  y:", '{"a": [1, 2]}', "", "🙂 ok"])
def test_any_text_survives(tokenizer_folder: Path, text: str) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_names_keep_their_tokens(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    assert [t for t in tokenizer.encode("a 1234").tokens if t != "Ġ"] == ["a", "1", "2", "3", "4"]
    name = tokenizer.encode("Paris").ids
    assert tokenizer.encode("in Paris").ids[-len(name) :] == name
    assert tokenizer.encode('"Paris').ids[-len(name) :] == name


def test_generation_stops_at_the_end_marks(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.load(tokenizer_folder)
    config = json.loads((tokenizer_folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
