"""A container image of an environment with Quire, made without a container engine, from files of this machine.

    python -m tools.image ENVIRONMENT OUT.tar        # ENVIRONMENT: a venv into which the wheel was installed

The root file system has the interpreter, the part of the standard library that Quire uses, the environment's packages
with byte code, the shared libraries that these need, certificates, and no shell. OUT.tar is an OCI image layout, which
`docker load`, `podman load` and `skopeo copy oci-archive:OUT.tar` read. Equal inputs give equal bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

HOME = "/opt/quire"
USER = 10001
MOST_BYTES = 150_000_000  # compressed
_LEFT_OUT = re.compile(
    r"(^|/)(test|tests|idlelib|tkinter|turtledemo|lib2to3|ensurepip|__pycache__|pip|setuptools|_distutils_hack|config-\d[^/]*)"
    r"(/|$)|(^|/)(pip|setuptools)-[^/]*\.dist-info|\.(a|exe|pth)$|_test[a-z]*\.[^/]*\.so$"
)
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/sbin/nologin\nquire:x:{USER}:{USER}::/data:/sbin/nologin\n",
    "etc/group": f"root:x:0:\nquire:x:{USER}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_COMPILE = (
    "import compileall, py_compile, sys; sys.exit(not compileall.compile_dir(sys.argv[1], quiet=2, "
    "stripdir=sys.argv[2], prependdir='/', invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))"
)
_ASK = (
    "import json, os, sys, sysconfig; print(json.dumps([os.path.realpath(sys.executable), "
    "sysconfig.get_path('stdlib'), sysconfig.get_path('purelib'), '%d.%d' % sys.version_info[:2]]))"
)


def build(environment: Path, out: Path, tag: str = "quire:0.1.0") -> int:
    """Write the image; returns its bytes. Raises CalledProcessError and OSError."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        python = _fill(environment, root)
        layer, whole = _layer(root)
    config = {
        "architecture": "amd64", "os": "linux",
        "config": {
            "User": f"{USER}:{USER}", "WorkingDir": "/data", "ExposedPorts": {"8000/tcp": {}},
            "Env": [f"PATH={HOME}/bin", "HOME=/data", "QUIRE_STORE=/data/models", "QUIRE_CACHE_DIR=/data/cache",
                    f"SSL_CERT_FILE={_CERTIFICATES}"],
            "Entrypoint": [python, "-m", "quire.cli.main"], "Cmd": ["serve", "--host", "0.0.0.0"],
        },
        "rootfs": {"type": "layers", "diff_ids": [whole]},
    }  # fmt: skip
    _write_layout(out, json.dumps(config).encode(), layer, tag)
    return out.stat().st_size


def _fill(environment: Path, root: Path) -> str:
    """Put all files under `root`; returns the path of the interpreter there."""
    asked = subprocess.run(
        [environment / "bin/python", "-c", _ASK], capture_output=True, text=True, check=True
    )
    binary, stdlib, packages, version = json.loads(asked.stdout)
    home = root / HOME[1:]
    library = home / f"lib/python{version}"
    python = home / f"bin/python{version}"
    _copy_tree(Path(stdlib), library, without="site-packages")
    _copy_tree(Path(packages), library / "site-packages")
    _copy(Path(binary), python)
    for path in _libraries([python, *library.rglob("*.so"), *library.rglob("*.so.*")], root):
        plain = (
            path.is_relative_to("/lib") or path.is_relative_to("/usr/lib") or path.is_relative_to("/lib64")
        )
        _copy(path, root / (str(path)[1:] if plain else f"usr/lib/{path.name}"))
    subprocess.run([binary, "-c", _COMPILE, library, str(root)], check=True)
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if _CERTIFICATES.exists():
        _copy(_CERTIFICATES, root / str(_CERTIFICATES)[1:])
    for name in ("tmp", "data", "proc", "sys", "dev"):
        (root / name).mkdir()
    return f"{HOME}/bin/{python.name}"


def _libraries(files: Iterable[Path], root: Path) -> list[Path]:
    """The shared libraries outside of `root` that files need, by the dynamic linker of this machine."""
    found: set[str] = set()
    for file in files:
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
        found |= set(re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listed, re.M))
    return sorted(Path(each) for each in found if not Path(each).is_relative_to(root))


def _copy_tree(source: Path, target: Path, without: str = "") -> None:
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source).as_posix()
        if file.is_file() and not _LEFT_OUT.search(name) and not (without and name.startswith(f"{without}/")):
            _copy(file, target / name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    target.chmod(0o755 if source.stat().st_mode & 0o111 else 0o644)


def _layer(root: Path) -> tuple[bytes, str]:
    """The files as a compressed archive, and the digest of what it was before."""
    plain, packed = hashlib.sha256(), io.BytesIO()

    class Both(io.RawIOBase):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            plain.update(data)
            return stream.write(data)

    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as stream,
        tarfile.open(fileobj=Both(), mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(root.rglob("*")):
            archive.add(path, path.relative_to(root).as_posix(), recursive=False, filter=_owned)
    return packed.getvalue(), f"sha256:{plain.hexdigest()}"


def _owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    own = entry.name == "data"
    entry.uid = entry.gid = USER if own else 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o1777 if entry.name == "tmp" else 0o755 if entry.isdir() else entry.mode
    return entry


def _write_layout(out: Path, config: bytes, layer: bytes, tag: str) -> None:
    names = {"config": _digest(config), "layer": _digest(layer)}
    kind = "application/vnd.oci.image"
    manifest = json.dumps({
        "schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", "digest": f"sha256:{names['config']}", "size": len(config)},
        "layers": [
            {"mediaType": f"{kind}.layer.v1.tar+gzip", "digest": f"sha256:{names['layer']}", "size": len(layer)}
        ],
    }).encode()  # fmt: skip
    index = json.dumps({
        "schemaVersion": 2, "mediaType": f"{kind}.index.v1+json",
        "manifests": [{
            "mediaType": f"{kind}.manifest.v1+json", "digest": f"sha256:{_digest(manifest)}", "size": len(manifest),
            "annotations": {
                "io.containerd.image.name": tag, "org.opencontainers.image.ref.name": tag.partition(":")[2]
            },
        }],
    }).encode()  # fmt: skip
    blobs = "blobs/sha256/"
    older = [{"Config": blobs + names["config"], "RepoTags": [tag], "Layers": [blobs + names["layer"]]}]
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index,
        "manifest.json": json.dumps(older).encode(),
        **{blobs + _digest(each): each for each in (config, layer, manifest)},
    }  # fmt: skip
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    """Build one, and say how large it is."""
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    size = build(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{sys.argv[2]}: {size / 1e6:.1f} MB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
