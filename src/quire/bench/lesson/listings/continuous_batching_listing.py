"""Continuous batching: requests join and leave at every step."""

from quire.bench.lesson.listings.replayed_arrivals import show


def main() -> None:
    show("continuous")
