"""Certificates for tests, each of an authority of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(key: Path, certificate: Path, name: str, of: str = "") -> None:
    """Write a key, and a certificate for a common name and a further one as openssl writes it (IP:…, DNS:…). Skips the
    test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes certificates")
    further = ["-addext", f"subjectAltName={of}"] if of else []
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
         *further, "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
