"""LiteLLM's proxy in front of the server: OpenAI's client through it, whole, streamed, async, errors; its own key."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "served", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
KEY = "sk-proxy"


def main() -> None:
    url = sys.argv[1]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"  # JSON is YAML
        behind = {"api_base": f"{url}/v1", "api_key": os.environ["OPENAI_API_KEY"]}
        served = [
            {"model_name": "served", "litellm_params": {"model": "hosted_vllm/tiny", **behind}},
            {"model_name": "text", "litellm_params": {"model": "text-completion-openai/tiny", **behind}},
        ]
        config.write_text(json.dumps({"model_list": served, "general_settings": {"master_key": KEY}}))
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
        proxy = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=os.environ | quiet, cwd=folder,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            ask(f"http://127.0.0.1:{port}/v1", url, proxy)
        finally:
            proxy.terminate()
            proxy.wait(30)
    print("litellm[proxy]", version("litellm"))


def ask(through: str, url: str, proxy: subprocess.Popen[bytes]) -> None:
    """The same answers through the proxy as without it."""
    direct = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    expected = direct.chat.completions.create(**ASKED | {"model": "tiny"}).choices[0].message.content
    client = openai.OpenAI(base_url=through, api_key=KEY, max_retries=0, timeout=120)
    end = time.monotonic() + 240
    while True:
        try:
            assert {model.id for model in client.models.list()} == {"served", "text"}
            break
        except openai.APIConnectionError:
            assert proxy.poll() is None, "the proxy did not start"
            assert time.monotonic() < end, "the proxy does not listen"
            time.sleep(1)
    assert client.chat.completions.create(**ASKED).choices[0].message.content == expected
    stream = client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage is not None
    assert client.completions.create(model="text", prompt="one two", max_tokens=8).choices[0].text is not None
    assert set(asyncio.run(several(through))) == {expected}
    for error, more in (
        (openai.BadRequestError, {"temperature": -1}), (openai.BadRequestError, {"model": "other"}),
    ):  # fmt: skip
        try:
            client.chat.completions.create(**ASKED | more)
        except error:
            continue
        raise AssertionError(f"no {error.__name__} for {more}")


async def several(through: str) -> list[Any]:
    client = openai.AsyncOpenAI(base_url=through, api_key=KEY, max_retries=0, timeout=120)
    answers = await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(8)))
    return [answer.choices[0].message.content for answer in answers]


if __name__ == "__main__":
    main()
