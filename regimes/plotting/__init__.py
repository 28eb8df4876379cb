"""Records as numbers and pictures, for `regimes report` and the study (`analysis`).

- `groups`, `curves`, `schedules`: runs by schedule and seed, their curves, the table of schedules;
  `decays`: where their learning rates fall.
- `looks`, `metrics`: the look and label of a schedule; the label, unit and digits of a metric.
- `style`: the theme, the texts of every caption, saving.
- `panels`, `heatmaps`: one panel of curves; the map of levels, the bands of detectors.

The last three import seaborn and matplotlib, so the command line imports them late. No torch.
"""
