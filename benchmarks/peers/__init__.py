"""The same work on Quire and on other engines, in turns on one machine; see docs/benchmarking.md."""
