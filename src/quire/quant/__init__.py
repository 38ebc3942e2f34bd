"""Weight formats in numpy: the values of codes, and rounding floats to codes.

One module per family of stored formats (ggml: the blocks of GGUF files); `groups` is the format of the kernels.
"""

from quire.quant.groups import GroupCodes, check_codes, dequantize, quantize

__all__ = ["GroupCodes", "check_codes", "dequantize", "quantize"]
