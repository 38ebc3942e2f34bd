"""Weight formats in numpy: what codes stand for, and how floats are rounded to them.

One module a family of stored formats (ggml: the blocks of GGUF files); groups is what the kernels compute in.
"""

from quire.quant.groups import GroupCodes, check_codes, dequantize, quantize

__all__ = ["GroupCodes", "check_codes", "dequantize", "quantize"]
