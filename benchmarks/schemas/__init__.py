"""JSON schemas in Quire and in other compilers: python -m benchmarks.schemas."""
