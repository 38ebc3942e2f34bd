"""An inference of KServe's protocol as a completion request, and what that streams as responses.

The tensors are those of Triton's vLLM backend: a text and its sampling parameters in, a text out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quire.records import dataclass
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import ChunkPiece
from quire.server.kserve.kserve_messages import CLASSES
from quire.server.requests import SCALARS

Message = Any  # one of kserve_messages.CLASSES
# Inputs and outputs: name -> data type. Each input has one element; only text_input is required.
INPUTS = {
    "text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL", "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
}  # fmt: skip
OUTPUTS = {
    "text_output": "BYTES", "finish_reason": "BYTES", "num_input_tokens": "UINT32", "num_output_tokens": "UINT32",
}  # fmt: skip
REFUSED = {
    "return_cumulative_logprob": "not implemented", "return_logprobs": "not implemented", "image": "text only",
}  # fmt: skip
# Fields of a completion request that the protocol sets, and parameters of Triton's that need no answer.
_OWN = frozenset(
    {"model", "prompt", "stream", "stream_options", "echo", "return_token_ids", "return_accepted_drafts", "request_id"}
)  # fmt: skip
_TRITONS = frozenset({"triton_enable_empty_final_response", "binary_data_output"})
MAX_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class InferenceAsk:
    """One inference. `body` is the completion request, `outputs` the names of the tensors wanted, `raw` whether they
    come as bytes, `samples` the length of each.
    """

    id: str
    model: str
    stream: bool
    body: bytes
    outputs: tuple[str, ...]
    raw: bool
    samples: int


def read_ask(request: Message, *, streams: bool, deadline: float | None) -> InferenceAsk:
    """The ask of a ModelInferRequest; `streams`: the call can have several responses. `deadline`: seconds left.

    Raises ApiError naming the input, parameter or output.
    """
    if request.model_version not in {"", "1"}:
        raise ApiError(
            404, "model_version: there is one version, 1", code="model_not_found", param="model_version"
        )
    given = _read_inputs(request)
    stream = given.get("stream", False)
    if stream and not streams:
        raise bad_request("stream", "stream: needs the call ModelStreamInfer")
    echo = not given.get("exclude_input_in_output", stream)
    if echo and stream:
        raise bad_request(
            "exclude_input_in_output", "exclude_input_in_output: false is not possible in a stream"
        )
    fields = _sampling(request, given)
    outputs = _outputs(request, given, stream=stream)
    samples = fields.get("n") or 1
    if not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES:
        raise bad_request("n", f"n: {samples!r:.50} is not in [1, {MAX_SAMPLES}]")
    if deadline is not None:
        fields["deadline_ms"] = min(_milliseconds(fields.get("deadline_ms")), max(0.0, deadline * 1000))
    fields |= {
        "model": request.model_name or None,
        "prompt": given["text_input"],
        "stream": stream,
        "echo": echo,
    }
    return InferenceAsk(
        request.id, request.model_name, stream, msgspec.json.encode(fields), outputs,
        bool(request.raw_input_contents), samples,
    )  # fmt: skip


def _milliseconds(given: object) -> float:
    return float(given) if isinstance(given, int | float) else float("inf")


def _read_inputs(request: Message) -> dict[str, Any]:
    """The value of each input."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise bad_request(
            "raw_input_contents", f"raw_input_contents: {len(raw)} for {len(request.inputs)} inputs"
        )
    found: dict[str, Any] = {}
    for number, tensor in enumerate(request.inputs):
        name = tensor.name
        if name in REFUSED:
            raise bad_request(name, f"{name}: {REFUSED[name]}", "unsupported_parameter")
        if name not in INPUTS:
            raise bad_request("inputs", f"inputs: {name!r:.100} is not one of {', '.join(INPUTS)}")
        if name in found:
            raise bad_request(name, f"{name}: given more than once")
        if tensor.datatype != INPUTS[name]:
            raise bad_request(name, f"{name}: datatype {tensor.datatype!r:.50} is not {INPUTS[name]}")
        if any(size != 1 for size in tensor.shape):
            raise bad_request(name, f"{name}: shape {list(tensor.shape)[:8]} does not have one element")
        found[name] = _element(name, tensor.contents, raw[number] if raw else None)
    if not found.get("text_input"):
        raise bad_request("text_input", "text_input: missing or empty")
    return found


def _element(name: str, contents: Message, raw: bytes | None) -> str | bool:
    """The one element of a tensor. Bytes in raw form follow their length in four bytes, the lowest first."""
    if INPUTS[name] == "BOOL":
        values: Sequence[Any] = contents.bool if raw is None else [byte != 0 for byte in raw]
    elif raw is None:
        values = contents.bytes
    else:
        whole = len(raw) >= 4 and struct.unpack_from("<I", raw)[0] == len(raw) - 4
        values = [raw[4:]] if whole else []
    if len(values) != 1:
        raise bad_request(name, f"{name}: its contents are not one element of {INPUTS[name]}")
    if isinstance(values[0], bool):
        return values[0]
    try:
        return bytes(values[0]).decode()
    except UnicodeDecodeError:
        raise bad_request(name, f"{name}: not UTF-8") from None


def _sampling(request: Message, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a completion request, from the input `sampling_parameters` or, without it, from the parameters."""
    if (text := given.get("sampling_parameters")) is None:
        where = "parameters"
        named = {
            p.key: getattr(p.value, p.value.WhichOneof("choice") or "string") for p in request.parameters
        }
        fields = {name: value for name, value in named.items() if name not in _TRITONS}
    else:
        where = "sampling_parameters"
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(where, f"{where}: not a JSON object: {error}") from None
    for name in _OWN.intersection(fields):
        raise bad_request(where, f"{where}: {name} is not a sampling parameter")
    return {name: _number(name, value) for name, value in fields.items()}


def _number(name: str, value: Any) -> Any:
    """A number or switch that came as a text, as Triton's clients send them."""
    if not isinstance(value, str) or name not in SCALARS:
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value  # refused as any other wrong value is


def _outputs(request: Message, given: Mapping[str, Any], *, stream: bool) -> tuple[str, ...]:
    offered = ["text_output", *(name for name in OUTPUTS if given.get(f"return_{name}"))]
    for name in offered:
        if stream and name.startswith("num_"):
            raise bad_request(f"return_{name}", f"return_{name}: not in a stream")
    wanted = [output.name for output in request.outputs]
    for name in wanted:
        if name not in offered:
            raise bad_request("outputs", f"outputs: {name!r:.100} is not one of {', '.join(offered)}")
    return tuple(dict.fromkeys(wanted or offered))


class InferenceAnswer:
    """What a completion request answers, as responses: bytes in, messages out."""

    def __init__(self, ask: InferenceAsk, model: str) -> None:
        self._ask, self._model = ask, model
        self._buffer = bytearray()
        self._open = set(range(ask.samples))  # samples that have not ended
        # of an event with a text and nothing else, in a stream of one sample: what is around the text, and its message
        self._before: ChunkPiece = b""
        self._after: ChunkPiece = b""
        self._template: _Template | None = None
        self.failure: ApiError | None = None  # how a stream ended, if it failed

    def feed(self, data: bytes) -> Iterator[Message]:
        """The responses that these bytes complete."""
        self._buffer += data
        if not self._ask.stream:
            return
        *blocks, rest = bytes(self._buffer).split(b"\n\n")
        self._buffer = bytearray(rest)
        for block in blocks:
            if block.startswith(b"data: {"):
                event = msgspec.json.decode(block[6:])
                if "error" in event:
                    self.failure = inner_error(_STATUSES.get(event["error"]["code"], 500), block[6:])
                elif event["choices"]:
                    yield self._response(event["choices"], None)

    def most_bytes(self, data: bytes) -> int:
        """The largest size of the messages for events, each with its frame."""
        beside = 64 * len(self._ask.outputs) * self._ask.samples + len(self._model) + len(self._ask.id) + 256
        return len(data) + max(1, data.count(b"\n\n")) * beside

    def continued(self, before: ChunkPiece, text: ChunkPiece, after: ChunkPiece) -> bytes | None:
        """The message of a stream for an event in three pieces, the one between being the JSON of a text; None if it is
        another event, and then nothing has changed.
        """
        if before is not self._before or after is not self._after:
            if not before or self._ask.samples != 1:
                return None
            (choice,) = msgspec.json.decode(before[6:] + b'""' + after)["choices"]
            if choice["finish_reason"] is not None:
                return None
            self._before, self._after = before, after
            empty = {"index": 0, "text": "", "finish_reason": None}
            self._template = _Template(self._response([empty], None))
        if self._buffer:
            return None
        return self._template.message(  # type: ignore[union-attr]
            text[1:-1] if b"\\" not in text else msgspec.json.decode(text, type=str).encode()
        )

    def whole(self) -> Message:
        """The response of an answer that is not streamed."""
        answer = msgspec.json.decode(self._buffer)
        return self._response(answer["choices"], answer["usage"])

    def _response(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int] | None) -> Message:
        texts, reasons = [b""] * self._ask.samples, [b""] * self._ask.samples
        for choice in choices:
            index = choice["index"]
            texts[index] = choice["text"].encode()
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"].encode()
                self._open.discard(index)
        values: dict[str, list[Any]] = {"text_output": texts, "finish_reason": reasons}
        if usage is not None:
            values["num_input_tokens"] = [usage["prompt_tokens"]]
            values["num_output_tokens"] = [usage["completion_tokens"]]
        made = CLASSES["ModelInferResponse"](model_name=self._model, model_version="1", id=self._ask.id)
        made.parameters.add(key="triton_final_response").value.bool = not self._open
        for name in self._ask.outputs:
            self._add(made, name, values[name])
        return made

    def _add(self, response: Message, name: str, values: list[Any]) -> None:
        datatype = OUTPUTS[name]
        tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        if not self._ask.raw:
            (tensor.contents.bytes if datatype == "BYTES" else tensor.contents.uint).extend(values)
        elif datatype == "BYTES":
            parts = [struct.pack("<I", len(value)) + value for value in values]
            response.raw_output_contents.append(b"".join(parts))
        else:
            response.raw_output_contents.append(struct.pack(f"<{len(values)}I", *values))


class _Template:
    """The ModelStreamInferResponse of one text after the other, on the wire: what is not the text is encoded once."""

    def __init__(self, response: Message) -> None:
        """`response`: the one of an empty text."""
        tensors, raw = list(response.outputs), list(response.raw_output_contents)
        at = next(number for number, tensor in enumerate(tensors) if tensor.name == "text_output")
        kind = CLASSES["ModelInferResponse"]
        bare = kind.FromString(response.SerializeToString())
        if raw:
            del bare.raw_output_contents[:]
            before, after = kind(raw_output_contents=raw[:at]), kind(raw_output_contents=raw[at + 1 :])
        else:
            del bare.outputs[:]
            before, after = kind(outputs=tensors[:at]), kind(outputs=tensors[at + 1 :])
        self._raw = bool(raw)
        self._before = bare.SerializeToString() + before.SerializeToString()
        self._after = after.SerializeToString()
        tensors[at].ClearField("contents")
        self._tensor = tensors[at].SerializeToString()

    def message(self, text: ChunkPiece) -> bytes:
        """The message of a text in UTF-8. Fields by their numbers in kserve_messages, all of them with a length."""
        size = len(text)
        if self._raw:
            field = b"\x32%b%b%b" % (_varint(size + 4), size.to_bytes(4, "little"), text)  # type: ignore[str-format]
        else:
            contents = b"\x42%b%b" % (_varint(size), text)  # type: ignore[str-format]
            tensor = b"%b\x2a%b%b" % (self._tensor, _varint(len(contents)), contents)
            field = b"\x2a%b%b" % (_varint(len(tensor)), tensor)
        whole = len(self._before) + len(field) + len(self._after)
        return b"\x12%b%b%b%b" % (_varint(whole), self._before, field, self._after)


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    if number < 0x80:
        return b"%c" % number
    return b"%c" % (number & 0x7F | 0x80) + _varint(number >> 7)


# The status of an error that came after the beginning of a stream, by its code; 500 for others.
_STATUSES = {"deadline_exceeded": 504, "engine_unavailable": 503, "request_blocked": 400}


def inner_error(status: int, body: bytes) -> ApiError:
    """The error that a completion request was answered with, which names the inputs of this protocol."""
    error = msgspec.json.decode(body)["error"]
    message, param = error["message"], error["param"]
    if param == "prompt":
        param, message = "text_input", message.replace("prompt", "text_input", 1)
    return ApiError(status, message, code=error["code"], param=param)
