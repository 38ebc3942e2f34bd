"""Drafts over the target's features: they are what the papers say of the text so far, and no bit depends on them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers import drafts
from helpers.checkpoints import VOCAB, load_reference
from helpers.drafts import Passed
from helpers.speculating import bits, costs_without_a_clock, params, prompts, tree_rows
from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.program.memory import weight_bytes
from quire.speculate.allotment import Allotment
from quire.speculate.draft_modules import ModuleDraftProposer
from quire.speculate.feature_drafts import FeatureDraftProposer
from quire.speculate.medusa import MedusaProposer
from quire.speculate.proposer import DraftTree, Room
from quire.speculate.step_costs import PassCosts
from quire.types import CheckpointError, NewSeq, UnsupportedModelError

TARGETS = {"eagle": "smollm3", "eagle3": "smollm3", "mtp": "deepseek3", "medusa": "smollm3"}
MODULES = {"mtp, one module": 1, "mtp, three modules": 3}
WRITERS = {"eagle": drafts.write_eagle, "eagle3": drafts.write_eagle3, "medusa": drafts.write_medusa}


@dataclass
class Case:
    """A method with its target and draft, in torch too."""

    method: str
    target: Path
    draft: Path
    layers: list[Any] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        model = {} if self.method == "mtp" else {"model": str(self.draft)}
        return {"method": self.method, "num_speculative_tokens": 3, **model}

    def features(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            hidden = model(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
        found: torch.Tensor = (
            torch.cat([hidden[at][0] for at in (1, 2, 3)], -1) if self.method == "eagle3" else hidden[-1][0]
        )
        return found

    def passed(
        self, model: Any, weights: drafts.Weights, tokens: torch.Tensor, features: torch.Tensor
    ) -> Passed:
        if self.method == "mtp":
            return drafts.mtp(self.layers[0], model, weights, tokens, features)
        definition = {"eagle": drafts.eagle, "eagle3": drafts.eagle3}[self.method]
        return definition(weights, model.state_dict(), tokens, features)

    def chain(
        self, model: Any, weights: drafts.Weights, text: list[int], count: int, path: tuple[int, ...] = ()
    ) -> list[int]:
        """The greedy drafts after a text, behind a path of drafts."""
        tokens = torch.tensor(text)
        features = self.features(model, tokens[:-1])
        if self.method == "medusa":
            logits = drafts.medusa(weights, model.state_dict(), features[-1:])[0]
            return logits[:count].argmax(-1).tolist()
        if len(self.layers) > 1:
            return self.modules(model, weights, text, features, count, path)
        ids = weights["t2d"].nonzero().flatten() if self.method == "eagle3" else torch.arange(VOCAB)
        found: list[int] = []
        for at in range(count):
            going = torch.tensor([*text[1:], *found])
            made = self.passed(model, weights, going, features)
            found += path[at : at + 1] or [int(ids[made.logits[-1].argmax()])]
            if self.method == "eagle3" and features.shape[1] > drafts.DIM:
                features = features @ weights["fc.weight"].T
            features = torch.cat([features, made.hidden[-1:]])
        return found

    def modules(
        self,
        model: Any,
        weights: drafts.Weights,
        text: list[int],
        rows: torch.Tensor,
        count: int,
        path: tuple[int, ...],
    ) -> list[int]:
        """Each module takes the rows of the one before, and tokens one further ahead, of which the last are drafts."""
        found: list[int] = []
        for module, layer in enumerate(self.layers[:count]):
            going = torch.tensor([*text, *found][1 + module :])
            made = drafts.mtp(layer, model, weights, going, rows, module)
            found += path[module : module + 1] or [int(made.logits[-1].argmax())]
            rows = made.hidden
        return found


@pytest.fixture(params=[*(method for method in TARGETS if method != "mtp"), *MODULES])
def case(request: pytest.FixtureRequest, checkpoint: Folder, tmp_path: Path) -> Case:
    method = request.param.partition(",")[0]
    source = checkpoint(TARGETS[method])
    if method != "mtp":
        return Case(method, source, WRITERS[method](tmp_path / "draft"))
    target = tmp_path / "target"
    reference = load_reference(source, torch.float32)
    layers = drafts.write_mtp(target, reference, source, MODULES[request.param])
    for file in source.iterdir():
        if not (target / file.name).exists():
            (target / file.name).write_bytes(file.read_bytes())
    return Case(method, target, target, layers)


@dataclass
class Recorded:
    """Drafts with the texts that they follow, of a tree the likeliest; those that go on are right up to a random place,
    in a tree along second choices. `behind`: drafts of a tree with the texts and the drafts that they follow, likeliest
    ones behind others."""

    texts: dict[tuple[int, ...], list[int]]
    made: list[tuple[list[int], list[int]]] = field(default_factory=list)
    behind: list[tuple[list[int], tuple[int, ...], int]] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(2))

    def of(self, before: list[int], drafted: list[int] | DraftTree) -> list[int] | DraftTree:
        trunk = drafted if isinstance(drafted, list) else likeliest(drafted)
        self.made.append((list(before), list(trunk)))
        if isinstance(drafted, DraftTree):
            self.behind += [(list(before), path, token) for path, token in behind_others(drafted)]
        rest = next(t for prompt, t in self.texts.items() if tuple(before[: len(prompt)]) == prompt)
        right = rest[len(before) :][:3]
        wrong = self.random.randrange(len(right) + 1)
        path = [t if at < wrong else (t + 1) % VOCAB for at, t in enumerate(right)]
        if isinstance(drafted, list):
            return path
        parents = [2 * at + both for at in range(len(path)) for both in (0, 0)]
        return DraftTree([token for t in path for token in ((t + 7) % VOCAB, t)], tuple(parents))


def likeliest(tree: DraftTree) -> list[int]:
    """The first drafts behind one another."""
    found, at = list[int](), 0
    while at in tree.parents:
        at = tree.parents.index(at) + 1
        found.append(tree.token_ids[at - 1])
    return found


def behind_others(tree: DraftTree) -> list[tuple[tuple[int, ...], int]]:
    """Of each draft but the likeliest of its place that has others behind it: its path, and the first of these."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    first = {parent: tree.parents.index(parent) for parent in tree.parents}
    return [
        (paths[parent], tree.token_ids[at])
        for parent, at in first.items()
        if parent and first[tree.parents[parent - 1]] != parent - 1
    ]


PROMPTS = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (5, 40, 17, 1)]
PAGES = 8 * 4096  # arenas of two executors, in whole pages
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
COMMON: dict[str, Any] = {"max_model_len": 96, "progress": False, "dtype": "float32", "max_num_seqs": 3}


@pytest.mark.parametrize(("top_k", "tree_width"), [(1, 1), (3, 1), (3, 3)])
def test_drafts_are_those_of_the_paper(
    case: Case, monkeypatch: pytest.MonkeyPatch, top_k: int, tree_width: int
) -> None:
    """After prompts whole and in chunks, and after drafts of which some were right."""
    if case.method == "medusa" and tree_width > 1:
        pytest.skip("heads give every combination")
    costs_without_a_clock(monkeypatch)
    common = COMMON | {"max_num_batched_tokens": 24}
    with LLM(case.target, **common) as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    recorded = Recorded(
        {tuple(p): [*p, *o.outputs[0].token_ids] for p, o in zip(PROMPTS, plain, strict=True)}
    )
    kind: Any = MedusaProposer if case.method == "medusa" else FeatureDraftProposer
    if len(case.layers) > 1:
        kind = ModuleDraftProposer
    start, extend, propose = kind.start, kind.extend, kind.propose
    texts: dict[int, list[int]] = {}

    def started(self: Any, new: NewSeq) -> None:
        texts[new.seq_id] = list(new.token_ids)
        start(self, new)

    def extended(self: Any, seq_id: int, tokens: list[int]) -> None:
        texts[seq_id] += tokens
        extend(self, seq_id, tokens)

    def proposed(self: Any, rooms: Mapping[int, Room]) -> dict[int, list[int] | DraftTree]:
        return {seq_id: recorded.of(texts[seq_id], made) for seq_id, made in propose(self, rooms).items()}

    for name, patch in (("start", started), ("extend", extended), ("propose", proposed)):
        monkeypatch.setattr(kind, name, patch)
    monkeypatch.setattr(
        Allotment,
        "share",
        lambda self, rows, offers: dict.fromkeys(offers, Room(3 if top_k == 1 else 8 * tree_width, 3)),
    )

    # What is said of first choices counts here, not what is learned of them.
    monkeypatch.setattr("quire.speculate.tree_growth.TreeGrowth.learn", lambda self, root, tokens: None)
    chosen = {"top_k": top_k, "num_speculative_tokens": 3 if top_k == 1 else 8 * tree_width}
    chosen |= {"tree_width": tree_width} if tree_width > 1 else {}
    with LLM(case.target, speculative_config=case.config | chosen, **common) as llm:
        assert bits(llm.generate(PROMPTS, PARAMS)) == bits(plain)
        assert sum(r.accepted for r in llm.step_records()) > 10
    model, weights = load_reference(case.target, torch.float32), drafts.tensors(case.draft)
    assert len(recorded.made) > 20
    for before, drafted in recorded.made:
        assert drafted == case.chain(model, weights, before, len(drafted)), len(before)
    assert bool(recorded.behind) == (tree_width > 1 or (case.method == "medusa" and top_k > 1))
    for before, path, token in recorded.behind[::5]:
        assert case.chain(model, weights, before, len(path) + 1, path)[-1] == token, (len(before), path)


def test_every_bit_is_that_without(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all kinds of parameters, in a cache in which sequences wait, resume and find prefixes."""
    costs_without_a_clock(monkeypatch, 0.01)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)
    trees = tree_rows(monkeypatch)
    formats, asked = FORMATS[case.method], [prompt[:60] for prompt in prompts()]
    with LLM(case.target, max_model_len=128, progress=False, **formats) as llm:
        expected = bits(llm.generate(asked, params()))
    chosen = {"num_speculative_tokens": 8} | ({} if case.method == "medusa" else {"tree_width": 3})
    with LLM(
        case.target, speculative_config=case.config | chosen, max_model_len=128,
        progress=False, max_num_seqs=3, max_num_batched_tokens=32, num_kv_blocks=14, **formats,
    ) as llm:  # fmt: skip
        assert bits(llm.generate(asked, params())) == expected
        core = llm._built.core
        assert core.speculation is not None
        assert core.speculation.drafted > 20
        assert len(trees) > 5
        assert not core.speculation.faults
        core.scheduler.audit()


def test_heads_keep_to_what_was_asked_for(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medusa with fewer drafts than it has heads, of a part of the vocabulary: one sequence takes several rows."""
    costs_without_a_clock(monkeypatch, 0.01)
    trees = tree_rows(monkeypatch)
    chosen = {"method": "medusa", "model": str(drafts.write_medusa(tmp_path / "draft"))}
    common, asked = COMMON | {"max_num_seqs": 1}, replace(PARAMS, max_tokens=80)
    with LLM(checkpoint("smollm3"), **common) as llm:
        plain = llm.generate(PROMPTS[:1], asked)
    for most in (2, 8):
        chosen |= {"draft_vocab_size": 40, "num_speculative_tokens": most}
        trees.clear()
        with LLM(checkpoint("smollm3"), speculative_config=chosen, **common) as llm:
            assert bits(llm.generate(PROMPTS[:1], asked)) == bits(plain)
            assert llm._built.core.speculation is not None
            assert not llm._built.core.speculation.faults
            assert llm._built.core.speculation.drafted > 5
        assert 2 <= max(row.drafts for row in trees) <= most
        assert all(token < 40 for row in trees for token in row.token_ids[-row.drafts :])


FORMATS: dict[str, dict[str, Any]] = {
    "eagle": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "eagle3": {"quantization": "int4"},
    "mtp": {"dtype": "bfloat16"},
    "medusa": {"dtype": "float32"},
}


def test_what_a_draft_takes_is_in_the_plan(case: Case) -> None:
    """Embedding and head are the target's and held once; what a step leaves for the draft counts."""
    with LLM(case.target, **COMMON) as llm:
        alone = llm._built.plan.parts
    with LLM(case.target, speculative_config=case.config, **COMMON) as llm:
        both, draft = llm._built.plan.parts, llm._built.draft
        assert draft is not None
        held = [llm._built.executor.memory(), draft.memory()]
        shared = {param.name for param in draft.program.borrowed}
    assert shared == {"eagle": {"head", "embed"}, "eagle3": {"embed"}, "mtp": {"head", "embed"}}.get(
        case.method, set()
    )
    assert both["weights"] == alone["weights"] + weight_bytes(draft.program)
    assert both["activations"] > alone["activations"]
    assert both["drafts"] > alone["drafts"]
    for part in ("kv", "activations", "tables"):
        planned = both[part] + (both["branches"] if part == "kv" else 0)
        assert sum(each[part] for each in held) <= planned + PAGES


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("eagle", {"hidden_size": 32}, "draft .*: config.json: hidden_size: 32 is not that of the target, 64"),
        ("eagle", {"vocab_size": 99}, "config.json: vocab_size: 99 is not that of the target, 128"),
        ("eagle", {"num_hidden_layers": 1}, "the checkpoint has tensors that its config does not imply"),
        ("eagle", {"num_hidden_layers": 3}, "the checkpoint lacks .*model.layers.2"),
        ("eagle", {"model_type": "oracle"}, "model_type = 'oracle' is not supported"),
        ("eagle3", {"draft_vocab_size": 400}, r"draft_vocab_size: 400 is not in \[1, 128\]"),
        ("eagle3", {"draft_vocab_size": 39}, r"tensor d2t: I64 \[40\] is not I64 \[39\]"),
        ("eagle3", {"eagle_config": {}}, "eagle_aux_hidden_state_layer_ids: is missing"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 9, 2]}, r"\[1\]: 9 is not in \[0, 4\]"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"\[1, 2\] are not three layers"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers = 2 is not supported"),
        ("medusa", {"hidden_size": 32}, "draft .*: config.json: hidden_size: 32 is not that of the target, 64"),
        ("medusa", {"medusa_num_heads": 65}, r"medusa_num_heads: 65 is not in \[1, 64\]"),
        ("medusa", {"medusa_num_heads": 2}, "the checkpoint has tensors that its config does not imply"),
    ],
)  # fmt: skip
def test_a_draft_that_does_not_fit_is_one_clear_error(
    checkpoint: Folder, tmp_path: Path, method: str, changes: dict[str, Any], message: str
) -> None:
    folder = WRITERS[method](tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    chosen = {"method": method, "model": str(folder)}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        LLM(checkpoint(TARGETS[method]), speculative_config=chosen, **COMMON)


def test_heads_for_another_hidden_size_are_refused(checkpoint: Folder, tmp_path: Path) -> None:
    """Medusa's own configs do not say it, so the tensors do."""
    folder = drafts.write_medusa(tmp_path / "draft")
    name = "medusa_lm_head.safetensors"
    save_file(
        {n: t[:32, :32].clone() if t.dim() > 1 else t for n, t in drafts.tensors(folder).items()},
        folder / name,
    )
    with pytest.raises(CheckpointError, match=r"draft .*: tensor 0\.0\.linear\.weight: shape \[32, 32\]"):
        LLM(checkpoint("smollm3"), speculative_config={"method": "medusa", "model": str(folder)}, **COMMON)


def test_a_pickle_is_never_read(checkpoint: Folder, tmp_path: Path) -> None:
    folder = drafts.write_medusa(tmp_path / "draft")
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    chosen = {"method": "medusa", "model": str(folder)}
    with pytest.raises(
        CheckpointError, match="pickle files can run code and are never read; save the model as"
    ):
        LLM(checkpoint("smollm3"), speculative_config=chosen, **COMMON)


def test_a_map_to_tokens_that_do_not_exist_is_refused(checkpoint: Folder, tmp_path: Path) -> None:
    folder = drafts.write_eagle3(tmp_path / "draft")
    weights = drafts.tensors(folder)
    weights["d2t"][7] = 1000
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="tensor d2t: element 7 names token 1007, outside the vocabulary of 128"
    ):
        LLM(checkpoint("smollm3"), speculative_config={"method": "eagle3", "model": str(folder)}, **COMMON)


def test_a_model_without_mtp_layers_is_refused(checkpoint: Folder) -> None:
    with pytest.raises(UnsupportedModelError, match="no layer for multi-token prediction"):
        LLM(checkpoint("smollm3"), speculative_config={"method": "mtp"}, **COMMON)
