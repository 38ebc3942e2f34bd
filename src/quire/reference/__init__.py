"""Inference in plain numpy: the algorithms of this project in their shortest form, to read and to compare with.

Nothing here is fast, and nothing else imports it. Tests hold each one equal to the path that serves.
"""

from quire.reference.decoder import generate

__all__ = ["generate"]
