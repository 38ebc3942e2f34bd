"""What `quire bench` measures with. Every command writes one file format: see quire.bench.results."""
