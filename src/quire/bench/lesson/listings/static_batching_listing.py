"""Static batching: a batch of eight starts when it is full, and ends with its longest answer."""

from quire.bench.lesson.listings.replayed_arrivals import show


def main() -> None:
    show("static")
