"""LLM.embed, classify and score: equal to transformers', whatever else runs; what they refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.encoders import TinyEncoder
from helpers.memory import memory_for
from helpers.pooling_folders import pooling_folder, word_tokenizer, write_sentence_files
from helpers.tokenizers import save_whole
from quire import LLM, AsyncLLM
from quire.types import CheckpointError, ContextLengthError, RequestError, UnsupportedModelError

TEXTS = ["hello, world", "a", "the quick brown fox", "jumps over it", "b c d e f g"] * 3


def common() -> dict[str, Any]:
    """Options of every engine here."""
    return {"memory": memory_for(2**29), "threads": 2, "progress": False, "weight_cache": "off"}


def quiet(llm: LLM, texts: list[str], **options: Any) -> np.ndarray:
    found = llm.embed(texts, use_tqdm=False, **options)
    return np.array([out.outputs.embedding for out in found], np.float32)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder, theirs = pooling_folder(
        "bert",
        tmp_path_factory.mktemp("bert"),
        mode="mean_tokens",
        prompts={"query": "find: ", "plain": ""},
        length=48,
    )
    with LLM(folder, max_num_batched_tokens=64, **common()) as llm:
        yield llm, theirs


def hidden(theirs: Any, text: str) -> torch.Tensor:
    encoding = word_tokenizer().encode(text)
    with torch.inference_mode():
        return theirs(torch.tensor([encoding.ids])).last_hidden_state[0]


def test_vectors_are_those_of_transformers(bert: tuple[LLM, Any]) -> None:
    llm, theirs = bert
    wanted = [torch.nn.functional.normalize(hidden(theirs, text).mean(0), dim=0).numpy() for text in TEXTS]
    assert np.abs(quiet(llm, TEXTS) - wanted).max() < 1e-5


def test_a_vector_has_the_same_bits_alone_and_among_others(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    together = quiet(llm, TEXTS)
    assert all(np.array_equal(quiet(llm, [text])[0], row) for text, row in zip(TEXTS, together, strict=True))


def test_answers_of_async_llm_are_those_of_llm(bert: tuple[LLM, Any], tmp_path: Path) -> None:
    llm, _ = bert
    options = {name: value for name, value in common().items() if name != "progress"}
    ids = [2, 7, 8, 3]
    scorer, _ = pooling_folder(
        TinyEncoder("score", "BertForSequenceClassification", "BertConfig", {"num_labels": 1}),
        tmp_path / "score",
    )
    with LLM(scorer, **common()) as judge:
        scores, labels = judge.score("a b", ["c", "d e"]), judge.classify(["a b"], use_activation=False)

    async def run() -> None:
        async with AsyncLLM(llm.built.model.folder, max_num_batched_tokens=64, **options) as other:
            found, some = await asyncio.gather(
                other.embed([*TEXTS, ids], prompt_name="query", dimensions=9),
                other.score("a b", ["c", "d e"]),
            )
            assert found == llm.embed([*TEXTS, ids], prompt_name="query", dimensions=9)
            assert some == llm.score("a b", ["c", "d e"])
            with pytest.raises(RequestError, match=r"prompts: 128 is not a token id"):
                await other.embed([[128]])
            with pytest.raises(RequestError, match="model: this model is for the task embed, not classify"):
                await other.classify("a")
            with pytest.raises(RequestError, match="truncate_prompt_tokens cuts"):
                await other.embed("a " * 60)
        async with AsyncLLM(scorer, **options) as other:
            assert await other.score("a b", ["c", "d e"]) == scores
            assert await other.classify("a b", use_activation=False) == labels

    asyncio.run(run())


def test_a_shorter_vector_is_the_beginning_of_the_whole_one(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    whole, short = quiet(llm, TEXTS[:3]), quiet(llm, TEXTS[:3], dimensions=8)
    assert np.allclose(short, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6)
    raw = quiet(llm, TEXTS[:3], normalize=False)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1


def test_a_prompt_is_put_before_the_text(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    assert np.array_equal(quiet(llm, ["a b"], prompt_name="query"), quiet(llm, ["find: a b"]))
    assert np.array_equal(quiet(llm, ["a b"], prompt_name="plain"), quiet(llm, ["a b"]))
    with pytest.raises(
        RequestError, match="prompt_name: 'other' is not a prompt of this model, which has query, plain"
    ):
        llm.embed("a", prompt_name="other")


def test_the_length_is_that_of_the_folder_and_longer_texts_are_cut_only_when_asked(
    bert: tuple[LLM, Any],
) -> None:
    llm, _ = bert
    with pytest.raises(ContextLengthError, match="52 tokens are over the limit of 48 tokens for a text"):
        llm.embed("a " * 50)
    (cut,) = llm.embed("a " * 50, truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == llm.embed("a " * 46, use_tqdm=False)[0].prompt_token_ids


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed(""), "prompts: a text is empty"),
        (lambda llm: llm.embed([[]]), "prompts: has no tokens"),
        (lambda llm: llm.embed([[200]]), "prompts: 200 is not a token id below the vocabulary size 128"),
        (lambda llm: llm.embed("a", dimensions=49), r"dimensions: 49 is not in \[1, 48\]"),
        (lambda llm: llm.classify("a"), "model: this model is for the task embed, not classify"),
        (lambda llm: llm.generate("a"), "model: this model gives vectors or scores for texts and generates none"),
        (lambda llm: llm.score(["a", "b"], ["c", "d", "e"]), "text_1: 2 texts are neither 1 nor the 3 of text_2"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(bert: tuple[LLM, Any], call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(bert[0])


def test_the_score_of_vectors_is_their_cosine(bert: tuple[LLM, Any]) -> None:
    llm, _ = bert
    one, other, last = quiet(llm, ["a b", "c", "d e"])
    scores = [out.outputs.score for out in llm.score("a b", ["c", "d e"], use_tqdm=False)]
    assert scores == pytest.approx([float(one @ other), float(one @ last)], abs=1e-6)


@pytest.mark.parametrize("name", ["bert-labels", "xlm-roberta-score"])
def test_labels_and_pairs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, theirs = pooling_folder(name, tmp_path)
    pairs = [("a b", "c d e"), ("hello", "world"), ("x", "y z")]
    encodings = [word_tokenizer().encode(*pair) for pair in pairs]
    segments = [torch.tensor([e.type_ids]) if "bert-labels" in name else None for e in encodings]
    with torch.inference_mode():
        logits = [
            theirs(torch.tensor([e.ids]), token_type_ids=s).logits[0]
            for e, s in zip(encodings, segments, strict=True)
        ]
    if name == "bert-labels":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "id2label": {"0": "A", "1": "B", "2": "C"}})
        )
        with LLM(folder, **common()) as llm:
            plain = word_tokenizer().encode("a b").ids
            (found,) = llm.classify([plain], use_tqdm=False)
            with torch.inference_mode():
                wanted = theirs(torch.tensor([plain])).logits[0].softmax(-1)
            assert found.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-5)
            assert found.outputs.label == "ABC"[int(wanted.argmax())]
        return
    with LLM(folder, **common()) as llm:
        found = llm.score([one for one, _ in pairs], [other for _, other in pairs], use_tqdm=False)
        assert [out.outputs.score for out in found] == pytest.approx(
            [float(x.sigmoid()) for x in logits], abs=1e-5
        )


def test_a_pair_has_two_segments(tmp_path: Path) -> None:

    model = TinyEncoder("bert-score", "BertForSequenceClassification", "BertConfig", {"num_labels": 1})
    folder, theirs = pooling_folder(model, tmp_path)
    encoding = word_tokenizer().encode("a b", "c d")
    assert encoding.type_ids == [0, 0, 0, 0, 1, 1, 1]
    with torch.inference_mode():
        wanted = theirs(
            torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
        ).logits[0]
    with LLM(folder, **common()) as llm:
        (raw,) = llm.score("a b", "c d", use_activation=False, use_tqdm=False)
        assert raw.outputs.score == pytest.approx(float(wanted), abs=2e-5)
        (cut,) = llm.score("a b", "c " * 70, truncate_prompt_tokens=10, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 10
        assert [token // 128 for token in cut.prompt_token_ids] == [0] * 4 + [1] * 6
        with pytest.raises(RequestError, match="truncate_prompt_tokens: 4 tokens leave no room"):
            llm.score("a b", "c", truncate_prompt_tokens=4)


def test_a_decoder_embeds_in_chunks_and_with_a_cached_prefix(tmp_path: Path) -> None:
    folder = save_whole("qwen3", tmp_path)
    text = "a text of more than two chunks, that is, of more tokens than a step of this engine takes at once"
    with LLM(folder, task="embed", max_num_batched_tokens=16, max_num_seqs=4, **common()) as small:
        first, again = quiet(small, [text])[0], quiet(small, [text, text + " and more"])
    with LLM(folder, task="embed", pooling="last", max_num_batched_tokens=256, **common()) as large:
        whole = quiet(large, [text, text + " and more"])
    assert np.array_equal(first, whole[0])
    assert np.array_equal(again, whole)
    with (
        LLM(folder, **common()) as llm,
        pytest.raises(RequestError, match="model: this model generates text"),
    ):
        llm.embed("a")


def test_a_decoder_judges_by_two_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_whole("qwen3", tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    a, b = vocabulary["a"], vocabulary["b"]
    del vocabulary["a"], vocabulary["b"]
    vocabulary |= {"yes": a, "no": b}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, task="score", max_model_len=None, **common()) as llm:
        (found,) = llm.score("q", "d", instruction="i", truncate_prompt_tokens=250, use_tqdm=False)
        with torch.inference_mode():
            logits = theirs(torch.tensor([found.prompt_token_ids])).logits[0, -1]
        assert found.outputs.score == pytest.approx(
            float(torch.stack((logits[b], logits[a])).softmax(-1)[1]), abs=1e-5
        )


def add_modules(folder: Path, *modules: tuple[str, dict[str, Any], dict[str, torch.Tensor]]) -> None:
    """Put layers of sentence-transformers between pooling and norm: kind, config, tensors."""
    listed = json.loads((folder / "modules.json").read_text())
    for number, (kind, config, tensors) in enumerate(modules, 2):
        path = folder / f"{number}_{kind}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        if tensors:
            save_file(tensors, path / "model.safetensors")
        entry = {"idx": number, "path": path.name, "type": f"sentence_transformers.models.{kind}"}
        listed.insert(number, entry)
    (folder / "modules.json").write_text(json.dumps(listed))


def dense(inputs: int, outputs: int, act: str = "torch.nn.modules.activation.Tanh") -> dict[str, Any]:
    return {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": act}


def test_layers_behind_the_pooling(tmp_path: Path) -> None:
    """Dense and LayerNorm of sentence-transformers, as LaBSE, sentence-t5 and distiluse have them."""
    folder, theirs = pooling_folder("bert", tmp_path, mode="mean_tokens")
    torch.manual_seed(3)
    first, second, norm = torch.nn.Linear(48, 32), torch.nn.Linear(32, 20, bias=False), torch.nn.LayerNorm(32)
    norm.weight.data, norm.bias.data = torch.rand(32) + 0.5, torch.randn(32)
    add_modules(
        folder,
        ("Dense", dense(48, 32), {f"linear.{name}": value for name, value in first.state_dict().items()}),
        ("LayerNorm", {"dimension": 32}, {f"norm.{name}": value for name, value in norm.state_dict().items()}),
        ("Dense", dense(32, 20, "torch.nn.modules.linear.Identity") | {"bias": False},
         {"linear.weight": second.weight.data}),
    )  # fmt: skip
    with LLM(folder, **common()) as llm, torch.inference_mode():
        for text, found in zip(TEXTS, quiet(llm, TEXTS), strict=True):
            row = second(norm(torch.tanh(first(hidden(theirs, text).mean(0)))))
            assert np.abs(found - torch.nn.functional.normalize(row, dim=0).numpy()).max() < 1e-5
        with pytest.raises(RequestError, match=r"dimensions: 21 is not in \[1, 20\]"):
            llm.embed("a", dimensions=21)


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([("Dense", dense(40, 8), {})], CheckpointError, "2_Dense/config.json: in_features: 40 is not 48"),
        ([("Dense", dense(48, 8, "torch.nn.ELU"), {})], UnsupportedModelError, "2_Dense/config.json: activation_funct"),
        ([("Dense", dense(48, 8), {})], CheckpointError, "2_Dense: .*safetensors"),
        ([("Dropout", {}, {})], UnsupportedModelError, "implemented modules are Transformer, Pooling, Dense"),
        ([("Normalize", {}, {}), ("LayerNorm", {}, {})], UnsupportedModelError, "Normalize must be the last"),
        ([("Dense", dense(48, 8) | {"module_input_name": "token_embeddings"}, {})], UnsupportedModelError,
         "layers over vectors of texts"),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit_are_refused(
    modules: list[Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder, _ = pooling_folder("bert", tmp_path, mode="mean_tokens")
    add_modules(folder, *modules)
    with pytest.raises(error, match=message):
        LLM(folder, **common())


def test_folders_and_tasks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, _ = pooling_folder("bert", tmp_path)
    for options, message in (
        ({"task": "generate"}, "task: 'generate' needs the head of a language model, which BertModel lacks"),
        ({"task": "classify"}, "task: 'classify' needs a model with labels, and BertModel has none"),
        ({"task": "score"}, "task: 'score' needs a model with a label or a head"),
        ({"speculate": "ngram"}, "speculate: a model with pooling generates no tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(folder, **options, **common())
    write_sentence_files(folder, mode="max_tokens")
    with pytest.raises(UnsupportedModelError, match="pooling by pooling_mode_max_tokens is not implemented"):
        LLM(folder, **common())


def test_a_decoder_saved_without_head_and_prefix_is_read_with_its_folder(tmp_path: Path) -> None:
    """As Qwen3-Embedding: the names of the inner model under the architecture of a causal one."""
    folder, theirs = pooling_folder("qwen3", tmp_path, mode="lasttoken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    with LLM(folder, **common()) as llm:
        (found,) = llm.embed("hello, world", use_tqdm=False)
    wanted = torch.nn.functional.normalize(hidden(theirs, "hello, world")[-1], dim=0)
    assert np.abs(np.array(found.outputs.embedding) - wanted.numpy()).max() < 1e-5
