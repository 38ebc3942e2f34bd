"""The measurements of `quire bench`. Every command writes one file format: see quire.bench.results."""
