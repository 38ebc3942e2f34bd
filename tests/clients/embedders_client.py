"""Vectors by the classes of LangChain, LlamaIndex and Haystack: one text, several, queries, async; all the same."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = ["a b", "c", "a c b d e"]


def main() -> None:
    url = f"{sys.argv[1]}/v1"
    found = [langchain(url), llama_index(url), haystack(url)]
    assert all(len(vectors) == len(TEXTS) for vectors in found)
    for vectors in found[1:]:
        for one, other in zip(vectors, found[0], strict=True):
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6
    names = ("langchain-openai", "llama-index-core", "haystack-ai")
    print(*(f"{name} {version(name)}" for name in names))


def langchain(url: str) -> list[list[float]]:
    # Its own count of tokens would fetch the tokenizer of OpenAI's models.
    model = OpenAIEmbeddings(
        model="tiny", base_url=url, check_embedding_ctx_length=False, chunk_size=2, max_retries=0
    )
    vectors = model.embed_documents(TEXTS)
    assert model.embed_query(TEXTS[0]) == vectors[0]
    assert asyncio.run(model.aembed_documents(TEXTS)) == vectors
    return vectors


def llama_index(url: str) -> list[list[float]]:
    model = OpenAILikeEmbedding(model_name="tiny", api_base=url, api_key="secret", max_retries=0)
    vectors: list[list[float]] = model.get_text_embedding_batch(TEXTS)
    assert model.get_query_embedding(TEXTS[0]) == vectors[0]
    assert asyncio.run(model.aget_text_embedding_batch(TEXTS)) == vectors
    return vectors


def haystack(url: str) -> list[list[float]]:
    base: Any = {
        "model": "tiny",
        "api_base_url": url,
        "api_key": Secret.from_token("secret"),
        "max_retries": 0,
    }
    asked = [Document(content=text) for text in TEXTS]
    documents = OpenAIDocumentEmbedder(**base, progress_bar=False).run(asked)["documents"]
    assert OpenAITextEmbedder(**base).run(TEXTS[0])["embedding"] == documents[0].embedding
    return [document.embedding for document in documents]


if __name__ == "__main__":
    main()
