"""Two places, one near and one far, behind a router: time to an answer by policy, and the gap of a stream that is cut.

PYTHONPATH=tests python -m helpers.places_times        (as root: network namespaces, with delays by TUN devices)
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.places import FAR, NEAR, Places, text_streamed, two_places
from helpers.unix_server import ask
from quire.config.shipped import DEFAULT_MODEL, shipped_models

REQUESTS, CUTS = 60, 3


def times(places: Places, at_once: int) -> tuple[list[float], Counter[str]]:
    """Seconds of requests of two tokens, so many at once, and how many each place answered."""

    def one(_: int) -> tuple[float, str]:
        began = time.perf_counter()
        place = places.asked()
        return time.perf_counter() - began, place

    with ThreadPoolExecutor(at_once) as clients:
        found = list(clients.map(one, range(REQUESTS)))
    return [seconds for seconds, _ in found], Counter(place for _, place in found)


def gap(places: Places) -> tuple[float, bool]:
    """The longest time between two parts of a stream whose way is cut, and whether its text is that of one without."""
    whole = text_streamed(ask(places.path, 900, stream=True))
    stream = ask(places.path, 900, stream=True)
    data, longest, last = stream.read(2000), 0.0, time.perf_counter()
    places.networks.way(1, "cut")
    while part := stream.read1(65536):
        now = time.perf_counter()
        data, longest, last = data + part, max(longest, now - last), now
    places.networks.way(1, NEAR)
    return longest, text_streamed(stream, data) == whole


def main() -> None:
    model = shipped_models()[DEFAULT_MODEL]
    print(f"ways of {1e3 * NEAR:g} and {1e3 * FAR:g} ms; {REQUESTS} requests")
    print("| policy | at once | p50, ms | p90, ms | near |\n|---|--:|--:|--:|--:|")
    for policy in ("round-robin", "prefix"):
        with (
            tempfile.TemporaryDirectory() as folder,
            two_places(Path(folder), [model, model], policy=policy) as places,
        ):
            for at_once in (1, 4):
                times(places, at_once)
                found, shares = times(places, at_once)
                cuts = statistics.quantiles(found, n=10)
                print(
                    f"| {policy} | {at_once} | {1e3 * cuts[4]:.0f} | {1e3 * cuts[8]:.0f} "
                    f"| {shares['place-1'] / REQUESTS:.0%} |", flush=True,
                )  # fmt: skip
            if policy == "prefix":
                made = []
                for _ in range(CUTS):
                    while places.asked() != "place-1":
                        time.sleep(0.2)
                    made.append(gap(places))
                print(
                    "gaps of streams, s:",
                    ", ".join(f"{seconds:.2f} (equal: {same})" for seconds, same in made),
                )


if __name__ == "__main__":
    main()
