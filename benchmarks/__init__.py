"""Speed against peers and against the machine's limits: ``python -m benchmarks``. Not part of the
installed package. `nodes` and `network` test the cost model, `curvature` Hessian products."""
