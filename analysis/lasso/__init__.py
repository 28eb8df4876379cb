"""The LASSO of the paper's theory: moments of its solutions, and why small gradients say little."""
