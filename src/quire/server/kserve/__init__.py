"""KServe's inference protocol over gRPC."""
