"""Names of models in the store: organisation/name, with a tag after ":" and a revision after "@"."""

from __future__ import annotations

import re
from urllib.parse import quote

from quire.records import dataclass
from quire.types import CheckpointError
from quire.util.printable import printable

MAX_CHARS = 200
_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
_WORDS = r"[\w-][\w./-]{0,127}"
_REFERENCE = re.compile(
    rf"(?:hf\.co/|huggingface\.co/)?(?P<name>{_PART}(?:/{_PART})?)"
    rf"(?:(?::(?P<tag>{_WORDS})|/(?P<file>{_WORDS}\.gguf)))?(?:@(?P<revision>{_WORDS}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A name that a person types. `tag` selects among the files of a repository, or names a version of one's own.

    `tag` "" is written "latest" or not at all; `revision` "" is the branch main. Letter case does not matter.
    """

    name: str
    tag: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> ModelReference:
        """Raises CheckpointError with the accepted form."""
        match = _REFERENCE.fullmatch(text) if len(text) <= MAX_CHARS else None
        if match is None or ".." in text or "--" in match["name"]:
            raise CheckpointError(
                f"{printable(text[:MAX_CHARS])}: not a model's name; expected organisation/name, :TAG and @REVISION"
                f" as wanted, of at most {MAX_CHARS} characters"
            )
        tag, revision = match["tag"] or match["file"] or "", match["revision"] or ""
        return cls(match["name"], "" if tag == "latest" else tag, "" if revision == "main" else revision)

    def __str__(self) -> str:
        tag, revision = self.tag and f":{self.tag}", self.revision and f"@{self.revision}"
        return f"{self.name}{tag}{revision}"

    @property
    def key(self) -> str:
        """The name as a file name, equal for all spellings of it."""
        return quote(str(self).lower(), safe="@:")
