"""`quire tenants`: keys, their hashes, and files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from quire.cli.main import main


def test_a_key_and_its_hash(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["tenants", "key"]) == 0
    (_, key), (_, digest) = (line.split() for line in capsys.readouterr().out.splitlines())
    assert len(key) > 40
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    assert main(["tenants", "hash"]) == 0
    assert capsys.readouterr().out.strip() == digest
    monkeypatch.setattr("sys.stdin", io.StringIO("password\n"))
    assert main(["tenants", "hash"]) == 2
    assert "password" not in capsys.readouterr().err


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.a]\nweight = 2\nrequests_per_minute = 5\ncache_share = 0.25\n")
    assert main(["tenants", "check", str(file)]) == 0
    assert capsys.readouterr().out == "a: 0 keys, weight 2, requests_per_minute 5, cache share 0.25\n"
    file.write_text("[tenants.a]\nweight = -1\n")
    assert main(["tenants", "check", str(file)]) == 2
    assert "line 2: tenants.a.weight: -1 is not in" in capsys.readouterr().err
    assert main(["tenants", "check"]) == 2
