"""Records as numbers and pictures, for `regimes report` and the study (`analysis`). No torch.

`style` and `panels` import seaborn and matplotlib, so the command line imports them late.
"""
