"""Tenants of a server with several models: limits are counted once, in front of the models."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers.process import running, until
from quire.config.tenants import key_digest

KEY = "qk-" + "0123456789" * 3
AUTH = {"authorization": f"Bearer {KEY}"}


def test_limits_are_counted_once_and_read_again_at_a_signal(folder: Path, tmp_path: Path) -> None:
    file, models = tmp_path / "tenants.toml", tmp_path / "models.toml"
    file.write_text(tenant("requests_per_minute = 3\nmodels = ['first', 'second']"))
    models.write_text("\n".join(f'[{name}]\npath = "{folder}"' for name in ("first", "second", "third")))
    options = ["--memory", "1500MiB", "--tenants", str(file), "--models", str(models), "--max-num-seqs", "4"]
    with running(None, *options) as server:

        def ask(model: str) -> tuple[int, dict[str, str]]:
            body = {"model": model, "prompt": [1, 2], "max_tokens": 1}
            reply = server.request("POST", "/v1/completions", body, AUTH)
            return reply.status, reply.headers

        assert {each["id"] for each in server.request("GET", "/v1/models", headers=AUTH).json["data"]} == {
            "first",
            "second",
        }
        left = []
        for model in ("first", "second", "third"):
            status, headers = ask(model)
            assert status == (403 if model == "third" else 200)
            left.append(headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        status, headers = ask("first")
        assert status == 429
        assert 1 <= int(headers["retry-after"]) <= 60
        file.write_text("[tenants.one]\nweight = 'heavy'\n")
        server.process.send_signal(signal.SIGHUP)
        server.said("still using the old one: tenants")
        assert ask("first")[0] == 429
        file.write_text(tenant("requests_per_minute = 5\ncache_share = 0.5\nadmin = true"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: ask("third")[0] == 200)
        for model in ("first", "second"):
            config = server.request("GET", f"/admin/config?model={model}", headers=AUTH).json["config"]
            assert config["cache_shares"] == {"one": 0.5}
        rows = server.request("GET", "/admin/usage?model=second", headers=AUTH).json["rows"]
        assert [row["tenant"] for row in rows] == ["one"]


def tenant(fields: str) -> str:
    return f"[tenants.one]\nkeys = ['sha256:{key_digest(KEY).hex()}']\n{fields}\n"
