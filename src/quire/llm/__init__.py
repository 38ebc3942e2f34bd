"""The Python API: LLM for scripts and notebooks, AsyncLLM (quire.llm.asynchronous) for asyncio programs."""

from quire.llm.sync import LLM, TextStream

__all__ = ["LLM", "TextStream"]
