"""Tenants over HTTP: keys from a file, limits with OpenAI's headers, what each may use, and what each has used."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, Reply, serving
from quire.config.serving import ServingConfig
from quire.config.tenants import TenantsFileError, key_digest, parse_tenants, read_tenants
from quire.server.rate_limits import Refusal, TokenCharge
from quire.server.tenant_access import TenantDirectory

KEYS = {name: f"qk-{name}-{'0123456789' * 3}" for name in ("small", "large", "boss", "other")}
SLO = ("chat:ttft=600000ms", "batch:")


def text(**more: str) -> str:
    """A file with four tenants. `more` are lines for one of them."""
    lines = {
        "small": "requests_per_minute = 3\ntokens_per_minute = 100\nconcurrent_requests = 2\nclasses = ['batch']",
        "large": "weight = 4\ncache_share = 0.5\ntokens_per_day = 1000000",
        "boss": "admin = true\nmodels = ['tiny']",
        "other": "models = ['elsewhere']",
    }
    parts = ["[prices]\ncurrency = 'EUR'\nprompt = 1000000\ngeneration = 2000000"]
    for name, body in (lines | more).items():
        parts.append(f"[tenants.{name}]\nkeys = ['sha256:{key_digest(KEYS[name]).hex()}']\n{body}")
    return "\n".join(parts)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(text())
    return path


@pytest.fixture(scope="module")
def server(folder: Path, file: Path) -> Iterator[LiveServer]:
    options = {"slo": SLO, "scheduling_policy": "fair"}
    with serving(
        folder,
        ENDLESS | options,
        tenants=str(file),
        api_key=("plain-key",),
        served_model_name=("tiny",),
        **PATIENT,
    ) as live:
        live.headers = auth("plain-key")
        yield live


def auth(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS.get(name, name)}"}


def ask(
    server: LiveServer, name: str, tokens: int = 2, headers: dict[str, str] | None = None, **more: object
) -> Reply:
    body = {"prompt": [5] * 4, "max_tokens": tokens, "ignore_eos": True} | more
    return server.post("/v1/completions", body, auth(name) | (headers or {}))


def reload(server: LiveServer) -> Reply:
    return server.request("POST", "/admin/tenants/reload", b"", auth("boss"))


def test_limits_of_a_tenant_and_their_headers(server: LiveServer) -> None:
    first = ask(server, "small")
    assert first.status == 200
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-tokens"] == "94"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    never = ask(server, "small", 97).error(400, "over_rate_limit", "max_tokens")
    assert never.startswith("tokens_per_minute: prompt and max_tokens are 101 tokens, over the 100")
    late = ask(server, "small", 95)
    message = late.error(429, "rate_limit_exceeded")
    assert message.startswith("tokens_per_minute: prompt and max_tokens are 99 tokens, 94 of 100 are left")
    assert 1 <= int(late.headers["retry-after"]) <= 60
    over = ask(server, "small")
    assert over.error(429, "rate_limit_exceeded").startswith("requests_per_minute: 3 requests in a minute")
    assert over.headers["x-ratelimit-remaining-requests"] == "0"
    assert (
        server.metric("quire_rate_limited_requests_total", tenant="small", limit="requests_per_minute") == 1
    )
    assert "x-ratelimit-limit-requests" not in ask(server, "large").headers
    assert "x-ratelimit-limit-requests" not in ask(server, "plain-key").headers


def test_a_streamed_answer_is_settled_with_what_it_used(server: LiveServer, file: Path) -> None:
    file.write_text(text(large="tokens_per_minute = 1000"))
    assert reload(server).json == {"tenants": 4}
    before = int(ask(server, "large").headers["x-ratelimit-remaining-tokens"])
    server.post(
        "/v1/completions", {"prompt": [5] * 4, "max_tokens": 500, "stream": True, "stop_token_ids": [*range(300)]},
        auth("large"),
    )  # fmt: skip
    server.wait(lambda: int(ask(server, "large", 1).headers["x-ratelimit-remaining-tokens"]) > before - 100)
    file.write_text(text())
    assert reload(server).status == 200


def test_requests_at_once_end_with_their_answers(server: LiveServer, file: Path) -> None:
    file.write_text(text(large="concurrent_requests = 1\nweight = 4"))
    reload(server)
    with server.busy(1, f"authorization: Bearer {KEYS['large']}\r\n"):
        server.wait(lambda: server.engine.stats.running == 1)
        ((request, _),) = server.engine.requests()
        assert (request.terms.account, request.terms.weight, request.tenant) == ("large", 4.0, "large")
        assert (
            ask(server, "large").error(429).startswith("concurrent_requests: 1 requests of this tenant run")
        )
    server.wait(lambda: ask(server, "large").status == 200)
    file.write_text(text())
    reload(server)


def test_a_file_with_errors_changes_nothing(
    server: LiveServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong, named in (
        (text(large="weight = 'heavy'"), "line 13: tenants.large.weight: must be a number"),
        (text(large="keys = ['secret-in-clear']\n"), "Cannot overwrite a value"),
        ("[tenants.a]\nkeys = ['secret-in-clear']", "line 2: tenants.a.keys: entry 1 is not sha256:"),
        ("[tenants.a", "is not TOML"),
        ("", "there is no section [tenants.NAME]"),
    ):
        file.write_text(wrong)
        with caplog.at_level(logging.ERROR, "quire.server"):
            message = reload(server).error(400, "invalid_tenants_file")
        assert named in message
        assert "still using the old one" in caplog.text
        assert "secret-in-clear" not in message + caplog.text
        assert ask(server, "boss").status == 200
    file.write_text(text())
    assert reload(server).json == {"tenants": 4}


def test_keys_are_rotated_by_the_file(server: LiveServer, file: Path) -> None:
    """A tenant with another key keeps its prefixes; the old key is refused at once."""
    prompt = {"prompt": "word " * 60, "max_tokens": 1}
    assert server.post("/v1/completions", prompt, auth("large")).status == 200
    old, KEYS["large"] = KEYS["large"], "qk-new-" + "9876543210" * 3
    file.write_text(text())
    reload(server)
    server.post("/v1/completions", prompt, {"authorization": f"Bearer {old}"}).error(401, "invalid_api_key")
    usage = server.post("/v1/completions", prompt, auth("large")).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    other = server.post("/v1/completions", prompt, auth("plain-key")).json["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_models_classes_and_scopes(server: LiveServer) -> None:
    ask(server, "other").error(403, "model_not_allowed", "model")
    assert server.get("/v1/models", auth("other")).json["data"] == []
    assert server.get("/v1/models", auth("boss")).json["data"][0]["id"] == "tiny"
    server.post("/tokenize", {"prompt": "a"}, auth("other")).error(403, "model_not_allowed")
    server.get("/admin/tenants", auth("large")).error(403, "not_admin")
    server.get("/admin/tenants", auth("nobody")).error(401)
    tenants = {one["name"]: one for one in server.get("/admin/tenants", auth("boss")).json["tenants"]}
    assert tenants["large"]["cache_share"] == 0.5
    assert tenants["large"]["keys"] == 1


def test_a_tenant_gets_only_its_classes(server: LiveServer, file: Path) -> None:
    file.write_text(text(small="classes = ['batch']"))
    reload(server)
    message = ask(server, "small", service_tier="chat").error(403, "class_not_allowed", "service_tier")
    assert message == "service_tier: this tenant may not ask for chat; batch can be had"
    assert ask(server, "small").status == ask(server, "small", service_tier="flex").status == 200
    file.write_text(text())
    reload(server)


def test_usage_adds_up_to_what_the_engine_did(server: LiveServer) -> None:
    for tag in ("red", "blue", ""):
        assert ask(server, "large", 7, {"x-quire-tag": tag} if tag else {}).status == 200
    ask(server, "large", 1, {"x-quire-tag": "not a tag"}).error(400, None, "x-quire-tag")
    server.wait(server.idle)
    server.wait(
        lambda: server.metric("quire_tenant_generation_tokens_total", tenant="large", tag="blue") == 7
    )
    report = server.get("/admin/usage?period=day", auth("boss")).json
    rows = {(row["tenant"], row["tag"]): row for row in report["rows"]}
    assert rows["large", "red"]["prompt_tokens"] == 4
    assert rows["large", "red"]["generation_tokens"] == 7
    assert rows["large", "red"]["cost"] == pytest.approx(4 * 1 + 7 * 2)
    assert rows["large", "red"]["currency"] == "EUR"
    assert ("api-key-1", "") in rows
    stats = server.engine.stats
    seconds = sum(row["compute_seconds"] for row in rows.values())
    assert seconds == pytest.approx(stats.step_seconds, rel=0.005)
    assert sum(row["cached_tokens"] for row in rows.values()) == stats.prefix_hit_tokens
    assert all(row["kv_byte_seconds"] >= 0 for row in rows.values())
    assert sum(row["kv_byte_seconds"] for row in rows.values()) > 0
    table = list(
        csv.DictReader(io.StringIO(server.get("/admin/usage?format=csv&period=hour", auth("boss")).text))
    )
    assert sum(int(row["generation_tokens"]) for row in table) == sum(
        row["generation_tokens"] for row in rows.values()
    )
    assert server.get("/admin/usage?to=2001-01-01", auth("boss")).json["rows"] == []
    for wrong in ("period=week", "format=xml", "from=soon", "x=1"):
        assert server.get(f"/admin/usage?{wrong}", auth("boss")).status == 400


def test_keys_are_in_no_metric_log_or_list(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        pages = [
            server.get(path, auth("boss")).text
            for path in ("/metrics", "/admin/tenants", "/admin/usage", "/admin/config", "/server_info")
        ]
        pages.append(ask(server, "small", 97).text)
        pages.append(ask(server, KEYS["small"] + "x").text)
    shown = "\n".join([*pages, caplog.text])
    for key in (*KEYS.values(), "plain-key"):
        assert key not in shown
        assert key_digest(key).hex() not in shown


def test_days_begin_at_midnight_and_clocks_that_are_set_change_nothing(file: Path) -> None:
    wall, now = [86_400.0 * 20_000 + 3600], [5 * 10**9]
    directory = TenantDirectory(ServingConfig(tenants=str(file)), (), lambda: now[0], lambda: wall[0])
    quota = directory._limits["large"].day
    assert quota.ends == 5 * 10**9 + 23 * 3600 * 10**9
    wall[0] -= 10**6  # somebody sets the clock: times are monotonic
    directory.reload()
    assert directory._limits["large"].day is quota
    assert quota.ends == 5 * 10**9 + 23 * 3600 * 10**9


def test_a_daily_quota_outlives_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, wall, now = tmp_path / "tenants.toml", [86_400.0 * 20_000 + 3600], [5 * 10**9]
    path.write_text("counts = 'counts.json'\n[tenants.a]\ntokens_per_day = 100\n[tenants.b]\n")

    def started() -> TenantDirectory:
        return TenantDirectory(ServingConfig(tenants=str(path)), (), lambda: now[0], lambda: wall[0])

    first = started()
    assert isinstance(first._limits["a"].charge(60, now[0]), TokenCharge)
    first.save(now=False)
    assert not (tmp_path / "counts.json").exists()  # not yet
    now[0] += 11 * 10**9
    first.save(now=False)
    second = started()
    assert second._limits["a"].day.used == 60
    refused = second._limits["a"].charge(41, now[0])
    assert isinstance(refused, Refusal)
    assert "40 of 100 are left" in refused.message
    # The day ends while the server runs: what it writes then is of the next day.
    now[0] += 23 * 3600 * 10**9
    second._limits["a"].charge(7, now[0])
    second.save()
    assert started()._limits["a"].day.used == 0
    wall[0] += 86_400
    assert started()._limits["a"].day.used == 7
    (tmp_path / "counts.json").write_text('{"day": 20001, "tokens": {"a": -1}}')
    with pytest.raises(TenantsFileError, match=r"counts\.json: is not a file of counts.*remove it to begin"):
        started()
    path.write_text("counts = 'missing/counts.json'\n[tenants.a]\n")
    third = started()
    third.save()
    third.save()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("[tenants.a]\nweight = 0", "line 2: tenants.a.weight: 0 is not in [0.001, 1000]"),
        ("[tenants.a]\n\nquota = 1", "line 3: tenants.a.quota: unknown; there are keys, weight"),
        ("[tenants.a]\nrequests_per_minute = 1.5", "must be an integer above 0; leave it out for no limit"),
        ("[tenants.'a:b']", "line 1: tenants.a:b: a name has up to 48 letters"),
        (
            "[tenants.a]\ncache_share = 0.6\n[tenants.b]\ncache_share = 0.6",
            "line 4: tenants.b.cache_share: with those",
        ),
        ("[tenants.a]\nmodels = 'x'", "line 2: tenants.a.models: must be a list of texts"),
        ("[tenants.a.prices]\nprompt = -1", "line 2: tenants.a.prices.prompt: -1 is not in"),
        ("[prices]\ncurrency = 5\n[tenants.a]", "line 2: prices.currency: must be up to 8 letters, like EUR"),
        ("counts = 5\n[tenants.a]", "line 1: counts: must be the path of a file"),
        ("[tenant.a]", "line 1: tenant: unknown; there are counts, prices, shared, tenants"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(wrong: str, message: str) -> None:
    with pytest.raises(TenantsFileError) as error:
        parse_tenants(wrong)
    assert message in str(error.value)


def test_what_contradicts_the_options_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text())
    with pytest.raises(
        TenantsFileError, match="cache_share and cache_domain need --prefix-cache-sharing key"
    ):
        TenantDirectory(ServingConfig(tenants=str(path), prefix_cache_sharing="all"))
    with pytest.raises(TenantsFileError, match=r"small\.keys: one of them is also a key of the options"):
        TenantDirectory(ServingConfig(tenants=str(path)), [KEYS["small"].encode()])
    with pytest.raises(TenantsFileError, match="cannot be read"):
        read_tenants(tmp_path / "none")
    team = "cache_domain = 'team'\ncache_share ="
    path.write_text(f"[tenants.a]\n{team} 0.2\n[tenants.b]\n{team} 0.1\n")
    directory = TenantDirectory(ServingConfig(tenants=str(path)))
    assert directory.domain("a") == directory.domain("b") == "shared:team"
    assert directory.floors() == {"shared:team": pytest.approx(0.3)}
