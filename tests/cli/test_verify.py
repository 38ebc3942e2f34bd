"""quire verify: what it passes, what it warns of, what it fails, and its exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cli.main import main


def verify(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify", str(folder), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def status(report: dict[str, Any], check: str) -> list[str]:
    return [found["status"] for found in report["checks"] if found["check"] == check]


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edited(folder: Path, name: str, **changes: Any) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | changes))


def flip(folder: Path, value: float) -> None:
    """Overwrite the last float of the weights."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(value).tobytes()
    path.write_bytes(data)


def test_a_sound_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, folder)
    assert (code, report["ok"]) == (0, True)
    assert {file["name"] for file in report["files"]} == {path.name for path in folder.iterdir()}
    for check in ("files", "config", "tensors", "weights", "tokenizer", "chat template"):
        assert "ok" in status(report, check), report["checks"]
    assert main(["verify", str(folder), "--no-weights"]) == 0
    assert capsys.readouterr().out.endswith("ok\n")


def test_digests_of_an_earlier_run(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = verify(capsys, copy)
    (tmp_path / "before.json").write_text(json.dumps(report))
    again = ("--digests", str(tmp_path / "before.json"))
    assert verify(capsys, copy, *again)[0] == 0
    flip(copy, 0.5)
    code, report = verify(capsys, copy, *again)
    assert (code, status(report, "digests"), status(report, "weights")) == (1, ["failed"], ["ok"])


def test_nan_fails(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy, float("nan"))
    code, report = verify(capsys, copy)
    assert (code, status(report, "weights")) == (1, ["failed"])
    assert main(["verify", str(copy), "--no-weights"]) == 0


@pytest.mark.parametrize(
    ("name", "changes", "failed"),
    [
        ("config.json", {"num_hidden_layers": 1, "layer_types": None}, "tensors"),
        ("config.json", {"hidden_size": 63}, "tensors"),
        ("config.json", {"vocab_size": 100}, "tokenizer"),
        ("config.json", {"model_type": "gpt2"}, "config"),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].nothing.more }}"}, "chat template"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_parts_that_do_not_belong_together(
    name: str, changes: dict[str, Any], failed: str, *, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(copy, name, **changes)
    code, report = verify(capsys, copy, "--no-weights")
    assert code == 1
    assert "failed" in status(report, failed), report["checks"]


def test_a_blob_with_another_digest_than_on_the_hub(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs = copy.parent / "blobs"
    blobs.mkdir()
    (copy / "config.json").rename(blobs / ("0" * 40))
    (copy / "config.json").symlink_to(blobs / ("0" * 40))
    code, report = verify(capsys, copy, "--no-weights")
    assert (code, status(report, "files")) == (1, ["failed"])


def test_warnings_do_not_fail(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(copy, "generation_config.json", eos_token_id=5)
    code, report = verify(capsys, copy, "--no-weights")
    assert code == 0
    assert "warning" in status(report, "tokenizer")


def test_a_report_that_is_none(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["verify", str(folder), "--digests", str(tmp_path / "x.json")]) == 1
    assert "files" in capsys.readouterr().err


NAME = "\x1b[31mred\x9b2J\n\u202e"


def rename(folder: Path, old: str, new: str) -> None:
    """Give a tensor another name."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = {new if name == old else name: entry for name, entry in header.items()}
    text = json.dumps(names).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("command", ["verify", "inspect", "generate", "convert"])
def test_names_in_files_are_not_obeyed(
    command: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By no command, whether a tensor, a file or a field of a config has such a name."""
    options = {"inspect": ["--no-measure"], "convert": [str(tmp_path / "out")], "generate": ["--prompt", "a"]}
    for step in (
        lambda: rename(copy, "model.norm.weight", NAME),
        lambda: (copy / f"model{NAME}.safetensors").write_bytes(b"x"),
        lambda: edited(copy, "config.json", **{NAME: 1, "torch_dtype": NAME}),
        lambda: edited(copy, "config.json", model_type=NAME, architectures=[NAME]),
        lambda: (copy / "tokenizer.json").write_text(json.dumps({"model": {"type": NAME}})),
    ):
        step()
        main([command, str(copy), *options.get(command, [])])
    shown = capsys.readouterr()
    for line in (shown.out + shown.err).split("\n"):
        assert line.isprintable(), repr(line)
