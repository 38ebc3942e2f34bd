"""`quire top` against a server, and `quire config explain` from the description of the options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, serving
from quire.cli import top
from quire.cli.config_explain import explained
from quire.cli.main import main
from quire.config.effects import LIVE, MOVES

KEYS = ("key-of-a", "key-of-b")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = ENDLESS | {"max_num_seqs": 1, "slo": ("chat:ttft=600000", "batch:"), "degrade": ("shed",)}
    with serving(folder, options, api_key=KEYS, admin_api_key=("root",), **PATIENT) as live:
        yield live


def test_top_shows_requests_by_class_and_tenant(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEYS[0])
    file = tmp_path / "admin"
    file.write_text("root\n")
    with server.busy(2, headers=f"authorization: Bearer {KEYS[1]}\r\n", service_tier="batch"):
        admin = ["--admin-api-key-file", str(file)]
        server.wait(lambda: server.engine.stats.running == 1)
        for seconds in ("0.3", "3", "30"):  # until it is enough for a step
            assert main(["top", server.url, "--once", "--json", "--seconds", seconds, *admin]) == 0
            found = json.loads(capsys.readouterr().out)
            if found["output_tokens_per_second"]:
                break
        assert found["by_class"]["batch"] | {"prompt": 0, "output": 0, "longest wait": 0} == {
            "running": 1, "waiting": 1, "prompt": 0, "output": 0, "longest wait": 0,
        }  # fmt: skip
        assert len(found["by_tenant"]) == 1
        assert found["kv_blocks"] > 0
        assert found["output_tokens_per_second"] > 0
        assert found["step_ms"] > 0
        assert set(found["goodput"]) == {"chat", "batch"}
        assert [one["status"] for one in found["requests"]] == ["running", "waiting"]
        assert main(["top", server.url, "--once", "--requests", "1", "--seconds", "0.3", *admin]) == 0
        text = capsys.readouterr().out
        assert "running 1   waiting 1" in text
        assert "KV [" in text
        assert "\nclass " in text
        assert text.count("cmpl-") == 1
        assert main(["top", server.url, "--once", "--json", "--seconds", "0.1"]) == 0  # another client's
        assert json.loads(capsys.readouterr().out)["requests"] == []
        monkeypatch.delenv("QUIRE_API_KEY")  # an administrator needs no client's key
        assert main(["top", server.url, "--once", "--json", "--seconds", "0.1", *admin]) == 0
        assert len(json.loads(capsys.readouterr().out)["requests"]) == 2


def test_top_goes_on_in_place_until_it_is_stopped(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each view takes the place of the one before."""
    monkeypatch.setenv("QUIRE_API_KEY", KEYS[0])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    views, whole = list[dict[str, Any]](), top.view

    def counted(*args: Any) -> dict[str, Any]:
        if len(views) == 3:
            raise KeyboardInterrupt
        views.append(whole(*args))
        return views[-1]

    monkeypatch.setattr(top, "view", counted)
    assert main(["top", server.url, "--seconds", "0.1"]) == 0
    assert len(views) == 3
    shown = capsys.readouterr().out
    assert shown.count("\x1b[H\x1b[J" + server.url) == 3


def test_top_says_why_it_cannot(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.url, "--once"]) == 1
    assert "401: missing API key" in capsys.readouterr().err
    assert main(["top", "ftp://x", "--once"]) == 2
    assert main(["top", "--seconds", "0"]) == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["top", "--api-key", "x"])
    said = "--api-key is no option of this command, but of quire serve (did you mean --api-key-file?)"
    assert said in capsys.readouterr().err


def test_every_option_is_explained_with_metrics_that_exist(server: LiveServer) -> None:
    found = explained()
    assert found.keys() == MOVES.keys()
    assert found.keys() >= LIVE
    page = server.get("/metrics", {"authorization": f"Bearer {KEYS[0]}"}).text
    families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    for name, each in found.items():
        assert each["effect"], name
        for metric in each["metrics"]:
            if metric.startswith("quire_adapter_"):  # only where there are adapters
                continue
            assert {metric, f"{metric}_total"} & families, (name, metric)


def test_an_option_is_explained_by_any_of_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("max-num-seqs", "max_num_seqs", "QUIRE_MAX_NUM_SEQS"):
        assert main(["config", "explain", name]) == 0
        text = capsys.readouterr().out
        assert text.startswith("--max-num-seqs  [memory and limits]\n")
        assert "default:  64" in text
        assert "quire_num_requests_running" in text
    assert main(["config", "explain", "scheduling-policy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheduling_policy"]["change"] in {"live", "start-up"}
    assert main(["config", "explain", "max-num-sekk"]) == 2
    assert "unknown (did you mean" in capsys.readouterr().err.replace("; ", " (")
