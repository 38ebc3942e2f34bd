"""Fetch the files of a pull: over several connections, verified, and once in all processes."""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from threading import Lock

import msgspec

from quire.store.hub_client import CUT, TRIES, HubClient, HubError, StoppedError, pause, reason_of
from quire.store.manifests import Manifest, StoredFile
from quire.store.model_store import ModelStore
from quire.store.partial_blob import PartialBlob, Segment
from quire.types import CheckpointError
from quire.util.sizes import format_size

_CHUNK = 2**20
_FILES = 4  # that are fetched, or verified, at once
_LOOK = 0.1  # seconds between looks at files of other processes, and at progress
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class FileFetcher:
    """Fetches the files of a manifest into the blobs of a store. `tell` gets lines for the user.

    `arrived` gets each file as it is stored, from any thread, and before another process can ask for it.
    """

    def __init__(
        self,
        store: ModelStore,
        client: HubClient,
        manifest: Manifest,
        connections: int,
        tell: Callable[[str], None],
        arrived: Callable[[StoredFile], None],
    ) -> None:
        self._store, self._client, self._manifest, self._tell = store, client, manifest, tell
        self._connections, self._arrived = connections, arrived
        self._repository = manifest.source.removeprefix(f"{client.endpoint}/")
        self._lock, self._told = Lock(), False
        self._done = 0  # bytes that are here or were verified
        self.fetched = 0  # bytes that came from the hub

    def run(
        self,
        missing: list[StoredFile],
        progress: Callable[[int, int], None],
    ) -> None:
        """Fetch files; `progress` gets (done, total) in bytes, in this thread.

        What has arrived stays on disk if this raises: CheckpointError naming the file, or an interrupt.
        """
        total = sum(file.size for file in missing)
        with (
            ThreadPoolExecutor(self._connections, "quire-pull") as pool,
            ThreadPoolExecutor(_FILES, "quire-pull-file") as files,
        ):
            left = {files.submit(self._file, file, pool) for file in missing}
            try:
                while left:
                    done, left = wait(left, _LOOK, FIRST_COMPLETED)
                    for future in done:
                        # a file that was stopped says nothing: the one that failed is still ending its connections
                        if not isinstance(future.exception(), StoppedError):
                            future.result()
                    progress(min(self._done, total), total)
            except BaseException:
                self._client.stopped.set()
                for future in left:
                    future.cancel()
                raise

    def _file(self, file: StoredFile, pool: ThreadPoolExecutor) -> None:
        """Fetch a file, or wait until another process has. Raises CheckpointError, StoppedError."""
        try:
            self._obtain(file, pool)
        except OSError as error:
            raise self._problem(file, self._disk(error)) from None

    def _disk(self, error: OSError) -> str:
        reason = os.strerror(error.errno or 0)
        return f"{reason}: {self._store.folder}; what has arrived is kept: make room and pull again"

    def _obtain(self, file: StoredFile, pool: ThreadPoolExecutor) -> None:
        while True:
            partial = PartialBlob.locked(self._store.partial, file, self._connections)
            found = self._stored(file)
            if found is not None:
                if partial is not None:
                    partial.discard()
                    partial.close()
                self._count(file.size)
                self._arrived(found)
                return
            if partial is not None:
                with closing(partial):
                    found = self._fetch(file, partial, pool)
                    self._arrived(found)  # before others can open the file anew: they would fetch it again
                    partial.become(self._store.blobs / found.sha256)
                    return
            with self._lock:
                told, self._told = self._told, True
            if not told:
                self._tell(f"{file.name} is being fetched by another process; waiting for it")
            self._client.rest(_LOOK)

    def _stored(self, file: StoredFile) -> StoredFile | None:
        """The file if it has become a blob meanwhile."""
        kind, _, sha256 = file.promised.partition(":")
        if kind != "sha256":
            known = self._store.known_files().get(file.promised)
            if known is None:
                return None
            sha256 = known[0]
        try:
            status = (self._store.blobs / sha256).stat()
        except OSError:
            return None
        return msgspec.structs.replace(file, sha256=sha256, modified=status.st_mtime_ns)

    def _fetch(self, file: StoredFile, partial: PartialBlob, pool: ThreadPoolExecutor) -> StoredFile:
        self._count(partial.resumed)
        for again in (True, False):
            self._segments(file, partial, pool)
            sha256, found = partial.digest(file.promised)
            if found == file.promised:
                return msgspec.structs.replace(file, sha256=sha256, modified=partial.settle())
            if again:
                self._tell(f"{file.name}: the bytes that arrived are wrong; fetching them again")
                self._count(-file.size)
                partial.restart(self._connections)
        partial.discard()
        raise CheckpointError(
            f"{self._manifest.reference}: {file.name}: expected {file.promised}, found {found}, twice: the hub, or"
            " something between, sends wrong bytes"
        )

    def _segments(self, file: StoredFile, partial: PartialBlob, pool: ThreadPoolExecutor) -> None:
        """Fetch what is missing. No connection writes to the file after this."""
        running = [pool.submit(self._segment, file, partial, segment) for segment in partial.segments]
        try:
            for future in running:
                future.result()
        except BaseException:
            self._client.stopped.set()
            wait(running)
            # that of the segment which failed, and not of those which it stopped
            for future in running:
                if (error := future.exception()) is not None and not isinstance(error, StoppedError):
                    raise error from None
            raise

    def _segment(self, file: StoredFile, partial: PartialBlob, segment: Segment) -> None:
        """Fetch a segment, over as many connections as it takes while each brings something."""
        failures = 0
        while segment.at < segment.end:
            before, reason = segment.at, "the connection ended early"
            try:
                self._stream(file, partial, segment)
            except HubError as error:
                raise self._problem(file, str(error)) from None
            except CUT as error:
                reason = reason_of(error)
            if segment.at == segment.end:
                return
            failures = 0 if segment.at > before else failures + 1
            if failures >= TRIES:
                raise self._problem(
                    file, f"{reason}, {TRIES} times; what has arrived is kept: pull again to go on"
                )
            self._client.rest(pause(failures))

    def _stream(self, file: StoredFile, partial: PartialBlob, segment: Segment) -> None:
        """Write what one connection brings. Raises what `CUT` lists if it breaks."""
        address = self._client.file_address(self._repository, self._manifest.commit, file.name)
        asked = {"Range": f"bytes={segment.at}-{segment.end - 1}"}
        with self._client.opened(address, asked) as response:
            skip = self._offset(file, segment, response)
            while segment.at < segment.end:
                data = response.read1(min(_CHUNK, skip + segment.end - segment.at))
                if not data:
                    return
                if self._client.stopped.is_set():
                    raise StoppedError
                data, skip = data[skip:], max(0, skip - len(data))
                try:
                    partial.write(segment, data)
                except OSError as error:
                    raise self._problem(file, self._disk(error)) from None
                with self._lock:
                    self._done += len(data)
                    self.fetched += len(data)

    def _offset(self, file: StoredFile, segment: Segment, response: http.client.HTTPResponse) -> int:
        """How many bytes of an answer precede the segment. Raises CheckpointError if it is of another file."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise self._problem(file, f"it comes as {encoding}, which was not asked for")
        if response.status == 206:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != segment.at:
                raise self._problem(file, "another range came than the one that was asked for")
            skip, size = 0, int(match[2])
        else:
            skip, size = segment.at, int(response.headers.get("Content-Length", file.size))
        if size != file.size:
            raise self._problem(
                file, f"the hub lists {file.size} bytes ({format_size(file.size)}), but sends {size}"
            )
        return skip

    def _problem(self, file: StoredFile, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._manifest.reference}: {file.name}: {reason}")

    def _count(self, size: int) -> None:
        with self._lock:
            self._done += size
