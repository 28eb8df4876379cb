"""The LASSO of the paper's Lemma 1: how sparse its mean gradient and how dense its noise is."""
