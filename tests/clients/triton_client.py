"""tritonclient: health, metadata, inferences whole and streamed, async, errors. The third argument: the gRPC port."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
from importlib.metadata import version
from typing import Any

import numpy
import tritonclient.grpc as client
import tritonclient.grpc.aio as async_client
from tritonclient.utils import InferenceServerException

ADDRESS = f"127.0.0.1:{sys.argv[3]}"
KEY = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
GREEDY = {"temperature": "0", "max_tokens": "12", "ignore_eos": True}


def tensor(name: str, value: Any) -> client.InferInput:
    boolean = isinstance(value, bool)
    made = client.InferInput(name, [1], "BOOL" if boolean else "BYTES")
    made.set_data_from_numpy(
        numpy.array([value if boolean else value.encode()], dtype=bool if boolean else object)
    )
    return made


def inputs(text: str, *, stream: bool) -> list[client.InferInput]:
    return [
        tensor("text_input", text), tensor("stream", stream), tensor("exclude_input_in_output", True),
        tensor("sampling_parameters", json.dumps(GREEDY)), tensor("return_finish_reason", True),
    ]  # fmt: skip


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def whole_and_streamed() -> str:
    with client.InferenceServerClient(ADDRESS) as server:
        assert server.is_server_live()
        assert server.is_server_ready()
        assert server.is_model_ready("tiny", headers=KEY)
        assert server.get_server_metadata(headers=KEY).name == "quire"
        assert server.get_model_metadata("tiny", headers=KEY).outputs[0].name == "text_output"
        result = server.infer(
            "tiny", inputs("Hello", stream=False), request_id="7", headers=KEY, client_timeout=300
        )
        assert result.get_response().id == "7"
        assert result.as_numpy("finish_reason")[0] == b"length"
        found: queue.Queue[Any] = queue.Queue()
        server.start_stream(lambda result, error: found.put(error or result), headers=KEY)
        server.async_stream_infer("tiny", inputs("Hello", stream=True))
        said, final = "", False
        while not final:
            piece = found.get(timeout=300)
            assert not isinstance(piece, Exception), piece
            said += text_of(piece)
            final = piece.get_response().parameters["triton_final_response"].bool_param
        server.stop_stream()
        assert said == text_of(result)
        plain = server.infer(
            "tiny",
            [tensor("text_input", "Hello")],
            parameters={"max_tokens": 3, "temperature": 0.0},
            headers=KEY,
        )
        assert text_of(plain).startswith("Hello")
        return said


async def at_once(said: str) -> None:
    async with async_client.InferenceServerClient(ADDRESS) as server:
        results = await asyncio.gather(
            *(server.infer("tiny", inputs("Hello", stream=False), headers=KEY) for _ in range(8))
        )
        assert [text_of(result) for result in results] == [said] * 8

        async def requests() -> Any:
            for _ in range(3):
                yield {"model_name": "tiny", "inputs": inputs("Hello", stream=True)}

        pieces = [text_of(result) async for result, _ in server.stream_infer(requests(), headers=KEY)]
        assert sum(map(len, pieces)) == 3 * len(said)


def errors() -> None:
    with client.InferenceServerClient(ADDRESS) as server:
        for name, given, key, status, text in (
            ("tiny", inputs("Hello", stream=False), {}, "UNAUTHENTICATED", "API key"),
            ("other", inputs("Hello", stream=False), KEY, "NOT_FOUND", "available: tiny"),
            ("tiny", inputs("Hello", stream=True), KEY, "INVALID_ARGUMENT", "ModelStreamInfer"),
            ("tiny", [tensor("text", "Hello")], KEY, "INVALID_ARGUMENT", "is not one of text_input"),
        ):
            found, message = refusal(server, name, given, key)
            assert found == f"StatusCode.{status}", message
            assert text in message, message


def refusal(server: Any, name: str, given: Any, key: dict[str, str]) -> tuple[str, str]:
    """The status and message of an inference that must fail."""
    try:
        server.infer(name, given, headers=key)
    except InferenceServerException as error:
        return str(error.status()), str(error.message())
    raise AssertionError("not refused")


asyncio.run(at_once(whole_and_streamed()))
errors()
print("tritonclient", version("tritonclient"))
