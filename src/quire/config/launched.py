"""What a launcher says of this process: which rank or node it is, and where all meet.

torchrun, and whatever sets its variables (Kubernetes' LeaderWorkerSet, a shell): RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. The options --nnodes, --node-rank, --master-addr and --master-port set them, too. Slurm and
the launchers of MPI have names of their own, and say no address.

Where all processes are on one host, each is a rank. Else there is one on each host (node), which starts the ranks
there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.records import dataclass
from quire.types import QuireError

SECRET = "QUIRE_RANK_SECRET"  # the variable of the secret that all have
_LEAST_SECRET = 16
_DEFAULT_PORT = "29500"
# A launcher's name -> its variables for the number of a process, how many there are, and how many on this host.
_OTHERS = {
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
}


class RendezvousError(QuireError):
    """Ranks did not meet, or have other settings."""


@dataclass(frozen=True, slots=True)
class Launched:
    """This process's number, and where all `world` processes meet. Number 0 leads.

    `nodes`: processes are hosts, which start ranks; else they are the ranks, all on one host.
    """

    number: int
    world: int
    address: str
    port: int
    secret: bytes
    nodes: bool = False

    @property
    def leads(self) -> bool:
        return self.number == 0


def node_count(environ: Mapping[str, str], ranks: int) -> int:
    """Hosts that a model of so many ranks is spread over. Raises RendezvousError as `launched`."""
    found = launched(environ, ranks)
    return found.world if found is not None and found.nodes else 1


def launched(environ: Mapping[str, str], ranks: int) -> Launched | None:
    """Read a launcher's variables for a model of so many ranks; None where there are none, or one rank.

    Raises RendezvousError for variables that do not fit.
    """
    found = _variables(environ) if ranks > 1 else None
    if found is None:
        return None
    number_name, world_name, local_name = found
    try:
        number, world = int(environ[number_name]), int(environ[world_name])
        local = int(_first_number(environ.get(local_name, str(world))))
        port = int(environ.get("MASTER_PORT", _DEFAULT_PORT)) + 1
    except ValueError as error:
        raise RendezvousError(f"{number_name}, {world_name}, {local_name}, MASTER_PORT: {error}") from None
    if world == 1:
        return None
    nodes = local < world
    if nodes and local != 1:
        raise RendezvousError(
            f"{local_name} {local} of {world_name} {world}: over several hosts, a launcher starts one process on each, "
            f"which starts the ranks there"
        )
    if not 0 <= number < world or (not nodes and world != ranks):
        raise RendezvousError(f"{number_name} {number} of {world_name} {world}: the model has {ranks} ranks")
    secret = environ.get(SECRET, "").encode()
    if len(secret) < _LEAST_SECRET:
        raise RendezvousError(f"{SECRET}: all ranks need the same secret of {_LEAST_SECRET} bytes or more")
    address = environ.get("MASTER_ADDR") or _first_host(environ) or ("" if nodes else "127.0.0.1")
    if not address:
        raise RendezvousError(f"MASTER_ADDR: where the other hosts reach node 0 ({world_name} {world})")
    return Launched(number, world, address, port, secret, nodes)


def variables_of(nnodes: int, node_rank: int, address: str, port: int | None) -> dict[str, str]:
    """What a launcher would set for a node; see `quire serve --nnodes`."""
    found = {
        "RANK": str(node_rank),
        "WORLD_SIZE": str(nnodes),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
    }
    return found if port is None else found | {"MASTER_PORT": str(port)}


def _variables(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    # Jobs of the others may start processes that have nothing to do with each other: the secret says that these have.
    others = [*_OTHERS.values()] if SECRET in environ else []
    for names in (("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), *others):
        if names[0] in environ and names[1] in environ:
            return names
    return None


def _first_number(text: str) -> str:
    """Slurm writes 2(x3),1 for three hosts with two processes and one with one."""
    return re.split(r"[(,]", text, maxsplit=1)[0]


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of Slurm's list, such as node[03-05,9],other; "" where there is none."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", environ.get("SLURM_STEP_NODELIST", ""))
    return "" if found is None else "".join(part or "" for part in found.groups())
