"""The one place that knows which kinds of executors there are."""

from __future__ import annotations

from quire.config.schema import ResolvedConfig
from quire.executor.base import ExecutorKind
from quire.program.program import Program
from quire.types import CheckpointError


def import_executor(name: str) -> None:
    """Import what an executor needs, so that the memory of this process contains it.

    Raises CheckpointError if torch is asked for and missing.
    """
    if name == "native":
        import quire.executor.native
    else:
        try:
            import quire.executor.torch  # noqa: F401
        except ImportError as error:
            raise CheckpointError("executor 'torch' needs torch: pip install 'quire-llm[gpu]'") from error


def native_kind(threads: int, isa: str = "") -> ExecutorKind:
    """Native executors with so many threads; `isa` "" is the best of this machine."""
    from quire.executor.native import NativeKind

    return NativeKind(threads, isa)


def executor_kind(config: ResolvedConfig, programs: tuple[Program, ...] = ()) -> ExecutorKind:
    """The kind of executor that a configuration names; with `programs`, one that leads ranks which run them. Raises
    CheckpointError if torch is asked for and missing."""
    import_executor(config.asked.execution.executor)
    if programs:
        from quire.executor.native_ranks import RankedKind

        return RankedKind(config.threads, config.isa, programs, config.nodes)
    if config.asked.execution.executor == "native":
        return native_kind(config.threads, config.isa)
    from quire.executor.torch import TorchKind

    return TorchKind(config.asked.execution.device, config.threads, config.isa)
