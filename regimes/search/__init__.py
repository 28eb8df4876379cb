"""Many runs: several processes, grids, and searches within a budget. No torch at import.

``tune`` chooses a value, ``harms`` says where more may be compressed, ``plans`` which method
trains fastest on a link. This room uses all below it; cli alone uses it.
"""
