"""Batches on disk: what OpenAI says of each, and which files it reads and writes."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.server.batches.batch_lines import LineError
from quire.server.batches.file_store import FilesDirError, FileStore
from quire.server.errors import ApiError
from quire.util.files import written_anew

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
MAX_BATCHES = 10_000  # of a domain; the oldest that have ended are forgotten first
ENDED = ("failed", "completed", "expired", "cancelled")


class BatchCounts(msgspec.Struct):
    """Requests of a batch by what became of them."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(msgspec.Struct):
    """What is wrong with the input of a batch."""

    data: list[LineError]
    object: Literal["list"] = "list"


class BatchBody(msgspec.Struct, kw_only=True):
    """A batch, as OpenAI describes it. Times are wall-clock seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ] = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    metadata: Metadata | None = None


class _Stored(msgspec.Struct):
    """A batch on disk: what clients see; how long its output is kept; and how it ends, once that is decided."""

    body: BatchBody
    output_seconds: float | None = None
    ending: Literal["completed", "expired", "cancelled"] = "completed"


class BatchStates:
    """The batches of all domains, each in <domain>/<id>.json of a file store."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._batches: dict[str, dict[str, _Stored]] = {}
        files.in_use = self._reads
        for domain in files.domains():
            found = self._batches[domain] = {}
            for path in sorted((files.root / domain).glob("batch_*.json")):
                try:
                    stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
                except msgspec.DecodeError as error:
                    raise FilesDirError(f"files_dir: {path}: {error}") from None
                found[stored.body.id] = stored

    def create(
        self, domain: str, endpoint: str, source: str, window: tuple[str, float], metadata: Metadata | None,
        output_seconds: float | None,
    ) -> BatchBody:  # fmt: skip
        """A new batch of the file `source`; `window` is its time as text and in seconds."""
        now = int(time.time())
        body = BatchBody(
            id=f"batch_{uuid.uuid4().hex}", endpoint=endpoint, input_file_id=source, completion_window=window[0],
            created_at=now, expires_at=now + int(window[1]), metadata=metadata,
        )  # fmt: skip
        batches = self._batches.setdefault(domain, {})
        if len(batches) >= MAX_BATCHES:
            ended = [batch for batch in self.all(domain) if batch.status in ENDED]
            if not ended:
                raise ApiError(
                    429, f"{MAX_BATCHES} batches have not ended, the limit", code="too_many_batches"
                )
            del batches[ended[0].id]
            self.path(domain, ended[0].id, "json").unlink(missing_ok=True)
        batches[body.id] = _Stored(body, output_seconds)
        self.save(domain, body.id)
        return body

    def all(self, domain: str) -> list[BatchBody]:
        """The batches of a domain in order of creation."""
        found = [stored.body for stored in self._batches.get(domain, {}).values()]
        return sorted(found, key=lambda body: (body.created_at, body.id))

    def get(self, domain: str, name: str) -> BatchBody:
        """A batch. Raises ApiError 404, also for that of another domain."""
        stored = self._batches.get(domain, {}).get(name)
        if stored is None:
            raise ApiError(404, f"no such batch: {name[:100]!r}", code="not_found", param="id")
        return stored.body

    def unfinished(self) -> list[tuple[str, str]]:
        """Domain and id of each batch that has not ended, the oldest first."""
        found = [(b.created_at, domain, b.id) for domain in self._batches for b in self.all(domain)
                 if b.status not in ENDED]  # fmt: skip
        return [(domain, name) for _, domain, name in sorted(found)]

    def path(self, domain: str, name: str, suffix: str) -> Path:
        """A file of a batch: its state, `json`, or what it has written so far, `output` and `errors`."""
        return self._files.folder(domain) / f"{name}.{suffix}"

    def save(self, domain: str, name: str) -> None:
        """Write the state of a batch to disk."""
        with written_anew(self.path(domain, name, "json"), durable=True) as file:
            file.write(msgspec.json.encode(self._batches[domain][name]))

    def finalize(self, domain: str, name: str, ending: Literal["completed", "expired", "cancelled"]) -> None:
        """Decide how a batch ends, and make files of what it has written. After a crash in between, `finish` does the
        rest.
        """
        stored = self._batches[domain][name]
        stored.ending = ending
        body = stored.body
        body.status, body.finalizing_at = "finalizing", int(time.time())
        if self._has(domain, name, "output"):
            body.output_file_id = self._files.new_id()
        if self._has(domain, name, "errors"):
            body.error_file_id = self._files.new_id()
        self.save(domain, name)
        self.finish(domain, name)

    def finish(self, domain: str, name: str) -> None:
        """End a batch whose ending is decided."""
        stored = self._batches[domain][name]
        body = stored.body
        for suffix, file_id in (("output", body.output_file_id), ("errors", body.error_file_id)):
            part = self.path(domain, name, suffix)
            if file_id is not None and part.exists():
                filename = f"{name}_{suffix}.jsonl"
                self._files.add(domain, file_id, part, filename, "batch_output", stored.output_seconds)
            part.unlink(missing_ok=True)
        body.status = stored.ending
        setattr(body, f"{stored.ending}_at", int(time.time()))
        self.save(domain, name)

    def fail(self, domain: str, name: str, errors: list[LineError]) -> None:
        """End a batch that cannot be run."""
        body = self.get(domain, name)
        body.status, body.failed_at, body.errors = "failed", int(time.time()), BatchErrors(errors)
        self.save(domain, name)

    def _has(self, domain: str, name: str, suffix: str) -> bool:
        path = self.path(domain, name, suffix)
        return path.exists() and path.stat().st_size > 0

    def _reads(self, domain: str, file_id: str) -> bool:
        batches = self._batches.get(domain, {}).values()
        return any(s.body.input_file_id == file_id and s.body.status not in ENDED for s in batches)
