"""Generation programs: Python functions whose text is partly generated, in branches that share the prefix cache."""

from quire.lang.expressions import assistant, gen, select, system, user
from quire.lang.generation_program import GenerationProgram, function
from quire.lang.program_state import Forks, ProgramState

__all__ = [
    "Forks", "GenerationProgram", "ProgramState", "assistant", "function", "gen", "select", "system", "user",
]  # fmt: skip
