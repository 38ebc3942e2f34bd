"""quire serve --from-command: the equivalent command, and what it leaves out."""

from __future__ import annotations

import re
import shlex

import pytest

from quire.cli.main import command_parser, main
from quire.config.elsewhere.known import ROWS

COMMANDS = [
    (
        "vllm serve org/m --max_model_len 8k --tensor-parallel-size 1 --no-enable-prefix-caching --api-key=k -O3",
        "quire serve org/m --max-model-len 8k --tensor-parallel-size 1 --no-enable-prefix-caching --api-key k "
        "--host 0.0.0.0",
    ),
    (
        "HF_TOKEN=t python3 -m vllm.entrypoints.openai.api_server --model org/m --uds s --enforce-eager",
        "HF_TOKEN=t quire serve org/m --uds s",
    ),
    (
        "/opt/llama-server -hf org/m:Q4_K_M -c 0 -np 4 -ngl 99 -ctk q8_0 --api-key a,b -fa --host ::1",
        "quire serve org/m:Q4_K_M --max-num-seqs 4 --kv-cache-dtype int8 --api-key a b --host ::1 --port 8080",
    ),
    (
        "LLAMA_ARG_CTX_SIZE=99 llama-server -m 'my model.gguf' --metrics",
        "quire serve 'my model.gguf' --max-model-len 99 --port 8080",
    ),
    (
        "python -m sglang.launch_server --model-path org/m --tp 2 --schedule-policy lpm --chunked-prefill-size -1",
        "quire serve org/m --tensor-parallel-size 2 --scheduling-policy lpm --no-enable-chunked-prefill --port 30000",
    ),
    (
        "python -m sglang.launch_server --model-path org/m --random-seed 3 --attention-backend native "
        "--enable-mixed-chunk",
        "quire serve org/m --seed 3 --port 30000",
    ),
    (
        "llama-server -m x.gguf --chat-template '{{ messages }}' --no-prefill-assistant --keep -1 -sps 0.5",
        "quire serve x.gguf --chat-template '{{ messages }}' --port 8080",
    ),
    (
        "text-generation-launcher --model-id org/m --payload-limit 2000000 --kv-cache-dtype fp8_e4m3fn",
        "quire serve org/m --max-body-bytes 2000000 --kv-cache-dtype fp8_e4m3 --host 0.0.0.0 --port 3000",
    ),
    (
        "MAX_TOTAL_TOKENS=4096 text-generation-launcher --model-id org/m --num-shard 2 -p 80 --speculate 0",
        "quire serve org/m --max-model-len 4096 --tensor-parallel-size 2 --port 80 --host 0.0.0.0",
    ),
]


@pytest.mark.parametrize(("command", "expected"), COMMANDS)
def test_a_command_becomes_its_equivalent(
    command: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--from-command", command]) == 0
    out, err = capsys.readouterr()
    assert out == expected + "\n"
    assert "cannot be had" not in err
    words = [word for word in shlex.split(out) if "=" not in word][2:]
    assert command_parser("serve").parse_args(words).model in expected


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "llama-server -m x.gguf --lora a.gguf",
            "--lora a.gguf: is not supported: an adapter is a model name",
        ),
        ("vllm serve org/m --no-such 3", "--no-such: no option that is known here"),
        ("vllm serve org/m --dtype fp4", "--dtype fp4: invalid choice"),
        (
            "llama-server -m x.gguf --temp 0.2",
            "--temp 0.2: is not supported: requests set their own parameters",
        ),
        ("llama-server -m x.gguf -ctk f16 -ctv q8_0", "-ctv q8_0: contradicts -ctk f16"),
        (
            "llama-server -m x.gguf --chat-template chatml",
            "--chat-template chatml: 'chatml': no templates have",
        ),
        (
            "python -m sglang.launch_server --model-path m --allow-auto-truncate",
            "prompts are never truncated",
        ),
        ("llama-server", "no model"),
    ],
)
def test_what_is_essential_and_cannot_be_had_fails(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--from-command", command]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("quire serve ")
    assert re.search(f"cannot be had: .*{re.escape(told)}", err)


def test_ollama_is_configured_by_its_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_NUM_PARALLEL", "2")
    assert main(["serve", "--from-command", "OLLAMA_HOST=0.0.0.0:80 OLLAMA_KEEP_ALIVE=5m ollama serve"]) == 1
    out, err = capsys.readouterr()
    assert out == "quire serve MODEL --max-num-seqs 2 --host 0.0.0.0 --port 80\n"
    assert "left out: OLLAMA_KEEP_ALIVE 5m: " in err
    assert "put one in place of MODEL" in err


@pytest.mark.parametrize("command", ["nginx -c x", "'", ""])
def test_a_command_of_no_known_server_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--from-command", command]) == 2
    assert "quire: from_command: " in capsys.readouterr().err


def test_contradictions_between_the_options_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--from-command", "vllm serve m --ssl-keyfile k"]) == 2
    assert "ssl_keyfile and ssl_certfile" in capsys.readouterr().err


def test_a_name_means_one_thing_in_each_server() -> None:
    seen: set[tuple[str, str]] = set()
    for row in ROWS:
        for entry in ((name, server) for name in row.names for server in row.servers):
            assert entry not in seen, entry
            seen.add(entry)
