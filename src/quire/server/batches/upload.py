"""A file in a body of multipart/form-data (RFC 7578), written to disk as it arrives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Exchange

_MAX_PARTS, _MAX_FIELD_BYTES = 16, 1024
_MAX_HEADERS, _MAX_HEADER_BYTES = 8, 1024  # of a part
_MAX_NAME_CHARS = 255
# What a client sends wrong is answered, not logged.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class Upload:
    """The parts of a body: short fields, and one file, whose bytes go to `part`."""

    def __init__(self, part: Path) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.size = -1  # of the file; -1 until its part begins
        self._path = part
        self._file: IO[bytes] | None = None
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name: str | None = None
        self._field = bytearray()
        self._parts = 0
        self._ended = False

    async def read(self, exchange: Exchange, limit: int, seconds: float) -> None:
        """Read the body of a request whose file has at most `limit` bytes.

        Raises ApiError 400 for a malformed body, 408, 413 and 415, and OSError.
        """
        from python_multipart.exceptions import MultipartParseError
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(exchange.header(b"content-type"))
        if kind.lower() != b"multipart/form-data" or not options.get(b"boundary"):
            shown = exchange.header(b"content-type")[:100] or "none"
            message = f"content-type: {shown!r} is not multipart/form-data with a boundary"
            raise ApiError(415, message, code="unsupported_media_type")
        parser = MultipartParser(options[b"boundary"], {
            "on_part_begin": self._begin, "on_part_data": self._data, "on_part_end": self._end,
            "on_header_field": self._take_header, "on_header_value": self._take_value,
            "on_header_end": self._end_header, "on_headers_finished": self._end_headers, "on_end": self._finish,
        }, max_header_count=_MAX_HEADERS, max_header_size=_MAX_HEADER_BYTES)  # fmt: skip
        most = limit + _MAX_PARTS * (
            _MAX_HEADERS * _MAX_HEADER_BYTES + _MAX_FIELD_BYTES
        )  # the file with what is around it
        try:
            with self._path.open("xb") as self._file:
                async for piece in exchange.chunks(most, seconds):
                    parser.write(piece)
                    if self.size > limit:
                        raise ApiError(
                            413, f"file: is over the limit of {limit} bytes (--max-file-size)",
                            code="request_too_large", param="file", close=True,
                        )  # fmt: skip
                parser.finalize()
        except MultipartParseError as error:
            raise bad_request(
                None, f"the body is not multipart/form-data: {error}", "invalid_multipart"
            ) from None
        if not self._ended:
            raise bad_request(None, "the body ends before its last boundary", "invalid_multipart")
        if self.size < 0:
            raise bad_request("file", "file: missing")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(None, f"the body has more than {_MAX_PARTS} parts", "invalid_multipart")
        self._disposition, self._name = b"", None
        self._field.clear()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise bad_request(None, "a part has no name", "invalid_multipart")
        self._name = name.decode("utf-8", "replace")
        if self._name == "file":
            if self.size >= 0:
                raise bad_request("file", "file: sent more than once")
            self.size = 0
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = given.replace("\\", "/").rpartition("/")[2][:_MAX_NAME_CHARS] or "upload"
        elif self._name in self.fields:
            raise bad_request(self._name[:100], f"{self._name[:100]}: sent more than once")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            assert self._file is not None
            self._file.write(data[start:end])
            self.size += end - start
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise bad_request(self._name, f"{self._name}: is over {_MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._name is not None and self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._ended = True
