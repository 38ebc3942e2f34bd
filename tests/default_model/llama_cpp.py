"""Requests to llama.cpp's server about one GGUF file, from an environment that has xllamacpp and no Quire.

    python llama_cpp.py FILE.gguf < requests.json > responses.json

Requests are a list of [path, body]; number formats of cache and products are float32 where the file's are.
"""

from __future__ import annotations

import json
import sys
import urllib.request

import xllamacpp


def main() -> None:
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 2048, 1, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.use_jinja, params.warmup, params.port = True, False, 0
    server = xllamacpp.Server(params)
    responses = []
    for path, body in json.load(sys.stdin):
        url = server.listening_address + path
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            responses.append(json.load(response))
    json.dump(responses, sys.stdout)


if __name__ == "__main__":
    main()
