"""Lines of a batch: read and checked, written, and put in an order in which prompts share prefixes.

OpenAI's format (https://platform.openai.com/docs/guides/batch): a line of the input is
{"custom_id", "method": "POST", "url", "body"}, one of the output {"id", "custom_id", "response", "error"}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quire.records import dataclass
from quire.server.inner_request import InnerAnswer
from quire.util.files import open_regular

if TYPE_CHECKING:
    import numpy as np

MAX_CUSTOM_ID_CHARS = 512
# Bytes of a line. Inputs are read outside of the memory for requests, with a few lines in memory at once.
MAX_LINE = 4 * 2**20
_SKIP = 64 * 1024
# Prompts are compared by their first characters, so many at a time: equal beginnings are neighbours in the order.
_PREFIXES = (256, 1024, 4096, 16384)
_DIGEST = 8  # bytes
_encode = msgspec.json.Encoder().encode


class BatchLine(msgspec.Struct):
    """A request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Prompts(msgspec.Struct):
    """The fields of a body that begin its prompt."""

    tools: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    stream: bool | None = None


class LineError(msgspec.Struct):
    """Why a line is no request, in OpenAI's form. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class InvalidLineError(Exception):
    """A line that is no request of a batch."""

    def __init__(self, error: LineError, custom_id: str | None = None) -> None:
        super().__init__(error.message)
        self.error, self.custom_id = error, custom_id


class LineResponse(msgspec.Struct):
    """The answer to a request of a batch."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct):
    """A line of the output; `response` is None if the request was not run."""

    id: str
    custom_id: str | None = None
    response: LineResponse | None = None
    error: LineError | None = None


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_prompts = msgspec.json.Decoder(_Prompts).decode
_decode_output = msgspec.json.Decoder(OutputLine).decode


def check_line(data: bytes, number: int, endpoints: Collection[str], longest: int) -> BatchLine:
    """A line of the input, of at most `longest` bytes. Raises InvalidLineError."""
    if len(data) > longest:
        message = f"line {number}: is over the limit of {longest} bytes"
        raise InvalidLineError(LineError("line_too_long", message, number))
    return read_line(data, number, endpoints)


def read_line(data: bytes, number: int, endpoints: Collection[str]) -> BatchLine:
    """A line of the input. Raises InvalidLineError saying what is wrong, with the number of the line."""

    def failure(
        code: str, message: str, param: str | None = None, custom_id: str | None = None
    ) -> InvalidLineError:
        return InvalidLineError(LineError(code, f"line {number}: {message}", number, param), custom_id)

    try:
        line = _decode_line(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        kind = "missing_required_parameter" if "missing required field" in str(error) else "invalid_json_line"
        raise failure(kind, f"not a request of a batch: {error}", custom_id=_custom_id(data)) from None
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise failure(
            "invalid_custom_id", f"custom_id: not 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    if line.method != "POST":
        raise failure(
            "invalid_method", f"method: {line.method[:20]!r} is not 'POST'", "method", line.custom_id
        )
    if line.url not in endpoints:
        known = ", ".join(sorted(endpoints))
        raise failure("invalid_url", f"url: {line.url[:100]!r} is not one of {known}", "url", line.custom_id)
    try:
        prompts = _decode_prompts(line.body)
    except msgspec.DecodeError as error:
        raise failure("invalid_request", f"body: {error}", "body", line.custom_id) from None
    if prompts.stream:
        raise failure("invalid_request", "stream: an answer in a batch is whole", "stream", line.custom_id)
    return line


def _custom_id(data: bytes) -> str | None:
    """The custom_id of a line that is JSON but no request."""
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def line_id(number: int) -> str:
    """The id of a line's output: the same whenever it is run."""
    return f"batch_req_{number}"


def answered(number: int, custom_id: str, answer: InnerAnswer) -> bytes:
    """The output of a request that was run."""
    response = LineResponse(answer.status, answer.request_id, msgspec.Raw(answer.body))
    return bytes(_encode(OutputLine(line_id(number), custom_id, response))) + b"\n"


def refused(number: int, custom_id: str | None, error: LineError) -> bytes:
    """The output of a line that was not run."""
    return bytes(_encode(OutputLine(line_id(number), custom_id, error=error))) + b"\n"


class OutputMismatchError(ValueError):
    """An output that does not belong to an input."""


def resume_output(path: Path) -> dict[int, str | None]:
    """Cut what follows the last whole line of an output; returns the custom_id by number of each line in it.

    Raises OutputMismatchError for a file that is no output of a batch.
    """
    if not path.exists():
        return {}
    done: dict[int, str | None] = {}
    whole = 0
    with open_regular(path) as file:
        for data in file:
            if not data.endswith(b"\n"):
                break
            try:
                line = _decode_output(data)
                done[int(line.id.removeprefix("batch_req_"))] = line.custom_id
            except (msgspec.DecodeError, ValueError):
                raise OutputMismatchError(f"{path}: contains a line that is no output of a batch") from None
            whole += len(data)
    if whole != path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(whole)
    return done


@dataclass(frozen=True, slots=True)
class InputOrder:
    """The lines of an input, those with the same beginning of a prompt next to each other.

    `offsets` and `numbers` are in this order, and have no entry for empty lines. Numbers count from 1. `repeated` are
    the lines whose custom_id an earlier line has.
    """

    offsets: np.ndarray[Any, np.dtype[np.int64]]
    numbers: np.ndarray[Any, np.dtype[np.int64]]
    repeated: frozenset[int]

    def __len__(self) -> int:
        return len(self.numbers)


def order_of(path: Path, longest: int) -> InputOrder:
    """Read an input once. Raises OSError."""
    import numpy as np  # with the first batch: a server starts without it

    keys, offsets, numbers = bytearray(), [], []
    seen: set[bytes] = set()
    repeated: set[int] = set()
    with open_regular(path) as file:
        for number, (offset, data) in enumerate(_lines(file, longest), 1):
            if not data.strip():
                continue
            key, custom_id = _key(data if len(data) <= longest else b"")
            keys += key
            offsets.append(offset)
            numbers.append(number)
            if custom_id in seen:
                repeated.add(number)
            elif custom_id:
                seen.add(custom_id)
    names = [f"prefix{i}" for i in range(len(_PREFIXES))]
    table = np.frombuffer(bytes(keys), dtype=[(name, ">u8") for name in names])
    order: np.ndarray[Any, np.dtype[np.int64]] = np.argsort(table, order=names, kind="stable")
    return InputOrder(
        np.array(offsets, np.int64)[order], np.array(numbers, np.int64)[order], frozenset(repeated)
    )


def repeated_line(number: int, custom_id: str | None) -> InvalidLineError:
    """What is wrong with a line whose custom_id an earlier line has."""
    message = f"line {number}: custom_id: an earlier line has the same"
    return InvalidLineError(LineError("duplicate_custom_id", message, number, "custom_id"), custom_id)


def input_errors(
    path: Path, endpoints: Collection[str], order: InputOrder, longest: int, most: int
) -> list[LineError]:
    """What is wrong with the lines of an input, of the first `most` wrong lines."""
    found: list[LineError] = []
    with open_regular(path) as file:
        for number, (_, data) in enumerate(_lines(file, longest), 1):
            if not data.strip():
                continue
            try:
                line = check_line(data, number, endpoints, longest)
                if number in order.repeated:
                    raise repeated_line(number, line.custom_id)
            except InvalidLineError as error:
                found.append(error.error)
                if len(found) == most:
                    break
    return found


def line_at(file: BinaryIO, offset: int, longest: int) -> bytes:
    """The line at an offset, at most one byte longer than `longest`."""
    file.seek(offset)
    return file.readline(longest + 1)


def _lines(file: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """Each line with its offset; of one that is too long, only its beginning."""
    offset = 0
    while data := file.readline(longest + 1):
        start = offset
        offset += len(data)
        while not data.endswith(b"\n") and (more := file.readline(_SKIP)):
            offset += len(more)
            if more.endswith(b"\n"):
                break
        yield start, data


def _key(data: bytes) -> tuple[bytes, bytes]:
    """What a line is sorted by, digests of longer and longer beginnings of its prompt; and a digest of its custom_id,
    b"" if it has none.
    """
    try:
        line = _decode_line(data)
        found = _decode_prompts(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return bytes(_DIGEST * len(_PREFIXES)), b""
    text = line.url.encode() + b"".join(
        map(bytes, (found.tools, found.instructions, found.messages, found.prompt, found.input))
    )
    return b"".join(_digest(text[:size]) for size in _PREFIXES), _digest(line.custom_id.encode())


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST).digest()
