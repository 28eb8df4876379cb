"""Records as tables, pictures and lines of text. No torch.

This room uses records, policies, presets and job; cli, search, cost and the study use it. `style`
and `panels` import seaborn and matplotlib, so the command line imports them late.
"""
