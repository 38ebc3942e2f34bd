"""Property tests of every route from the OpenAPI document, by schemathesis (pip install schemathesis).

PYTHONPATH=src:tests python tests/clients/run_schemathesis.py [more arguments for `schemathesis run`]

Not part of the suite: it takes minutes. No response may be a 5xx, and each must be as the document says.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.checkpoints import TinyModel, save
from helpers.server import serving
from helpers.tokenizers import write_byte_tokenizer

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# 504 is the right answer to a deadline that has passed.
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 504]
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save(TinyModel("served", "LlamaConfig", {"max_position_embeddings": 2048}), folder)
        write_byte_tokenizer(folder)
        with serving(folder, served_model_name=("tiny",)) as server:
            settings = Path(name) / "schemathesis.toml"
            settings.write_text(SETTINGS)
            command = [
                "schemathesis",
                "--config-file",
                str(settings),
                "run",
                f"{server.url}/openapi.json",
                "--checks",
                CHECKS,
            ]
            done = subprocess.run([*command, *sys.argv[1:]], check=False)
            server.wait(server.idle)
            assert server.chat(max_tokens=1).status == 200
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
