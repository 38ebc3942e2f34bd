"""Dynamic batching: a batch starts when it is full, or half a second after its first request."""

from quire.bench.lesson.listings.replayed_arrivals import show


def main() -> None:
    show("dynamic")
