"""The one place that knows which kinds of executors there are."""

from __future__ import annotations

from quire.config.schema import EngineConfig, ResolvedConfig
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


def library_facts(config: EngineConfig) -> dict[str, str | int]:
    """What hosts that run a model together must have in common of their executor's library, by what it is called."""
    if config.execution.executor == "native":
        return {}
    from quire.executor.torch.kind import torch_facts

    return torch_facts(config.execution.device)


def native_kind(threads: int, isa: str = "") -> ExecutorKind:
    """Native executors with so many threads; `isa` "" is the best of this machine."""
    from quire.executor.native import NativeKind

    return NativeKind(threads, isa)


def executor_kind(config: ResolvedConfig, programs: tuple[Program, ...] = ()) -> ExecutorKind:
    """The kind of executor that a configuration names; with `programs`, one that leads ranks which run them. Raises
    CheckpointError if torch is asked for and missing."""
    import_executor(config.asked.execution.executor)
    if config.asked.execution.executor == "native":
        from quire.executor.native import NativeKind

        native = NativeKind(config.threads, config.isa, config.asked.loading.weight_memory)
        if not programs:
            return native
        from quire.executor.native_ranks import ranked_kind

        return ranked_kind(native, programs, config.nodes)
    from quire.executor.torch import TorchKind

    torch = TorchKind(config.asked.execution.device, config.threads, config.isa)
    if not programs:
        return torch
    from quire.executor.torch.ranks import ranked_torch_kind

    return ranked_torch_kind(torch, programs, config.nodes)
