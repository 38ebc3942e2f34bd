"""The same program in plain torch: the reference that defines each op. The one room that imports torch."""

from quire.executor.torch.executor import TorchExecutor
from quire.executor.torch.kind import TorchKind

__all__ = ["TorchExecutor", "TorchKind"]
