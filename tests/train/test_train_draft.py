"""Training of drafts: what is trained is what runs, and training raises the acceptance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers import drafts
from helpers.checkpoints import VOCAB, random_tokens
from helpers.speculating import costs_without_a_clock
from helpers.tokenizers import save_whole
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.spec import NormSpec, Rope
from quire.spec.draft import Features
from quire.speculate.speculation import Speculation
from quire.speculate.step_costs import PassCosts
from quire.train.heads import Chain, Eagle, Eagle3, LayerShape, Medusa, SmallModel, TargetWeights
from quire.train.teacher import Teacher, read_tables
from quire.train.training import feature_layers
from quire.types import CheckpointError, SchedulerOutput

SHAPE = LayerShape(
    drafts.DIM, drafts.HEADS, drafts.KV_HEADS, drafts.HEAD_DIM, drafts.WIDTH, Rope(drafts.THETA, drafts.HEAD_DIM),
    NormSpec(eps=drafts.EPS),
)  # fmt: skip


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_depths_that_are_trained_are_chains_of_drafts(method: str) -> None:
    """Depth s at a position: the target's features up to s positions before, then s passes over rows of the draft."""
    torch.manual_seed(3)
    eagle, length = Eagle(SHAPE) if method == "eagle" else Eagle3(SHAPE), 6
    head, embed = torch.randn(VOCAB, drafts.DIM), torch.randn(VOCAB, drafts.DIM)
    width = drafts.DIM if method == "eagle" else 3 * drafts.DIM
    features, tokens = torch.randn(length, width), torch.tensor(random_tokens(0, length))
    weights = eagle.state_dict() | {"lm_head.weight": head}
    target = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    definition = drafts.eagle if method == "eagle" else drafts.eagle3
    with torch.inference_mode():
        made = eagle.guesses(features[None], tokens[None], TargetWeights(embed, head))
        for depth, logits in enumerate(made):
            for at in range(depth, length - 1):
                rows = features[: at - depth + 1]
                if method == "eagle3":
                    rows = rows @ weights["fc.weight"].T
                for more in range(depth + 1):
                    seen = definition(weights, target, tokens[1 : at - depth + more + 2], rows)
                    rows = torch.cat([rows, seen.hidden[-1:]])
                torch.testing.assert_close(logits[0, at - depth], seen.logits[-1], atol=1e-4, rtol=1e-4)


SIZES = ["--steps", "24", "--length", "32", "--batch-size", "4", "--learning-rate", "0.01"]
METHODS = {
    "eagle3": ["--draft-vocab-size", "40", "--steps", "48"],
    "eagle": [],
    "medusa": ["--heads", "2", "--steps", "60"],
    "draft_model": ["--hidden-size", "64", "--layers", "2", "--steps", "60"],
}


def reloaded(method: str, folder: Path, target: Path) -> tuple[Chain, Features | None]:
    """A draft with the weights of a checkpoint, and what it takes."""
    config = json.loads((folder / "config.json").read_text())
    (file,) = folder.glob("*.safetensors")
    state = {name: t.float() if t.is_floating_point() else t for name, t in load_file(file).items()}
    spec = open_model(str(target)).facts.spec
    if method == "medusa":
        medusa = Medusa(spec.dim, config["medusa_num_heads"])
        medusa.load_state_dict({f"medusa_head.{name}": t for name, t in state.items()})
        return medusa, Features()
    sizes = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                                     "intermediate_size"))  # fmt: skip
    rope, norm = Rope(config["rope_theta"], config["head_dim"]), NormSpec(eps=config["rms_norm_eps"])
    shape = LayerShape(*sizes, rope, norm)
    draft: Chain
    if method == "draft_model":
        draft = SmallModel(shape, config["num_hidden_layers"], config["vocab_size"])
        draft.load_state_dict({name.removeprefix("model."): t for name, t in state.items()})
        return draft, None
    if method == "eagle":
        draft = Eagle(shape)
        draft.load_state_dict(state)
        return draft, Features()
    moved = state.pop("d2t")
    draft = Eagle3(shape, moved + torch.arange(len(moved)), torch.zeros(spec.vocab, spec.dim))
    draft.load_state_dict(state)
    return draft, Features(tuple(config["eagle_aux_hidden_state_layer_ids"]))


def forced(draft: Chain, features: Features | None, target: Path, text: list[int]) -> list[list[int]]:
    """By depth: the guess at the token after each part of a text, all drafts before it in the chain being right. Entry
    n of depth d is the guess at token n + d behind the first n tokens; the first entries are not there (-1)."""
    model = open_model(str(target))
    asked = EngineConfig().replace(dtype="float32", threads=1)
    teacher = Teacher(model, asked, features, 1, len(text))
    rows, _ = teacher.answer(np.array([text], np.int32))
    taken = torch.from_numpy(rows.copy())
    teacher.close()
    embed, head = (torch.from_numpy(table) for table in read_tables(model))
    with torch.inference_mode():
        made = draft.guesses(taken, torch.tensor([text]), TargetWeights(embed, head))
    found = [logits[0].argmax(-1) for logits in made]
    if isinstance(draft, Eagle3) and draft.ids is not None:
        found = [draft.ids[each] for each in found]
    if isinstance(draft, SmallModel):
        return [[-1, *found[0][depth:].tolist()] for depth in range(3)]
    return [[-1, -1, *each.tolist()] for each in found]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The drafts of each row that ran, and how many tokens were known before them."""
    costs_without_a_clock(monkeypatch, 0.001)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.001)
    found: list[tuple[int, list[int]]] = []
    fill = Speculation.fill

    def noted(self: Speculation, out: SchedulerOutput, text_of: Callable[[int], list[int]]) -> None:
        fill(self, out, text_of)
        for row in out.scheduled:
            if row.drafts:
                known = len(row.token_ids) - row.drafts
                found.append((row.start + known, row.token_ids[known:]))

    monkeypatch.setattr(Speculation, "fill", noted)
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("smollm3", tmp_path_factory.mktemp("target"), torch.float32)


def some_text() -> str:
    """Of four words."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(4)]
    return " ".join(rng.choices(words, k=300))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_trained_is_what_drafts(
    method: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    drafted: list[tuple[int, list[int]]],
) -> None:  # fmt: skip
    """Training raises the acceptance on text that was held out. The engine, which loads what was written, makes at
    every position of its answers the drafts of the definition that was trained, over the same text: it takes the right
    features, positions, tokens and cache, after a prompt, after drafts, and after a prefix that was found."""
    text = some_text()
    (tmp_path / "text").write_text(text)
    command = [
        str(target),
        "--text",
        str(tmp_path / "text"),
        "--out",
        str(tmp_path / "draft"),
        "--method",
        method,
    ]
    assert main(["train-draft", *command, *SIZES, *METHODS[method], "--threads", "1"]) == 0
    before, after = (
        float(line.split(" tokens a step")[0].split()[-1])
        for line in capsys.readouterr().err.splitlines()
        if "tokens a step" in line
    )
    assert after > before + (0.01 if method == "medusa" else 0.1)
    draft, features = reloaded(method, tmp_path / "draft", target)
    config: Any = {
        "method": method,
        "model": str(tmp_path / "draft"),
        "quantization": "none",
        "num_speculative_tokens": 3,
        "top_k": 1,
    }
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    compared = right = 0
    with LLM(target, speculative_config=config, dtype="float32", max_model_len=128, progress=False) as llm:
        for prompt in (text[:40], text[40:60], text[:56]):
            drafted.clear()
            (output,) = llm.generate([prompt], params)
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            expected = forced(draft, features, target, tokens)
            for known, row in drafted:
                for depth, (made, then) in enumerate(zip(row, tokens[known:], strict=False)):
                    assert made == expected[depth][known], (known, depth)
                    compared += 1
                    if made != then:
                        break
                    right += 1
        assert sum(r.accepted for r in llm.step_records()) == right
    assert compared > 30
    assert right > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps: 0 is not in"),
        (["--learning-rate", "2"], "learning_rate: 2.0 is not above 0"),
        (["--method", "oracle"], "method: 'oracle' is not one of eagle3, eagle, medusa, draft_model"),
        (["--method", "draft_model", "--hidden-size", "100"], "hidden_size: 100 is not a multiple of 64"),
        (
            ["--method", "eagle", "--draft-vocab-size", "9"],
            "draft_vocab_size: eagle has none, only eagle3 does",
        ),
        (["--draft-vocab-size", "4096"], "draft_vocab_size: 4096 is above the model's 128"),
        (["--text", "nowhere"], "text: nowhere: No such file or directory"),
        ([], "text: 6 tokens are too few; batch_size and length need 2048"),
    ],
)
def test_a_bad_option_is_one_clear_error(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("A text")
    target = save_whole("llama2", tmp_path / "target", torch.float32)
    command = ["train-draft", str(target), "--text", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_with_two_layers_has_no_three_features() -> None:
    assert feature_layers(12) == (2, 6, 9)
    assert feature_layers(3) == (1, 1, 2)
    with pytest.raises(CheckpointError, match="num_hidden_layers: 2 are too few"):
        feature_layers(2)
