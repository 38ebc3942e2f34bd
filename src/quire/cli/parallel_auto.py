"""`--parallel auto`: the ranks and replicas of a model that this machine's memory nodes ask for."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from quire.config.schema import EngineConfig

if TYPE_CHECKING:
    from quire.planner.host_ranks import HostRanks

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")


class _Parallel(argparse.Action):
    """`--parallel auto`; a number is what llama-server means by it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        if values == "auto":
            namespace.parallel = values
        elif values == "-1":  # of its own choice
            pass
        elif not str(values).isdigit() or not int(values):
            parser.error(f"argument {option}: {values!r} is not auto, or sequences that run at once")
        else:
            namespace.max_num_seqs = int(values)


def add_parallel_option(parser: argparse.ArgumentParser) -> None:
    """Add `--parallel`."""
    parser.add_argument(
        "--parallel", action=_Parallel, default=argparse.SUPPRESS, metavar="auto",
        help="choose ranks and replicas by the memory nodes (NUMA) of this machine, and say why. A number is "
        "llama-server's: --max-num-seqs",
    )  # fmt: skip


def with_parallel(config: EngineConfig, model: str, *, quiet: bool, hosts: int = 1) -> EngineConfig:
    """Options with the degrees chosen for `hosts` like this one, told on stderr unless `quiet`. Raises ValueError if
    some were given."""
    default = EngineConfig().parallel
    given = [name for name in _SIZES if getattr(config.parallel, name) != getattr(default, name)]
    if given:
        raise ValueError(f"parallel: auto chooses {given[0]}; leave one of them out")
    found = chosen_ranks(config, model, hosts)
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in found.options().items()
    ]
    if not quiet:
        print(f"quire: --parallel auto: {' '.join(words) or 'one process'}: {found.why}", file=sys.stderr)
    return config.replace(**found.options())


def chosen_ranks(config: EngineConfig, model: str, hosts: int = 1) -> HostRanks:
    """What the rules of planner/host_ranks say of a model on this machine, or on several like it."""
    from quire.engine.build.assemble import choose, choose_ranks, machine_facts
    from quire.engine.build.opening import open_model
    from quire.planner.host_ranks import host_ranks, ranks_over_hosts
    from quire.program.memory import kv_block_bytes, weight_bytes
    from quire.spec import MoE
    from quire.types import UnsupportedModelError
    from quire.util.numa import memory_nodes

    nodes = [node.nbytes for node in memory_nodes()]
    if len(nodes) < 2 and hosts == 1:
        return host_ranks(0, nodes, possible=lambda *_: False)
    opened, facts = open_model(model, tokenizer=False), machine_facts(config.execution.executor)
    program, size = choose(opened, config, facts)[1], config.cache.block_size
    longest = config.limits.max_model_len or opened.facts.spec.max_positions
    cache = -(-longest // size) * len(program.cache_groups) * kv_block_bytes(program, size)

    def possible(tensor: int, stages: int) -> bool:
        split = config.replace(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
        try:
            choose_ranks(opened, split, facts)
        except UnsupportedModelError:
            return False
        return True

    experts = max(
        (layer.mlp.router.experts for layer in opened.facts.spec.layers if isinstance(layer.mlp, MoE)),
        default=0,
    )
    need = weight_bytes(program) + cache
    if hosts > 1:
        return ranks_over_hosts(need, nodes, hosts, experts=experts, possible=possible)
    return host_ranks(need, nodes, experts=experts, possible=possible)
