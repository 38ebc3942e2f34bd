"""pull, list, show, rm and run; models of this machine; Ollama's store read in place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_hub import FakeHub
from helpers.folders import llama_folder
from quire import LLM
from quire.cli import chat
from quire.cli.main import main
from quire.loader import resolve_model
from quire.offline.convert import convert
from quire.types import CheckpointError

NAME = "org/tiny"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("made") / "tiny-llama")


@pytest.fixture(scope="session")
def gguf(made: Path) -> Path:
    out = made.parent / "tiny-bf16.gguf"
    convert(str(made), out)
    return out


@pytest.fixture
def served(hub: FakeHub, made: Path) -> FakeHub:
    hub.add(NAME, {file.name: file.read_bytes() for file in made.iterdir()})
    hub.licences[NAME] = "apache-2.0"
    return hub


def called(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(words) == code, capsys.readouterr().err
    found = capsys.readouterr()
    return found.out, found.err


def answer(name: str | Path) -> list[int]:
    with LLM(str(name), threads=1, memory="2GiB", progress=False) as llm:
        (out,) = llm.generate([[1, 2, 3]])
        return list(out.outputs[0].token_ids)


def test_a_pulled_model_is_found_by_its_name_everywhere(
    served: FakeHub, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = called(capsys, "pull", NAME)
    assert Path(out.strip()) == resolve_model(NAME)
    assert "2 files, " in err
    assert "fetched in" in err
    assert answer(NAME) == answer(made)
    out, _ = called(capsys, "verify", NAME)
    assert "2 files equal to the hub's" in out


def test_list_and_show(served: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    called(capsys, "pull", NAME, "--quiet")
    listed = json.loads(called(capsys, "list", "--json")[0])
    (model,) = [model for model in listed["models"] if model["name"] == NAME]
    assert (model["tag"], model["state"], model["source"]) == ("latest", "complete", f"{served.url}/{NAME}")
    assert model["size"] == listed["used"]
    table = called(capsys, "list")[0]
    assert [line.split()[:2] for line in table.splitlines()[:2]] == [["NAME", "TAG"], [NAME, "latest"]]
    assert "shipped" in table
    out, _ = called(capsys, "show", NAME)
    digest = hashlib.sha256(served.repositories[NAME]["main"]["model.safetensors"]).hexdigest()
    for text in (f"{served.url}/{NAME}", "apache-2.0", f"model.safetensors  sha256:{digest}",
                 served.commit(NAME, "main"), "LlamaForCausalLM", "parameters"):  # fmt: skip
        assert text in out
    shown = json.loads(called(capsys, "show", NAME, "--json")[0])
    assert shown["inspect"]["architecture"] == "LlamaForCausalLM"
    assert shown["problem"] is None


def test_show_of_a_model_that_quire_cannot_run(served: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    served.add(
        "org/odd",
        {"config.json": b'{"architectures": ["OddModel"]}', "model.safetensors": b"12345678" * 1000},
    )
    called(capsys, "pull", "org/odd", "--quiet")
    out, _ = called(capsys, "show", "org/odd")
    assert "quire cannot run it: " in out
    assert "config.json  sha256:" in out


def test_rm_says_what_it_frees_and_what_stays(served: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    files = served.repositories[NAME]["main"]
    served.add(NAME, files | {"config.json": b"{}"}, "v2")
    called(capsys, "pull", NAME, "--quiet")
    called(capsys, "pull", NAME, "--revision", "v2", "--quiet")
    out, _ = called(capsys, "rm", "--dry-run", f"{NAME}@v2")
    assert f"{NAME}@v2: would free" in out
    assert f"in 1 files; 1 files stay for {NAME}" in out
    assert resolve_model(f"{NAME}@v2").is_dir()
    assert "removed, freed" in called(capsys, "rm", f"{NAME}@v2")[0]
    out, err = called(capsys, "rm", f"{NAME}@v2", NAME, code=1)
    assert "no such model" in err
    assert f"{NAME}: removed, freed" in out
    assert json.loads(called(capsys, "list", "--json")[0])["used"] == 0


def test_run_pulls_what_is_missing(
    served: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chatted: list[Path] = []
    monkeypatch.setattr(chat, "run", lambda args: chatted.append(resolve_model(args.model)) or 0)
    called(capsys, "run", NAME, "--quiet")
    count = len(served.seen)
    called(capsys, "run", NAME, "--quiet")
    called(capsys, "run", "quire-mini", "--quiet")
    assert len(served.seen) == count
    assert chatted[0] == chatted[1]
    assert "no such repository" in called(capsys, "run", "org/absent", code=1)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["org/x:Q8_0", "--quantization", "Q4_0"], "quantization: Q4_0 contradicts Q8_0"),
        (["org/x@v1", "--revision", "v2"], "revision: v2 contradicts v1"),
        (["org/x", "--name", "y"], "name: org/x is of a hub, and keeps its name"),
        (["org/x", "--connections", "0"], r"connections: 0 is not in [1, 32]"),
        (["a/b/c"], "a/b/c: not a model's name"),
    ],
)
def test_mistakes_name_the_option(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in called(capsys, "pull", *words, code=1)[1]
    assert not hub.seen


def test_the_limit_of_the_store(
    served: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_STORE_LIMIT", "1KiB")
    assert "exceed --store-limit 1.00 KiB" in called(capsys, "pull", NAME, code=1)[1]
    called(capsys, "pull", NAME, "--store-limit", "1GiB")
    monkeypatch.setenv("QUIRE_STORE_LIMIT", "much")
    assert "QUIRE_STORE_LIMIT: 'much' is not a size" in called(capsys, "pull", NAME, code=2)[1]


def test_folders_and_files_of_this_machine(
    hub: FakeHub, made: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called(capsys, "pull", str(made), "--name", "mine:v1", "--quiet")
    called(capsys, "pull", str(gguf), "--quiet")
    assert answer("mine:v1") == answer("tiny-bf16") == answer(made)
    assert resolve_model("tiny-bf16").name == gguf.name
    weights = resolve_model("mine:v1") / "model.safetensors"
    assert weights.read_bytes() == (made / "model.safetensors").read_bytes()
    called(capsys, "rm", "mine:v1", "tiny-bf16")
    assert (made / "model.safetensors").exists()
    assert not hub.seen
    for path in (made / "config.json", made.parent / "empty"):
        (made.parent / "empty").mkdir(exist_ok=True)
        assert "GGUF" in called(capsys, "pull", str(path), code=1)[1]


def add_to_ollama(folder: Path, gguf: Path, name: str, *more: dict[str, Any]) -> None:
    data = gguf.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / f"sha256-{digest}").write_bytes(data)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": len(data),
    }
    path = folder / "manifests" / "registry.ollama.ai" / "library" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": [layer, *more]}))


def test_ollamas_models_are_read_in_place(
    hub: FakeHub, made: Path, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_to_ollama(
        tmp_path / "ollama", gguf, "tinyllama/1b", {"mediaType": "application/vnd.ollama.image.template"}
    )
    add_to_ollama(
        tmp_path / "ollama", gguf, "tuned/latest", {"mediaType": "application/vnd.ollama.image.adapter"}
    )
    assert answer("tinyllama:1b") == answer(made)
    assert not (tmp_path / "store").exists()
    models = {
        model["reference"]: model for model in json.loads(called(capsys, "list", "--json")[0])["models"]
    }
    assert models["tinyllama:1b"]["source"] == f"ollama: {tmp_path / 'ollama'}"
    assert "a LoRA adapter" in models["tuned:latest"]["state"]
    with pytest.raises(CheckpointError, match="a LoRA adapter, which Quire does not read"):
        resolve_model("tuned")
    assert "ollama: " in called(capsys, "show", "tinyllama:1b")[0]
    assert "ollama rm tinyllama:1b" in called(capsys, "rm", "tinyllama:1b", code=1)[1]
    assert not hub.seen
