"""Quire: LLM inference and serving on native CPU kernels, without torch at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "ProgramState", "RequestOutput", "SamplingParams", "StructuredOutput",
    "__version__", "assistant", "function", "gen", "openai_app", "select", "system", "user",
]  # fmt: skip

if TYPE_CHECKING:
    from quire.lang import ProgramState, assistant, function, gen, select, system, user
    from quire.llm import LLM
    from quire.llm.asynchronous import AsyncLLM
    from quire.llm.beam_outputs import BeamSearchParams
    from quire.llm.openai_app import openai_app
    from quire.outputs import RequestOutput
    from quire.structured.ask import StructuredOutput
    from quire.types import SamplingParams

_HOMES = {
    "AsyncLLM": "quire.llm.asynchronous",
    "BeamSearchParams": "quire.llm.beam_outputs",
    "LLM": "quire.llm",
    "ProgramState": "quire.lang",
    "RequestOutput": "quire.outputs",
    "SamplingParams": "quire.types",
    "StructuredOutput": "quire.structured.ask",
    "assistant": "quire.lang",
    "function": "quire.lang",
    "gen": "quire.lang",
    "openai_app": "quire.llm.openai_app",
    "select": "quire.lang",
    "system": "quire.lang",
    "user": "quire.lang",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that importing the package costs nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
