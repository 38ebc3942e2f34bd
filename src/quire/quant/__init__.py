"""Weight formats in numpy: what codes stand for, and how floats are rounded to them."""

from quire.quant.groups import GroupCodes, check_codes, dequantize, quantize

__all__ = ["GroupCodes", "check_codes", "dequantize", "quantize"]
