"""Git LFS pointers, which a clone without git-lfs has in place of large files."""

from __future__ import annotations

_START = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = len(_START)
POINTER = "is a Git LFS pointer and not the file itself: run git lfs pull, or download the file"


def is_pointer(head: bytes) -> bool:
    """Whether a file that begins with these bytes (POINTER_BYTES suffice) is a pointer."""
    return head.startswith(_START)
