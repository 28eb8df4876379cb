"""One GPU in fifteen minutes (``python -m benchmarks.gpu``)."""
