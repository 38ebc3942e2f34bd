"""Making quantized checkpoints: `quire quantize`. Layer by layer, with the executor's forward pass and numpy's solvers.

`recipe` says what is asked for, `run` does it; `forward` runs one layer over the calibration text, `gram` holds what is
kept of the inputs of linears, `grid`, `gptq`, `scaling` and `floats8` round weights, `layout` writes what was rounded,
`work` is the unfinished folder that a later run continues.
"""
