"""Making quantized checkpoints: `quire quantize`. Layer by layer, with the executor's forward pass and numpy's solvers.

`recipe` says what is asked for, `quantize_model` does it; `forward` runs one layer over the calibration text, `gram`
has what is kept of the inputs of linears, `grid`, `error_feedback`, `refinement` and `scaling` round weights, `layout`
writes them, `unfinished` is the folder that a later run continues.
"""
