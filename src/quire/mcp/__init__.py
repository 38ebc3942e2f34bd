"""A client of tool servers that speak the Model Context Protocol, over pipes or HTTP."""
