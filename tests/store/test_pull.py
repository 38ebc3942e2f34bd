"""Pulling from a hub: what is fetched, what is kept, and what happens when things go wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_hub import LFS_BYTES, FakeHub, until
from quire.cli.main import main
from quire.loader import resolve_model
from quire.store import hub_client, partial_blob
from quire.store.model_store import ModelStore
from quire.store.partial_blob import PartialBlob
from quire.store.pulling import Pulled, PullOptions, pull
from quire.store.references import ModelReference
from quire.types import CheckpointError

NAME = "org/tiny"
WEIGHTS = random.Random(7).randbytes(600_000)
FILES = {
    "config.json": b'{"model_type": "x"}',
    "tokenizer.json": b"{}" * LFS_BYTES,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "README.md": b"# tiny",
    "onnx/model.safetensors": b"other",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}


class Puller:
    """Pulls into the store of a test, and keeps what it was told."""

    def __init__(self, folder: Path) -> None:
        self.store = ModelStore(folder)
        self.told: list[str] = []
        self.progress: list[tuple[int, int]] = []

    def __call__(self, name: str = NAME, limit: int | None = None, connections: int = 4) -> Pulled:
        options = PullOptions(connections, limit, lambda *at: self.progress.append(at), self.told.append)
        return pull(self.store, ModelReference.parse(name), options)


@pytest.fixture
def puller(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Puller:
    monkeypatch.setattr(hub_client, "pause", lambda _: 0.0)
    monkeypatch.setattr("quire.store.fetching_files.pause", lambda _: 0.0)
    monkeypatch.setattr(partial_blob, "SEGMENT_BYTES", 100_000)
    hub.add(NAME, FILES)
    return Puller(tmp_path / "store")


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def left_over(puller: Puller) -> list[str]:
    """Files of a store that no model is made of."""
    folders = [puller.store.partial, puller.store.folder / "pending"]
    return [path.name for folder in folders for path in folder.iterdir()]


def test_model_files_are_fetched_once_and_opened_by_name(hub: FakeHub, puller: Puller) -> None:
    pulled = puller()
    assert contents(pulled.path) == {name: FILES[name] for name in WANTED}
    assert pulled.fetched == sum(len(FILES[name]) for name in WANTED) == puller.progress[-1][1]
    assert {file.name for file in puller.store.find(ModelReference.parse(NAME)).files} == WANTED  # type: ignore[union-attr]
    assert len({seen.range for seen in hub.fetched("model.safetensors") if seen.server == "cdn"}) == 4
    assert resolve_model(NAME) == pulled.path
    assert resolve_model(NAME.upper()) == pulled.path
    assert not left_over(puller)
    before = hub.sent.copy()
    assert puller().fetched == 0
    assert hub.sent == before


def test_a_new_version_replaces_the_old_one_and_frees_what_only_it_had(hub: FakeHub, puller: Puller) -> None:
    old = puller()
    hub.add(NAME, FILES | {"model.safetensors": WEIGHTS[::-1]})
    new = puller()
    assert new.fetched == len(WEIGHTS)
    assert (new.path / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert new.freed.files == 1
    assert not old.path.exists()
    assert len(list(puller.store.blobs.iterdir())) == len(WANTED)


def test_revisions_have_names_of_their_own(hub: FakeHub, puller: Puller) -> None:
    hub.add(NAME, FILES | {"config.json": b"{}"}, "v1.0")
    main, old = puller(), puller(f"{NAME}@v1.0")
    assert (old.path / "config.json").read_bytes() == b"{}"
    assert (main.path / "config.json").read_bytes() == FILES["config.json"]
    assert old.fetched == 2
    assert resolve_model(f"{NAME}@v1.0") == resolve_model(NAME, revision="v1.0") == old.path
    commit = hub.commit(NAME, "v1.0")
    assert puller(f"{NAME}@{commit}").fetched == 0
    freed = puller.store.remove(ModelReference.parse(NAME))
    assert (freed.files, freed.kept, len(freed.used_by)) == (1, 2, 1)


GGUF = {
    f"{name}.gguf": name.encode() * 1000
    for name in (
        "x-Q4_K_M",
        "x-Q8_0",
        "BF16/x-BF16-00001-of-00002",
        "BF16/x-BF16-00002-of-00002",
        "mmproj-Q8_0",
    )
}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (":Q4_K_M", {"x-Q4_K_M.gguf"}),
        (":q8_0", {"x-Q8_0.gguf"}),
        ("/x-Q8_0.gguf", {"x-Q8_0.gguf"}),
        (":BF16", {"BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf"}),
    ],
)
def test_a_gguf_file_is_chosen_by_type_or_name(
    hub: FakeHub, puller: Puller, name: str, files: set[str]
) -> None:
    hub.add("org/x-GGUF", GGUF)
    pulled = puller(f"org/x-GGUF{name}")
    assert resolve_model(f"org/x-GGUF{name}") == pulled.path
    assert pulled.path.name == min(files).rpartition("/")[2]
    assert {file.name for file in pulled.manifest.files} == files
    assert pulled.path.read_bytes() == GGUF[min(files)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/x-GGUF", r"3 GGUF models: choose one by type or name.*x-Q4_K_M.gguf \(7.81 KiB\)"),
        ("org/x-GGUF:Q5_0", "no file is 'Q5_0' among .*x-Q4_K_M.gguf, x-Q8_0.gguf"),
        (
            "org/pickled",
            "no weights in safetensors or GGUF; it has pytorch_model.bin, formats that",
        ),
        (f"{NAME}@nowhere", "there is no such revision"),
        ("org/tinny", r"no such repository or file \(near: org/tiny\)"),
    ],
)
def test_what_is_not_there_is_named(hub: FakeHub, puller: Puller, name: str, message: str) -> None:
    hub.add("org/x-GGUF", GGUF)
    hub.add("org/pickled", {"pytorch_model.bin": b"p", "config.json": b"{}"})
    with pytest.raises(CheckpointError, match=message):
        puller(name)
    assert not hub.sent


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "org/na--me", "org/x:../y", "-x", "org/x@", "x" * 300])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a model's name"):
        ModelReference.parse(name)


def test_a_cut_connection_goes_on_where_it_was(hub: FakeHub, puller: Puller) -> None:
    hub.faults.cut_after["model.safetensors"] = [1000, 0, 0, 50_000, 3]
    assert (puller(connections=1).path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] == len(WEIGHTS)


def test_a_hub_without_ranges(hub: FakeHub, puller: Puller) -> None:
    hub.faults.no_ranges = True
    hub.faults.cut_after["model.safetensors"] = [1000]
    assert (puller().path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_connection_that_brings_nothing_ends_the_pull_and_the_next_goes_on(
    hub: FakeHub, puller: Puller
) -> None:
    hub.faults.cut_after["model.safetensors"] = [200_000, *[0] * hub_client.TRIES]
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: the connection ended early, 5 times; what has"
    ):
        puller(connections=1)
    assert left_over(puller)
    assert puller(connections=1).path.exists()
    assert hub.sent["model.safetensors"] == len(WEIGHTS)
    assert not left_over(puller)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_wrong_bytes_are_fetched_again_once(hub: FakeHub, puller: Puller, name: str) -> None:
    hub.faults.wrong[name] = 1
    assert contents(puller().path)[name] == FILES[name]
    assert puller.told == [f"{name}: the bytes that arrived are wrong; fetching them again"]
    puller.store.remove(ModelReference.parse(NAME))
    hub.faults.wrong[name] = 100
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected (sha256|git):\w+, found (sha256|git):\w+, twice"
    ):
        puller()
    assert puller.store.find(ModelReference.parse(NAME)) is None


def test_a_file_of_another_size_than_listed(hub: FakeHub, puller: Puller) -> None:
    hub.faults.lie["model.safetensors"] = len(WEIGHTS) + 5
    with pytest.raises(CheckpointError, match=r"the hub lists 600005 bytes .* but sends 600000"):
        puller()


def test_the_token_stays_with_the_hub(hub: FakeHub, puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.private[NAME] = "Bearer hf_secret"
    puller()
    assert {seen.token for seen in hub.seen if seen.server == "hub"} == {"Bearer hf_secret"}
    assert {seen.token for seen in hub.seen if seen.server == "cdn"} == {None}


def test_redirects_that_are_refused(hub: FakeHub, puller: Puller) -> None:
    for place, message in (
        (f"{hub.url}/{NAME}/resolve/main/", "more than 10 redirects"),
        ("file:///etc/", "which is not https"),
    ):
        hub.faults.redirect = place
        with pytest.raises(CheckpointError, match=message):
            puller()


def test_gated_and_private_models_name_the_token(
    hub: FakeHub, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add(NAME)
    with pytest.raises(
        CheckpointError, match=rf"{hub.url}/{NAME}: HTTP 401 .*accept its terms on its page, and set"
    ):
        puller()
    hub.gated.clear()
    hub.private[NAME] = "Bearer right"
    with pytest.raises(
        CheckpointError, match="it does not exist, or no token is set to read it: set HF_TOKEN"
    ):
        puller()
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(CheckpointError, match="the token of HF_TOKEN is not allowed to read it"):
        puller()


def test_a_busy_hub_is_asked_again_when_it_says(
    hub: FakeHub, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hub_client.HubClient, "rest", lambda _, seconds: waits.append(seconds))
    hub.faults.busy = [
        (429, {"Retry-After": "7"}), (503, {}), (429, {"RateLimit": '"api";r=0;t=55'}),
        (429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    ]  # fmt: skip
    puller()
    assert [wait for wait in waits if wait != 0.1] == [7.0, 0.0, 55.0, 0.0]
    assert "is busy (HTTP 429) and asks to wait 7 s" in puller.told[0]
    hub.faults.busy = [(429, {"Retry-After": "3600"})]
    with pytest.raises(CheckpointError, match="it asks to wait 3600 s, more than 300; try again later"):
        puller()
    hub.faults.busy = [(429, {"Retry-After": "1"})] * 20
    with pytest.raises(CheckpointError, match="HTTP 429"):
        puller()
    assert len(hub.faults.busy) >= 20 - 2 * (hub_client.TRIES + 1)


def test_no_hub(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"http://127.0.0.1:9: no answer: .*refused"):
        puller()
    monkeypatch.setattr(constants, "ENDPOINT", "ftp://x")
    with pytest.raises(CheckpointError, match="HF_ENDPOINT: 'ftp://x' is not an address"):
        puller()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids to ask the hub"):
        puller()


def test_room_is_checked_before_anything_is_fetched(
    hub: FakeHub, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CheckpointError, match=r"more exceed --store-limit 488.28 KiB: 0 B are used; quire rm"
    ):
        puller(limit=500_000)
    usage = os.statvfs("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**26 + 1000, "s": usage}))
    with pytest.raises(CheckpointError, match=r"more do not fit on the disk of .*: 64.00 MiB are free"):
        puller()
    assert not hub.sent
    monkeypatch.undo()


def test_a_disk_that_fills_up_meanwhile(
    hub: FakeHub, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = PartialBlob.write, [0]

    def full(self: PartialBlob, segment: Any, data: bytes) -> None:
        count[0] += 1
        if count[0] > 3:
            raise OSError(errno.ENOSPC, "full")
        write(self, segment, data)

    monkeypatch.setattr(PartialBlob, "write", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device: .*what has arrived is kept: make room"
    ):
        puller()
    monkeypatch.setattr(PartialBlob, "write", write)
    assert contents(puller().path) == {name: FILES[name] for name in WANTED}


COMMAND = [sys.executable, "-m", "quire.cli.main", "pull", NAME, "--quiet"]


@pytest.fixture
def start() -> Any:
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_pull_is_resumed(
    hub: FakeHub, puller: Puller, start: Callable[[], subprocess.Popen[str]]
) -> None:
    hub.faults.held["model.safetensors"] = 400_000
    process = start()
    partial = puller.store.partial / hashlib.sha256(WEIGHTS).hexdigest()
    until(lambda: partial.exists() and partial.stat().st_blocks * 512 >= 390_000)
    with pytest.raises(CheckpointError, match="another process is pulling it"):
        puller.store.remove(ModelReference.parse(NAME))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert puller.store.find(ModelReference.parse(NAME)) is None
    assert [manifest.reference for manifest in puller.store.pending()] == [NAME]
    hub.faults.held.clear()
    hub.faults.go_on.set()
    pulled = puller()
    assert contents(pulled.path) == {name: FILES[name] for name in WANTED}
    assert pulled.fetched <= len(WEIGHTS) - 300_000 + len(FILES["tokenizer.json"]) + len(FILES["config.json"])
    assert not left_over(puller)


def test_two_pulls_at_the_same_time_are_one_download(
    hub: FakeHub, puller: Puller, start: Callable[[], subprocess.Popen[str]]
) -> None:
    hub.faults.held["model.safetensors"] = 1000
    processes = [start(), start()]
    until(lambda: sum(seen.path.startswith("/api/models/org/tiny/tree") for seen in hub.seen) >= 4)
    until(lambda: hub.sent["model.safetensors"] >= 1000)
    hub.faults.go_on.set()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    for name in WANTED:
        assert hub.sent[name] == len(FILES[name]), name


def test_an_unfinished_pull_is_listed_and_can_be_removed(
    hub: FakeHub, puller: Puller, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults.cut_after["model.safetensors"] = [200_000, *[0] * hub_client.TRIES]
    with pytest.raises(CheckpointError):
        puller(connections=1)
    assert main(["list"]) == 0
    assert "(unfinished)" in capsys.readouterr().out
    freed = puller.store.remove(ModelReference.parse(NAME))
    assert freed.size >= 200_000
    assert not left_over(puller)
    with pytest.raises(CheckpointError, match="no such model"):
        puller.store.remove(ModelReference.parse(NAME))


def test_files_of_the_hub_cache_are_not_fetched(hub: FakeHub, puller: Puller, tmp_path: Path) -> None:
    blobs = tmp_path / "hf" / "hub" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / hashlib.sha256(WEIGHTS).hexdigest()).write_bytes(WEIGHTS)
    (blobs / hashlib.sha256(FILES["tokenizer.json"]).hexdigest()).write_bytes(b"damaged")
    puller()
    assert hub.sent["model.safetensors"] == 0
    assert hub.sent["tokenizer.json"] == len(FILES["tokenizer.json"])


def test_a_blob_that_was_written_to_is_refused_and_repaired(hub: FakeHub, puller: Puller) -> None:
    path = puller().path
    blob = (path / "model.safetensors").resolve()
    blob.write_bytes(WEIGHTS[:-1] + b"!")
    os.utime(blob, ns=(1, 1))
    with pytest.raises(
        CheckpointError, match=r"model.safetensors was written to after it was verified; quire pull"
    ):
        resolve_model(NAME)
    assert puller().fetched == len(WEIGHTS)
    assert (resolve_model(NAME) / "model.safetensors").read_bytes() == WEIGHTS
